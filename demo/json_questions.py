"""Questions that ask for JSON, and the one right answer to each.

The question names the keys, in the order in which the answer has them, or asks for JSON without naming keys; then the
answer has the default ones. JSON is written as `json.dumps` writes it, so that exact match is well defined.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from demo import data, questions
from demo.world import Example, Picture, Thing, Turn

JSON_KINDS = ("json_thing", "json_count", "json_picture", "json_number", "json_pair")


@dataclass(frozen=True)
class Copied:
    """A part of an answer repeats earlier words: the patterns of `Turn.copied` that find them."""

    patterns: tuple[str, ...]


About = tuple[Thing, ...] | Copied | None
Part = tuple[str, About]
"""A piece of an answer, and what it is about; None for punctuation and the like."""
Field = tuple[str, Any, tuple[Thing, ...] | None]
"""Key, value and what the value is about."""

ATTRIBUTES = {"color": ("color", "color", "colour"), "shape": ("shape",), "place": ("place", "place", "position")}
"""The attributes of a thing and the keys for each."""
COUNT_KEYS = ("count", "count", "number", "total")
REQUESTS = (
    "{} Answer in JSON{}.",
    "{} Answer as JSON{}.",
    "{} Reply in JSON{}.",
    "{} Reply with a JSON object{}.",
    "{} Answer with a JSON object{}.",
    "{} Give JSON{}.",
)
DEFAULTS = {
    "colour": ("color",), "shape": ("shape",), "object": ("color", "shape"), "where": ("place",),
}  # fmt: skip
"""The attributes that answer a question of each kind."""


def value_of(thing: Thing, attribute: str) -> str | None:
    """The colour, shape or place of `thing`."""
    return {"color": thing.colour, "shape": thing.glyph, "place": thing.place}[attribute]


def turn_of(kind: str, question: str, parts: Iterable[Part], **more: Any) -> Turn:
    """A turn whose answer consists of `parts`."""
    answer = ""
    spans: list[tuple[int, int, tuple[Thing, ...]]] = []
    copied: list[tuple[int, int, tuple[str, ...]]] = []
    about: list[Thing] = []
    for text, things in parts:
        if isinstance(things, Copied):
            copied.append((len(answer), len(answer) + len(text), things.patterns))
        elif things is not None:
            spans.append((len(answer), len(answer) + len(text), things))
            about += [thing for thing in things if not any(thing is other for other in about)]
        answer += text
    return Turn(kind, question, answer, tuple(about), spans=tuple(spans), copied=tuple(copied), **more)


def key_part(key: str, first: bool, named: bool) -> Part:
    """The text before a value, with its key; `named`: the question names the key."""
    return f'{"{" if first else ", "}"{key}": ', Copied(("JSON", rf"\b({key})\b")) if named else None


def end_part(named: bool) -> Part:
    """The end of an object; `named`: it depends on where the question's list of keys ends."""
    return "}", Copied(("JSON", r"(\.)<")) if named else None


def object_parts(fields: Sequence[Field], named: bool) -> list[Part]:
    """The parts of a JSON object."""
    parts: list[Part] = []
    for key, value, things in fields:
        parts += [key_part(key, not parts, named), (json.dumps(value), things)]
    return [*parts, end_part(named)]


def list_parts(values: Sequence[tuple[Any, Thing]]) -> list[Part]:
    """The parts of a JSON list of one value for each thing."""
    parts: list[Part] = []
    for value, thing in values:
        parts += [(", " if parts else "[", None), (json.dumps(value), (thing,))]
    return [*parts, ("]", None)]


def keys_for(rng: random.Random, attributes: Sequence[str]) -> dict[str, str]:
    """Key -> attribute, with a random key for each of `attributes`, in their order."""
    return {rng.choice(ATTRIBUTES[attribute]): attribute for attribute in attributes}


def some_attributes(rng: random.Random, needed: Sequence[str] = ()) -> list[str]:
    """`needed` and a random choice of the other attributes, in random order; at least one in all."""
    others = [attribute for attribute in ATTRIBUTES if attribute not in needed]
    least = 0 if needed else 1
    chosen = [*needed, *rng.sample(others, rng.randint(least, len(others)))]
    rng.shuffle(chosen)
    return chosen


def _listed(rng: random.Random, keys: Sequence[str]) -> str:
    """For example "the keys color and shape"."""
    names = [f'"{key}"' for key in keys] if rng.random() < 0.3 else list(keys)
    noun = "key" if len(names) == 1 else "keys"
    if len(names) > 1 and rng.random() < 0.6:
        names = [*names[:-2], f"{names[-2]} and {names[-1]}"]
    return f"{rng.choice(('the ', '', ''))}{noun} {', '.join(names)}"


def _with(rng: random.Random, keys: Sequence[str]) -> str:
    """The part of a request that names the keys; "" if there are none."""
    return f" with {_listed(rng, keys)}" if keys else ""


def _request(rng: random.Random, question: str, keys: Sequence[str]) -> str:
    return rng.choice(REQUESTS).format(question, _with(rng, keys))


def _plain(ask: Callable[[], Turn]) -> Turn:
    """A question that does not ask for a sentence."""
    turn = ask()
    while "sentence" in turn.question:
        turn = ask()
    return turn


# One thing -----------------------------------------------------------------------------------------------------------


def reference(rng: random.Random, picture: Picture) -> tuple[str, Thing]:
    """A description that fits only one thing of `picture`, and that thing."""
    thing = rng.choice(picture.things)
    options = [f"the shape at the {thing.place}", f"what is at the {thing.place}", f"the {thing.colour} {thing.glyph}"]
    if sum(other.glyph == thing.glyph for other in picture.things) == 1:
        options.append(f"the {thing.glyph}")
    if sum(other.colour == thing.colour for other in picture.things) == 1:
        options.append(f"the {thing.colour} shape")
    if len(picture.things) == 1:
        options += ["the shape", "what you see"]
    return rng.choice(options), thing


def _thing_turn(rng: random.Random, picture: Picture) -> Turn:
    """A question about one thing, or about an empty place."""
    if rng.random() < 0.3:
        described, thing = reference(rng, picture)
        keys = keys_for(rng, some_attributes(rng))
        question = rng.choice((f"Describe {described} as JSON{{}}.", f"Describe {described} in JSON{{}}."))
        fields: list[Field] = [(key, value_of(thing, attribute), (thing,)) for key, attribute in keys.items()]
        return turn_of("json_thing", question.format(_with(rng, list(keys))), object_parts(fields, True))
    plain = _plain(lambda: questions.ASK_SCENE[rng.choice(tuple(DEFAULTS))](rng, picture))
    things = plain.about or None
    style = rng.random()
    named = style < 0.1 or style >= 0.3
    if style < 0.1:
        answer = None if plain.empty_place else plain.answer
        question, fields = _request(rng, plain.question, ["answer"]), [("answer", answer, things)]
    else:
        needed = DEFAULTS[plain.kind]
        keys = keys_for(rng, some_attributes(rng, needed)) if named else {name: name for name in needed}
        question = _request(rng, plain.question, list(keys) if named else [])
        values = {a: value_of(plain.about[0], a) if things else None for a in ATTRIBUTES}
        if plain.empty_place:
            values["place"] = plain.empty_place
        fields = [(key, values[attribute], things) for key, attribute in keys.items()]
    parts = object_parts(fields, named)
    if plain.empty_place:  # the values are about the place
        parts = [(text, () if about is None else about) for text, about in parts]
    return turn_of("json_thing", question, parts, empty_place=plain.empty_place)


def _count_turn(rng: random.Random, picture: Picture) -> Turn:
    plain = _plain(lambda: questions.ASK_SCENE["count"](rng, picture))
    key = rng.choice((*COUNT_KEYS, "answer"))
    named = rng.random() < 0.7
    parts = object_parts([(key if named else "count", int(plain.answer), plain.about)], named)
    return turn_of("json_count", _request(rng, plain.question, [key] if named else []), parts)


# A whole picture -----------------------------------------------------------------------------------------------------


def _picture_turn(rng: random.Random, picture: Picture) -> Turn:
    """A description of everything in `picture`."""
    way = rng.random()
    if len(picture.things) == 1 and way < 0.4:
        return _single(rng, picture.things[0])
    if way < 0.3:
        return _columns(rng, picture)
    named = way < 0.8
    keys = keys_for(rng, some_attributes(rng)) if named else {name: name for name in ATTRIBUTES}
    objects: list[Part] = []
    for thing in picture.things:
        objects.append((", " if objects else "[", None))
        objects += object_parts([(key, value_of(thing, of), (thing,)) for key, of in keys.items()], named)
    objects.append(("]", None))
    if not named:
        question = _request(rng, _plain(lambda: questions.ASK_SCENE["caption"](rng, picture)).question, [])
        if rng.random() < 0.5:
            question = rng.choice(("Describe the picture as JSON.", "Describe the picture in JSON."))
        return turn_of("json_picture", question, [('{"shapes": ', None), *objects, ("}", None)])
    question = rng.choice(
        (
            "List the shapes as a JSON array{}.",
            "Describe the picture as a JSON array{}.",
            "Describe each shape in a JSON array{}.",
        )
    )
    return turn_of("json_picture", question.format(_with(rng, list(keys))), objects)


def _describe(rng: random.Random, keys: Sequence[str]) -> str:
    if rng.random() < 0.5:
        question = rng.choice(("Describe the picture.", "What does the picture show?", "What do you see?"))
        return _request(rng, question, keys)
    return rng.choice(("Describe the picture as JSON{}.", "Describe the picture in JSON{}.")).format(_with(rng, keys))


def _single(rng: random.Random, thing: Thing) -> Turn:
    """A description of a picture with one thing."""
    keys = keys_for(rng, some_attributes(rng))
    names = [*keys, "count"] if rng.random() < 0.4 else list(keys)
    rng.shuffle(names)
    fields = [(n, 1 if n == "count" else value_of(thing, keys[n]), (thing,)) for n in names]
    return turn_of("json_picture", _describe(rng, names), object_parts(fields, True))


def _columns(rng: random.Random, picture: Picture) -> Turn:
    """A description with a list for each attribute, and perhaps the count. The keys of lists are plurals, or singulars
    where there is more than one thing."""
    ending = "" if len(picture.things) > 1 and rng.random() < 0.35 else "s"
    keys = {key + ending: attribute for key, attribute in keys_for(rng, some_attributes(rng)).items()}
    names = [*keys, "count"] if rng.random() < 0.4 else list(keys)
    rng.shuffle(names)
    parts: list[Part] = []
    for name in names:
        parts.append(key_part(name, not parts, True))
        if name in keys:
            parts += list_parts([(value_of(thing, keys[name]), thing) for thing in picture.things])
        else:
            parts.append((str(len(picture.things)), None))
    return turn_of("json_picture", _describe(rng, names), [*parts, end_part(True)])


# Numbers and pairs ---------------------------------------------------------------------------------------------------


def _digits(things: Sequence[Thing]) -> list[Part]:
    return [(thing.glyph, (thing,)) for thing in things]


def _keyed(rng: random.Random, plain: Turn, default: str, keys: Sequence[str], value: list[Part]) -> Turn:
    """A question whose answer has one key, which the question names or not."""
    key = rng.choice(keys)
    named = rng.random() < 0.7
    parts = [key_part(key if named else default, True, named), *value, end_part(named)]
    kind = "json_pair" if plain.kind.startswith("pair") else "json_number"
    return turn_of(kind, _request(rng, plain.question, [key] if named else []), parts)


def _number_turn(rng: random.Random, picture: Picture) -> Turn:
    if picture.handwritten:
        plain = _plain(lambda: questions.ask_handwritten(rng, picture))
        return _keyed(rng, plain, "digit", ("digit", "number", "answer"), _digits(picture.things))
    plain = _plain(lambda: questions.ask_number(rng, picture))
    return _keyed(rng, plain, "number", ("number", "value", "answer"), _digits(picture.things))


def _pair_turn(rng: random.Random, pictures: Sequence[Picture]) -> Turn:
    number = pictures[0].things[0].place is None
    if not number and rng.random() < 0.5:
        plain = _plain(lambda: questions.ask_pair_same(rng, pictures))
        return _keyed(rng, plain, "same", ("same", "answer"), [(json.dumps(plain.answer == "yes"), tuple(plain.about))])
    plain = _plain(lambda: questions.ask_pair_what(rng, pictures))
    if number:
        return _keyed(rng, plain, "number", ("number", "value", "answer"), _digits(plain.about))
    thing = plain.about[0]
    named = rng.random() < 0.7
    attributes = rng.choice((["color", "shape"], ["shape", "color"], ["color"], ["shape"]))
    keys = keys_for(rng, attributes) if named else {"color": "color", "shape": "shape"}
    fields = [(key, value_of(thing, attribute), (thing,)) for key, attribute in keys.items()]
    parts = object_parts(fields, named)
    return turn_of("json_pair", _request(rng, plain.question, list(keys) if named else []), parts)


# Examples ------------------------------------------------------------------------------------------------------------

ASK: dict[str, Callable[[random.Random, Sequence[Picture]], Turn]] = {
    "json_thing": lambda rng, pictures: _thing_turn(rng, pictures[0]),
    "json_count": lambda rng, pictures: _count_turn(rng, pictures[0]),
    "json_picture": lambda rng, pictures: _picture_turn(rng, pictures[0]),
    "json_number": lambda rng, pictures: _number_turn(rng, pictures[0]),
    "json_pair": _pair_turn,
}


def json_turn(rng: random.Random, pictures: Sequence[Picture]) -> Turn:
    """A question about `pictures` that asks for JSON."""
    if len(pictures) == 2:
        return _pair_turn(rng, pictures)
    if pictures[0].things[0].place is None:
        return _number_turn(rng, pictures[0])
    whole = 0.3 if len(pictures[0].things) <= questions.CAPTION_LIMIT else 0.0
    kind = rng.choices(("json_thing", "json_count", "json_picture"), (0.5, 0.2, whole))[0]
    return ASK[kind](rng, pictures)


def with_json(rng: random.Random, example: Example, share: float) -> Example:
    """`example` in which about `share` of the questions ask for JSON."""
    if not example.pictures:
        return example
    turns = (json_turn(rng, example.pictures) if rng.random() < share else turn for turn in example.turns)
    return Example(example.pictures, tuple(turns))


def json_example(seed: int, kind: str) -> Example:
    """Held-out question number `seed` of `kind`, one of JSON_KINDS."""
    rng = random.Random(f"held out {kind} {seed}")
    if kind == "json_number":
        example = data.glyph_example(rng, held_out=True)
    elif kind == "json_pair":
        example = data.pair_example(rng, 1, held_out=True)
    else:
        whole = "caption" if kind == "json_picture" else "colour"
        example = data.scene_example(rng, 1, kind=whole, held_out=True)
    return Example(example.pictures, (ASK[kind](rng, example.pictures),))
