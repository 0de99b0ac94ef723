"""Loads the compiled code for one instruction set (`instruction_sets.py`).

If the package contains a library that was built from the same source, that one is loaded (`prebuilt.py`). Otherwise the
source is compiled with the same options, in half a minute to a minute and a half, and cached under a digest of source,
compiler and options (`compiler.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from typing import Any

from kernels.native import prebuilt
from kernels.native.compiler import compiled, find_compiler
from kernels.native.instruction_sets import (
    InstructionSet,
    NativeUnavailable,
    choose,
    in_use,
    processor_features,
    supported,
)
from kernels.native.layout import check_layout

log = logging.getLogger(__name__)


def library() -> ctypes.CDLL:
    """The compiled code for the instruction set in use. Raises NativeUnavailable if this machine can neither load nor
    compile it; a failed attempt is not repeated."""
    found = _library(in_use())
    if isinstance(found, NativeUnavailable):
        raise found
    return found


@functools.cache
def _library(name: str) -> ctypes.CDLL | NativeUnavailable:
    try:
        return _load(choose(name, processor_features()))
    except NativeUnavailable as reason:
        return reason


def origin(wanted: InstructionSet) -> str:
    """Where the compiled code for a set of this processor comes from, in words, without building it. Raises
    NativeUnavailable if the package has no such library and there is no compiler."""
    if prebuilt.find(wanted, processor_features()):
        return "built into the package"
    return f"built by {find_compiler()} at the first start"


def _load(wanted: InstructionSet) -> ctypes.CDLL:
    loaded = _prebuilt(wanted) or _compiled(wanted)
    names = ", ".join(each.name for each in supported(processor_features()))
    log.info("compiled code uses the instruction set %s (this processor has %s)", wanted.name, names)
    if wanted.only_emulated:
        log.warning("the instruction set %s was only tested under an emulator", wanted.name)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    _declare(loaded.saccade_layout, [], ctypes.c_char_p)
    check_layout(loaded.saccade_layout().decode())
    _declare(loaded.saccade_step, [pointer, pointer, number, number], ctypes.c_char_p, _raise)
    _declare(loaded.saccade_draft, [pointer, pointer, pointer], ctypes.c_char_p, _raise)
    _declare(
        loaded.saccade_sample,
        [pointer, number, number, pointer, pointer, pointer, pointer, pointer, number, number],
        ctypes.c_char_p,
        _raise,
    )
    _declare(loaded.saccade_varlen_attention, [pointer, number])
    _declare(loaded.saccade_tower, [pointer, pointer, number, number])
    _declare(loaded.saccade_advance, [pointer, number, pointer])
    _declare(loaded.saccade_convert_states, [pointer, number, number, pointer])
    _declare(loaded.saccade_state_bytes, [pointer, number], number)
    _declare(loaded.saccade_pack, [pointer, number], ctypes.c_char_p)
    _declare(loaded.saccade_compact, [pointer, number])
    _declare(loaded.saccade_rows, [pointer, pointer, number, pointer, number])
    _declare(
        loaded.saccade_linear,
        [pointer, pointer, number, number, pointer, number, number, number, number, pointer, number, pointer],
    )
    return loaded


def _prebuilt(wanted: InstructionSet) -> ctypes.CDLL | None:
    """The library that came with the package, or None. If the package has libraries that cannot be used, the log gives
    the reason."""
    path = prebuilt.find(wanted, processor_features())
    if path is None:
        if prebuilt.FOLDER.is_dir():  # an installed wheel whose source was changed
            log.warning("the compiled code in the package was built from another source, so it is not used")
        return None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:  # a C library that is too old, for example
        log.warning("the compiled code in the package cannot be loaded: %s", error)
        return None
    log.info("compiled code came with the package: %s", path)
    return loaded


def _compiled(wanted: InstructionSet) -> ctypes.CDLL:
    with contextlib.ExitStack() as ends:
        path = compiled(wanted.name, wanted.options(processor_features()), ends)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(str(error)) from None


def _declare(function: Any, arguments: list[Any], result: Any = None, check: Any = None) -> None:
    function.argtypes, function.restype = arguments, result
    if check is not None:
        function.errcheck = check


def _raise(reason: bytes | None, *_: object) -> None:
    """Raises `IndexError` if compiled code has rejected a call, which then had no effect."""
    if reason is not None:
        raise IndexError(f"compiled code: {reason.decode()}")
