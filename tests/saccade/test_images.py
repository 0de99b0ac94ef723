"""Images in every form that the client accepts."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pathlib
import threading

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from saccade import errors
from saccade._core import images
from saccade._core.images import image_message, image_messages


def jpeg(**options: object) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((9, 5), 50).convert("RGB").save(buffer, "JPEG", **options)
    return buffer.getvalue()


def decoded(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    image.load()
    return image


def test_files_and_bytes_pass_untouched(tmp_path: pathlib.Path) -> None:
    data = jpeg()
    path = tmp_path / "an image.jpg"
    path.write_bytes(data)
    with path.open("rb") as file:
        forms = [path, str(path), data, bytearray(data), memoryview(data), file, io.BytesIO(data)]
        messages = image_messages(forms)  # type: ignore[arg-type]
    assert [message.data for message in messages] == [data] * 7


def test_urls() -> None:
    assert image_message("https://host/a.png").uri == "https://host/a.png"
    for start in ("data:image/png;base64,", "DATA:;BASE64,", "data:image/png;base64 ,"):
        assert image_message(start + base64.b64encode(b"abc").decode()).data == b"abc"
    for divided in ("YW\nJj\n", "YW\r\nJj"):  # as the command base64 and email programs write it
        assert image_message(f"data:image/png;base64,{divided}").data == b"abc"
    assert image_message("data:;base64,%2b+%2B/%0A").data == b"\xfb\xef\xbf"
    assert image_message("data:,a%20b").data == b"a b"


def test_one_image_is_a_list_of_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(b"x")
    array = numpy.zeros((2, 2, 3), numpy.uint8)
    for single in (str(path), path, b"x", io.BytesIO(b"x"), array, Image.new("RGB", (2, 2))):
        assert len(image_messages(single)) == 1  # type: ignore[arg-type]
    assert len(image_messages(numpy.zeros((4, 2, 2, 3), numpy.uint8))) == 4
    assert len(image_messages(image for image in (b"1", b"2"))) == 2
    assert image_messages(()) == []


@given(
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    channels=st.sampled_from([0, 1, 2, 3, 4]),
    seed=st.integers(0, 99),
)
def test_an_array_arrives_pixel_for_pixel(height: int, width: int, channels: int, seed: int) -> None:
    shape = (height, width, channels) if channels else (height, width)
    array = numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8)
    image = decoded(image_message(array).data)
    assert image.mode == {0: "L", 1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels]
    assert numpy.array_equal(numpy.asarray(image).reshape(shape), array)


def test_views_and_tensors() -> None:
    import torch

    array = numpy.arange(60, dtype=numpy.uint8).reshape(4, 5, 3)
    for view in (array[::-1, ::2], array.transpose(1, 0, 2), torch.from_numpy(array)):
        assert numpy.array_equal(numpy.asarray(decoded(image_message(view).data)), numpy.asarray(view))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "I;16", "HSV"])
def test_a_pillow_image_keeps_its_pixels(mode: str) -> None:
    image = Image.effect_noise((7, 4), 80).convert("RGB")
    image = Image.new(mode, (7, 4), 40000) if mode == "I;16" else image.convert(mode)
    sent = decoded(image_message(image).data)
    if mode in ("CMYK", "YCbCr", "HSV"):
        image = image.convert("RGB")
    assert sent.size == (7, 4) and sent.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L"])
def test_a_pillow_image_keeps_its_sixteen_bits(mode: str) -> None:
    greys = numpy.array([[7, 0x1234, 40000]], ">u2" if mode == "I;16B" else "<u2")
    image = Image.frombytes(mode, (3, 1), greys.tobytes())
    assert numpy.asarray(decoded(image_message(image).data)).tolist() == greys.tolist()


def test_a_sixteen_bit_file_that_pillow_opens_keeps_its_sixteen_bits() -> None:
    greys = numpy.array([[7, 0x1234, 40000]], ">u2")
    image = Image.open(io.BytesIO(b"P5 3 1 65535\n" + greys.tobytes()))
    assert image.mode == "I"
    assert numpy.asarray(decoded(image_message(image).data)).tolist() == greys.tolist()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_a_pillow_image_without_a_white_level_is_refused(mode: str) -> None:
    """Pillow's conversion would clip its samples, 0.2 and 0.9 alike to 0."""
    with pytest.raises(errors.InvalidArgument, match=rf"images\[0\]: a Pillow image of mode {mode} has no"):
        image_messages([Image.new(mode, (3, 1), 300)])


@pytest.mark.parametrize("mode", ["PA", "RGBa", "La"])
def test_a_pillow_image_keeps_its_transparency(mode: str) -> None:
    plain = Image.new("RGBA", (3, 2), (200, 200, 200, 51))
    image = plain.convert("LA").convert("La") if mode == "La" else plain.convert(mode)
    assert decoded(image_message(image).data).convert("RGBA").tobytes() == plain.tobytes()


def test_a_pillow_image_is_turned_as_its_file_would_be() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    image = Image.open(io.BytesIO(jpeg(exif=exif)))
    assert image.size == (9, 5)
    assert decoded(image_message(image).data).size == (5, 9)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    """Whatever exception the library or the file raises: one that is not an error of this package would end a `map`."""
    whole = tmp_path / "whole.png"
    Image.effect_noise((64, 64), 50).save(whole)
    cut = io.BytesIO(whole.read_bytes()[:600])
    with open(whole, "rb") as closed, Image.open(whole) as closed_image:
        pass

    class Broken:
        def read(self) -> bytes:
            raise OSError(5, "Input/output error")

    class OfAnotherDevice:
        shape, ndim = (2, 2), 2

        def __array__(self, *_: object) -> None:
            raise TypeError("copy the tensor to host memory first")

    unreadable = {
        "truncated": Image.open(cut),
        "closed file": closed,
        "PngImageFile: [A-Za-z]": closed_image,
        "Input/output error": Broken(),
        "empty image": Image.new("RGB", (0, 5)),
        "host memory": OfAnotherDevice(),
    }
    for words, image in unreadable.items():
        with pytest.raises(errors.InvalidArgument, match=rf"images\[1\]: cannot read the .*{words}") as caught:
            image_messages([b"x", image])  # type: ignore[list-item]
        assert caught.value.reason == "IMAGE_UNREADABLE"


def test_a_file_without_an_end_is_not_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"images\[0\]: cannot read '/dev/zero': it is a device") as caught:
        image_messages(["/dev/zero"])
    assert caught.value.reason == "IMAGE_UNREADABLE"
    monkeypatch.setattr(images, "LARGEST", 3 * 2**20)
    os.mkfifo(tmp_path / "pipe")

    def write(count: int) -> None:
        with contextlib.suppress(BrokenPipeError), open(tmp_path / "pipe", "wb") as pipe:
            pipe.write(bytes(count))

    for count in (3 * 2**20, 3 * 2**20 + 1):
        writer = threading.Thread(target=write, args=(count,))
        writer.start()
        if count <= 3 * 2**20:
            assert image_message(tmp_path / "pipe").data == bytes(count)
        else:
            with pytest.raises(errors.InvalidArgument, match="it has more than 3145728 bytes"):
                image_message(tmp_path / "pipe")
        writer.join()


def test_a_path_may_give_bytes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.png").write_bytes(b"content")
    with os.scandir(os.fsencode(tmp_path)) as entries:
        assert [image_message(entry).data for entry in entries] == [b"content"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("image", "named"),
    [
        pytest.param("no/such/file.png", "no/such/file.png", id="missing"),
        pytest.param("a\0b", "null byte", id="null-byte"),
        pytest.param(pathlib.Path(), "directory", id="folder"),
        pytest.param(3, "int", id="number"),
        pytest.param(io.StringIO("text"), "binary", id="text-file"),
        pytest.param(numpy.zeros((2, 2, 3)), "float64", id="floats"),
        pytest.param(numpy.zeros((2, 2, 5), numpy.uint8), "5", id="channels"),
        pytest.param(numpy.zeros((0, 2, 3), numpy.uint8), "0, 2, 3", id="empty"),
        pytest.param("data:image/png;base64,***", "base64", id="base64"),
        pytest.param("data:image/png;base64,YW Jj", "base64", id="space in base64"),
        pytest.param("data:image/png", "comma", id="no-comma"),
    ],
)
def test_what_is_no_image_is_refused_by_name(image: object, named: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"images\[1\]") as caught:
        image_messages([b"x", image])  # type: ignore[list-item]
    assert named in str(caught.value)
