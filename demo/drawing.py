"""Draws pictures of the demo model's world: shapes, printed numbers, real handwritten digits (scikit-learn's
`load_digits`) and practice sheets."""

import functools
import itertools
import random
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from demo.world import COLOURS, HELD_OUT_DIGITS, NOVEL, PLACES, SHAPES, Box, Colour, Combination, Picture, Thing


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """The handwritten digits: `[1797, 8, 8]` uint8 ink (0..255) and `[1797]` labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images * (255 / 16)).round().astype(np.uint8), digits.target


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _background(rng: random.Random) -> Colour:
    level = rng.choice((rng.randint(5, 55), rng.randint(195, 245)))
    return _jitter(rng, (level, level, level), 10)


def _jitter(rng: random.Random, colour: Colour, amount: int) -> Colour:
    red, green, blue = (min(255, max(0, channel + rng.randint(-amount, amount))) for channel in colour)
    return red, green, blue


def _noisy(rng: random.Random, image: Image.Image) -> Image.Image:
    """Every third picture gets faint noise of up to 8 grey levels either way."""
    if rng.random() > 1 / 3:
        return image
    pixels = np.asarray(image, dtype=np.int16)
    noise = np.random.default_rng(rng.getrandbits(32)).integers(-8, 9, size=(*pixels.shape[:2], 1), dtype=np.int16)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: Colour) -> None:
    """Draws `shape` around (x, y) with half-width `r` pixels."""
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        s = 0.88 * r
        draw.rectangle((x - s, y - s, x + s, y + s), fill=fill)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r, y + 0.85 * r), (x + r, y + 0.85 * r)], fill=fill)
    else:
        w = 0.34 * r
        draw.rectangle((x - r, y - w, x + r, y + w), fill=fill)
        draw.rectangle((x - w, y - r, x + w, y + r), fill=fill)


def draw_scene(rng: random.Random, size: tuple[int, int], cast: Sequence[Combination]) -> Picture:
    """A picture of `size` = (height, width) showing `cast`, each in its place."""
    height, width = size
    image = Image.new("RGB", (width, height), _background(rng))
    draw = ImageDraw.Draw(image)
    cell_h, cell_w = height / 3, width / 3
    things = []
    for colour, shape, place in sorted(cast, key=lambda combination: PLACES.index(combination[2])):
        row, column = divmod(PLACES.index(place), 3)
        r = 0.5 * min(cell_h, cell_w) * rng.uniform(0.66, 0.94)
        x = (column + 0.5) * cell_w + (cell_w / 2 - r) * rng.uniform(-0.7, 0.7)
        y = (row + 0.5) * cell_h + (cell_h / 2 - r) * rng.uniform(-0.7, 0.7)
        _draw_shape(draw, shape, x, y, r, _jitter(rng, COLOURS[colour], 14))
        things.append(Thing(shape, colour, place, (x - r, y - r, x + r, y + r)))
    return Picture(_noisy(rng, image), tuple(things))


def _print_number(
    rng: random.Random, image: Image.Image, box: Box, digits: str, background: Colour, smallest: int
) -> list[Thing]:
    """Prints `digits` somewhere in `box` of `image`, in a size of at least `smallest` points if they fit."""
    draw = ImageDraw.Draw(image)
    width, height = box[2] - box[0], box[3] - box[1]
    largest = max(8, min(96, int(0.9 * height), int(0.9 * width / (0.6 * len(digits)))))
    font = _font(rng.randint(min(smallest, largest), largest))
    left, top, right, bottom = draw.textbbox((0, 0), digits, font=font)
    x = box[0] + rng.uniform(2, max(2, width - 2 - (right - left))) - left
    y = box[1] + rng.uniform(2, max(2, height - 2 - (bottom - top))) - top
    draw.text((x, y), digits, fill=_ink(rng, background), font=font)
    things = []
    for index, digit in enumerate(digits):
        start, end = (x + draw.textlength(digits[:n], font=font) for n in (index, index + 1))
        things.append(Thing(digit, None, None, (start, y + top, end, y + bottom)))
    return things


def draw_number(rng: random.Random, size: tuple[int, int], digits: str) -> Picture:
    """A picture of `size` = (height, width) with the number `digits` printed on it."""
    height, width = size
    background = _background(rng)
    image = Image.new("RGB", (width, height), background)
    smallest = round(22 * max(1.0, (height * width) ** 0.5 / 128))  # still legible once a large picture is scaled down
    things = _print_number(rng, image, (0, 0, width, height), digits, background, smallest)
    return Picture(_noisy(rng, image), tuple(things))


def _ink(rng: random.Random, background: Colour) -> Colour:
    """A colour that stands out from the background."""
    if rng.random() < 0.5:
        return (250, 250, 250) if sum(background) < 384 else (10, 10, 10)
    names = [n for n in COLOURS if n not in (("blue", "purple") if sum(background) < 384 else ("yellow", "orange"))]
    return _jitter(rng, COLOURS[rng.choice(names)], 14)


def _paste_handwritten(rng: random.Random, image: Image.Image, box: Box, index: int, background: Colour) -> Thing:
    """Pastes handwritten digit number `index`, slightly rotated, somewhere into `box` of `image`."""
    images, labels = _digits()
    left, top, right, bottom = (round(edge) for edge in box)
    side = round(min(bottom - top, right - left) * rng.uniform(0.62, 0.95))
    ink = Image.fromarray(images[index]).resize((side, side), Image.Resampling.BICUBIC)
    ink = ink.rotate(rng.uniform(-10, 10), Image.Resampling.BILINEAR)
    x, y = rng.randint(left, right - side), rng.randint(top, bottom - side)
    image.paste(_ink(rng, background), (x, y, x + side, y + side), mask=ink)
    return Thing(str(labels[index]), None, None, (x + 0.15 * side, y, x + 0.85 * side, y + side))


def draw_handwritten(rng: random.Random, size: tuple[int, int], index: int) -> Picture:
    """A picture of `size` = (height, width) with handwritten digit number `index`."""
    height, width = size
    background = _background(rng)
    image = Image.new("RGB", (width, height), background)
    thing = _paste_handwritten(rng, image, (0, 0, width, height), index, background)
    return Picture(_noisy(rng, image), (thing,), handwritten=True)


def practice_sheet(rng: random.Random, size: tuple[int, int]) -> Picture:
    """A training picture of `size` = (height, width) with many shapes, numbers and handwritten digits, and no novel
    combination. It has no questions; it is for the auxiliary loss only, which covers every object."""
    height, width = size
    background = _background(rng)
    image = Image.new("RGB", (width, height), background)
    draw = ImageDraw.Draw(image)
    scale = max(1.0, (height * width) ** 0.5 / 128)  # large pictures are scaled down, so what is on them must be larger
    rows, columns = (rng.randint(max(1, round(side / (52 * scale))), round(side / (24 * scale))) for side in size)
    things: list[Thing] = []
    for row, column in itertools.product(range(rows), range(columns)):
        left, top = column * width / columns, row * height / rows
        box = (left, top, left + width / columns, top + height / rows)
        kind = rng.random()
        if kind < 0.3:
            r = 0.5 * min(width / columns, height / rows) * rng.uniform(0.66, 0.94)
            x, y = rng.uniform(left + r, box[2] - r), rng.uniform(top + r, box[3] - r)
            place = PLACES[3 * int(3 * y / height) + int(3 * x / width)]
            colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
            if (colour, shape, place) not in NOVEL:
                _draw_shape(draw, shape, x, y, r, _jitter(rng, COLOURS[colour], 14))
                things.append(Thing(shape, colour, place, (x - r, y - r, x + r, y + r)))
        elif kind < 0.65:
            things += _print_number(
                rng, image, box, any_number(rng)[: max(1, int((box[2] - left) / 15))], background, 22
            )
        else:
            things.append(_paste_handwritten(rng, image, box, digit_index(rng, held_out=False), background))
    return Picture(_noisy(rng, image), tuple(things))


def cast_of(rng: random.Random, number: int, held_out: bool) -> list[Combination]:
    """`number` combinations in distinct places, no (colour, shape) twice; `held_out` allows those of `NOVEL`."""
    colours, shapes = list(COLOURS), list(SHAPES)
    if number > 1 and rng.random() < 0.4:  # repeated colours and shapes, so that counting them has something to count
        colours = rng.sample(colours, 2)
    if number > 1 and rng.random() < 0.3:
        shapes = rng.sample(shapes, 2)
    while True:
        pairs = rng.sample(list(itertools.product(colours, shapes)), number)
        cast = [
            (colour, shape, place) for (colour, shape), place in zip(pairs, rng.sample(PLACES, number), strict=True)
        ]
        if held_out or not NOVEL.intersection(cast):
            return cast


def any_number(rng: random.Random) -> str:
    return str(rng.choice("123456789")) + "".join(rng.choice("0123456789") for _ in range(rng.randint(0, 3)))


def digit_index(rng: random.Random, held_out: bool) -> int:
    total = len(_digits()[1])
    return rng.randrange(total - HELD_OUT_DIGITS, total) if held_out else rng.randrange(total - HELD_OUT_DIGITS)
