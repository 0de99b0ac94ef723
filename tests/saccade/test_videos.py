"""The forms in which clips are accepted, and their messages."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import saccade
from saccade._core.requests import build_request
from saccade._core.videos import video_message, video_messages
from saccade.errors import InvalidArgument
from saccade.v1 import types_pb2

FRAME = np.zeros((4, 6, 3), np.uint8)


def test_files_pass_through_untouched(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"bytes of a clip")
    for source in (path, str(path), b"bytes of a clip", bytearray(b"bytes of a clip"), io.BytesIO(b"bytes of a clip")):
        assert video_message(source) == types_pb2.Video(data=b"bytes of a clip")
    assert video_message("https://example.org/a.mp4") == types_pb2.Video(uri="https://example.org/a.mp4")
    assert video_message("data:video/mp4;base64,YWJj") == types_pb2.Video(data=b"abc")
    assert video_message(saccade.Video(b"abc", max_frames=3)) == types_pb2.Video(data=b"abc", max_frames=3)


def test_frames_travel_as_images() -> None:
    whole = video_message(saccade.Video([FRAME, FRAME], fps=2))
    assert len(whole.frames.images) == 2 and whole.frames.fps == 2
    assert video_message(np.stack([FRAME, FRAME])).frames.images == whole.frames.images
    mixed = video_message([FRAME, Image.new("RGB", (6, 4)), whole.frames.images[0].data])
    assert len(mixed.frames.images) == 3 and not mixed.frames.HasField("fps")


def test_a_list_holds_clips_and_a_file_is_a_list_of_one() -> None:
    assert len(video_messages([b"a", b"b", [FRAME]])) == 3
    assert [len(video_messages(one)) for one in (b"a", saccade.Video(b"a"), np.stack([FRAME]), ())] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param(FRAME, "one image; a clip is", id="array"),
        pytest.param(Image.new("RGB", (2, 2)), "one image; a clip is", id="pillow"),
        pytest.param([], "expected 1 frame or more, got 0", id="empty"),
        pytest.param(saccade.Video(b"abc", fps=2), "a file contains its own frame rate", id="fps"),
        pytest.param(saccade.Video(b"abc", max_frames="two"), "max_frames", id="max-frames"),
        pytest.param(saccade.Video([FRAME], fps="two"), "fps", id="fps-word"),  # type: ignore[arg-type]
        pytest.param("no/such.mp4", "cannot read", id="absent"),
        pytest.param([FRAME, 3], r"videos\[0\]\[1\]", id="frame"),
        pytest.param(7, r"videos\[0\]", id="number"),
    ],
)
def test_what_is_no_clip_is_refused_by_name(source: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        video_messages([source])


def test_parts_of_messages() -> None:
    clip, other = b"clip", b"other"
    content: list[Any] = [
        {"type": "video"}, "text", {"type": "video", "video": clip, "max_frames": 2}, {"type": "image"},
        {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}, {"type": "video", "media_id": "m"},
    ]  # fmt: skip
    request = build_request([{"role": "user", "content": content}], images=[b"png"], videos=[other])
    parts = request.chat.messages[0].parts
    assert [part.WhichOneof("part") for part in parts] == ["video", "text", "video", "image", "video", "video"]
    assert parts[0].video.data == other and parts[2].video == types_pb2.Video(data=clip, max_frames=2)
    assert parts[4].video.uri == "https://example.org/a.mp4" and parts[5].video.media_id == "m"
    with pytest.raises(InvalidArgument, match="videos: 2 are given, but the messages have 1 parts for them"):
        build_request([{"role": "user", "content": [{"type": "video"}]}], videos=[clip, other])
    bare = build_request([{"role": "user", "content": "words"}], images=[b"png"], videos=[clip])
    assert [part.WhichOneof("part") for part in bare.chat.messages[0].parts] == ["image", "video", "text"]
    with pytest.raises(InvalidArgument, match="no user message"):
        build_request([{"role": "system", "content": "words"}], videos=[clip])
    prompt = build_request([1, 9], videos=[clip])
    assert prompt.tokens.videos[0].data == clip
