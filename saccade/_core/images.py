"""Converts images, in the forms in which users pass them, to `Image` messages.

Files and bytes are sent unchanged: encoding them again could change what the model gets. Pillow and numpy are only used
if the caller has imported them already, which is so if one of their objects is passed.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from saccade._core.data_urls import decode_data_url, is_data_url
from saccade._core.ranges import check_text, file_reason
from saccade.errors import InvalidArgument
from saccade.types import Media
from saccade.v1 import types_pb2

if TYPE_CHECKING:
    import numpy
    import PIL.Image

    ImageInput: TypeAlias = (
        str
        | os.PathLike[str]
        | bytes
        | bytearray
        | memoryview
        | io.IOBase
        | PIL.Image.Image
        | numpy.ndarray[Any, Any]
        | types_pb2.Image
        | Media
    )
else:
    ImageInput: TypeAlias = Any

LARGEST = 2**31 - 1
"""Bytes of a message of protobuf, and so of a file in one."""
# PNG stores these modes unchanged.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
# These are converted to others without loss of depth or transparency, by way of the modes listed, because Pillow's
# direct conversions clip; other modes (CMYK, YCbCr, ...) become RGB.
_PNG_EQUIVALENTS = {
    "I;16B": ("I", "I;16"), "I;16L": ("I", "I;16"), "I;16N": ("I", "I;16"),
    "PA": ("RGBA",), "RGBa": ("RGBA",), "La": ("LA",),
}  # fmt: skip
# The white level of their samples is undefined.
_UNSCALED_MODES = frozenset({"I", "F"})
_PNG_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}


def image_messages(images: Iterable[ImageInput] | ImageInput) -> list[types_pb2.Image]:
    """One message per image; a single image is taken as a list of one."""
    if isinstance(images, list | tuple):
        items = list(images)
    elif _is_single(images):
        items = [images]
    elif isinstance(images, Iterable):
        items = list(images)
    else:
        raise InvalidArgument(f"images: expected a list of images, got {type(images).__name__}")
    return [image_message(item, f"images[{position}]") for position, item in enumerate(items)]


def image_message(image: ImageInput, name: str = "image") -> types_pb2.Image:
    """The message for one image.

    Args:
        image: a path, an https or data URL, the bytes of an encoded file, a binary file object, a Pillow image, or a
            uint8 array `[H, W]` or `[H, W, C]` with 1 to 4 channels; an `Image` message stays as it is.
        name: the image's name in an error.

    Raises:
        InvalidArgument: it is none of these, or it cannot be read.
    """
    if isinstance(image, types_pb2.Image):
        return image
    if isinstance(image, Media):
        return types_pb2.Image(media_id=image.media_id)
    if isinstance(image, str | os.PathLike):
        return _from_path_or_url(os.fsdecode(image), name)
    if isinstance(image, bytes | bytearray | memoryview):
        return types_pb2.Image(data=bytes(image))
    try:
        return types_pb2.Image(data=_content(image, name))
    except (InvalidArgument, MemoryError):
        raise
    except Exception as error:  # raised by Pillow, an array's library or the file object, so of any class
        why = f"cannot read the {type(image).__name__}: {str(error) or type(error).__name__}"
        raise InvalidArgument(f"{name}: {why}", reason="IMAGE_UNREADABLE") from error


def _content(image: Any, name: str) -> bytes:
    """The file for a Pillow image, an array or a file object."""
    if is_pillow(image):
        return _png_from_pillow(image, name)
    if is_array(image):
        return _png_from_array(image, name)
    if hasattr(image, "read"):
        data = image.read()
        if not isinstance(data, bytes):
            raise InvalidArgument(f"{name}: the file object returns {type(data).__name__}; open it in binary mode")
        return data
    raise InvalidArgument(
        f"{name}: expected a path, bytes, a binary file, a Pillow image or a uint8 array, got {type(image).__name__}"
    )


def located(value: Any, name: str) -> Any:
    """The URL in OpenAI's `{"url": ...}`, or the value itself. Raises InvalidArgument for a mapping without a URL."""
    if not isinstance(value, Mapping):
        return value
    if value.get("url") is None:
        raise InvalidArgument(f"{name}: expected a URL or a dict with the key url, got keys {sorted(map(str, value))}")
    return value["url"]


def _is_single(value: Any) -> bool:
    if isinstance(value, str | os.PathLike | bytes | bytearray | memoryview | types_pb2.Image | Media) or hasattr(
        value, "read"
    ):
        return True
    # A 4-dimensional array is a batch; iterating over it yields its images.
    return is_pillow(value) or (is_array(value) and value.ndim <= 3)


def _from_path_or_url(text: str, name: str) -> types_pb2.Image:
    if text[:6].lower().startswith(("http:", "https:")):
        return types_pb2.Image(uri=check_text(name, text))
    if is_data_url(text):
        try:
            return types_pb2.Image(data=decode_data_url(text))
        except ValueError as error:
            raise InvalidArgument(f"{name}: {error}") from error
    try:
        return types_pb2.Image(data=file_content(text))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{name}: cannot read {text!r}: {file_reason(error)}", reason="IMAGE_UNREADABLE"
        ) from error


def file_content(path: str) -> bytes:
    """The content of a file or a pipe. Raises OSError, and ValueError for a device, such as /dev/zero, and for what has
    more bytes than any message."""
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise ValueError("it is a device, expected a file or a pipe")
        pieces, size = [], 0
        while piece := file.read(2**20):
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST:
                raise ValueError(f"it has more than {LARGEST} bytes, the largest size of a message")
        return b"".join(pieces)


def is_pillow(value: Any) -> bool:
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "shape") and hasattr(value, "ndim")


def _png_from_pillow(image: Any, name: str) -> bytes:
    from PIL import ImageOps

    # The server rotates a file according to its EXIF data. A Pillow image of that file has not been rotated yet.
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "I" and image.format in ("PNG", "PPM"):  # Pillow's mode for 16-bit greyscale in such files
        upright = upright.convert("I;16")
    if upright.mode in _UNSCALED_MODES:
        words = f"a Pillow image of mode {upright.mode} has no defined white; convert it to 8 bits (L) or 16 (I;16)"
        raise InvalidArgument(f"{name}: {words}")
    if upright.mode not in _PNG_MODES:
        for mode in _PNG_EQUIVALENTS.get(upright.mode, ("RGB",)):
            upright = upright.convert(mode)
    buffer = io.BytesIO()
    upright.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _png_from_array(array: Any, name: str) -> bytes:
    import numpy

    pixels = numpy.asarray(array)
    shape = tuple(pixels.shape)
    if pixels.dtype != numpy.uint8:
        raise InvalidArgument(f"{name}: expected a uint8 array, got {pixels.dtype} {list(shape)}")
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in _PNG_COLOR_TYPES or 0 in shape:
        raise InvalidArgument(f"{name}: expected an array [H, W] or [H, W, 1..4], got {list(shape)}")
    height, width, channels = pixels.shape
    rows = numpy.zeros((height, 1 + width * channels), dtype=numpy.uint8)  # each row starts with its filter type, 0
    rows[:, 1:] = pixels.reshape(height, width * channels)
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOR_TYPES[channels], 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _png_chunk(b"IHDR", header),
            _png_chunk(b"IDAT", zlib.compress(rows.tobytes(), 1)),
            _png_chunk(b"IEND", b""),
        )
    )


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
