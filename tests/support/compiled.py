"""Whether compiled code is available: a skip marker for tests that need it, and values of the option `native`."""

from __future__ import annotations

import pytest

from kernels.native import NativeUnavailable, library

try:
    library()
    UNAVAILABLE = ""
except NativeUnavailable as reason:
    UNAVAILABLE = str(reason)

NATIVE = ["off"] if UNAVAILABLE else ["on", "off"]
needs_compiled = pytest.mark.skipif(bool(UNAVAILABLE), reason=f"no compiled code on this machine: {UNAVAILABLE}")
"""For a test, or as `pytestmark` for a file, that needs AVX-512 BF16 and a C++ compiler."""
