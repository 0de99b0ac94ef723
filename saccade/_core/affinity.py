"""The key of a call over several replicas of a server: calls with the same key go to the same replica, which then has
the image's embeddings and the prompt's state in its caches.

gRPC maps keys to replicas by a hash ring (gRFC A42 and A76): a replica that goes away moves only its own keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

from saccade.v1 import types_pb2

if TYPE_CHECKING:
    from saccade._core.steps import Call

HEADER = "saccade-affinity"
"""The metadata key. Proxies may hash it as well."""
Affinity = Literal["auto", "image"]
CHOICES: tuple[str, ...] = get_args(Affinity)
BEGINNING = 256
"""Characters or ids of a prompt without messages that are its key if it has no image."""
LB_CONFIG = json.dumps(
    {"loadBalancingConfig": [{"ring_hash_experimental": {"requestHashHeader": HEADER}}]}, separators=(",", ":")
)
"""gRPC's service config."""
_BATCHES = "batches"


def files(request: Any) -> Iterator[types_pb2.Image | types_pb2.Video]:
    """The images and videos of any request with a prompt; for a video that is a list of frames, the frames."""
    match request.WhichOneof("input"):
        case "chat":
            parts = [part for message in request.chat.messages for part in message.parts]
            yield from (part.image for part in parts if part.HasField("image"))
            videos = [part.video for part in parts if part.HasField("video")]
        case "image":
            yield request.image
            return
        case None:
            return
        case name:
            yield from getattr(request, name).images
            videos = list(getattr(request, name).videos)
    for video in videos:
        yield from video.frames.images if video.HasField("frames") else (video,)


def file_key(file: types_pb2.Image | types_pb2.Video) -> str:
    """The id that the file has as an upload, so that a file has one key however it is sent; empty for an empty file."""
    if file.media_id:
        return file.media_id
    content = file.data or file.uri.encode()
    return hashlib.sha256(content).hexdigest() if content else ""


def prompt_key(request: Any, affinity: Affinity = "auto") -> str:
    """The key of a request with a prompt: that of its first image or video.

    With "auto", a request without images and videos has the key of its system prompt, else of its first message or of
    the beginning of its prompt. With "image" it has none, and any replica may get it.
    """
    for file in files(request):
        return file_key(file)
    if affinity == "image":
        return ""
    match request.WhichOneof("input"):
        case "chat":
            messages = request.chat.messages
            first = next((m for m in messages if m.role == types_pb2.ROLE_SYSTEM), messages[0] if messages else None)
            beginning = "" if first is None else "\0".join(part.text for part in first.parts)
        case "prompt":
            beginning = request.prompt.text[:BEGINNING]
        case "tokens":
            beginning = ",".join(map(str, request.tokens.ids[:BEGINNING]))
        case _:
            beginning = ""
    return hashlib.sha256(beginning.encode()).hexdigest() if beginning else ""


def call_key(call: Call, affinity: Affinity) -> str:
    """The key of a call; empty if any replica may get it.

    The calls of batches share a key, since a batch is known to one replica only. Calls of batches and uploads are never
    moved to another replica.
    """
    if call.affinity:
        key = call.affinity
    elif call.service == "batch":
        key = _BATCHES
    elif call.service == "media":
        key = call.message.media_id
    elif call.method == "StreamGenerate":
        key = prompt_key(call.message.request, affinity)
    elif call.service == "inference" and hasattr(call.message, "WhichOneof"):
        key = prompt_key(call.message, affinity)
    else:
        key = ""
    if not (key.isascii() and key.isprintable()):  # an invalid id, which a header could not hold
        key = hashlib.sha256(key.encode()).hexdigest()
    return f"{key}.{call.moved}" if key and call.moved and call.service == "inference" else key
