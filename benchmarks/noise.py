"""Images that benchmarks send."""

from __future__ import annotations

import io
import random

from PIL import Image


def noise_png(rng: random.Random, width: int, height: int) -> bytes:
    """A PNG of noise."""
    out = io.BytesIO()
    image = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
    image.save(out, "PNG", compress_level=1)  # noise cannot be compressed
    return out.getvalue()
