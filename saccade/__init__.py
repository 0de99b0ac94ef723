"""Saccade's Python client.

    import saccade

    client = saccade.Client("localhost:50051")
    print(client.generate("What is in the image?", images=["cat.png"]).text)

`Client` calls a server, `AsyncClient` does so from asyncio programs, and `LocalClient` runs the engine in this process.
Importing this module loads neither gRPC nor any of the three; each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from saccade import errors
from saccade.errors import SaccadeError
from saccade.types import (
    Batch,
    Delta,
    Embedding,
    Generation,
    Lark,
    Media,
    MediaLayout,
    Model,
    ModelLimits,
    Outcome,
    Regex,
    Sample,
    StructuralTags,
    Tag,
    Tensor,
    TokenLogprob,
    Tokens,
    Tool,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)

if TYPE_CHECKING:
    from saccade._async.client import AsyncClient
    from saccade._async.stream import AsyncStream
    from saccade._core.settings import TLSConfig
    from saccade._core.videos import Video
    from saccade._jobs.job import BatchSummary
    from saccade._sync.client import Client
    from saccade._sync.stream import Stream
    from saccade.local import LocalClient

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Batch",
    "BatchSummary",
    "Client",
    "Delta",
    "Embedding",
    "Generation",
    "Lark",
    "LocalClient",
    "Media",
    "MediaLayout",
    "Model",
    "ModelLimits",
    "Outcome",
    "Regex",
    "SaccadeError",
    "Sample",
    "Stream",
    "StructuralTags",
    "TLSConfig",
    "Tag",
    "Tensor",
    "TokenLogprob",
    "Tokens",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "Usage",
    "Video",
    "errors",
]

_LAZY = {
    "AsyncClient": "saccade._async.client",
    "AsyncStream": "saccade._async.stream",
    "BatchSummary": "saccade._jobs.job",
    "Client": "saccade._sync.client",
    "Stream": "saccade._sync.stream",
    "LocalClient": "saccade.local",
    "TLSConfig": "saccade._core.settings",
    "Video": "saccade._core.videos",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LAZY.keys())
