"""What is slow once (first kernels, first graphs, first pages of memory) is slow before health says SERVING."""

from __future__ import annotations

import asyncio
import io
import logging
import time

from service.answers.frontend import Frontend
from service.common import errors
from service.common.types import GenerateSpec, ImageInput, ImageSource, TokensInput

log = logging.getLogger(__name__)

SALT = b"warm-up"
"""Nothing that it leaves in a cache is ever met by a caller."""


async def warm_up(frontend: Frontend) -> None:
    """A short answer and, of a model that takes them, an image. Raises StatusError: a server that cannot answer this
    will not answer anything."""
    began = time.perf_counter()
    sampling = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    length = max(1, min(8, frontend.engine.info.max_len - 3))
    try:
        async for _ in frontend.stream(
            GenerateSpec("text", "", TokensInput((0,) * length), sampling=sampling), salt=SALT
        ):
            pass
        if frontend.assets.vision is not None:
            image = ImageSource(await asyncio.to_thread(_grey_image), "image")
            spec = GenerateSpec("image", "", ImageInput(), (image,), {"max_tokens": 1})
            await frontend.embed(spec, salt=SALT)
    except errors.InvalidArgument as error:  # limits so tight that not even this fits: then neither does it need warmth
        log.warning("warm-up: %s", error)
    except errors.Unavailable as error:
        if error.reason != "ENCODER_UNAVAILABLE":
            raise
        log.warning("warm-up: %s", error)  # encoders may come later, and text needs none
    log.info("warmed up in %.1f s", time.perf_counter() - began)


def _grey_image() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), (128, 128, 128)).save(file, "PNG")
    return file.getvalue()
