"""Asks the served demo model held-out questions of each kind over gRPC and prints the share of exactly right answers.

    python -m demo.evaluate                          # starts a server with demo/model
    python -m demo.evaluate --server HOST:PORT       # uses a running server

As controls, the same questions are asked about blank pictures and about the pictures of another question. Their scores
must fall to chance, the score of the best blind guess: the most frequent right answer to a question of this wording.
Questions whose answer depends on a combination of colour, shape and place that was never trained on are also reported
separately. Questions that ask for JSON are asked twice, with and without a `response_format`; requests with tools once.
The last line on stdout is JSON.
"""

import argparse
import contextlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

import saccade
from decoder.config import ACTIVATION_KINDS, WEIGHT_KINDS
from demo import data, world
from demo.json_questions import JSON_KINDS, json_example
from demo.tool_questions import TOOL_KINDS, tool_question
from service.commands.server_process import ServerProcess

MODEL = Path(__file__).parent / "model"
MAX_TOKENS = 128
"""The longest right answer has about 30 tokens, in JSON about 70."""
CHANCE_MARGIN = 0.12
"""How far the score with blank or swapped pictures may be above the blind guess: over three standard errors of 200
questions."""


@dataclass(frozen=True)
class Question:
    """One question with its pictures and its right answer."""

    turn: world.Turn
    images: tuple[Image.Image, ...]


@dataclass(frozen=True)
class Score:
    """Exact match for one kind of question, as shares from 0 to 1; `novel` is None if no question is novel."""

    questions: int
    right: float
    novel_questions: int
    novel: float | None
    blanked: float
    swapped: float
    blind: float
    """The score of the best blind guess: chance."""


@dataclass(frozen=True)
class JsonScore:
    """Scores of one kind of question that asks for JSON, as shares from 0 to 1."""

    questions: int
    valid: float
    """Answers without a format that are JSON."""
    right: float
    """Answers without a format whose JSON is the expected one."""
    formatted: float
    """Answers in the `response_format` of the expected JSON that are right."""


def held_out(kind: str, count: int) -> list[Question]:
    """The first `count` held-out questions of `kind`."""
    examples = (data.question_example(seed, kind) for seed in range(count))
    return [Question(e.turns[0], tuple(picture.image for picture in e.pictures)) for e in examples]


def blanked(questions: Sequence[Question]) -> list[Question]:
    """The same questions about plain grey pictures of the same sizes."""
    grey = (128, 128, 128)
    return [Question(q.turn, tuple(Image.new("RGB", image.size, grey) for image in q.images)) for q in questions]


def swapped(questions: Sequence[Question]) -> list[Question]:
    """The same questions, each about the pictures of the next one."""
    return [Question(q.turn, other.images) for q, other in zip(questions, [*questions[1:], questions[0]], strict=True)]


def blind_guess(kind: str, questions: Sequence[Question], draws: int = 4000) -> float:
    """Exact match of a guesser that answers each wording with its most frequent right answer in `draws`
    other examples."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for seed in range(draws):
        turn = data.question_example(-1 - seed, kind).turns[0]
        answers[turn.question][turn.answer] += 1
    guesses = {question: counts.most_common(1)[0][0] for question, counts in answers.items()}
    return sum(guesses.get(q.turn.question) == q.turn.answer for q in questions) / len(questions)


def evaluate(address: str, questions: int, controls: int, concurrency: int) -> dict[str, Score]:
    """Asks `questions` questions of each kind, and `controls` of them with blank and with swapped pictures,
    `concurrency` at a time."""
    scores = {}
    with saccade.Client(address) as client, ThreadPoolExecutor(concurrency) as pool:

        def right(question: Question) -> bool:
            answer = client.generate(
                question.turn.question, images=list(question.images), temperature=0, max_tokens=MAX_TOKENS
            )
            return answer.text.strip() == question.turn.answer

        def share(asked: Sequence[Question]) -> tuple[float, list[bool]]:
            marks = list(pool.map(right, asked))
            return sum(marks) / len(marks), marks

        for kind in world.KINDS:
            asked = held_out(kind, questions)
            score, marks = share(asked)
            novel = [mark for mark, question in zip(marks, asked, strict=True) if question.turn.novel]
            scores[kind] = Score(
                questions=len(asked),
                right=score,
                novel_questions=len(novel),
                novel=sum(novel) / len(novel) if novel else None,
                blanked=share(blanked(asked[:controls]))[0],
                swapped=share(swapped(asked[:controls]))[0],
                blind=blind_guess(kind, asked),
            )
            print(f"{kind}: {score:.1%}", file=sys.stderr)
    return scores


def schema_of(value: Any) -> dict[str, Any]:
    """A JSON schema for values like `value`; null stands for a string or null."""
    if isinstance(value, dict):
        properties = {key: schema_of(item) for key, item in value.items()}
        return {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0])}
    if value is None:
        return {"type": ["string", "null"]}
    return {"type": {bool: "boolean", int: "integer", str: "string"}[type(value)]}


def _read(text: str) -> Any:
    """The value of the JSON `text`; `_INVALID` if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return _INVALID


_INVALID = object()


def _same(value: Any, expected: Any) -> bool:
    """Whether two values are the same JSON. Unlike in Python, 1 and true differ."""
    return value is not _INVALID and json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True)


def evaluate_json(address: str, questions: int, concurrency: int) -> dict[str, JsonScore]:
    """Asks `questions` held-out questions of each kind that asks for JSON, with and without a format."""
    scores = {}
    with saccade.Client(address) as client, ThreadPoolExecutor(concurrency) as pool:

        def answers(example: world.Example) -> tuple[Any, Any, Any]:
            (turn,) = example.turns
            expected = json.loads(turn.answer)
            images = [picture.image for picture in example.pictures]
            options: dict[str, Any] = {"images": images, "temperature": 0, "max_tokens": MAX_TOKENS}
            free = client.generate(turn.question, **options)
            formatted = client.generate(turn.question, response_format=schema_of(expected), **options)
            return expected, _read(free.text), _read(formatted.text)

        for kind in JSON_KINDS:
            found = list(pool.map(answers, (json_example(seed, kind) for seed in range(questions))))
            scores[kind] = JsonScore(
                questions=questions,
                valid=sum(free is not _INVALID for _, free, _ in found) / questions,
                right=sum(_same(free, expected) for expected, free, _ in found) / questions,
                formatted=sum(_same(formatted, expected) for expected, _, formatted in found) / questions,
            )
            print(f"{kind}: {scores[kind]}", file=sys.stderr)
    return scores


def evaluate_tools(address: str, questions: int, concurrency: int) -> dict[str, float]:
    """Asks `questions` held-out requests of each kind with tools; returns the shares of exactly right answers, calls
    included."""
    with saccade.Client(address) as client, ThreadPoolExecutor(concurrency) as pool:

        def right(example: world.Example) -> bool:
            turn, images = example.turns[0], [picture.image for picture in example.pictures]
            answer = client.generate(
                turn.question, images=images, temperature=0, max_tokens=2 * MAX_TOKENS,
                chat_template_kwargs={"tools": list(example.tools)},
            )  # fmt: skip
            return answer.text.strip() == turn.answer

        scores = {}
        for kind in TOOL_KINDS:
            scores[kind] = sum(pool.map(right, (tool_question(seed, kind) for seed in range(questions)))) / questions
            print(f"{kind}: {scores[kind]:.1%}", file=sys.stderr)
    return scores


def json_table(scores: dict[str, JsonScore]) -> str:
    """The scores as a Markdown table."""
    lines = ["| kind | questions | valid | right | right in a format |", "| --- | --: | --: | --: | --: |"]
    rows = {**scores, "overall": JsonScore(0, *(overall(scores, name) for name in ("valid", "right", "formatted")))}
    for kind, s in rows.items():
        count = s.questions or sum(score.questions for score in scores.values())
        lines.append(f"| {kind} | {count} | {s.valid:.1%} | {s.right:.1%} | {s.formatted:.1%} |")
    return "\n".join(lines)


def overall(scores: Mapping[str, Score | JsonScore], name: str) -> float:
    """The mean of a share over the kinds."""
    values = [getattr(score, name) for score in scores.values()]
    return sum(values) / len(values)


def table(scores: dict[str, Score]) -> str:
    """The scores as a Markdown table."""
    lines = [
        "| kind | questions | right | of them novel | right | blanked | swapped | blind guess |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for kind, s in scores.items():
        novel = "" if s.novel is None else f"{s.novel:.1%}"
        lines.append(
            f"| {kind} | {s.questions} | {s.right:.1%} | {s.novel_questions} | {novel} "
            f"| {s.blanked:.1%} | {s.swapped:.1%} | {s.blind:.1%} |"
        )
    novel_total = sum(s.novel_questions for s in scores.values())
    novel_right = sum(s.novel_questions * (s.novel or 0) for s in scores.values()) / max(1, novel_total)
    lines.append(
        f"| overall | {sum(s.questions for s in scores.values())} | {overall(scores, 'right'):.1%} "
        f"| {novel_total} | {novel_right:.1%} | {overall(scores, 'blanked'):.1%} "
        f"| {overall(scores, 'swapped'):.1%} | {overall(scores, 'blind'):.1%} |"
    )
    return "\n".join(lines)


def shortcomings(scores: dict[str, Score], min_overall: float, min_kind: float) -> list[str]:
    """The scores below their thresholds, as messages."""
    missed = []
    if (mean := overall(scores, "right")) < min_overall:
        missed.append(f"overall {mean:.1%} is under {min_overall:.0%}")
    for kind, score in scores.items():
        if score.right < min_kind:
            missed.append(f"{kind} {score.right:.1%} is under {min_kind:.0%}")
        for name, value in (("blanked", score.blanked), ("swapped", score.swapped)):
            if value > score.blind + CHANCE_MARGIN:
                missed.append(f"{kind} {name} {value:.1%} is over chance ({score.blind:.1%})")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="HOST:PORT of a running server; by default one is started")
    parser.add_argument("--model", type=Path, default=MODEL, help="the model of the server that is started")
    parser.add_argument("--weights", choices=WEIGHT_KINDS, help="--weights of the server that is started")
    parser.add_argument("--activations", choices=ACTIVATION_KINDS, help="--activations of that server")
    parser.add_argument("--state-dtype", choices=("float32", "bfloat16"), help="--state-dtype of that server")
    parser.add_argument("--questions", type=int, default=500, help="questions of each kind")
    parser.add_argument("--controls", type=int, default=200, help="of these, asked with blank and swapped pictures")
    parser.add_argument("--concurrency", type=int, default=16, help="questions in flight")
    parser.add_argument("--min-overall", type=float, default=0.95)
    parser.add_argument("--min-kind", type=float, default=0.90)
    parser.add_argument("--min-json", type=float, default=0.90)
    parser.add_argument("--only", choices=("plain", "json", "tools"), help="only one of the three parts")
    arguments = parser.parse_args()
    for name in ("questions", "controls", "concurrency"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}; at least 1")
    started = time.monotonic()
    parts = [arguments.only] if arguments.only else ["plain", "json", "tools"]
    missed: list[str] = []
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        options = [str(arguments.model)]
        for name in ("weights", "activations", "state-dtype"):
            if value := getattr(arguments, name.replace("-", "_")):
                options += [f"--{name}", value]
        address = arguments.server or stack.enter_context(ServerProcess(options)).address
        asked = (arguments.questions, arguments.concurrency)
        if "plain" in parts:
            scores = evaluate(address, arguments.questions, arguments.controls, arguments.concurrency)
            print(table(scores))
            missed += shortcomings(scores, arguments.min_overall, arguments.min_kind)
            results["scores"] = {kind: score.__dict__ for kind, score in scores.items()}
        if "json" in parts:
            in_json = evaluate_json(address, *asked)
            print(json_table(in_json))
            if (right := overall(in_json, "right")) < arguments.min_json:
                missed.append(f"JSON {right:.1%} is under {arguments.min_json:.0%}")
            results["json"] = {kind: score.__dict__ for kind, score in in_json.items()}
        if "tools" in parts:
            results["tools"] = evaluate_tools(address, *asked)
            print("\n".join(f"{kind}: {share:.1%}" for kind, share in results["tools"].items()))
    for line in missed:
        print(line, file=sys.stderr)
    print(json.dumps({**results, "missed": missed, "seconds": round(time.monotonic() - started, 1)}))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
