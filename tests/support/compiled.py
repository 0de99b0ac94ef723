"""Which machines can run the compiled code, for the tests that have nothing to test without it."""

from __future__ import annotations

import pytest

from kernels.native import NativeUnavailable, library

try:
    library()
    UNAVAILABLE = ""
except NativeUnavailable as reason:
    UNAVAILABLE = str(reason)

needs_compiled = pytest.mark.skipif(bool(UNAVAILABLE), reason=f"no compiled code on this machine: {UNAVAILABLE}")
"""Marks a test, or as `pytestmark` a whole file, that needs AVX-512 BF16 and a C++ compiler."""
