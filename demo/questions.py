"""Questions about pictures of the demo model's world and their one right answers, in several wordings."""

import random
from collections.abc import Callable, Sequence

from demo.world import COLOURS, PLACES, SHAPES, Picture, Thing, Turn

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
