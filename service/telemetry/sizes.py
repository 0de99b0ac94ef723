"""The file of image sizes that `saccade tune` reads: image tokens -> number of images, over all runs of a server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encoder.tune import check_histogram
from service.common.config import ConfigError, ServerOptions

log = logging.getLogger(__name__)


def read_histogram(path: Path) -> dict[int, int]:
    """Reads {image tokens: number of images} from a JSON file that contains this object, or contains it under
    `image_tokens`. Raises `ValueError`, which names the file and what is wrong with it."""
    try:
        content: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if isinstance(content, dict) and "image_tokens" in content:
        content = content["image_tokens"]
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object of image tokens -> number of images")
    histogram: dict[int, int] = {}
    for key, value in content.items():
        if not key.isascii() or not key.isdigit() or not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{path}: {key!r}: {value!r} is not a number of image tokens and a number of images")
        histogram[int(key)] = histogram.get(int(key), 0) + value
    try:
        check_histogram(histogram)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return histogram


def check_sizes_file(options: ServerOptions) -> None:
    """Raises ConfigError if the file could not be written when the server stops, or has other content."""
    if options.sizes_file is None:
        return
    path = Path(options.sizes_file)
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"sizes_file: {path.parent} cannot be written to")
    if path.exists():
        try:
            read_histogram(path)
        except ValueError as error:
            raise ConfigError(f"sizes_file: {error}") from None


class SizesFile:
    """The file of a running server. Sizes are added to it once, even if the server is told to stop several times."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recording: asyncio.Future[None] | None = None

    async def record(self, sizes: Mapping[int, int]) -> None:
        """The first call adds `sizes`; further calls wait for it. The file is written even if the caller is
        cancelled."""
        if self._recording is None:
            self._recording = asyncio.get_running_loop().run_in_executor(None, record_sizes, self._path, sizes)
        await asyncio.shield(self._recording)


def record_sizes(path: Path, sizes: Mapping[int, int]) -> None:
    """Adds `sizes` to the file's counts. The file is replaced atomically; errors are logged."""
    if not sizes:
        return
    try:
        total = Counter(read_histogram(path) if path.exists() else {})
        total.update(sizes)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"image_tokens": {str(tokens): total[tokens] for tokens in sorted(total)}}) + "\n")
        part.replace(path)
    except (OSError, ValueError) as error:
        log.error("sizes_file: %s: %s", path, error)
