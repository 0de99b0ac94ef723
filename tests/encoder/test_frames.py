"""Frames of animations and videos: all of them, in order, upright and with their times; limits that apply before
decoding; hostile bytes."""

from __future__ import annotations

import io
import itertools
import struct
import sys
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import torch
from clips import film
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from encoder.frames import open_video, sniff_container
from encoder.media_limits import FORMATS as IMAGE_FORMATS
from encoder.media_limits import VideoError, VideoLimits, video_formats
from families.nemotron_h_omni.video_rule import OmniVideoRule, sample_indices
from families.nemotron_h_omni.vision import RadioVision

FORMATS = ["GIF", "PNG", "WEBP", *(["AVIF"] if "AVIF" in IMAGE_FORMATS else [])]
LOSSLESS: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}


def still_images(count: int, height: int = 12, width: int = 20) -> list[Image.Image]:
    """Uniform frames of different greys with a moving bar, which a palette also represents exactly."""
    made = []
    for index in range(count):
        frame = np.full((height, width, 3), 20 * index % 256, np.uint8)
        frame[:, index % width] = 255
        made.append(Image.fromarray(frame))
    return made


def animation(kind: str, frames: list[Image.Image], duration: int | list[int] = 40) -> bytes:
    buffer = io.BytesIO()
    frames[0].save(
        buffer, kind, save_all=True, append_images=frames[1:], duration=duration, **LOSSLESS.get(kind, {})
    )  # fmt: skip
    return buffer.getvalue()


def tensors(frames: list[Image.Image]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(frame)) for frame in frames]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_frame_in_order(kind: str) -> None:
    frames = still_images(7)
    clip = open_video(animation(kind, frames))
    assert clip.num_frames == 7
    for _ in range(2):
        got = list(clip.frames(range(7)))
        assert all(torch.equal(a, b) for a, b in zip(got, tensors(frames), strict=True))
    assert clip.fps == pytest.approx(25)


@pytest.mark.parametrize("kind", FORMATS)
def test_chosen_frames_and_the_mean_rate(kind: str) -> None:
    frames = still_images(9)
    durations = [20, 40, 60, 80, 100, 20, 40, 60, 80]
    clip = open_video(animation(kind, frames, durations))
    assert clip.fps == pytest.approx(9 * 1000 / sum(durations))
    chosen = sample_indices(9, 4)
    got = list(clip.frames(chosen))
    expected = [tensors(frames)[index] for index in chosen]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert clip.fps == pytest.approx(9 * 1000 / sum(durations))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])  # Pillow writes no AVIF with a duration of 0
def test_a_duration_of_0_is_a_tenth_of_a_second(kind: str) -> None:
    assert open_video(animation(kind, still_images(5), 0)).fps == pytest.approx(10)
    assert open_video(animation(kind, still_images(5), [0, 40, 0, 40, 120])).fps == pytest.approx(5 / 0.4)


def test_a_still_image_is_a_clip_of_one_frame() -> None:
    (frame,) = still_images(1)
    for kind in ("PNG", "BMP", "GIF"):
        buffer = io.BytesIO()
        frame.save(buffer, kind)
        clip = open_video(buffer.getvalue())
        assert clip.num_frames == 1 and clip.fps is None
        assert torch.equal(next(clip.frames([0])), tensors([frame])[0])


def test_transparency_is_laid_on_white() -> None:
    frames = [Image.new("RGBA", (8, 8), (0, 0, 0, alpha)) for alpha in (0, 255)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:], duration=40)
    clip = open_video(buffer.getvalue())
    assert [int(frame[0, 0, 0]) for frame in clip.frames(range(2))] == [255, 0]


def test_an_image_for_programs_without_animations_is_no_frame() -> None:
    frames = still_images(4)
    buffer = io.BytesIO()
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:], duration=100, default_image=True)
    clip = open_video(buffer.getvalue())
    got = list(clip.frames(range(clip.num_frames)))
    assert all(torch.equal(a, b) for a, b in zip(got, tensors(frames[1:]), strict=True))
    assert clip.fps == pytest.approx(10)


def test_a_frame_begins_with_the_image_that_its_file_says() -> None:
    """Disposal "previous": each frame is drawn on the first one, whichever frames are read before it."""
    frames = [Image.new("RGBA", (6, 2), "white")]
    for column in range(1, 6):
        frame = Image.new("RGBA", (6, 2))
        frame.paste((0, 0, 0, 255), (column, 0, column + 1, 2))
        frames.append(frame)
    buffer = io.BytesIO()
    frames[0].save(
        buffer, "PNG", save_all=True, append_images=frames[1:], duration=40, disposal=[0, 2, 2, 2, 2, 2], blend=1
    )  # fmt: skip
    clip = open_video(buffer.getvalue())
    for chosen in ([0, 1, 2, 3, 4, 5], [1, 3], [2, 3, 5], [4]):
        for index, pixels in zip(chosen, clip.frames(chosen), strict=True):
            dark = (pixels[0, :, 0] == 0).nonzero().flatten().tolist()
            assert dark == ([index] if index else [])


def test_frames_go_straight_into_patches() -> None:
    config = RadioVision(patch_size=4, video_target_num_patches=24, video_temporal_patch_size=2)
    frames = still_images(5)
    clip = open_video(animation("PNG", frames))
    indices = sample_indices(clip.num_frames, 3)
    video = OmniVideoRule(config).patchify(clip.frames(indices), torch.float32, num_frames=3)
    listed = OmniVideoRule(config).patchify([tensors(frames)[i] for i in indices], torch.float32)
    assert torch.equal(video.patches, listed.patches)


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        (VideoLimits(max_bytes=100), "bytes, more than the 100"),
        (VideoLimits(max_frames=6), "7 frames, more than the 6"),
        (VideoLimits(max_pixels=200), "20x12 pixels, 240 in all, more than the 200"),
        (VideoLimits(max_total_pixels=1600), "1680 pixels in all, more than the 1600"),
        (VideoLimits(max_side=15), "20x12 pixels, a side longer than the 15"),
        (VideoLimits(max_aspect=1.5), "aspect of 1.66667 to 1, more than the 1.5"),
    ],
)
@pytest.mark.parametrize("kind", FORMATS)
def test_limits_hold_before_a_frame_is_decoded(kind: str, limits: VideoLimits, numbers: str) -> None:
    with pytest.raises(VideoError, match=numbers):
        open_video(animation(kind, still_images(7)), limits)


@pytest.mark.parametrize("data", [animation(kind, still_images(7)) for kind in FORMATS], ids=FORMATS)
def test_a_clip_at_every_limit_is_served(data: bytes) -> None:
    exact = VideoLimits(len(data), 7, 240, 7 * 240, 20, 20 / 12)
    assert len(list(open_video(data, exact).frames(range(7)))) == 7


def test_a_frame_that_is_larger_than_the_clip_said_is_refused() -> None:
    """GIF: a later frame exceeds the size in the header."""
    data = animation("GIF", [Image.new("P", (8, 8), 1), Image.new("P", (8, 8), 2)])
    second = data.rindex(b"\x2c" + bytes(4) + b"\x08\0\x08\0")
    broken = data[: second + 5] + b"\x40\0\x40\0" + data[second + 9 :]
    with pytest.raises(VideoError, match="64x64"):
        list(open_video(broken, VideoLimits(max_pixels=100)).frames(range(2)))


def test_a_frame_is_refused_before_its_pixels_are_allocated() -> None:
    """The second frame declares 60,000 x 60,000 pixels, 3.4 GiB, and has the data of one."""
    header = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frames = [b"\x2c" + struct.pack("<HHHHB", 0, 0, side, side, 0) + b"\2\2\x44\1\0" for side in (1, 60000)]
    clip = open_video(header + b"".join(frames) + b";")
    assert clip.num_frames == 2
    with pytest.raises(VideoError, match="frame 1: the image has 60000x60000 pixels, 3600000000 in all, more than"):
        list(clip.frames([0, 1]))


def test_frames_come_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    first, *rest = still_images(2)
    first.save(buffer, "PNG", save_all=True, append_images=rest, exif=exif.tobytes())
    assert next(open_video(buffer.getvalue()).frames([0])).shape == (20, 12, 3)


@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_broken_bytes_raise_nothing_else(kind: str, data: st.DataObject) -> None:
    whole = bytearray(animation(kind, still_images(4)))
    cut = data.draw(st.integers(0, len(whole)))
    for position in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=5)):
        whole[position] ^= data.draw(st.integers(1, 255))
    try:
        clip = open_video(bytes(whole[:cut]), VideoLimits(max_pixels=1 << 16))
        for frame in clip.frames(range(clip.num_frames)):
            assert frame.dim() == 3 and frame.dtype == torch.uint8
    except VideoError as error:
        assert error.reason


def test_indices_must_ascend_within_the_clip() -> None:
    clip = open_video(animation("GIF", still_images(3)))
    for indices in ([1, 0], [0, 0], [0, 3], [-1, 0]):
        with pytest.raises(ValueError, match=r"frame"):
            list(clip.frames(indices))


def test_warnings_of_the_consumer_are_its_own() -> None:
    frames = open_video(animation("GIF", still_images(3))).frames(range(3))
    next(frames)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn_explicit("mine", UserWarning, "PIL/Image.py", 1, module="PIL.Image")
    assert len(caught) == 1
    frames.close()  # type: ignore[attr-defined]


def test_what_is_no_video_is_refused_as_one() -> None:
    for data, words in (
        (b"", "the video is empty: 0 bytes"),
        (b"RIFF....AVI ", f"no {', '.join(video_formats())} video"),
    ):
        with pytest.raises(VideoError, match=words):
            open_video(data)


# -- films ------------------------------------------------------------------------------------------------------------


def test_films_are_told_by_their_first_bytes() -> None:
    assert sniff_container(b"\0\0\0\x20ftypisom") == "mov,mp4,m4a,3gp,3g2,mj2"
    assert sniff_container(b"\x1a\x45\xdf\xa3....") == "matroska,webm"
    assert sniff_container(b"GIF89a") is None and sniff_container(b"") is None


@pytest.mark.parametrize("brand", [b"avif", b"avis", b"heic"])
def test_an_image_in_the_format_of_films_is_no_film(brand: bytes) -> None:
    data = film("mp4", "mpeg4")
    with pytest.raises(VideoError, match=r"no APNG, .*WEBP video is recognised in these \d+ bytes"):
        open_video(data[:8] + brand + data[12:])


@pytest.mark.parametrize("first", [b"wide", b"free", b"mdat"])
def test_a_quicktime_file_may_begin_with_another_atom(first: bytes) -> None:
    data = film("mov", "mpeg4")
    clip = open_video(data[:4] + first + data[8:])
    assert len(list(clip.frames(range(clip.num_frames)))) == 10


def test_without_the_extra_a_film_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(VideoError, match=r"saccade-server\[video\]"):
        open_video(b"\0\0\0\x20ftypisom")


def recording(moments: list[int], *, rate_stated: bool = False) -> bytes:
    """A WebM with frames at these times, in milliseconds. Its header states 30 frames per second or, as browsers record
    it, no rate."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as file:
        stream = file.add_stream("libvpx", rate=Fraction(30), options={"deadline": "realtime", "lag-in-frames": "0"})
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        packets = []
        for index in range(len(moments)):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 48, 3), np.uint8), format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, 1000)
            packets += stream.encode(frame)
        for packet, moment in zip([*packets, *stream.encode(None)], moments, strict=True):
            packet.pts = packet.dts = moment
            file.mux(packet)
    default_duration, void = b"\x23\xe3\x83\x84", b"\xec\x86\0\0"
    data = buffer.getvalue()
    assert data.count(default_duration) == 1
    return data if rate_stated else data.replace(default_duration, void)


def test_the_rate_of_a_recording_is_that_of_its_timestamps() -> None:
    moments = list(itertools.accumulate([0, *[33, 67, 33, 100, 17] * 12]))
    assert open_video(recording(moments)).fps == pytest.approx(60 / 3)
    assert open_video(recording([0, 2000])).fps == pytest.approx(0.5)
    assert open_video(recording([0])).fps is None
    assert open_video(recording([0, 4 * 10**15])).fps is None, "a frame in 126,000 years is no rate"
    slower = [*range(0, 2000, 33), *range(3000, 30000, 1000)]
    for rate_stated in (True, False):  # without a stated rate, FFmpeg takes that of the first frames
        clip = open_video(recording(slower, rate_stated=rate_stated))
        assert clip.fps == pytest.approx((len(slower) - 1) / 29)


def test_a_rate_that_timestamps_only_round_is_kept() -> None:
    assert open_video(recording([round(frame * 1000 / 30) for frame in range(40)], rate_stated=True)).fps == 30


@pytest.mark.parametrize(("container", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx")])
def test_films(container: str, codec: str) -> None:
    data = film(container, codec)
    clip = open_video(data)
    assert clip.num_frames == 10 and clip.fps == pytest.approx(5)
    for indices in (range(10), [0, 3, 9], [2]):
        got = list(clip.frames(indices))
        assert len(got) == len(indices)
        for index, frame in zip(indices, got, strict=True):
            assert frame.shape == (32, 48, 3) and frame.dtype == torch.uint8
            assert abs(frame.float().mean() - 20 * index) < 6


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        (VideoLimits(max_frames=9), "more than the 9"),
        (VideoLimits(max_pixels=1000), "1536 in all, more than the 1000"),
        (VideoLimits(max_total_pixels=15000), "15360 pixels in all, more than the 15000"),
    ],
)
def test_film_limits(limits: VideoLimits, numbers: str) -> None:
    with pytest.raises(VideoError, match=numbers):
        open_video(film("mp4", "mpeg4"), limits)


def test_a_film_at_every_limit_is_served() -> None:
    data = film("mp4", "mpeg4")
    exact = VideoLimits(len(data), 10, 32 * 48, 10 * 32 * 48, 48, 48 / 32)
    assert len(list(open_video(data, exact).frames(range(10)))) == 10
    with pytest.raises(VideoError, match="bytes, more than"):
        open_video(data, VideoLimits(len(data) - 1))


def cut(data: bytes, seconds: Fraction) -> bytes:
    """The MP4 without its first `seconds`, as `ffmpeg -ss -c copy` cuts it: with all packets from the last key frame
    before that time, and an edit list that hides the frames before it."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format="mp4") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.dts is not None and packet.pts is not None and stream.time_base:
                packet.pts -= int(seconds / stream.time_base)
                packet.dts -= int(seconds / stream.time_base)
                packet.stream = copy
                target.mux(packet)
    return buffer.getvalue()


def test_a_cut_film_has_the_frames_that_it_shows() -> None:
    data = cut(film("mp4", "libx264"), Fraction(3, 5))
    clip = open_video(data)
    assert clip.num_frames == 7
    grey = [float(frame.float().mean()) for frame in clip.frames(range(7))]
    assert grey == pytest.approx(range(60, 200, 20), abs=6)
    # The hidden frames are decoded too, so they count for the limits.
    with pytest.raises(VideoError, match="10 frames, more than the 9"):
        open_video(data, VideoLimits(max_frames=9))


def test_a_film_that_lacks_what_its_first_frames_depend_on_is_refused() -> None:
    """Decoders leave such frames out, and all others would have the numbers and times of earlier ones."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(film("mp4", "libx264"))) as source, av.open(buffer, "w", format="matroska") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        key, *others = (packet for packet in source.demux(stream) if packet.size)
        # The frames after the key frame, and then the whole film.
        for seconds, packets in ((0, others), (2, [key, *others])):
            for packet in packets:
                again = av.Packet(bytes(packet))
                shift = int(seconds / packet.time_base)
                again.pts, again.dts, again.time_base = packet.pts + shift, packet.dts + shift, packet.time_base
                again.is_keyframe, again.stream = packet.is_keyframe, copy
                target.mux(again)
    clip = open_video(buffer.getvalue())
    assert clip.num_frames == 19
    with pytest.raises(VideoError, match="the first frames cannot be decoded: they depend on frames that the file"):
        list(clip.frames([0]))


def changed(data: bytes, container: str, change: Callable[[int, bytes], list[bytes]]) -> bytes:
    """The video with other packets: `change` gives those that replace packet `index`, with its timestamps and later
    ones."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format=container) as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        for index, packet in enumerate(packet for packet in source.demux(stream) if packet.size):
            for later, content in enumerate(change(index, bytes(packet))):
                again = av.Packet(content)
                again.pts, again.dts, again.time_base = packet.pts + later, packet.dts + later, packet.time_base
                again.is_keyframe, again.stream = packet.is_keyframe, copy
                target.mux(again)
    return buffer.getvalue()


def flipped(data: bytes) -> bytes:
    """The bytes with every seventh one changed in their last two thirds."""
    damaged = bytearray(data)
    for place in range(len(data) // 3, len(data), 7):
        damaged[place] ^= 0x55
    return bytes(damaged)


EMPTY = b"\0\0\0\3\x46\x01\x50"
"""An access unit of HEVC without a frame."""


@pytest.mark.parametrize(
    ("codec", "damage", "words"),
    [
        ("mpeg4", flipped, r"frame 4, at 0\.800 s, is damaged"),
        ("libx265", lambda packet: EMPTY, r"frame \d, at \d\.\d00 s, cannot be decoded: it is damaged, or the"),
    ],
    ids=["damaged", "left-out"],
)
def test_a_film_with_a_damaged_frame_is_refused(codec: str, damage: Callable[[bytes], bytes], words: str) -> None:
    """Decoders conceal the damage or leave the frame out; later frames depend on it, or have its number."""
    whole = film("mp4", codec, ramp=90, height=96, width=128)
    data = changed(whole, "mp4", lambda index, packet: [damage(packet) if index == 4 else packet])
    clip = open_video(data)
    assert clip.num_frames == 10
    with pytest.raises(VideoError, match=words):
        list(clip.frames([0, 9]))
    assert len(list(clip.frames([0]))) == 1, "frames before the damage can be decoded"


def test_frames_that_are_only_references_are_no_frames_of_a_film() -> None:
    """VP8 has such frames in packets of their own."""
    whole = film("webm", "libvpx")

    def with_a_reference(index: int, packet: bytes) -> list[bytes]:
        return [packet] if index else [packet, bytes([packet[0] & ~0x10]) + packet[1:]]

    clip = open_video(changed(whole, "webm", with_a_reference))
    assert clip.num_frames == 10
    ours, theirs = list(clip.frames(range(10))), list(open_video(whole).frames(range(10)))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("repeated", [{3}, {4, 5}, {2, 8, 9}], ids=str)
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_frame_that_is_not_coded_shows_the_one_before_again(container: str, repeated: set[int]) -> None:
    """MPEG-4 has such frames, which FFmpeg's decoder leaves out."""
    whole = film("mp4", "mpeg4")

    def uncoded(index: int, packet: bytes) -> list[bytes]:
        if index not in repeated:
            return [packet]
        # Type P, a new second, a marker, fifths of a second, a marker, not coded; filled up to two bytes.
        bits = f"01{'1' if index % 5 == 0 else ''}01{index % 5:03b}100".ljust(16, "1")
        return [b"\0\0\1\xb6" + int(bits, 2).to_bytes(2, "big")]

    clip = open_video(changed(whole, container, uncoded))
    assert clip.num_frames == 10
    found = list(clip.frames(range(10)))
    for index in repeated:
        assert torch.equal(found[index], found[index - 1])
    assert all(not torch.equal(found[index], found[index - 1]) for index in set(range(1, 10)) - repeated)
    assert all(torch.equal(frame, found[index]) for index in repeated for frame in clip.frames([index]))


@pytest.mark.parametrize("height", [32, 1])
@pytest.mark.parametrize("degrees", [90, 270])
def test_a_turned_film_comes_upright(degrees: int, height: int) -> None:
    """As phones record it: the matrix in the track's header gives the rotation."""
    data = bytearray(film("mp4", "mpeg4", frames=2, height=height, ramp=200))
    one = {0: b"\0\1\0\0", 1: b"\xff\xff\0\0"}
    place = data.index(b"tkhd") + 4 + 40  # version, flags, times, ids, layer, volume
    sign = (0, 1) if degrees == 90 else (1, 0)
    zero = bytes(4)
    matrix = [zero, one[sign[0]], zero, one[sign[1]], zero, zero, zero, zero, b"\x40\0\0\0"]
    data[place : place + 36] = b"".join(matrix)
    with av.open(io.BytesIO(bytes(data))) as file:
        frame = next(file.decode(video=0))
        turned, plain = round(frame.rotation), frame.to_ndarray(format="rgb24")
    assert abs(turned) == 90
    found = next(open_video(bytes(data)).frames([0])).numpy()
    assert np.array_equal(found, np.rot90(plain, 1 if turned == 90 else 3))


def test_broken_films_raise_nothing_else() -> None:
    whole = film("mp4", "mpeg4")
    for cut, stride in itertools.product((0, 20, len(whole) // 2, len(whole)), (0, 7, 61)):
        broken = bytearray(whole[:cut])
        if stride:
            broken[12::stride] = bytes(len(broken[12::stride]))
        try:
            clip = open_video(b"\0\0\0\x20ftyp" + bytes(broken[8:]))
            list(clip.frames(range(clip.num_frames)))
        except VideoError as error:
            assert error.reason


def test_a_broken_header_is_described_without_ffmpegs_number() -> None:
    with pytest.raises(VideoError) as refused:
        open_video(b"\0\0\0\x18ftypmp42" + b"x" * 50)
    assert "Invalid data found" in str(refused.value) and "Errno" not in str(refused.value)


@pytest.mark.parametrize(("container", "name"), [("mp4", b"avc1"), ("matroska", b"V_MPEG4/ISO/AVC")])
def test_a_film_with_an_unknown_codec_is_refused(container: str, name: bytes) -> None:
    data = film(container, "libx264")
    assert name in data
    with pytest.raises(VideoError, match="codec of the video stream is not known"):
        open_video(data.replace(name, name[:-4] + b"zzzz"))
