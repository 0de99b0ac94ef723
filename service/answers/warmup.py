"""Runs everything that is slow the first time (kernels, graphs, memory) before health becomes SERVING."""

from __future__ import annotations

import asyncio
import io
import logging
import time

from service.answers.frontend import Frontend
from service.common import errors
from service.common.types import GenerateSpec, Image, ImageInput, TokensInput

log = logging.getLogger(__name__)

SALT = b"warm-up"
"""The salt of these requests, so that callers find nothing that they leave in a cache."""


async def warm_up(frontend: Frontend) -> None:
    """Generates a short answer and, if the model takes images, encodes one. Raises StatusError if that fails: such a
    server could not answer any request."""
    began = time.perf_counter()
    sampling = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    length = max(1, min(8, frontend.engine.info.max_len - 3))
    try:
        async for _ in frontend.stream(
            GenerateSpec("text", "", TokensInput((0,) * length), sampling=sampling), salt=SALT
        ):
            pass
        if frontend.assets.vision is not None:
            image = Image(await asyncio.to_thread(_grey_image), "image")
            spec = GenerateSpec("image", "", ImageInput(), (image,), {"max_tokens": 1})
            await frontend.embed(spec, salt=SALT)
    except errors.InvalidArgument as error:  # with limits so small that not even this fits, no warm-up is needed
        log.warning("warm-up: %s", error)
    except errors.Unavailable as error:
        if error.reason != "ENCODER_UNAVAILABLE":
            raise
        log.warning("warm-up: %s", error)  # encoders may connect later, and text needs none
    log.info("warmed up in %.1f s", time.perf_counter() - began)


def _grey_image() -> bytes:
    from PIL import Image as PillowImage

    file = io.BytesIO()
    PillowImage.new("RGB", (64, 64), (128, 128, 128)).save(file, "PNG")
    return file.getvalue()
