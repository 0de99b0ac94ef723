"""Examples for the demo model: pictures, questions about them and the one right answer to each, all drawn from a seed.

A picture shows one to four coloured shapes on a 3 x 3 grid of places, or a printed number of one to four digits, or one
real handwritten digit (scikit-learn's `load_digits`). Questions are about one picture or two. The wording of a question
fixes the form of its answer (a word, or a sentence when a sentence is asked for), so that exact match is well defined.

Two things are never trained on: 20 % of the colour x shape x place combinations (`NOVEL`) and the last 297 handwritten
digits.
"""

import itertools
import random
from collections.abc import Callable, Iterator

from demo.drawing import any_number, cast_of, digit_index, draw_handwritten, draw_number, draw_scene
from demo.questions import (
    ASK_SCENE,
    CAPTION_LIMIT,
    CHAT,
    SYSTEM_PROMPTS,
    ask_handwritten,
    ask_number,
    ask_pair_same,
    ask_pair_what,
)
from demo.world import (
    COLOURS,
    GLYPH_KINDS,
    MAX_SIDE,
    MIN_SIDE,
    NOVEL,
    PAIR_KINDS,
    SCENE_KINDS,
    SHAPES,
    Combination,
    Example,
)

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
    picture = draw_scene(rng, sizes(rng), cast_of(rng, rng.randint(1, limit), held_out))
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
        number = draw_number(rng, sizes(rng), any_number(rng))
        return Example((number,), (ask_number(rng, number),))
    digit = draw_handwritten(rng, sizes(rng), digit_index(rng, held_out))
    return Example((digit,), (ask_handwritten(rng, digit),))


def pair_example(
    rng: random.Random, turns: int, *, kind: str | None = None, held_out: bool = False, sizes: Sizes = any_size
) -> Example:
    """Two pictures and up to `turns` questions about them, the first of `kind` if given."""
    kind = kind or rng.choice(PAIR_KINDS)
    if kind == "pair_what" and rng.random() < 0.4:
        pictures = tuple(draw_number(rng, sizes(rng), any_number(rng)) for _ in range(2))
        return Example(pictures, tuple(ask_pair_what(rng, pictures) for _ in range(min(turns, 2))))
    casts = [cast_of(rng, 1, held_out) for _ in range(2)]
    if rng.random() < 0.5:  # else the answer to "the same?" would nearly always be no
        colour, shape, _ = casts[0][0]
        alike = [c for c in _similar(casts[1][0][2], colour, shape, rng) if held_out or c not in NOVEL]
        casts[1] = alike[:1] or casts[1]
    pictures = tuple(draw_scene(rng, sizes(rng), cast) for cast in casts)
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
