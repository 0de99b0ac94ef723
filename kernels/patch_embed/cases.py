"""Cases of patch_embed that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.linear import Linear
from kernels.patch_embed.kernel import patch_embed
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """Normalised patches, and bytes. For towers other than RADIO: a bias, no prefix tokens, and pairs of frames."""
    depth, width = 3 * shape.patch**2, shape.vit_hidden
    source, scale = meta(1040, dtype=torch.int64), meta(depth)
    if not shape.radio:
        yield from _plain(shape, source)
        return
    for dtype in shape.dtypes:
        projection, table = Linear(meta(width, depth, dtype=dtype)), meta(11, width, dtype=dtype)
        positions = meta(1024, width, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        patches = meta(1024, depth, dtype=dtype)
        yield Case(f"float {name}", partial(patch_embed, patches, projection, positions, table, source))
        pixels = meta(1024, depth, dtype=torch.uint8)
        yield Case(f"bytes {name}", partial(patch_embed, pixels, projection, positions, table, source, (scale, scale)))


def _plain(shape: ModelShape, source: torch.Tensor) -> Iterator[Case]:
    width = shape.vit_hidden
    for dtype in shape.dtypes:
        table, positions = meta(1, width, dtype=dtype), meta(1024, width, dtype=dtype)
        for kind, depth in (("image", 3 * shape.patch**2), ("video", 6 * shape.patch**2)):
            projection = Linear(meta(width, depth, dtype=dtype), meta(width, dtype=dtype))
            patches = meta(1024, depth, dtype=dtype)
            name = f"{kind} {str(dtype).removeprefix('torch.')}"
            yield Case(name, partial(patch_embed, patches, projection, positions, table, source))
