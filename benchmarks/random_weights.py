"""Random weights, written to safetensors files tensor by tensor, without a model in memory."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

SHARD = 4 * 10**9
POOL = 1 << 26
"""Bytes of random numbers, at most, slices of which become tensors."""


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint."""

    name: str
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    content: str
    """`codes`, `scales` and `fp8`: random bytes without NaN; `normal`: with variance 1 / inputs; or a number that fills
    the tensor."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * {"F32": 4, "BF16": 2}.get(self.dtype, 1)


def plain(name: str, shape: tuple[int, ...]) -> Piece:
    """A tensor that is not quantised, with numbers that suit its name."""
    constants = {
        "norm": "1",
        "layer_norm": "1",
        "D": "1",
        "A_log": "1",
        "dt_bias": "-3",
        "e_score_correction_bias": "0",
    }
    last = name.removesuffix(".weight").rpartition(".")[2]
    content = next((value for part, value in constants.items() if last == part or last.startswith("norm")), "normal")
    if name.endswith(".bias") and "dt_bias" not in name:
        content = "0"
    return Piece(name, "F32" if name.endswith("gate.weight") else "BF16", shape, content)


class Source:
    """Random bytes of tensors, from one pool; each tensor begins at another offset."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of all tensors."""
        random, pool = np.random.default_rng(0), min(POOL, max(size, 1 << 20))
        octets = random.integers(0, 256, pool, np.uint8)
        normal = random.standard_normal(pool // 4, np.float32)
        self._pools = {
            "codes": octets,
            "scales": octets & 0x0F | 0x30,  # 0.5 to 1.875
            "fp8": octets & 0xBF,  # -1.875 to 1.875
            "normal": normal,
        }
        self._place = 0

    def write(self, piece: Piece, to: BinaryIO) -> None:
        left = math.prod(piece.shape)
        if piece.content not in self._pools:
            to.write(_stored(np.full(left, float(piece.content), np.float32), piece.dtype))
            return
        pool = self._pools[piece.content]
        while left:
            part = pool[self._place : self._place + left]
            left -= len(part)
            if piece.content == "normal":
                scale = np.float32(1 / math.sqrt(piece.shape[-1]))
                to.write(_stored(part * scale, piece.dtype))
            else:
                to.write(part.tobytes())
            self._place = (self._place + len(part) + 4097) % (len(self._pools["normal"]) // 2)


def _stored(values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> bytes:
    if dtype == "F32":
        return values.tobytes()
    assert dtype == "BF16"
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # truncated: the numbers are random


def write_shards(folder: Path, parts: Sequence[Piece]) -> None:
    """Writes safetensors files of at most `SHARD` bytes each, and their index."""
    shards: list[list[Piece]] = [[]]
    filled = 0
    for part in parts:
        if shards[-1] and filled + part.nbytes > SHARD:
            shards.append([])
            filled = 0
        shards[-1].append(part)
        filled += part.nbytes
    source, places = Source(_size(parts)), {}
    for number, shard in enumerate(shards, 1):
        name, begin = f"model-{number:05d}.safetensors", 0
        table = {}
        for part in shard:
            table[part.name] = {
                "dtype": part.dtype, "shape": part.shape, "data_offsets": [begin, begin + part.nbytes],
            }  # fmt: skip
            begin += part.nbytes
            places[part.name] = name
        header = json.dumps(table).encode()
        header += b" " * (-len(header) % 8)
        with (folder / name).open("wb", buffering=io.DEFAULT_BUFFER_SIZE * 16) as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for part in shard:
                source.write(part, file)
    index = {"metadata": {"total_size": _size(parts)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _size(parts: Sequence[Piece]) -> int:
    return sum(part.nbytes for part in parts)
