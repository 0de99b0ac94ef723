"""Conversations with tools: a request for which there is a tool is answered with calls, any other as without tools.

A tool records a shape, a printed number or a count. Its name and its parameters are drawn, so that they have to be read
from the system message. The markup is that of Nemotron 3, as `demo.tokenizer.CHAT_TEMPLATE` renders it.
"""

import random
from dataclasses import dataclass
from typing import Any

from demo import data, questions, world
from demo.data import Sizes
from demo.json_questions import Copied, Part, keys_for, reference, some_attributes, turn_of, value_of
from demo.tokenizer import render_call, render_response
from demo.world import Example, Picture, Thing, Turn

TOOL_KINDS = ("tool_thing", "tool_all", "tool_number", "tool_count", "tool_none")

VERBS = ("record", "save", "report", "store", "note", "log", "send", "submit", "register", "add")
NOUNS = {
    "thing": ("shape", "object", "thing", "figure", "item", "drawing"),
    "number": ("number", "digit", "value"),
    "count": ("count", "total"),
}
PARAMETERS = {"number": ("number", "number", "value", "digit"), "count": ("count", "count", "total", "number")}
DESCRIPTIONS = (
    "{Verb}s a {noun}.",
    "{Verb}s the {noun} in a picture.",
    "{Verb} one {noun} of the picture.",
    "{Verb}s what the picture shows.",
)
OTHERS: tuple[dict[str, Any], ...] = tuple(
    {"name": name, "description": text, "parameters": {"type": "object", "properties": {key: {"type": "string"}}}}
    for name, text, key in (
        ("get_weather", "The weather in a town.", "city"),
        ("get_time", "Tells the time of day.", "zone"),
        ("find_book", "Looks for a book.", "title"),
        ("open_window", "Opens a window.", "room"),
        ("search", "Searches the web.", "query"),
    )
)
"""Tools that fit no question about a picture."""
RESPONSES = ("ok", "saved", "done", '{"ok": true}', "recorded", "1")
DONE, NO_TOOL = "Done.", "I have no tool for that."


@dataclass(frozen=True)
class Tool:
    """A tool that fits a request."""

    verb: str
    noun: str
    name: str
    keys: dict[str, str]
    """Parameter -> attribute. A tool for a number or a count has one, with the attribute "number" or "count"."""

    def definition(self, rng: random.Random) -> dict[str, Any]:
        """The tool in OpenAI's JSON form, with or without a description."""
        kind = {"number": "integer", "count": "integer"}
        properties: dict[str, dict[str, Any]] = {}
        described = rng.random() < 0.3
        for key, attribute in self.keys.items():
            properties[key] = {"type": kind.get(attribute, "string")}
            if described:
                properties[key]["description"] = f"The {attribute} of the {self.noun}."
            if attribute in ("color", "shape") and rng.random() < 0.1:
                properties[key]["enum"] = list(world.COLOURS if attribute == "color" else world.SHAPES)
        tool: dict[str, Any] = {"name": self.name}
        if rng.random() < 0.7:
            text = rng.choice(DESCRIPTIONS)
            tool["description"] = text.format(Verb=self.verb.capitalize(), noun=self.noun)
        return tool | {"parameters": {"type": "object", "properties": properties}}


def _tool(rng: random.Random, kind: str) -> Tool:
    """A random tool for a `kind`: "thing", "number" or "count"."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS[kind])
    keys = keys_for(rng, some_attributes(rng)) if kind == "thing" else {rng.choice(PARAMETERS[kind]): kind}
    return Tool(verb, noun, f"{verb}_{noun}" if rng.random() < 0.9 else verb, keys)


def _call(tool: Tool, values: dict[str, list[Part]]) -> list[Part]:
    """The parts of a call. `values`: parameter -> the parts of its value."""
    name = rf"<name>({tool.name})</name>"
    head, *rest = render_call(tool.name, dict.fromkeys(tool.keys, "\0")).split("\0")
    begin = head.index(tool.name) + len(tool.name)
    parts: list[Part] = [(head[:begin], Copied((name,)))]
    text = head[begin:]
    for key, after in zip(tool.keys, rest, strict=True):
        parts += [(text, Copied((name, rf"<name>({key})</name>"))), *values[key]]
        text = after
    return [*parts, (text, Copied((name, "(</parameters>)")))]


def _thing_call(tool: Tool, thing: Thing) -> list[Part]:
    return _call(tool, {key: [(str(value_of(thing, attribute)), (thing,))] for key, attribute in tool.keys.items()})


def _use(rng: random.Random, tool: Tool, what: str) -> str:
    """A request to call `tool` for `what`."""
    return rng.choice(
        (
            f"{tool.verb.capitalize()} {what}.",
            f"Please {tool.verb} {what}.",
            f"{rng.choice(VERBS).capitalize()} {what}.",
            f"Call {tool.name} for {what}.",
            f"Use the tool for {what}.",
        )
    )


def _thing_turn(rng: random.Random, tool: Tool, picture: Picture) -> Turn:
    described, thing = reference(rng, picture)
    return turn_of("tool_thing", _use(rng, tool, described), _thing_call(tool, thing))


def _all_turn(rng: random.Random, tool: Tool, picture: Picture) -> Turn:
    """A call for each thing."""
    parts: list[Part] = []
    for thing in picture.things:
        parts += [*([("\n", None)] if parts else []), *_thing_call(tool, thing)]
    return turn_of("tool_all", _use(rng, tool, rng.choice(("every shape", "all shapes", "each shape"))), parts)


def _number_turn(rng: random.Random, tool: Tool, picture: Picture) -> Turn:
    what = rng.choice(("the number", "the number in the picture", "the printed number", "what you read"))
    if picture.handwritten:
        what = rng.choice(("the digit", "the handwritten digit", "what you read"))
    (key,) = tool.keys
    digits: list[Part] = [(thing.glyph, (thing,)) for thing in picture.things]
    return turn_of("tool_number", _use(rng, tool, what), _call(tool, {key: digits}))


def _count_turn(rng: random.Random, tool: Tool, picture: Picture) -> Turn:
    """A request to record a count, and the call with the count."""
    plain = questions.ASK_SCENE["count"](rng, picture)
    while not plain.question.startswith("How many") or "sentence" in plain.question:
        plain = questions.ASK_SCENE["count"](rng, picture)
    counted = plain.question.removeprefix("How many ").removesuffix("?")
    counted = counted.removesuffix(" are there").removesuffix(" do you see")
    what = rng.choice((f"how many {counted} there are", f"the number of {counted}"))
    (key,) = tool.keys
    return turn_of("tool_count", _use(rng, tool, what), _call(tool, {key: [(plain.answer, plain.about)]}))


def _turn(rng: random.Random, kind: str, picture: Picture) -> tuple[Turn, list[dict[str, Any]]]:
    """A request about `picture` and the tools for it."""
    others = rng.sample(OTHERS, rng.choice((0, 0, 1)))
    number = picture.things[0].place is None
    if kind == "tool_none":
        tools = rng.sample(OTHERS, rng.choice((1, 1, 2)))
        if rng.random() < 0.3:
            described = "the number" if number else reference(rng, picture)[0]
            return Turn(kind, f"{rng.choice(VERBS).capitalize()} {described}.", NO_TOOL), tools
        if rng.random() < 0.6:
            tools = [_tool(rng, "number" if number else rng.choice(("thing", "count"))).definition(rng)]
        return questions.any_question(rng, picture), tools
    if kind == "tool_number":
        tool = _tool(rng, "number")
        turn = _number_turn(rng, tool, picture)
    elif kind == "tool_count":
        tool = _tool(rng, "count")
        turn = _count_turn(rng, tool, picture)
        others += [_tool(rng, "thing").definition(rng)] if rng.random() < 0.2 else []
    else:
        tool = _tool(rng, "thing")
        turn = (_thing_turn if kind == "tool_thing" else _all_turn)(rng, tool, picture)
        others += [_tool(rng, "count").definition(rng)] if rng.random() < 0.2 else []
    tools = [tool.definition(rng), *others]
    rng.shuffle(tools)
    return turn, tools


def _after(rng: random.Random, turn: Turn) -> list[Turn]:
    """A turn with the tools' responses and the answer to them."""
    calls = turn.answer.count("<tool_call>")
    if not calls:
        return []
    responses = [rng.choice(RESPONSES)] * calls
    return [Turn("tool_done", render_response(responses), DONE)]


def tool_example(
    rng: random.Random, *, kind: str | None = None, held_out: bool = False, sizes: Sizes = data.any_size
) -> Example:
    """A picture, tools and a request; often the responses of the tools and the last answer too."""
    kind = kind or rng.choices(TOOL_KINDS, (0.4, 0.15, 0.15, 0.1, 0.2))[0]
    if kind == "tool_number" or (kind == "tool_none" and rng.random() < 0.2):
        picture = data.glyph_example(rng, held_out=held_out, sizes=sizes).pictures[0]
    else:
        whole = "caption" if kind == "tool_all" else "colour"
        picture = data.scene_example(rng, 1, kind=whole, held_out=held_out, sizes=sizes).pictures[0]
    turn, tools = _turn(rng, kind, picture)
    after = _after(rng, turn) if not held_out and rng.random() < 0.4 else []
    return Example((picture,), (turn, *after), tuple(tools))


def tool_question(seed: int, kind: str) -> Example:
    """Held-out request number `seed` of `kind`, one of TOOL_KINDS."""
    return tool_example(random.Random(f"held out {kind} {seed}"), kind=kind, held_out=True)
