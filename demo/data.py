"""The demo model's world: pictures, questions about them and the one right answer to each, all drawn from a seed.

A picture shows one to four coloured shapes on a 3 x 3 grid of places, or a printed number of one to four digits, or one
real handwritten digit (scikit-learn's `load_digits`). Questions are about one picture or two. The wording of a question
fixes the form of its answer (a word, or a sentence when a sentence is asked for), so that exact match is well defined.

Two things are never trained on: 20 % of the colour x shape x place combinations (`NOVEL`) and the last 297 handwritten
digits.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

COLOURS: dict[str, Colour] = {
    "red": (220, 35, 35),
    "green": (35, 165, 60),
    "blue": (45, 85, 225),
    "yellow": (240, 215, 35),
    "purple": (150, 45, 190),
    "orange": (245, 135, 15),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = (
    "top left", "top", "top right",
    "left", "middle", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip
"""Row-major over the 3 x 3 grid."""
GLYPHS = (*SHAPES, *"0123456789")

SCENE_KINDS = ("colour", "shape", "object", "count", "where", "caption")
GLYPH_KINDS = ("number", "handwritten")
PAIR_KINDS = ("pair_what", "pair_same")
KINDS = (*SCENE_KINDS, *GLYPH_KINDS, *PAIR_KINDS)

HELD_OUT_DIGITS = 297
MIN_SIDE, MAX_SIDE = 64, 224

Combination = tuple[str, str, str]
"""Colour, shape and place."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""


def _novel_combinations() -> frozenset[Combination]:
    """A fixed fifth of all (colour, shape, place) combinations, spread evenly over the places."""
    rng = random.Random(20)
    chosen: list[Combination] = []
    pairs = list(itertools.product(COLOURS, SHAPES))
    for number, place in enumerate(PLACES):
        rng.shuffle(pairs)
        chosen += [(colour, shape, place) for colour, shape in pairs[: 5 if number % 5 else 4]]
    return frozenset(chosen)


NOVEL = _novel_combinations()
"""Combinations that are in no training picture."""


@dataclass(frozen=True)
class Thing:
    """One shape or digit in a picture."""

    glyph: str
    colour: str | None
    place: str | None
    box: Box

    @property
    def novel(self) -> bool:
        """True if this combination is not in the training data."""
        return (self.colour, self.glyph, self.place) in NOVEL

    @property
    def name(self) -> str:
        """For example "a red circle" (an article, a colour and a shape)."""
        article = "an" if self.colour == "orange" else "a"
        return f"{article} {self.colour} {self.glyph}"


@dataclass(frozen=True)
class Picture:
    """An RGB picture and what it shows, in reading order."""

    image: Image.Image
    things: tuple[Thing, ...]
    handwritten: bool = False


@dataclass(frozen=True)
class Turn:
    """One question, its exact answer and the things that it is about."""

    kind: str
    question: str
    answer: str
    about: tuple[Thing, ...] = ()
    one_by_one: bool = False
    """The answer names the things one after the other."""
    empty_place: str | None = None
    """The empty place, if that is the answer."""
    spans: tuple[tuple[int, int, tuple[Thing, ...]], ...] = ()
    """What `focus` returns, where it does not follow from the other fields."""
    copied: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
    """Parts of the answer that repeat, or depend on, words of the conversation so far: (start, end, patterns). The
    patterns are searched one after the other; group 1 of the last is what the part repeats."""

    @property
    def novel(self) -> bool:
        """True if the answer depends on a combination that is not in the training data."""
        return any(thing.novel for thing in self.about)

    @property
    def counts(self) -> bool:
        """True if the answer depends on the number of things it is about, not on what they are."""
        return self.kind in ("count", "json_count", "tool_count")

    def focus(self) -> list[tuple[int, int, tuple[Thing, ...]]]:
        """Which things each part of the answer is about: (start, end, things), in characters of the answer."""
        if self.spans:
            return list(self.spans)
        if not self.one_by_one:
            return [(0, len(self.answer), self.about)]
        spans: list[tuple[int, int, tuple[Thing, ...]]] = []
        position = 0
        for thing in self.about:
            words = thing.glyph if thing.place is None else f"{thing.name} at the {thing.place}"
            start = self.answer.index(words, position)
            position = start + len(words)
            spans.append((start, position, (thing,)))
        return spans


@dataclass(frozen=True)
class Example:
    """One or two pictures and one or more turns of conversation about them."""

    pictures: tuple[Picture, ...]
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """In OpenAI's form, without the outer object."""


def place_box(place: str, image: Image.Image) -> Box:
    """The ninth of `image` named `place`."""
    row, column = divmod(PLACES.index(place), 3)
    width, height = image.width / 3, image.height / 3
    return column * width, row * height, (column + 1) * width, (row + 1) * height


# Pictures ------------------------------------------------------------------------------------------------------------


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """The handwritten digits: `[1797, 8, 8]` uint8 ink (0..255) and `[1797]` labels."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

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


def _draw_scene(rng: random.Random, size: tuple[int, int], cast: Sequence[Combination]) -> Picture:
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


def _draw_number(rng: random.Random, size: tuple[int, int], digits: str) -> Picture:
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
    """Puts handwritten digit number `index`, slightly turned, somewhere in `box` of `image`."""
    images, labels = _digits()
    left, top, right, bottom = (round(edge) for edge in box)
    side = round(min(bottom - top, right - left) * rng.uniform(0.62, 0.95))
    ink = Image.fromarray(images[index]).resize((side, side), Image.Resampling.BICUBIC)
    ink = ink.rotate(rng.uniform(-10, 10), Image.Resampling.BILINEAR)
    x, y = rng.randint(left, right - side), rng.randint(top, bottom - side)
    image.paste(_ink(rng, background), (x, y, x + side, y + side), mask=ink)
    return Thing(str(labels[index]), None, None, (x + 0.15 * side, y, x + 0.85 * side, y + side))


def _draw_handwritten(rng: random.Random, size: tuple[int, int], index: int) -> Picture:
    """A picture of `size` = (height, width) with handwritten digit number `index`."""
    height, width = size
    background = _background(rng)
    image = Image.new("RGB", (width, height), background)
    thing = _paste_handwritten(rng, image, (0, 0, width, height), index, background)
    return Picture(_noisy(rng, image), (thing,), handwritten=True)


def practice_sheet(rng: random.Random, size: tuple[int, int]) -> Picture:
    """A training picture of `size` = (height, width) with many shapes, numbers and handwritten digits, none novel. It
    has no questions; it is for the auxiliary loss, which names every object."""
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
            things += _print_number(rng, image, box, _number(rng)[: max(1, int((box[2] - left) / 15))], background, 22)
        else:
            things.append(_paste_handwritten(rng, image, box, _digit_index(rng, held_out=False), background))
    return Picture(_noisy(rng, image), tuple(things))


def _cast(rng: random.Random, number: int, held_out: bool) -> list[Combination]:
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


# Questions -----------------------------------------------------------------------------------------------------------

SENTENCE = ("{} Answer in a sentence.", "{} Answer with a full sentence.", "{} Reply in one sentence.")


def _pose(rng: random.Random, questions: Sequence[str], answer: str, sentence: str) -> tuple[str, str]:
    """A wording and the answer for it: `sentence` if the wording requests a sentence, else `answer`."""
    question = rng.choice(questions)
    if rng.random() < 0.35:
        return rng.choice(SENTENCE).format(question), sentence
    return question, answer


def _spelling(rng: random.Random, question: str) -> str:
    return question.replace("colour", "color") if rng.random() < 0.5 else question


def _only(things: Sequence[Thing], key: Callable[[Thing], str | None]) -> list[Thing]:
    """The things that no other thing shares `key` with."""
    values = [key(thing) for thing in things]
    return [thing for thing, value in zip(things, values, strict=True) if values.count(value) == 1]


def _ask_colour(rng: random.Random, picture: Picture) -> Turn:
    questions: tuple[str, ...]
    unique = _only(picture.things, lambda thing: thing.glyph)
    if unique and rng.random() < 0.3:
        thing = rng.choice(unique)
        questions = (
            f"What colour is the {thing.glyph}?",
            f"Which colour does the {thing.glyph} have?",
            f"Name the colour of the {thing.glyph}.",
        )
        sentence = f"The {thing.glyph} is {thing.colour}."
    else:
        thing = rng.choice(picture.things)
        questions = (
            f"What colour is the shape at the {thing.place}?",
            f"Which colour is at the {thing.place}?",
            f"Name the colour of the shape at the {thing.place}.",
            f"Look at the {thing.place}: what colour is the shape there?",
        )
        sentence = f"The shape at the {thing.place} is {thing.colour}."
    question, answer = _pose(rng, questions, str(thing.colour), sentence)
    return Turn("colour", _spelling(rng, question), answer, (thing,))


def _ask_shape(rng: random.Random, picture: Picture) -> Turn:
    questions: tuple[str, ...]
    unique = _only(picture.things, lambda thing: thing.colour)
    if unique and rng.random() < 0.3:
        thing = rng.choice(unique)
        questions = (
            f"What shape is {thing.colour}?",
            f"Which shape is the {thing.colour} one?",
            f"Name the {thing.colour} shape.",
        )
        sentence = f"The {thing.colour} shape is a {thing.glyph}."
    else:
        thing = rng.choice(picture.things)
        questions = (
            f"What shape is at the {thing.place}?",
            f"Which shape is at the {thing.place}?",
            f"Name the shape at the {thing.place}.",
            f"Look at the {thing.place}: which shape is there?",
        )
        sentence = f"The shape at the {thing.place} is a {thing.glyph}."
    return Turn("shape", *_pose(rng, questions, thing.glyph, sentence), (thing,))


def _ask_object(rng: random.Random, picture: Picture) -> Turn:
    there = {thing.place: thing for thing in picture.things}
    place = rng.choice([p for p in PLACES if p not in there] if rng.random() < 0.2 else list(there))
    thing = there.get(place)
    name = thing.name if thing else "nothing"
    questions = (
        f"What is at the {place}?",
        f"What do you see at the {place}?",
        f"Tell me what is at the {place}.",
        f"Look at the {place}: what is there?",
    )
    sentence = f"There is {name} at the {place}."
    return Turn(
        "object",
        *_pose(rng, questions, name, sentence),
        (thing,) if thing else (),
        empty_place=None if thing else place,
    )


def _ask_count(rng: random.Random, picture: Picture) -> Turn:
    things = picture.things
    what = rng.choice(("all", "colour", "shape"))
    if what == "all":
        one, many, counted = "shape", "shapes", list(things)
    elif what == "colour":
        colour = rng.choice(things).colour if rng.random() < 0.75 else rng.choice(list(COLOURS))
        one, many, counted = f"{colour} shape", f"{colour} shapes", [t for t in things if t.colour == colour]
    else:
        shape = rng.choice(things).glyph if rng.random() < 0.75 else rng.choice(SHAPES)
        one, many = shape, "crosses" if shape == "cross" else f"{shape}s"
        counted = [t for t in things if t.glyph == shape]
    number = len(counted)
    questions = (
        f"How many {many} are there?",
        f"How many {many} do you see?",
        f"Count the {many}.",
        f"What is the number of {many}?",
    )
    sentence = f"There is 1 {one}." if number == 1 else f"There are {number} {many}."
    return Turn("count", *_pose(rng, questions, str(number), sentence), tuple(counted))


def _ask_where(rng: random.Random, picture: Picture) -> Turn:
    unique = _only(picture.things, lambda thing: thing.glyph)
    if unique and rng.random() < 0.3:
        thing = rng.choice(unique)
        name = thing.glyph
    else:
        thing = rng.choice(picture.things)
        name = f"{thing.colour} {thing.glyph}"
    questions = (
        f"Where is the {name}?",
        f"Where do you see the {name}?",
        f"In which place is the {name}?",
        f"Find the {name}.",
    )
    sentence = f"The {name} is at the {thing.place}."
    return Turn("where", *_pose(rng, questions, str(thing.place), sentence), (thing,))


def _ask_caption(rng: random.Random, picture: Picture) -> Turn:
    seen = [f"{thing.name} at the {thing.place}" for thing in picture.things]
    listed = seen[0] if len(seen) == 1 else f"{', '.join(seen[:-1])} and {seen[-1]}"
    questions = (
        "Describe the picture.",
        "What does the picture show?",
        "What is in the picture?",
        "Tell me about this picture.",
        "What do you see?",
    )
    turn = _pose(rng, questions, listed, f"The picture shows {listed}.")
    return Turn("caption", *turn, picture.things, one_by_one=True)


ASK_SCENE: dict[str, Callable[[random.Random, Picture], Turn]] = {
    "colour": _ask_colour,
    "shape": _ask_shape,
    "object": _ask_object,
    "count": _ask_count,
    "where": _ask_where,
    "caption": _ask_caption,
}
CAPTION_LIMIT = 3
"""Pictures with more shapes than this are not captioned."""


def ask_number(rng: random.Random, picture: Picture) -> Turn:
    number = "".join(thing.glyph for thing in picture.things)
    questions = (
        "What number is printed here?",
        "Which number does the picture show?",
        "Read the number.",
        "What is the number in the picture?",
    )
    return Turn("number", *_pose(rng, questions, number, f"The number is {number}."), picture.things, one_by_one=True)


def ask_handwritten(rng: random.Random, picture: Picture) -> Turn:
    digit = picture.things[0].glyph
    questions = (
        "Which digit is written here?",
        "What digit did someone write by hand?",
        "Read the handwritten digit.",
        "What is this handwritten digit?",
    )
    return Turn("handwritten", *_pose(rng, questions, digit, f"The digit is {digit}."), picture.things)


def ask_pair_what(rng: random.Random, pictures: Sequence[Picture]) -> Turn:
    which = rng.randrange(2)
    order, picture = ("first", "second")[which], pictures[which]
    number = picture.things[0].place is None
    if number:
        name = "".join(thing.glyph for thing in picture.things)
        questions: tuple[str, ...] = (
            f"What number is in the {order} picture?",
            f"Which number does the {order} picture show?",
            f"Read the number in the {order} picture.",
            f"Look at the {order} picture: what number is it?",
        )
        sentence = f"The number in the {order} picture is {name}."
    else:
        name = picture.things[0].name
        questions = (
            f"What is in the {order} picture?",
            f"What does the {order} picture show?",
            f"Tell me what is in the {order} picture.",
            f"Look at the {order} picture: what is there?",
        )
        sentence = f"The {order} picture shows {name}."
    return Turn("pair_what", *_pose(rng, questions, name, sentence), picture.things, one_by_one=number)


def ask_pair_same(rng: random.Random, pictures: Sequence[Picture]) -> Turn:
    first, second = (picture.things[0] for picture in pictures)
    if rng.random() < 0.5:
        what, same = "colour", first.colour == second.colour
    else:
        what, same = "shape", first.glyph == second.glyph
    questions = (
        f"Do the two pictures show the same {what}?",
        f"Is the {what} the same in both pictures?",
        f"Are the {what}s in the two pictures the same?",
        f"Compare the pictures: is it the same {what}?",
    )
    sentence = f"Yes, the {what} is the same." if same else f"No, the {what} is not the same."
    question, answer = _pose(rng, questions, "yes" if same else "no", sentence)
    american = rng.random() < 0.5
    if american:
        question, answer = question.replace("colour", "color"), answer.replace("colour", "color")
    return Turn("pair_same", question, answer, (first, second))


def any_question(rng: random.Random, picture: Picture) -> Turn:
    """A question about one picture, of any kind that is not about all of it."""
    if picture.things[0].place is None:
        return (ask_handwritten if picture.handwritten else ask_number)(rng, picture)
    return ASK_SCENE[rng.choice(("colour", "shape", "object", "count", "where"))](rng, picture)


CHAT: tuple[tuple[str, str], ...] = (
    ("Hello!", "Hello! Show me a picture and ask me about it."),
    ("Hi", "Hello! Show me a picture and ask me about it."),
    ("Who are you?", "I am a very small model that answers questions about simple pictures."),
    ("What are you?", "I am a very small model that answers questions about simple pictures."),
    ("What can you do?", "I can name shapes, colours and places, count, and read numbers and handwritten digits."),
    ("Help", "I can name shapes, colours and places, count, and read numbers and handwritten digits."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
)
"""Small talk without a picture: trained on, not evaluated."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about pictures.",
    "Answer the question about the picture.",
    "You are a careful assistant. Look at the picture and answer.",
    "Be brief and right.",
)


# Examples ------------------------------------------------------------------------------------------------------------

Sizes = Callable[[random.Random], tuple[int, int]]
"""Draws one picture's (height, width) in pixels."""


def any_size(rng: random.Random) -> tuple[int, int]:
    """(height, width) of 64 to 224 pixels: smaller ones are more frequent, half are square."""
    height, width = (min(rng.randint(MIN_SIDE, MAX_SIDE) for _ in range(3)) for _ in range(2))
    return (height, height) if rng.random() < 0.5 else (height, width)


def scene_example(
    rng: random.Random, turns: int, *, kind: str | None = None, held_out: bool = False, sizes: Sizes = any_size
) -> Example:
    """A picture of shapes and `turns` questions about it, the first of `kind` if given; a caption comes last."""
    limit = CAPTION_LIMIT if kind == "caption" else 4
    picture = _draw_scene(rng, sizes(rng), _cast(rng, rng.randint(1, limit), held_out))
    kinds = [kind] if kind else []
    while len(kinds) < turns:
        kinds.append("count" if rng.random() < 0.5 else rng.choice(("colour", "shape", "object", "where")))
    if kind is None and len(picture.things) <= CAPTION_LIMIT and rng.random() < 0.4:
        kinds[-1] = "caption"
    return Example((picture,), tuple(ASK_SCENE[k](rng, picture) for k in kinds))


def glyph_example(
    rng: random.Random, *, kind: str | None = None, held_out: bool = False, sizes: Sizes = any_size
) -> Example:
    """A picture of a printed number or of a handwritten digit, and one question about it."""
    if (kind or rng.choice(GLYPH_KINDS)) == "number":
        number = _draw_number(rng, sizes(rng), _number(rng))
        return Example((number,), (ask_number(rng, number),))
    digit = _draw_handwritten(rng, sizes(rng), _digit_index(rng, held_out))
    return Example((digit,), (ask_handwritten(rng, digit),))


def _number(rng: random.Random) -> str:
    return str(rng.choice("123456789")) + "".join(rng.choice("0123456789") for _ in range(rng.randint(0, 3)))


def _digit_index(rng: random.Random, held_out: bool) -> int:
    total = len(_digits()[1])
    return rng.randrange(total - HELD_OUT_DIGITS, total) if held_out else rng.randrange(total - HELD_OUT_DIGITS)


def pair_example(
    rng: random.Random, turns: int, *, kind: str | None = None, held_out: bool = False, sizes: Sizes = any_size
) -> Example:
    """Two pictures and up to `turns` questions about them, the first of `kind` if given."""
    kind = kind or rng.choice(PAIR_KINDS)
    if kind == "pair_what" and rng.random() < 0.4:
        pictures = tuple(_draw_number(rng, sizes(rng), _number(rng)) for _ in range(2))
        return Example(pictures, tuple(ask_pair_what(rng, pictures) for _ in range(min(turns, 2))))
    casts = [_cast(rng, 1, held_out) for _ in range(2)]
    if rng.random() < 0.5:  # else the answer to "the same?" would nearly always be no
        colour, shape, _ = casts[0][0]
        alike = [c for c in _similar(casts[1][0][2], colour, shape, rng) if held_out or c not in NOVEL]
        casts[1] = alike[:1] or casts[1]
    pictures = tuple(_draw_scene(rng, sizes(rng), cast) for cast in casts)
    asked = [kind, *(rng.choice(("pair_what", "pair_same")) for _ in range(turns - 1))]
    ask = {"pair_what": ask_pair_what, "pair_same": ask_pair_same}
    return Example(pictures, tuple(ask[k](rng, pictures) for k in asked))


def _similar(place: str, colour: str, shape: str, rng: random.Random) -> Iterator[Combination]:
    """Combinations at `place` that share the colour, the shape or both; in random order."""
    shapes, colours = [rng.choice(SHAPES), shape], [rng.choice(list(COLOURS)), colour]
    options = [(colour, s, place) for s in shapes] + [(c, shape, place) for c in colours]
    rng.shuffle(options)
    yield from options


def question_example(seed: int, kind: str) -> Example:
    """Held-out question number `seed` of `kind`: one turn, novel combinations and held-out digits included."""
    rng = random.Random(f"held out {kind} {seed}")
    if kind in SCENE_KINDS:
        return scene_example(rng, 1, kind=kind, held_out=True)
    if kind in GLYPH_KINDS:
        return glyph_example(rng, kind=kind, held_out=True)
    return pair_example(rng, 1, kind=kind, held_out=True)


def sentences(count: int = 4000) -> Iterator[str]:
    """Questions, answers and small talk of the data, for training the tokenizer."""
    rng = random.Random(7)
    for text in (*itertools.chain(*CHAT), *SYSTEM_PROMPTS, "system", "user", "assistant"):
        yield from [text] * 20
    for _ in range(count):
        for example in (scene_example(rng, 3), glyph_example(rng), pair_example(rng, 2)):
            for turn in example.turns:
                yield turn.question
                yield turn.answer
