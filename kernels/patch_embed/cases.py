"""What `kernels.aot` compiles of patch_embed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.linear import Linear
from kernels.patch_embed.kernel import patch_embed
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """Normalised patches, and bytes."""
    if not shape.radio:
        return
    depth, width = 3 * shape.patch**2, shape.vit_hidden
    source, scale = meta(1040, dtype=torch.int64), meta(depth)
    for dtype in shape.dtypes:
        projection, table = Linear(meta(width, depth, dtype=dtype)), meta(11, width, dtype=dtype)
        positions = meta(1024, width, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        patches = meta(1024, depth, dtype=dtype)
        yield Case(f"float {name}", partial(patch_embed, patches, projection, positions, table, source))
        pixels = meta(1024, depth, dtype=torch.uint8)
        yield Case(f"bytes {name}", partial(patch_embed, pixels, projection, positions, table, source, (scale, scale)))
