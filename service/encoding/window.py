"""Whether a server with `--role encoder` can take what its decoders send."""

from __future__ import annotations

import torch

from encoder.item import IMAGE
from encoder.tower import TowerSizes
from service.common.config import ConfigError, ServerOptions
from service.encoding.items import LARGEST_MESSAGE


def largest_image(sizes: TowerSizes, dtype: torch.dtype) -> int:
    """Bytes of patches of the largest image that the model's rule aims at."""
    return sizes.max_image_tokens * sizes.patches_per_token * sizes.patch_widths[IMAGE] * dtype.itemsize


def check_messages(options: ServerOptions) -> None:
    """Raises ConfigError if an encoder could not exchange pixels and rows with its decoders."""
    if options.max_message_bytes < LARGEST_MESSAGE:
        raise ConfigError(
            f"max_message_bytes: {options.max_message_bytes} is too small for the messages between an encoder and its "
            f"decoders; at least {LARGEST_MESSAGE} would work"
        )


def check_window(options: ServerOptions, sizes: TowerSizes, dtype: torch.dtype) -> None:
    """Raises ConfigError if one decoder's share of `max_inflight_bytes` is smaller than the pixels of the largest
    image, since no decoder with this model could attach then."""
    window, pixels = options.max_inflight_bytes // options.max_decoders, largest_image(sizes, dtype)
    if window < pixels:
        fewer = options.max_inflight_bytes // pixels
        raise ConfigError(
            f"max_inflight_bytes: {options.max_inflight_bytes} is {window} bytes of pixels for each of "
            f"{options.max_decoders} decoders (max_decoders), but the largest image has {pixels}; at least "
            f"{pixels * options.max_decoders} would work" + (f", or at most {fewer} decoders" if fewer else "")
        )
