"""Other projects' kernels, out of the sources that `make peers` has fetched: imported beside ours, never copied."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent.parent / ".peers" / "src"


def function(package: str, module: str, name: str) -> Callable[..., Any] | None:
    """A function of a fetched source; None where it has not been fetched.

    The package's own `__init__`, which wants compiled extensions, is left out.
    """
    top = package.replace("-", "_")
    folder = SOURCES / package / top
    if not folder.is_dir():
        return None
    if top not in sys.modules:
        bare = types.ModuleType(top)
        bare.__path__ = [str(folder)]
        sys.modules[top] = bare
    found: Callable[..., Any] = getattr(importlib.import_module(f"{top}.{module}"), name)
    return found
