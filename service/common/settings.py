"""Reads the values of options.

A value is taken from the command line (`--max-seqs 8`), else from the environment (`SACCADE_MAX_SEQS=8`), else from the
file given by `--config FILE.toml` (`max_seqs = 8`), else it is the default. A name that is not an option is an error
everywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from service.common.config import ConfigError, EngineOptions, HttpFrontOptions, ServerOptions
from service.common.small_files import read_small

ENV_PREFIX = "SACCADE_"
# Variables of the SDK, which have the same prefix.
_SDK_VARIABLES = {"SACCADE_API_KEY", "SACCADE_SERVER"}
# Variables that Kubernetes sets in every pod of a namespace for a Service named `saccade` or `saccade-...`, such as
# SACCADE_SERVICE_HOST=10.0.0.1, SACCADE_PORT=tcp://10.0.0.1:50051 and SACCADE_PORT_50051_TCP_ADDR=10.0.0.1.
_INJECTED_NAME = re.compile(
    r"SACCADE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_INJECTED_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


T = TypeVar("T", bound="EngineOptions | HttpFrontOptions")


# Cached, because it evaluates the annotations of all fields, which takes milliseconds, and is called several times for
# each field.
_type_hints = functools.cache(typing.get_type_hints)


def option_type(options: type, name: str) -> Any:
    """The type of a field without None: `int | None` -> int."""
    hint = _type_hints(options)[name]
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def parse_value(options: type, name: str, raw: Any) -> Any:
    """Converts one value from the command line, the environment or TOML to the field's type. Raises ConfigError."""
    spec = next(f for f in dataclasses.fields(options) if f.name == name)
    kind = option_type(options, name)
    try:
        if kind is bool:
            value: Any = _parse_bool(raw)
        elif typing.get_origin(kind) is tuple:
            parts = raw if isinstance(raw, list | tuple) else [p.strip() for p in str(raw).split(",") if p.strip()]
            value = tuple(_parse_one(typing.get_args(kind)[0], p) for p in parts)
        elif spec.metadata["size"]:
            value = parse_size(raw)
        else:
            value = _parse_one(kind, raw)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name}: {raw!r} is not {_describe(kind, spec)}") from None
    if spec.metadata["choices"] and value not in spec.metadata["choices"]:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(spec.metadata['choices'])}")
    if value == "":  # as a path, this would be the working directory
        raise ConfigError(f"{name}: it is empty; give it a value, or leave it out")
    minimum, maximum = spec.metadata["minimum"], spec.metadata["maximum"]
    for number in value if isinstance(value, tuple) else (value,):
        if minimum is not None and number < minimum:
            raise ConfigError(f"{name}: {number} is below the minimum of {minimum}")
        if maximum is not None and number > maximum:
            raise ConfigError(f"{name}: {number} is above the maximum of {maximum}")
    return value


def _parse_one(kind: Any, raw: Any) -> Any:
    """A whole number, a number or a text. Raises ValueError for a value of another type, as TOML and Python have."""
    others = {int: (bool, float), float: (bool,), str: (bool, int, float, list, tuple, dict)}[kind]
    if isinstance(raw, others):
        raise ValueError(raw)
    value = kind(raw)
    if kind is float and not math.isfinite(value):
        raise ValueError("not finite")
    return value


def parse_size(raw: Any) -> int:
    """`1048576`, `1Mi`, `64MiB` or `2g` -> bytes. Raises ValueError, also for a number that a double cannot hold."""
    text = str(raw).strip().lower().removesuffix("b")
    digits = text.rstrip("kmgi")
    if (unit := _UNITS.get(text[len(digits) :])) is None:
        raise ValueError(f"{raw!r} has an unknown unit")
    if not math.isfinite(number := float(digits) * unit):
        raise ValueError(f"{raw!r} is not finite")
    return int(digits) * unit if digits.isdecimal() else int(number)  # floats are exact up to 2**53


def _parse_bool(raw: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(raw, bool):
        return raw
    if str(raw).lower() not in words:
        raise ValueError(raw)
    return words[str(raw).lower()]


def _counts_bytes(spec: dataclasses.Field[Any]) -> bool:
    return "bytes" in spec.name


def _describe(kind: Any, spec: dataclasses.Field[Any]) -> str:
    if spec.metadata["size"]:
        return "a number of bytes, such as 67108864 or 64Mi" if _counts_bytes(spec) else "a count, such as 64M"
    if typing.get_origin(kind) is tuple:
        return "a list" if typing.get_args(kind)[0] is str else "a list of whole numbers, such as 64,256"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")


def flag_of(spec: dataclasses.Field[Any]) -> str:
    """How an option is written on a command line: `--max-seqs`, and `--no-warmup` for flags that are on by default."""
    return ("--no-" if spec.default is True else "--") + spec.name.replace("_", "-")


def value_words(options: type, spec: dataclasses.Field[Any]) -> str:
    """Describes an option's values for help texts: its choices, `flag`, `bytes, such as 64Mi`."""
    kind = option_type(options, spec.name)
    if spec.metadata["choices"]:
        return ", ".join(spec.metadata["choices"])
    if spec.metadata["size"]:
        return "bytes, such as 64Mi" if _counts_bytes(spec) else "count, such as 64M"
    if typing.get_origin(kind) is tuple:
        return "list" if typing.get_args(kind)[0] is str else "list of numbers"
    return {bool: "flag", int: "number", float: "number"}.get(kind, "text")


def shown_default(spec: dataclasses.Field[Any]) -> str:
    """An option's default for help texts: `64Mi` instead of 67108864 bytes, `64M` of other things; empty if there is
    none."""
    value: Any = spec.default
    if value in (None, ()) or isinstance(value, bool):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    binary, decimal = (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)), (("G", 10**9), ("M", 10**6))
    units = (*binary, *decimal) if _counts_bytes(spec) else (*decimal, *binary)
    if spec.metadata["size"]:
        return next((f"{value // size}{unit}" for unit, size in units if value % size == 0), str(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


_METAVARS = {"text": "TEXT", "list": "A,B", "list of numbers": "N,N", "number": "N"}


def add_arguments(parser: argparse.ArgumentParser, options: type) -> None:
    """Adds one argument per field. Values stay strings here; `resolve` parses them."""
    parser.add_argument("--config", metavar="FILE.toml", help="read options from this file")
    for spec in dataclasses.fields(options):
        if spec.name == "model":
            parser.add_argument(
                "model", nargs="?", default=None, help=f"{spec.metadata['help']} (default: {spec.default})"
            )
            continue
        flag, help_text = flag_of(spec), spec.metadata["help"].replace("%", "%%")
        if option_type(options, spec.name) is bool:
            const = not spec.default
            parser.add_argument(flag, action="store_const", const=const, default=None, dest=spec.name, help=help_text)
        else:
            default = f" (default: {shown_default(spec)})" if shown_default(spec) else ""
            metavar = "|".join(spec.metadata["choices"]) or _METAVARS.get(value_words(options, spec), "SIZE")
            parser.add_argument(flag, default=None, dest=spec.name, metavar=metavar, help=help_text + default)
        if spec.name == "frontends":
            parser.add_argument("--fronts", default=None, dest=spec.name, help=argparse.SUPPRESS)  # its former name


def resolve(options: type[T], arguments: Mapping[str, Any], environment: Mapping[str, str]) -> T:
    """Combines arguments, environment, `--config` file and defaults, in this order of precedence. Raises
    ConfigError."""
    names = {f.name for f in dataclasses.fields(options)}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path := arguments.get("config") or environment.get(ENV_PREFIX + "CONFIG"):
        values |= _read_file(Path(path), names)
        sources |= dict.fromkeys(values, f"config file {path}: ")
    everything = {f.name for options_of in (ServerOptions, HttpFrontOptions) for f in dataclasses.fields(options_of)}
    for variable, raw in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable in _SDK_VARIABLES or variable == ENV_PREFIX + "CONFIG":
            continue
        if _is_injected(variable, raw):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in everything:
            raise ConfigError(f"environment variable {variable}: {_unknown([name], everything)}")
        if name in names:
            values[name], sources[name] = raw, f"environment variable {variable}: "
    given = {name: value for name, value in arguments.items() if name in names and value is not None}
    values |= given
    sources |= dict.fromkeys(given, "")
    return options(**{name: _parsed(options, name, raw, sources[name]) for name, raw in values.items()})


def _parsed(options: type, name: str, raw: Any, source: str) -> Any:
    """Like `parse_value`; the error also names the source of the value."""
    try:
        return parse_value(options, name, raw)
    except ConfigError as error:
        raise ConfigError(f"{source}{error}") from None


def _unknown(unknown: Sequence[str], known: Iterable[str]) -> str:
    """The error for names that are not options. It suggests the most similar names instead of listing all options."""
    similar = [near for name in unknown for near in difflib.get_close_matches(name.lower(), list(known), 2)]
    hint = f"did you mean {' or '.join(similar)}?" if similar else "`saccade serve --help` lists the options"
    return f"{', '.join(unknown)}: no option has this name; {hint}"


def _is_injected(variable: str, raw: str) -> bool:
    """Whether Kubernetes sets a variable of this name for a Service, so that it is not meant for this server."""
    if variable.endswith("_PORT") and _INJECTED_ADDRESS.fullmatch(raw):
        return True
    return _INJECTED_NAME.fullmatch(variable) is not None


def _read_file(path: Path, names: set[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(read_small(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML or UTF-8, a number too long, nested too deep
        raise ConfigError(f"config file {path}: {error}") from None
    if unknown := sorted(set(values) - names):
        raise ConfigError(f"config file {path}: {_unknown(unknown, names)}")
    return values


def from_keywords(options: type[T], keywords: Mapping[str, Any]) -> T:
    """Keyword arguments of the SDK's LocalClient -> options. Raises ConfigError for unknown names."""
    names = {f.name for f in dataclasses.fields(options)}
    if unknown := sorted(set(keywords) - names):
        raise ConfigError(_unknown(unknown, names))
    return options(**{name: parse_value(options, name, raw) for name, raw in keywords.items() if raw is not None})


def from_command_line(options: type[T], parser: argparse.ArgumentParser, argv: Sequence[str]) -> T:
    """Parses and resolves the command line and this process's environment."""
    add_arguments(parser, options)
    parser.allow_abbrev = False  # an abbreviation could become ambiguous, or mean another option, after an update
    # argparse's own usage lists all options, in forty lines before each error, although the help describes them anyway.
    parser.usage = "%(prog)s [options]" + " [MODEL]" * any(spec.name == "model" for spec in dataclasses.fields(options))
    return resolve(options, vars(parser.parse_args(list(argv))), os.environ)
