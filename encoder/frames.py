"""Decodes the frames of clips, with limits on everything that a hostile file can declare.

Pillow reads GIF, APNG and animated WebP and AVIF, restricted to the decoders allowed for images. MP4 and WebM need
PyAV, the optional extra `video`, which is imported for the first such clip. Frames are yielded one at a time, upright,
as `[H, W, 3]` uint8 composited on white, so a clip is never in memory as a whole. An image of one frame is a clip of
one frame.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import UnidentifiedImageError

from encoder.images import (
    Pixels,
    check_layout,
    open_image_file,
    orientation_of,
    quiet_pillow,
    read_header,
    to_rgb,
    upright,
    words,
)
from encoder.media_limits import ImageError, ImageHeader, VideoError, VideoLimits, known_rate, video_formats

if TYPE_CHECKING:
    import torch

CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""PyAV demuxers that may be used; others read playlists or further files."""
MP4_ATOMS = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
"""Types of the first atom of an MP4 or QuickTime file. Cameras have written QuickTime files without `ftyp`."""
IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1")
"""Major brands of images and animations in MP4's format (AVIF, HEIC), of which a video decoder gives only one tile or
frame."""
RATE_TOLERANCE = 0.05
"""Largest relative difference between the frame rate that a file states and that of its timestamps, which may be
rounded to milliseconds."""
ANIMATIONS = ("GIF", "PNG", "WEBP", "AVIF")
"""Formats whose frames have durations."""
TIMED_BY_PIXELS = ("WEBP", "AVIF")
"""Those whose durations are read with the pixels."""
UNTIMED_MS = 100.0
"""How long a frame of an animation with no duration, or one of 0, is shown, as in browsers."""


class Clip(ABC):
    """An opened clip. Each call of `frames` starts over."""

    @property
    @abstractmethod
    def num_frames(self) -> int:
        """Frames in the file."""

    @property
    @abstractmethod
    def fps(self) -> float | None:
        """Frames per second, the average if it varies; None if the file does not say."""

    @abstractmethod
    def arrays(self, indices: Sequence[int]) -> Generator[Pixels, None, None]:
        """Yields `[H, W, 3]` uint8 of the frames at `indices`. Raises `ValueError` for indices that are not ascending
        or not in the file, and otherwise only `VideoError`: for a file that is corrupt, truncated or exceeds its limits
        while it is decoded."""

    def frames(self, indices: Sequence[int]) -> Generator[torch.Tensor, None, None]:
        """`arrays` as tensors of the same memory."""
        import torch  # imported here: the process that only decodes needs no torch

        with closing(self.arrays(indices)) as arrays:
            for pixels_HWC in arrays:
                yield torch.from_numpy(pixels_HWC)


def open_video(data: bytes, limits: VideoLimits | None = None) -> Clip:
    """Opens a clip by its headers; no frame is decoded, except that an animation's frames are counted.

    Raises only `VideoError`: for bytes that are not a clip of an allowed format, exceed `limits`, or need an extra that
    is not installed.
    """
    limits = limits or VideoLimits()
    if not data:
        raise VideoError("the video is empty: 0 bytes")
    limits.check_bytes(len(data))
    container = sniff_container(data)
    return _AvClip(data, limits, container) if container is not None else _PillowClip(data, limits)


def describe(data: bytes, limits: VideoLimits) -> ImageHeader:
    """Format and size of an image or clip, within the limits of a frame, without decoding it. Raises `ImageError`."""
    container = sniff_container(data)
    if container is None:
        return read_header(data, limits.frame)
    clip = _AvClip(data, limits, container)
    return ImageHeader("MP4" if container == CONTAINERS[0] else "WEBM", clip.width, clip.height, "RGB")


def sniff_container(data: bytes) -> str | None:
    """The PyAV demuxer for these bytes; None if they are neither MP4 nor Matroska."""
    if data[4:8] == b"ftyp" and data[8:12] in IMAGE_BRANDS:
        return None
    if data[4:8] in MP4_ATOMS:
        return CONTAINERS[0]
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return CONTAINERS[1]
    return None


class _PillowClip(Clip):
    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        self._data, self._limits = data, limits
        self._fps: float | None = None
        self._timed = False
        with quiet_pillow():
            image = self._open()
            try:
                # An APNG may begin with an image for programs that show no animations.
                self._hidden = int(getattr(image, "default_image", False))
                self._count = int(getattr(image, "n_frames", 1)) - self._hidden
            except Exception as error:
                raise VideoError(f"the frames of the {image.format} cannot be counted: {words(error)}") from error
            limits.check(self._count, image.width, image.height)

    def _open(self) -> Any:
        try:
            return open_image_file(self._data, self._limits.frame)
        except ImageError as error:
            why = error.reason
            if isinstance(error.__cause__, UnidentifiedImageError):
                why = f"no {', '.join(video_formats())} video is recognised in these {len(self._data)} bytes"
            raise VideoError(why, too_large=error.too_large) from error

    @property
    def num_frames(self) -> int:
        return self._count

    @property
    def fps(self) -> float | None:
        if not self._timed:
            for _ in self.arrays([]):
                pass
        return self._fps

    def arrays(self, indices: Sequence[int]) -> Generator[Pixels, None, None]:
        wanted = _ascending(indices, self._count)
        with quiet_pillow():
            image = self._open()
        milliseconds = 0.0
        for index in range(self._count):
            # Entered for each frame separately: the consumer's code between two frames must get its warnings.
            with quiet_pillow():
                frame_HWC = self._frame(image, index, index in wanted)
                if self._count > 1 and image.format in ANIMATIONS:
                    milliseconds += float(image.info.get("duration") or UNTIMED_MS)
            if frame_HWC is not None:
                yield frame_HWC
        self._timed = True
        self._fps = 1000.0 * self._count / milliseconds if milliseconds > 0 else None

    def _check_size(self, image: Any) -> None:
        self._limits.frame.check_size(image.width, image.height)

    def _frame(self, image: Any, index: int, wanted: bool) -> Pixels | None:
        try:
            image.seek(self._hidden + index)
            # Frames of a GIF may enlarge the image. Pillow allocates it in `load`, which may change the size again.
            self._check_size(image)
            check_layout(image)
            if not wanted and image.format not in TIMED_BY_PIXELS:
                return None
            _load(image)
            self._check_size(image)
            return upright(to_rgb(image), orientation_of(image)) if wanted else None
        except ImageError as error:
            raise VideoError(f"frame {index}: {error.reason}", too_large=error.too_large) from error
        except Exception as error:  # Pillow and codecs raise any exception on hostile bytes
            raise VideoError(f"frame {index} of the {image.format} cannot be decoded: {words(error)}") from error


def _load(image: Any) -> None:
    """Loads the current frame. Pillow draws the frame of an APNG also on its copy of the image before it, which the
    next frame may begin with (disposal "previous"): this restores the copy."""
    before = getattr(image, "_prev_im", None) if image.format == "PNG" else None
    kept = None if before is None else before.copy()
    image.load()
    if kept is not None:
        image._prev_im = kept


class _AvClip(Clip):
    def __init__(self, data: bytes, limits: VideoLimits, container: str) -> None:
        self._data, self._limits, self._container = data, limits, container
        try:
            av: Any = importlib.import_module("av")
        except ImportError as error:
            raise VideoError("MP4 and WebM need the extra `video`: pip install 'saccade-server[video]'") from error
        self._av = av
        with self._opened() as (file, stream):
            self.width, self.height = stream.codec_context.width, stream.codec_context.height
            try:
                limits.frame.check_size(self.width, self.height)
            except ImageError as error:
                raise VideoError(error.reason, too_large=error.too_large) from error
            packets, moments, repeated = self._packets(file, stream)
            self._count = len(moments)
            self._moments = [] if None in moments else sorted(moments)
            """Timestamps of the frames; empty if one has none."""
            self._repeated = {index for index, moment in enumerate(self._moments) if moment in repeated}
            limits.check(packets, self.width, self.height)
            if not self._count:
                raise VideoError("the video has no frame in the time that is shown")
            self._fps = known_rate(self._mean_rate(stream))

    @property
    def num_frames(self) -> int:
        return self._count

    @property
    def fps(self) -> float | None:
        return self._fps

    def _mean_rate(self, stream: Any) -> float | None:
        """Frames per second: what the file states, or what its timestamps give, if it states nothing or is a Matroska
        file whose timestamps differ by more than `RATE_TOLERANCE`. A Matroska header may lack the rate, and FFmpeg then
        states an estimate from the first frames. None if neither is known."""
        stated = float(stream.average_rate) if stream.average_rate else None
        if not self._moments or self._moments[0] == self._moments[-1]:
            return stated
        measured = float((self._count - 1) / ((self._moments[-1] - self._moments[0]) * stream.time_base))
        kept = self._container == CONTAINERS[0] or abs((stated or 0) - measured) <= RATE_TOLERANCE * measured
        return stated if stated and kept else measured

    def _opened(self) -> _AvFile:
        return _AvFile(self._av, self._data, self._container)

    def _packets(self, file: Any, stream: Any) -> tuple[int, list[Any], set[Any]]:
        """The number of packets, since the header may be wrong or empty, the timestamps of those that give a frame
        (None for one without), and those at which the frame before is shown again. Files that were cut without encoding
        them again contain packets outside the time that is shown: they are decoded, but give no frame."""
        packets, moments, repeated = 0, [], set()
        for packet in file.demux(stream):
            if packet.size > 0:
                packets += 1
                # VP8 keeps frames that are only references in packets of their own, without the bit for showing them.
                hidden = stream.codec_context.name == "vp8" and not memoryview(packet)[0] & 0x10
                if not packet.is_discard and not hidden:
                    moments.append(packet.pts)
                    if stream.codec_context.name == "mpeg4" and _is_not_coded(bytes(packet), stream.codec_context):
                        repeated.add(packet.pts)
            if packets > self._limits.max_frames:
                break
        return packets, moments, repeated

    def arrays(self, indices: Sequence[int]) -> Generator[Pixels, None, None]:
        wanted = _ascending(indices, self._count)
        left = len(wanted)
        size: tuple[int, int] | None = None
        with self._opened() as (file, stream):
            for index, frame in enumerate(self._decoded(file, stream)):
                if not left or index == self._count:
                    break
                self._check_frame(frame, index)
                if index in wanted:
                    left -= 1
                    pixels_HWC = self._pixels(frame, index)
                    size = size or (pixels_HWC.shape[0], pixels_HWC.shape[1])
                    yield pixels_HWC
        if left:
            raise VideoError(
                f"the video ends early: {left} chosen frames are missing of the {self._count} that it declares"
            )

    def _decoded(self, file: Any, stream: Any) -> Iterator[Any]:
        """Yields the decoder's frames, and again the frame before one that is not coded, which the decoder leaves
        out."""
        index, last = 0, None
        for frame in file.decode(stream):
            while last is not None and index in self._repeated and self._is_late(frame, index):
                yield last
                index += 1
            yield frame
            index, last = index + 1, frame

    def _is_late(self, frame: Any, index: int) -> bool:
        """Whether the decoder has left out frame `index`, since `frame` is a later one."""
        return bool(self._moments) and frame.pts is not None and frame.pts > self._moments[index]

    def _check_frame(self, frame: Any, index: int) -> None:
        """Raises VideoError if frame `index`, and maybe others, is missing before `frame`, or if `frame` is damaged.
        Later frames may depend on either, and all would have the numbers and times of earlier ones."""
        if self._is_late(frame, index):
            if not index:
                raise VideoError("the first frames cannot be decoded: they depend on frames that the file lacks")
            raise VideoError(
                f"{_place(index, self._moments[index], frame.time_base)} cannot be decoded: it is damaged, or the file "
                "lacks what it depends on"
            )
        if frame.is_corrupt:
            raise VideoError(f"{_place(index, frame.pts, frame.time_base)} is damaged")

    def _pixels(self, frame: Any, index: int) -> Pixels:
        try:
            self._limits.frame.check_size(frame.width, frame.height)
        except ImageError as error:
            raise VideoError(f"frame {index}: {error.reason}", too_large=error.too_large) from error
        pixels_HWC: Pixels = frame.to_ndarray(format="rgb24")
        turns = round(getattr(frame, "rotation", 0) / 90) % 4  # counter-clockwise, as numpy.rot90
        # `ascontiguousarray` would return a view with a negative stride where a side has one pixel.
        return np.rot90(pixels_HWC, turns).copy() if turns else np.ascontiguousarray(pixels_HWC)


class _AvFile:
    """An open PyAV file and its first video stream, decoded by one thread; every libav error becomes a `VideoError`."""

    def __init__(self, av: Any, data: bytes, container: str) -> None:
        self._av, self._data, self._container = av, data, container

    def __enter__(self) -> tuple[Any, Any]:
        try:
            self._file = self._av.open(io.BytesIO(self._data), format=self._container.split(",")[0])
        except Exception as error:
            raise VideoError(f"the header of the video cannot be read: {words(error)}") from error
        if not self._file.streams.video:
            self._file.close()
            raise VideoError("the file holds no video stream")
        stream = self._file.streams.video[0]
        if stream.codec_context is None:
            self._file.close()
            raise VideoError("the codec of the video stream is not known: no decoder for it is installed")
        stream.codec_context.thread_count = 1
        return self._file, stream

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._file.close()
        if isinstance(error, Exception) and not isinstance(error, VideoError):
            raise VideoError(f"the video cannot be decoded: {words(error)}") from error


def _is_not_coded(packet: bytes, codec_context: Any) -> bool:
    """Whether an MPEG-4 packet says that the frame before it is shown again: the bit `vop_coded` of its header (ISO/IEC
    14496-2, 6.2.5) is 0."""
    if not codec_context.framerate:
        return False
    header = packet.partition(b"\0\0\1\xb6")[2][:16]
    bits = f"{int.from_bytes(header, 'big'):0{8 * len(header)}b}"
    tick_bits = max(1, (codec_context.framerate.numerator - 1).bit_length())
    return re.match(rf"..1*01.{{{tick_bits}}}10", bits) is not None  # type, seconds, marker, ticks, marker, coded


def _place(index: int, pts: int | None, unit: Fraction | None) -> str:
    """A frame's name in messages: its index and, if it has a timestamp, its time. `unit`: seconds of one tick."""
    return f"frame {index}" if pts is None or unit is None else f"frame {index}, at {float(pts * unit):.3f} s,"


def _ascending(indices: Sequence[int], count: int) -> frozenset[int]:
    if list(indices) != sorted(set(indices)):
        raise ValueError(f"frame indices must ascend without repeats, got {list(indices)[:8]}")
    if indices and not 0 <= indices[0] <= indices[-1] < count:
        raise ValueError(f"frames {indices[0]} to {indices[-1]} are not all in a clip of {count} frames")
    return frozenset(indices)
