"""Decodes untrusted image bytes to RGB pixels with Pillow.

Only these formats, whose decoders run in this process, are allowed: PNG (APNG), JPEG (MPO), WebP, GIF, BMP, TIFF, PPM
(PBM, PGM) and AVIF. Pillow's EPS and WMF readers, which start other programs, and its rarely used readers are not.

Conversions: several frames -> the first; EXIF orientation -> applied; alpha and palette transparency -> composited on
white; CMYK, palettes, greyscale, one bit -> RGB as Pillow converts them, ignoring colour profiles; 16-bit greyscale ->
scaled to 8 bits; 16-bit colours -> their high bytes. 32-bit integer and float samples, whose white level is undefined,
CIELAB, and layouts of uncompressed TIFF files that Pillow reads as others are errors. Limits are checked against the
header before any pixel is decoded.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from encoder.media_limits import FORMATS, ImageError, ImageHeader, ImageLimits

if TYPE_CHECKING:
    import torch

Pixels = NDArray[np.uint8]
"""`[H, W, 3]`, RGB."""
ORIENTATION_TAG = 0x0112
TIFF_BITS, TIFF_PHOTOMETRIC, TIFF_WHITE_IS_ZERO = 258, 262, 0
TIFF_COMPRESSION, TIFF_UNCOMPRESSED, TIFF_PLANES, TIFF_SEPARATE = 259, 1, 284, 2
TIFF_SUBSAMPLING = 530
GREY16 = ("I;16", "I;16L", "I;16B", "I;16N")


def read_header(data: bytes, limits: ImageLimits | None = None) -> ImageHeader:
    """Format and size of an image without decoding it. Raises `ImageError` like `decode_pixels`."""
    with quiet_pillow():
        image = open_image_file(data, limits or ImageLimits())
        return ImageHeader(image.format or "", image.width, image.height, image.mode)


def decode_image(data: bytes, limits: ImageLimits | None = None) -> torch.Tensor:
    """`decode_pixels` as a tensor that shares the memory."""
    import torch  # imported here: the process that only decodes needs no torch

    return torch.from_numpy(decode_pixels(data, limits))


def decode_pixels(data: bytes, limits: ImageLimits | None = None) -> Pixels:
    """Decodes the first frame: `[H, W, 3]` uint8 RGB, upright, on white; new contiguous memory.

    Raises only `ImageError`: for bytes that are not an image of an allowed format, are truncated or corrupt, or exceed
    `limits`. Pillow releases the GIL while its codecs run.
    """
    limits = limits or ImageLimits()
    with quiet_pillow():
        image = open_image_file(data, limits)
        try:
            image.load()
            # The size may change while frames or tiles are read.
            limits.check_size(image.width, image.height)
            pixels_HWC = to_rgb(image)
            return upright(pixels_HWC, orientation_of(image))
        except ImageError:
            raise
        except Exception as error:  # Pillow and codecs raise any exception on hostile bytes
            raise ImageError(f"the {image.format} image cannot be decoded: {words(error)}") from error


def open_image_file(data: bytes, limits: ImageLimits) -> Image.Image:
    """Opens an image by its header, without decoding. Raises `ImageError` like `decode_pixels`. Call it within
    `quiet_pillow`."""
    if not data:
        raise ImageError("the image is empty: 0 bytes")
    limits.check_bytes(len(data))
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ImageError(f"no {', '.join(FORMATS)} image is recognised in these {len(data)} bytes") from error
    except Exception as error:
        raise ImageError(f"the header of the image cannot be read: {words(error)}") from error
    limits.check_size(image.width, image.height)
    _scale_colour_key(image)
    check_layout(image)
    return image


def check_layout(image: Any) -> None:
    """Raises `ImageError` for a frame of an uncompressed TIFF whose samples Pillow would read as others: separate
    planes of 16 bits as planes of 8, and subsampled colours as if each pixel had its own."""
    if image.format != "TIFF":
        return
    try:
        tags = {tag: image.tag_v2.get(tag) for tag in (TIFF_BITS, TIFF_COMPRESSION, TIFF_PLANES, TIFF_SUBSAMPLING)}
    except Exception as error:
        raise ImageError(f"the header of the image cannot be read: {words(error)}") from error
    if tags[TIFF_COMPRESSION] not in (None, TIFF_UNCOMPRESSED):
        return
    bits, subsampling = tags[TIFF_BITS] or (1,), tags[TIFF_SUBSAMPLING]
    if tags[TIFF_PLANES] == TIFF_SEPARATE and len(bits) > 1 and set(bits) != {8}:
        raise ImageError(f"uncompressed TIFF images with separate planes of {bits[0]} bits are not served: compress it")
    if image.mode == "YCbCr" and subsampling not in (None, (1, 1)):
        raise ImageError(f"uncompressed TIFF images with subsampling {subsampling} are not served: compress it")


def _scale_colour_key(image: Any) -> None:
    """Converts the transparent colour of a PNG without alpha from samples of the file's depth to those of 8 bits that
    Pillow compares it with. Pillow reads only the high bytes of 16-bit colours, so only those are compared."""
    key = image.info.get("transparency")
    if image.format != "PNG" or key is None or not image.tile:
        return
    rawmode = image.tile[0][3]
    if rawmode in ("L;2", "L;4"):
        most = 2 ** int(rawmode[2:]) - 1
        image.info["transparency"] = (key & most) * 255 // most
    elif rawmode == "RGB;16B":
        image.info["transparency"] = tuple(sample >> 8 for sample in key)


def words(error: Exception) -> str:
    """The message of a decoder's exception, without FFmpeg's number and file name."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]


def to_rgb(image: Image.Image) -> Pixels:
    """The loaded image as `[H, W, 3]` uint8, transparency composited on white."""
    if image.mode in GREY16 or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _grey16(image)
    if image.mode in ("I", "F", "LAB"):
        raise ImageError(f"{image.format} images with samples of mode {image.mode} are not served: use 8 or 16 bits")
    if image.mode == "La":  # Pillow converts premultiplied grey only to LA
        image = image.convert("LA")
    transparent = image.mode[-1] in "Aa" or image.info.get("transparency") is not None
    if transparent:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.array(image.convert("RGB"), dtype=np.uint8)


def _grey16(image: Image.Image) -> Pixels:
    """Scales greyscale samples of more than 8 bits to 8, rounding (a plain conversion would clip them to white)."""
    grey_HW = np.array(image).astype(np.int64)
    white = 0xFFFF
    tags: Any = getattr(image, "tag_v2", {})
    bits = tags.get(TIFF_BITS, (16,))[0]
    if bits < 16:
        white = (1 << bits) - 1
    opaque = None
    transparency = image.info.get("transparency")
    if isinstance(transparency, int):
        opaque = grey_HW != transparency
    if tags.get(TIFF_PHOTOMETRIC) == TIFF_WHITE_IS_ZERO:
        grey_HW = white - grey_HW
    scaled_HW = np.clip((grey_HW * 255 + white // 2) // white, 0, 255).astype(np.uint8)
    if opaque is not None:
        scaled_HW[~opaque] = 255
    return np.repeat(scaled_HW[:, :, None], 3, axis=2)


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation 1..8; 1 if there is none or the metadata is broken, which does not make the image invalid."""
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def upright(pixels_HWC: Pixels, orientation: int) -> Pixels:
    """Undoes an EXIF orientation: 5..8 are stored transposed; flips refer to the upright image."""
    if orientation == 1:
        return pixels_HWC
    if orientation >= 5:
        pixels_HWC = pixels_HWC.transpose(1, 0, 2)
    flips = {2: (1,), 3: (0, 1), 4: (0,), 5: (), 6: (1,), 7: (0, 1), 8: (0,)}[orientation]
    # `ascontiguousarray` would return the view with its negative stride where the flipped side has one pixel.
    return np.flip(pixels_HWC, flips).copy()


_quiet_lock = threading.Lock()
_quiet_depth = 0
_quiet_filter: Any = None
_pillows_limit: int | None = None


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Mutes warnings of PIL modules while any thread decodes, and lifts Pillow's own limit on pixels, which
    `ImageLimits` replaces.

    `warnings.catch_warnings` restores the whole filter list, which is unsafe across threads. Here the first decoder
    adds one filter and the last one removes it.
    """
    global _quiet_depth, _quiet_filter, _pillows_limit
    with _quiet_lock:
        _quiet_depth += 1
        if _quiet_depth == 1:
            warnings.filterwarnings("ignore", module=r"PIL\b")
            _quiet_filter = warnings.filters[0]
            _pillows_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0:
                Image.MAX_IMAGE_PIXELS = _pillows_limit
                if _quiet_filter in warnings.filters:
                    warnings.filters.remove(_quiet_filter)  # type: ignore[attr-defined]
