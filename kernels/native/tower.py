"""The structs and enums of tower.h."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p
from enum import IntEnum

from kernels.native.structs import Weight


class Code(IntEnum):
    """Operation codes; see README.md."""

    LINEAR = 0
    EMBED = 1
    NORM = 2
    GATE = 3
    TOKEN = 4
    ATTENTION = 5
    ROTATE = 6
    CONVOLVE = 7


class Of(IntEnum):
    """Selects the number of rows of an operation."""

    ROWS = 0
    PATCHES = 1
    TOKENS = 2


class Place(IntEnum):
    """Buffers that products read and write."""

    PIXELS = 0
    NORMED = 1
    WIDE = 2
    STREAM = 3
    OUT = 4


class Store(IntEnum):
    """How a product is stored."""

    FLOAT32 = 0
    ADD = 1
    BFLOAT16 = 2


class TowerOp(Structure):
    _fields_ = [
        ("code", c_int64), ("of", c_int64), ("weight", Weight), ("source", c_int64), ("ld_source", c_int64),
        ("target", c_int64), ("ld_target", c_int64), ("store", c_int64), ("activation", c_int64), ("norm", c_void_p),
        ("bias", c_void_p), ("eps", c_float),
    ]  # fmt: skip


class Tower(Structure):
    _fields_ = [
        ("count", c_int64), ("ops", c_void_p), ("threads", c_int64), ("kind", c_int64), ("hidden", c_int64),
        ("heads", c_int64), ("kv_heads", c_int64), ("taps", c_int64), ("merged", c_int64),
        ("scratch", c_int64), ("table_rows", c_int64), ("table", c_void_p), ("token_norm", c_void_p),
        ("token_eps", c_float), ("scale", c_float),
    ]  # fmt: skip


class TowerStep(Structure):
    _fields_ = [
        ("rows", c_int64), ("patches", c_int64), ("tokens", c_int64), ("x", c_void_p), ("pixels", c_void_p),
        ("positions", c_void_p), ("source", c_void_p), ("token_rows", c_void_p), ("sequences", c_int64),
        ("bounds", c_void_p), ("rotations", c_void_p), ("neighbours", c_void_p), ("normed", c_void_p),
        ("wide", c_void_p), ("out", c_void_p),
    ]  # fmt: skip
