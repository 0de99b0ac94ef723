"""Images to send. This module has no slow imports, because test programs that are started to be killed import it
too."""

from __future__ import annotations

import base64
import io
import random

from PIL import Image


def png(seed: int, size: tuple[int, int] | None = None) -> bytes:
    """A PNG of noise, 8 to 64 pixels a side."""
    rng = random.Random(seed)
    width, height = size or (rng.randint(8, 64), rng.randint(8, 64))
    return encoded(Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height)))


def encoded(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
