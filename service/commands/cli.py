"""The server's commands; the `saccade` command passes them to `main`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from service.common.config import ConfigError, HttpFrontOptions, ServerOptions
from service.common.errors import EngineDied
from service.common.helper_process import SPINNING
from service.common.settings import from_command_line

IN_MODULES = ("demo", "tune", "quantize", "convert", "key", "probe")
"""Commands that are the `main` of the module of their name, which is imported when they run."""


def main(argv: Sequence[str]) -> int:
    """Runs one command. Returns the exit code: 0, 1 for a failure, 2 for invalid options."""
    commands = {"serve": serve, "http": http, "plan": plan}
    if not argv or argv[0] not in (*commands, *IN_MODULES):
        print(f"usage: saccade {{{','.join((*commands, *IN_MODULES))}}} ...", file=sys.stderr)
        return 2
    try:
        if argv[0] in IN_MODULES:
            code: int = importlib.import_module(f"service.commands.{argv[0]}").main(argv[1:])
            return code
        return commands[argv[0]](argv[1:])
    except ValueError as error:  # ConfigError and CheckpointError: the user can correct them, so no traceback
        print(f"saccade {argv[0]}: {error}", file=sys.stderr)
        return 2
    except EngineDied as error:  # during startup; the engine process has logged the reason
        print(f"saccade {argv[0]}: {error}", file=sys.stderr)
        return 1


def serve(argv: Sequence[str]) -> int:
    """`saccade serve [MODEL] [options]`"""
    parser = argparse.ArgumentParser("saccade serve", description="Serve a model over gRPC.")
    options = from_command_line(ServerOptions, parser, argv)
    if options.role == "encoder":  # there is no helper process: this one encodes; see service/common/helper_process.py
        os.environ.update({**SPINNING, **os.environ})
    from service.servers.run import run

    return run(options)


def http(argv: Sequence[str]) -> int:
    """`saccade http [options]`: the HTTP server in front of gRPC servers."""
    parser = argparse.ArgumentParser("saccade http", description="Serve an OpenAI-compatible HTTP API.")
    options = from_command_line(HttpFrontOptions, parser, argv)
    return needs_http()(options)


def needs_http() -> Callable[[HttpFrontOptions], int]:
    """The function that runs an HTTP server. Raises ConfigError if its packages are not installed."""
    try:
        from service.http.run import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "httptools", "pydantic"):
            raise
        raise ConfigError(f"{error.name} is not installed: pip install 'saccade-server[http]'") from None
    return run


def plan(argv: Sequence[str]) -> int:
    """`saccade plan [MODEL] [options]`: what `serve` would do with these options, without running it. `--replicas`:
    how many servers a load needs."""
    if "--replicas" in argv:
        from service.commands.replicas import main as replicas

        return replicas([argument for argument in argv if argument != "--replicas"])
    parser = argparse.ArgumentParser(
        "saccade plan", description="Show what `saccade serve` would do with the same options, without loading weights."
    )
    options = from_command_line(ServerOptions, parser, argv)
    from service.commands.plan import plan as tables

    print("\n\n".join(str(table) for table in tables(options)))
    return 0
