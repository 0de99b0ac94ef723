"""The demo model's world: what pictures show, what is asked about them, and the combinations never trained on."""

import itertools
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image

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
    """Whether the answer names the things one after the other."""
    empty_place: str | None = None
    """The place that the question is about, if it is empty."""
    spans: tuple[tuple[int, int, tuple[Thing, ...]], ...] = ()
    """The result of `focus`, if it does not follow from the other fields."""
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
