"""Asks the served demo model held-out questions of each kind over gRPC and prints the share of exactly right answers.

    python -m demo.evaluate                          # starts a server of demo/model by itself
    python -m demo.evaluate --server HOST:PORT       # asks one that is running

Beside it stand the same questions with the pictures blanked and with another question's pictures, which must fall to
chance: what the best blind guess scores, that is the answer most often right for that very wording. Questions whose
answer rests on a combination of colour, shape and place that was never trained on are also reported apart. The last
line on stdout is JSON.
"""

import argparse
import contextlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

import saccade
from decoder.config import WEIGHT_KINDS
from demo import data
from service.commands.cli import ServerProcess

MODEL = Path(__file__).parent / "model"
MAX_TOKENS = 64
"""The longest right answer has about 30 tokens."""
CHANCE_MARGIN = 0.12
"""How far a blanked or swapped score may be above the blind guess: over three standard errors of 200 questions."""


@dataclass(frozen=True)
class Question:
    """One question as it is asked."""

    turn: data.Turn
    images: tuple[Image.Image, ...]


@dataclass(frozen=True)
class Score:
    """Exact match, as shares from 0 to 1, of one kind; `novel` is None where nothing is novel."""

    questions: int
    right: float
    novel_questions: int
    novel: float | None
    blanked: float
    swapped: float
    blind: float
    """The score of the best blind guess: chance."""


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
    """Exact match of a guesser that answers each wording with the answer that was most often right for it in `draws`
    other examples."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for seed in range(draws):
        turn = data.question_example(-1 - seed, kind).turns[0]
        answers[turn.question][turn.answer] += 1
    guesses = {question: counts.most_common(1)[0][0] for question, counts in answers.items()}
    return sum(guesses.get(q.turn.question) == q.turn.answer for q in questions) / len(questions)


def evaluate(address: str, questions: int, controls: int, concurrency: int) -> dict[str, Score]:
    """Asks `questions` questions of each kind and `controls` each blanked and swapped, `concurrency` at a time."""
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

        for kind in data.KINDS:
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


def overall(scores: dict[str, Score], value: Callable[[Score], float]) -> float:
    """The mean of `value` over the kinds."""
    return sum(value(score) for score in scores.values()) / len(scores)


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
        f"| overall | {sum(s.questions for s in scores.values())} | {overall(scores, lambda s: s.right):.1%} "
        f"| {novel_total} | {novel_right:.1%} | {overall(scores, lambda s: s.blanked):.1%} "
        f"| {overall(scores, lambda s: s.swapped):.1%} | {overall(scores, lambda s: s.blind):.1%} |"
    )
    return "\n".join(lines)


def shortcomings(scores: dict[str, Score], min_overall: float, min_kind: float) -> list[str]:
    """The scores below their thresholds, as messages."""
    missed = []
    if (mean := overall(scores, lambda s: s.right)) < min_overall:
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
    parser.add_argument("--model", type=Path, default=MODEL, help="what the started server serves")
    parser.add_argument("--weights", choices=WEIGHT_KINDS, help="quantised weights in the started server")
    parser.add_argument("--questions", type=int, default=500, help="questions of each kind")
    parser.add_argument("--controls", type=int, default=200, help="of these, how many are also blanked and swapped")
    parser.add_argument("--concurrency", type=int, default=16, help="questions in flight")
    parser.add_argument("--min-overall", type=float, default=0.95)
    parser.add_argument("--min-kind", type=float, default=0.90)
    arguments = parser.parse_args()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        options = [str(arguments.model), *(["--weights", arguments.weights] if arguments.weights else [])]
        address = arguments.server or stack.enter_context(ServerProcess(options)).address
        scores = evaluate(address, arguments.questions, arguments.controls, arguments.concurrency)
    print(table(scores))
    missed = shortcomings(scores, arguments.min_overall, arguments.min_kind)
    for line in missed:
        print(line, file=sys.stderr)
    result = {kind: score.__dict__ for kind, score in scores.items()}
    print(json.dumps({"scores": result, "missed": missed, "seconds": round(time.monotonic() - started, 1)}))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
