"""Cases of chunk_scan that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.chunk_scan.kernel import chunk_scan
from kernels.scan_tables import ScanTables
from kernels.selective_state_update.cases import mixed, states
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """A prefill of two rows that saves one state."""
    if not shape.mamba_heads:
        return
    head = meta(shape.mamba_heads)
    tables = ScanTables.of([300, 50], [0, 7], shape.chunk, [(0, 70, 3)], device="meta")
    rows = (meta(2, dtype=torch.int64), meta(2, dtype=torch.bool))
    for dtype in shape.dtypes:
        x, b, c = mixed(shape, 350, dtype)
        given = (x, meta(350, shape.mamba_heads), head, b, c, head)
        call = partial(chunk_scan, states(shape), *rows, *given, (), (), tables)
        yield Case(str(dtype).removeprefix("torch."), call)
