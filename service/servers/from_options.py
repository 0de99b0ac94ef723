"""Makes the parts of a server that follow from its options: limits of the other packages, the model's assets, and the
image workers."""

from __future__ import annotations

import logging

from encoder.media_limits import ImageLimits, VideoLimits
from service.answers.bounds import FrontendLimits
from service.answers.door import DoorLimits
from service.answers.prepare import decoder_processes
from service.answers.weigh import MIN_IDS
from service.common.config import ServerOptions
from service.common.limits import ByteBudget
from service.media.image_pool import ImagePool
from service.media.images import MediaLimits
from service.model.assets import ModelAssets
from service.model.chat import has_other_template
from service.model.resolve import checkpoint_of, resolve_vision

log = logging.getLogger(__name__)


def frontend_limits(options: ServerOptions) -> FrontendLimits:
    image = ImageLimits(max_bytes=options.max_image_bytes, max_pixels=options.max_image_pixels)
    video = VideoLimits(
        options.max_video_bytes, options.max_video_file_frames, options.max_image_pixels, options.max_video_pixels
    )
    return FrontendLimits(
        max_queue=options.max_queue, max_images=options.max_images_per_request,
        max_videos=options.max_videos_per_request, media=MediaLimits(image, video, options.max_video_frames),
        prepared_bytes=options.preprocess_bytes, prepared_cache_bytes=options.image_cache_bytes,
        max_answer_bytes=options.max_message_bytes,
    )  # fmt: skip


def byte_budget(options: ServerOptions) -> ByteBudget:
    """Limits the bytes of messages in progress. A tenant with a key may use half of them, and always one message of the
    largest size."""
    return ByteBudget(options.max_inflight_bytes, max(options.max_inflight_bytes // 2, options.max_message_bytes))


def door_limits(options: ServerOptions, max_len: int = 0) -> DoorLimits:
    """`max_len`: tokens of the model's context, which limits the ids in a message."""
    return DoorLimits(
        options.stall_timeout, options.receive_timeout, options.max_message_bytes, options.max_tenant_calls,
        max(max_len, MIN_IDS),
    )  # fmt: skip


def make_image_pool(options: ServerOptions, assets: ModelAssets) -> ImagePool:
    """A pool of `image_workers` processes, which have not been started."""
    return ImagePool(
        frontend_limits(options).media, decoder_processes(options.image_workers), image_seconds=options.image_timeout,
        video_seconds=options.video_timeout, vision=assets.vision, dtype=assets.config.compute_dtype(options.dtype),
    )  # fmt: skip


def load_assets(options: ServerOptions) -> ModelAssets:
    checkpoint = checkpoint_of(options)
    assets = ModelAssets(checkpoint.config, resolve_vision(options, checkpoint))
    if checkpoint.adapter is not None and has_other_template(checkpoint.adapter.path, assets.template):
        log.warning(
            "%s has a chat template of its own, which is not used: prompts have the model's. To use it, put it into a "
            "copy of the model's folder", checkpoint.adapter.path,
        )  # fmt: skip
    return assets
