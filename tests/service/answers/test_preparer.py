"""Preparing images and clips: keys that separate what must not be shared, and upper bounds of sizes."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from clips import animation, moving_frames
from images import png
from PIL import Image as PillowImage

from service.answers.prepare import Preparer
from service.common.config import ServerOptions
from service.common.errors import InvalidArgument
from service.common.types import Image, MediaSource, Video
from service.media.images import MediaLimits
from service.media.patches import Patcher
from service.media.prepared import PreparedItem
from service.media.prepared_cache import PreparedCache
from service.servers.from_options import load_assets

VISION = load_assets(ServerOptions()).vision
assert VISION is not None
LIMITS = MediaLimits(video_frames=8)
STILL, OTHER = png(1, (32, 32)), png(2, (32, 32))


def preparer(revision: str = "r", dtype: str = "float32", cache_bytes: int = 0) -> Preparer:
    assert VISION is not None
    return Preparer(
        Patcher(LIMITS, VISION, dtype),
        VISION,
        dtype,
        LIMITS,
        revision,
        PreparedCache(cache_bytes),
    )


def frames(*files: bytes, fps: float | None = None) -> Video:
    return Video(b"", "v", frames=tuple(Image(file, f"v[{i}]") for i, file in enumerate(files)), fps=fps)


def test_equal_keys_are_for_equal_rows_of_one_tenant() -> None:
    """Rows are shared by key, so equal keys must mean equal rows of the same tenant."""
    one, gif = preparer(), animation(moving_frames(6, 32, 32), "GIF")
    different: list[tuple[Preparer, MediaSource, bytes]] = [
        (one, Image(STILL, "f"), b""), (one, Image(STILL, "f"), b"a"), (one, Image(STILL, "f"), b"b"),
        (one, Image(OTHER, "f"), b""), (preparer("s"), Image(STILL, "f"), b""),
        (preparer(dtype="bfloat16"), Image(STILL, "f"), b""), (one, frames(STILL), b""),
        (one, frames(STILL, OTHER), b""), (one, frames(OTHER, STILL), b""), (one, Video(gif, "v"), b""),
        (one, Video(gif, "v"), b"a"), (one, Video(gif, "v", max_frames=3), b""),
        (one, Image(gif, "f"), b""),
    ]  # fmt: skip
    keys = [maker.prepare(source, salt).key for maker, source, salt in different]
    assert len(set(keys)) == len(keys)
    again = [maker.prepare(replace(source, field="elsewhere"), salt).key for maker, source, salt in different]
    assert again == keys


def test_a_frame_that_is_a_file_s_image_has_another_key_than_the_first_frame_of_its_animation() -> None:
    first, second = (PillowImage.open(io.BytesIO(file)) for file in (STILL, OTHER))
    buffer = io.BytesIO()
    first.save(buffer, "PNG", save_all=True, append_images=[second], default_image=True)
    one, data = preparer(), buffer.getvalue()
    image, video = one.prepare(frames(data), b""), one.prepare(Video(data, "v"), b"")
    assert not image.encoder_item.patches.equal(video.encoder_item.patches) and image.key != video.key


def test_only_the_frames_that_are_looked_at_make_a_key() -> None:
    one = preparer()
    both = [
        one.prepare(replace(frames(STILL, unseen, STILL, unseen), max_frames=2), b"").key for unseen in (OTHER, b"")
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize("wanted", [None, 1, 3, 8])
def test_no_clip_takes_more_than_was_expected_of_it(wanted: int | None) -> None:
    one = preparer()
    for source in (frames(*[STILL, OTHER] * 6), Video(animation(moving_frames(12, 40, 20), "GIF"), "v")):
        made: PreparedItem = one.prepare(replace(source, max_frames=wanted), b"")
        assert made.frames == (wanted or LIMITS.video_frames)
        assert made.layout.nbytes <= one.most_bytes(replace(source, max_frames=wanted))
        assert len(made.labels) == -(-made.frames // 2), "the demo model looks at frames in pairs"


def test_no_image_takes_more_than_was_expected_of_it() -> None:
    one = preparer()
    for size in ((8, 8), (32, 32), (700, 30), (1500, 1400)):
        source = Image(png(1, size), "f")
        assert 0 < one.prepare(source, b"").layout.nbytes <= one.most_bytes(source)


def test_labels_say_when_a_frame_was_taken_where_that_is_known() -> None:
    one = preparer()
    assert not any("seconds" in label for label in one.prepare(frames(STILL, OTHER), b"").labels)
    dated = one.prepare(frames(STILL, OTHER, STILL, fps=2.0), b"").labels
    assert "0.00 seconds" in dated[0] and "0.50 seconds" in dated[0]
    stats = one.stats()
    assert (stats["images"], stats["videos"], stats["frames"]) == (0, 2, 5)


def test_a_repeated_file_is_not_decoded_again_and_gives_the_same_item() -> None:
    """Counted by the decoder's own statistics; the field is that of the request at hand."""
    one, gif = preparer(cache_bytes=2**24), animation(moving_frames(6, 32, 32), "GIF")
    sources: list[MediaSource] = [
        Image(STILL, "f"), Video(gif, "f"), Video(gif, "f", max_frames=3), frames(STILL, OTHER, fps=2.0),
        frames(STILL, OTHER, fps=4.0), frames(STILL, OTHER),
    ]  # fmt: skip
    first = [one.prepare(source, b"") for source in sources]
    before = one.stats()
    again = [one.prepare(replace(source, field="g"), b"") for source in sources]
    counts = one.stats()
    assert {name: counts[name] - before[name] for name in ("images", "videos", "decode_seconds", "cache_hits")} == {
        "images": 0, "videos": 0, "decode_seconds": 0, "cache_hits": len(sources),
    }  # fmt: skip
    for old, new in zip(first, again, strict=True):
        assert new.field == "g" and replace(new, field=old.field, layout=old.layout) == old
        assert new.encoder_item.patches.equal(old.encoder_item.patches)
    assert len({item.labels for item in first}) == len(first), "what was asked for, not just the file, is compared"
    one.prepare(Image(STILL, "f"), b"another tenant")
    assert one.stats()["images"] == counts["images"] + 1


def test_a_file_that_was_refused_is_refused_again() -> None:
    one = preparer(cache_bytes=2**24)
    for source in (Image(STILL[:40], "f"), Video(STILL, "f", max_frames=9)):
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="^f: "):
                one.prepare(source, b"")
