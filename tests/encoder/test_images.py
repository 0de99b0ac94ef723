"""Decoding of allowed formats: every kind of image, every limit, and no exception other than ImageError for hostile
bytes."""

from __future__ import annotations

import io
import random
import struct
import threading
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from encoder.images import decode_image, read_header
from encoder.media_limits import FORMATS, ImageError, ImageLimits

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20)


def gradient(height: int = 21, width: int = 34, channels: int = 3) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rows, columns = np.mgrid[0:height, 0:width]
    planes = [rows * 9, columns * 7, rows * 3 + columns * 2, 60 + rows * 4 + columns]
    return np.stack([plane % 256 for plane in planes[:channels]], axis=-1).astype(np.uint8)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def white_rgb(image: Image.Image) -> torch.Tensor:
    """The oracle: transformers' conversion of a PIL image, with transparency on white and the rest by Pillow."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255,) * 4), image)
    return torch.from_numpy(np.array(image.convert("RGB")))


RGB = Image.fromarray(gradient())
RGBA = Image.fromarray(gradient(channels=4))
PALETTE = RGB.quantize(16)
KINDS: list[Any] = [
    pytest.param(encoded(RGB, "PNG"), id="png"),
    pytest.param(encoded(RGB, "JPEG"), id="jpeg"),
    pytest.param(encoded(RGB, "JPEG", progressive=True, quality=50), id="jpeg-progressive"),
    pytest.param(encoded(RGB.convert("L"), "JPEG"), id="jpeg-grey"),
    pytest.param(encoded(RGB.convert("CMYK"), "JPEG"), id="jpeg-cmyk"),
    pytest.param(encoded(RGB, "WEBP", lossless=True), id="webp"),
    pytest.param(encoded(RGBA, "WEBP", lossless=True), id="webp-alpha"),
    pytest.param(encoded(PALETTE, "GIF"), id="gif"),
    pytest.param(encoded(RGB, "BMP"), id="bmp"),
    pytest.param(encoded(RGBA, "BMP"), id="bmp-alpha"),
    pytest.param(encoded(RGB, "TIFF"), id="tiff"),
    pytest.param(encoded(RGB.convert("CMYK"), "TIFF", compression="tiff_lzw"), id="tiff-cmyk-lzw"),
    pytest.param(encoded(RGBA, "TIFF"), id="tiff-alpha"),
    pytest.param(encoded(RGB, "PPM"), id="ppm"),
    pytest.param(encoded(RGB.convert("L"), "PPM"), id="pgm"),
    pytest.param(encoded(RGB.convert("1"), "PPM"), id="pbm"),
    pytest.param(encoded(RGB.convert("1"), "PNG"), id="one-bit"),
    pytest.param(encoded(RGB.convert("L"), "PNG"), id="grey"),
    pytest.param(encoded(RGBA.convert("LA"), "PNG"), id="grey-alpha"),
    pytest.param(encoded(RGBA, "PNG"), id="alpha"),
    pytest.param(encoded(PALETTE, "PNG"), id="palette"),
    pytest.param(encoded(PALETTE, "PNG", transparency=3), id="palette-transparent-index"),
    pytest.param(encoded(PALETTE, "PNG", transparency=bytes([255, 0, 128, 7])), id="palette-alpha-table"),
    pytest.param(encoded(PALETTE, "GIF", transparency=2), id="gif-transparent"),
    pytest.param(encoded(RGB, "PNG", transparency=(9, 7, 5)), id="rgb-colour-key"),
    pytest.param(encoded(RGB.convert("L"), "PNG", transparency=16), id="grey-colour-key"),
]
if "AVIF" in FORMATS:
    KINDS += [
        pytest.param(encoded(RGB, "AVIF"), id="avif"),
        pytest.param(encoded(RGBA, "AVIF", subsampling="4:4:4"), id="avif-alpha"),
        pytest.param(encoded(RGB.convert("L"), "AVIF"), id="avif-grey"),
    ]


@pytest.mark.parametrize("data", KINDS)
def test_every_kind_equals_the_oracle(data: bytes) -> None:
    got = decode_image(data, LIMITS)
    assert got.dtype == torch.uint8 and got.shape == (21, 34, 3) and got.is_contiguous()
    assert torch.equal(got, white_rgb(Image.open(io.BytesIO(data))))


def test_lossless_kinds_give_the_pixels_back() -> None:
    for format in ("PNG", "BMP", "TIFF", "PPM"):
        assert np.array_equal(decode_image(encoded(RGB, format)).numpy(), gradient())


def test_transparency_is_laid_on_white() -> None:
    clear = Image.new("RGBA", (4, 4), (200, 10, 10, 0))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert (decode_image(encoded(clear, "PNG")) == 255).all()
    assert (decode_image(encoded(half, "PNG")) == 127).all()


def test_sixteen_bit_greys_are_scaled_not_clipped() -> None:
    values = np.array([[0, 128, 129, 257], [32768, 65535, 65407, 1000]], dtype=np.uint16)
    expected = [[0, 0, 1, 1], [128, 255, 255, 4]]
    pgm = b"P5 4 2 65535\n" + values.astype(">u2").tobytes()
    for data in (
        encoded(Image.fromarray(values), "PNG"),
        encoded(Image.fromarray(values), "TIFF"),
        pgm,
    ):
        got = decode_image(data)
        assert got[:, :, 0].tolist() == expected
        assert torch.equal(got[:, :, 0], got[:, :, 2])


def test_a_sixteen_bit_colour_key_is_white() -> None:
    header = struct.pack(">IIBBBBB", 2, 1, 16, 0, 0, 0, 0)
    chunks = [
        (b"IHDR", header),
        (b"tRNS", b"\x01\x00"),
        (b"IDAT", zlib.compress(b"\0\x01\x00\x02\x00")),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, body) for kind, body in chunks)
    assert decode_image(data)[0, :, 0].tolist() == [255, 2]


@pytest.mark.parametrize(
    ("depth", "colour", "key", "row", "expected"),
    [
        (1, 0, b"\0\0", b"\x40", [255, 255]),
        (2, 0, b"\0\1", b"\x60", [255, 170]),
        (4, 0, b"\0\5", b"\x5a", [255, 170]),
        (8, 0, b"\0\5", b"\x05\x0a", [255, 10]),
        (8, 2, b"\0\1\0\2\0\3", b"\1\2\3\1\2\4", [255, 1]),
        (16, 2, b"\x12\1\x34\2\x56\3", b"\x12\1\x34\2\x56\3\x12\1\x34\2\x57\3", [255, 0x12]),
    ],
)
def test_the_transparent_colour_of_every_depth_is_white(
    depth: int, colour: int, key: bytes, row: bytes, expected: list[int]
) -> None:
    """Two pixels: the transparent colour, and another one."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 2, 1, depth, colour, 0, 0, 0)),
        (b"tRNS", key),
        (b"IDAT", zlib.compress(b"\0" + row)),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, body) for kind, body in chunks)
    assert decode_image(data)[0, :, 0].tolist() == expected


def test_twelve_bit_tiffs_are_scaled_by_their_own_white() -> None:
    entries = [(256, 3, 2), (257, 3, 1), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (278, 3, 1), (279, 4, 3)]
    table = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    pixels = b"\x80\x0f\xff\0"  # 0x800 and 0xfff
    data = struct.pack("<2sHI", b"II", 42, 12) + pixels + struct.pack("<H", len(entries)) + table + b"\0\0\0\0"
    assert decode_image(data)[0, :, 0].tolist() == [128, 255]


def test_sixteen_bit_tiffs_with_zero_as_white_are_inverted() -> None:
    data = encoded(Image.fromarray(np.array([[0, 65535]], dtype=np.uint16)), "TIFF", tiffinfo={262: 0})
    assert decode_image(data)[0, :, 0].tolist() == [255, 0]


def tiff(tags: dict[int, list[int]], samples: bytes) -> bytes:
    """An uncompressed little-endian TIFF of one strip; offsets of planes follow from tag 284."""
    tags = {259: [1], **tags}
    planes = len(tags[258]) if tags.get(284) == [2] else 1
    tags |= {279: [len(samples) // planes] * planes, 273: [8 + i * len(samples) // planes for i in range(planes)]}
    end, table, more = 8 + len(samples) + 2 + 12 * len(tags) + 4, b"", b""
    for tag in sorted(tags):
        values = struct.pack(f"<{len(tags[tag])}H", *tags[tag])
        table += struct.pack("<HHI", tag, 3, len(tags[tag]))
        table += values.ljust(4, b"\0") if len(values) <= 4 else struct.pack("<I", end + len(more))
        more += values if len(values) > 4 else b""
    head = struct.pack("<2sHI", b"II", 42, 8 + len(samples))
    return head + samples + struct.pack("<H", len(tags)) + table + b"\0\0\0\0" + more


def test_uncompressed_tiffs_that_pillow_would_misread_are_refused() -> None:
    """Pillow takes separate planes of 16 bits for planes of 8, and reads subsampled colours as if they were not, beyond
    the strip's end."""
    size = {256: [2], 257: [2], 278: [2], 277: [3]}
    planes = np.arange(12, dtype="<u2") * 5000
    for bits, samples in ((8, planes.astype(np.uint8)), (16, planes)):
        data = tiff({**size, 258: [bits] * 3, 262: [2], 284: [2]}, samples.tobytes())
        if bits == 8:
            assert torch.equal(decode_image(data), torch.from_numpy(samples.reshape(3, 2, 2)).permute(1, 2, 0))
            continue
        for read in (decode_image, read_header):
            with pytest.raises(ImageError, match="separate planes of 16 bits"):
                read(data)
    ycbcr = {**size, 258: [8, 8, 8], 262: [6]}
    assert decode_image(tiff({**ycbcr, 530: [1, 1]}, bytes([60, 128, 128] * 4)))[:, :, 1].tolist() == [[60, 60]] * 2
    with pytest.raises(ImageError, match=r"with subsampling \(2, 2\)"):
        decode_image(tiff({**ycbcr, 530: [2, 2]}, bytes([60, 60, 60, 60, 128, 128])))


def test_thirty_two_bit_samples_are_refused_with_a_reason() -> None:
    for mode in ("F", "I"):
        with pytest.raises(ImageError, match="8 or 16 bits"):
            decode_image(encoded(Image.new(mode, (4, 4)), "TIFF"))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", sorted({"PNG", "JPEG", "TIFF", "WEBP", "AVIF"} & set(FORMATS)))
def test_exif_orientation_is_applied(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(RGB, format, exif=exif.tobytes(), **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    got = decode_image(data)
    assert torch.equal(got, white_rgb(upright))
    assert got.shape == ((34, 21, 3) if orientation >= 5 else (21, 34, 3))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1)], ids=str)
def test_exif_orientation_of_one_row_or_column(orientation: int, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(gradient(*size)), "PNG", exif=exif.tobytes())
    assert torch.equal(decode_image(data), white_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))


def test_broken_exif_does_not_refuse_the_image() -> None:
    data = encoded(RGB, "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert decode_image(data).shape == (21, 34, 3)


@pytest.mark.parametrize("format", sorted({"GIF", "PNG", "WEBP", "TIFF", "AVIF"} & set(FORMATS)))
def test_animations_give_their_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (9, 7), colour) for colour in ("red", "green", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    rounding = 1 if format == "AVIF" else 0
    assert decode_image(data)[3, 3].tolist() == pytest.approx([255, 0, 0], rel=0, abs=rounding)


def test_mpo_gives_its_first_image() -> None:
    data = encoded(RGB, "MPO", save_all=True, append_images=[RGB.rotate(180)])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert decode_image(data).shape == (21, 34, 3)


@pytest.mark.parametrize("format", ["EPS", "ICO", "PCX", "TGA", "SGI", "JPEG2000", "PDF", "ICNS"])
def test_other_formats_are_refused(format: str) -> None:
    with pytest.raises(ImageError, match="recognised"):
        decode_image(encoded(Image.new("RGB", (32, 32)), format))


def test_no_listed_format_starts_another_program() -> None:
    assert not {"EPS", "WMF", "FPX", "MIC"} & set(FORMATS)


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        (ImageLimits(max_bytes=100), ("100",)),
        (ImageLimits(max_pixels=713), ("714", "713", "34x21")),
        (ImageLimits(max_side=33), ("33", "34x21")),
        (ImageLimits(max_aspect=1.5), ("1.5", "34x21", "1.61905")),
    ],
    ids=["bytes", "pixels", "side", "aspect"],
)
def test_limits_name_both_numbers(limits: ImageLimits, numbers: tuple[str, ...]) -> None:
    for read in (decode_image, read_header):
        with pytest.raises(ImageError) as refused:
            read(encoded(RGB, "PNG"), limits)
        assert all(number in refused.value.reason for number in numbers), refused.value.reason
    with pytest.raises(ImageError, match="of 200.5 to 1, more than the 200 allowed"):
        decode_image(encoded(Image.new("RGB", (2, 401)), "PNG"))


def test_an_image_at_every_limit_is_served() -> None:
    data = encoded(RGB, "PNG")  # 34 x 21
    exact = ImageLimits(max_bytes=len(data), max_pixels=34 * 21, max_side=34, max_aspect=34 / 21)
    assert decode_image(data, exact).shape == (21, 34, 3)
    exact.check_size(21, 34)
    for width, height in ((0, 5), (5, 0)):
        with pytest.raises(ImageError, match="empty"):
            exact.check_size(width, height)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_a_bomb_is_refused_by_its_header() -> None:
    """200,000 pixels square in a few bytes: rejected without decoding, whatever Pillow's own limit."""
    header = struct.pack(">IIBBBBB", 200_000, 200_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    with pytest.raises(ImageError, match="200000x200000"):
        decode_image(bomb)
    modest = bomb.replace(png_chunk(b"IHDR", header), png_chunk(b"IHDR", struct.pack(">II", 9000, 9000) + header[8:]))
    with pytest.raises(ImageError, match="81000000 .* 67108864"):
        decode_image(modest)


@pytest.mark.parametrize("data", KINDS)
def test_truncated_files_are_refused(data: bytes) -> None:
    for share in (0.05, 0.5):
        with pytest.raises(ImageError):
            decode_image(data[: int(len(data) * share)], LIMITS)
    with pytest.raises(ImageError, match="empty"):
        decode_image(b"")


def decode_or_refuse(data: bytes) -> None:
    try:
        got = decode_image(data, LIMITS)
    except ImageError as error:
        assert error.reason
    else:
        assert got.dtype == torch.uint8 and got.dim() == 3 and got.shape[2] == 3


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200), st.sampled_from([kind.values[0][:24] for kind in KINDS] + [b""]))
def test_any_bytes_decode_or_are_refused(tail: bytes, magic: bytes) -> None:
    decode_or_refuse(magic + tail)


@pytest.mark.parametrize("data", KINDS)
def test_mutated_files_decode_or_are_refused(data: bytes) -> None:
    generator = random.Random(len(data))
    for _ in range(60):
        mutated = bytearray(data)
        for _ in range(generator.choice((1, 1, 3, 20))):
            position = generator.randrange(min(len(mutated), generator.choice((64, len(mutated)))))
            mutated[position] = generator.choice((0, 255, generator.randrange(256)))
        if generator.random() < 0.2:
            del mutated[generator.randrange(len(mutated)) :]
        decode_or_refuse(bytes(mutated))


def test_no_warning_leaks_and_no_filter_stays() -> None:
    """A palette with a byte table and broken EXIF both make Pillow warn; decoding in threads is silent."""
    noisy = [
        encoded(PALETTE, "PNG", transparency=bytes([255, 0, 128, 7])),
        encoded(RGB, "TIFF")[:-4] + b"\xff\xff\xff\xff",
        encoded(RGB, "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff"),
    ]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        # pytest restores the filters after each test, also one of a thread that decoded for an earlier test.
        decode_or_refuse(noisy[0])
        before = list(warnings.filters)
        for data in noisy:
            decode_or_refuse(data)
        threads = [threading.Thread(target=decode_or_refuse, args=(noisy[i % 3],)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(warnings.filters) == before
    assert not seen, [str(warning.message) for warning in seen]


def test_the_limit_on_pixels_is_ours_and_not_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert decode_image(encoded(RGB, "PNG"), ImageLimits(max_pixels=34 * 21)).shape == (21, 34, 3)
    assert Image.MAX_IMAGE_PIXELS == 10


def test_header_without_pixels() -> None:
    header = read_header(encoded(RGB, "JPEG"))
    assert (header.format, header.width, header.height, header.mode) == ("JPEG", 34, 21, "RGB")
