"""Trains the demo model on pictures and conversations that are generated during training, with `transformers`' modules.

    python -m demo.train --work ~/.cache/saccade/demo --minutes 100     # resumes if --work holds a checkpoint
    python -m demo.train --work ~/.cache/saccade/demo --start demo/model            # a new run from exported weights
    python -m demo.train --work ~/.cache/saccade/demo --export --out demo/model

The loss is the cross-entropy of the answers' tokens plus two losses that only help training:

- an auxiliary linear head on the projected image tokens predicts which colour, shape or digit covers each patch, in
  which of the nine places the token lies, and whether it contains the centre of an object. It is not exported.
- two attention heads are trained to attend to the image tokens that show what the next word is about.
"""

import argparse
import ctypes
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from transformers import NemotronH_Omni_Reasoning_V3

from demo import data, fast, world
from demo.architecture import export
from demo.batches import Generator
from demo.conversations import Renderer
from demo.json_questions import JSON_KINDS, json_example
from demo.optimiser import ADAM_RATE, MUON_RATE, optimisers
from demo.tokenizer import extended, train_tokenizer
from demo.tool_questions import TOOL_KINDS, tool_question
from demo.trainee import Balance, Trainee

log = logging.getLogger("demo.train")

WARMUP_STEPS = 100
DECAY_SHARE = 0.6
"""Share of the training time, at its end, over which the learning rate falls to zero."""
EMA_DECAY = 0.99
EVALUATION_QUESTIONS = 40
"""Questions of each kind in the evaluations during training."""


def _tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in the file `path`. If there is none, it is trained and written there, so that a resumed run keeps
    its tokenizer."""
    if not path.exists():
        train_tokenizer(data.sentences()).save(str(path))
    return Tokenizer.from_file(str(path))


class Run:
    """A training run, which can be resumed from its checkpoint."""

    def __init__(
        self, work: Path, seed: int, start: Path | None = None, decoder_only: bool = False, rate: float = 1.0,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.path = work / "checkpoint.pt"
        self.rate = rate
        if start is not None and not (work / "tokenizer.json").exists():
            extended(Tokenizer.from_file(str(start / "tokenizer.json"))).save(str(work / "tokenizer.json"))
        self.tokenizer = _tokenizer(work / "tokenizer.json")
        self.renderer = Renderer(self.tokenizer)
        self.trainee = Trainee(seed, decoder_only)
        self.average = Trainee(seed).requires_grad_(False).eval()
        self.optimisers = optimisers(self.trainee)
        self.balance = Balance(self.trainee)
        self.steps, self.seconds, self.sequences = 0, 0.0, 0
        if self.path.exists():
            self._restore()
        elif start is not None:
            weights = NemotronH_Omni_Reasoning_V3.from_pretrained(start, dtype=torch.float32).state_dict()
            self.trainee.model.load_state_dict(weights)
            self._initialise_new_tokens(Tokenizer.from_file(str(start / "tokenizer.json")))
            self.average.load_state_dict(self.trainee.state_dict())
        self.generator = Generator(self.renderer, seed + self.steps, scale)

    def _restore(self) -> None:
        state = torch.load(self.path, weights_only=True)
        self.trainee.load_state_dict(state["trainee"])
        self.average.load_state_dict(state["average"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.steps, self.seconds, self.sequences = state["steps"], state["seconds"], state["sequences"]
        log.info("resumed at step %d after %.1f minutes", self.steps, self.seconds / 60)

    @torch.no_grad()
    def _initialise_new_tokens(self, old: Tokenizer) -> None:
        """Sets the vectors of each token that `old` lacks to the mean of those of the tokens into which `old` divides
        its text."""
        decoder = self.trainee.model.language_model
        for token in range(old.get_vocab_size(), self.tokenizer.get_vocab_size()):
            parts = old.encode(self.tokenizer.decode([token]), add_special_tokens=False).ids
            for table in (decoder.get_input_embeddings().weight, decoder.lm_head.weight):
                table[token] = table[parts].mean(0)

    def save(self) -> None:
        """Replaces the checkpoint, atomically."""
        state = {
            "trainee": self.trainee.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "steps": self.steps,
            "seconds": self.seconds,
            "sequences": self.sequences,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

    def step(self, progress: float) -> tuple[float, ...]:
        """One optimiser step at `progress` (0..1) of the training; returns the answer, auxiliary and focus losses."""
        factor = min((self.steps + 1) / WARMUP_STEPS, (1 - progress) / DECAY_SHARE, 1.0)
        for optimiser, rate in zip(self.optimisers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = self.rate * rate * max(factor, 0.0)
        self.generator.progress = progress
        weight = 0.5 if progress < 0.5 else 0.25
        answers, auxiliaries, focuses = [], [], []
        batches = list(self.generator.step())
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                logits, labels, auxiliary = self.trainee(batch)
            answer = F.cross_entropy(logits, labels)
            loss = answer + weight * auxiliary
            if len(batch.focus_at):
                focus = self.trainee.focus_loss(batch)
                loss = loss + 0.5 * focus
                focuses.append(focus.item())
            (loss / len(batches)).backward()
            answers.append(answer.item())
            auxiliaries.append(auxiliary.item())
            self.sequences += len(batch.ids)
        if not self.trainee.decoder_only:
            with torch.autocast("cpu", torch.bfloat16):
                _, auxiliary = self.trainee.image_features(self.generator.sheets())
            (weight * auxiliary).backward()
        nn.utils.clip_grad_norm_(self.trainee.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.balance.step()
        self.steps += 1
        decay = min(EMA_DECAY, self.steps / (self.steps + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.trainee.parameters()), 1 - decay)
            for averaged, buffer in zip(self.average.buffers(), self.trainee.buffers(), strict=True):
                averaged.copy_(buffer)
        return tuple(sum(losses) / len(losses) for losses in (answers, auxiliaries, focuses))

    def evaluate(self, questions: int) -> dict[str, float]:
        """Share of held-out questions of each kind whose every answer token is the likeliest (teacher-forced)."""
        return evaluate(self.average, self.renderer, questions)


EXAMPLES: dict[str, Callable[[int, str], world.Example]] = {
    **dict.fromkeys(world.KINDS, data.question_example),
    **dict.fromkeys(JSON_KINDS, json_example),
    **dict.fromkeys(TOOL_KINDS, tool_question),
}
"""Kind of question -> the function that makes a held-out example of it from a seed."""


@torch.no_grad()
def evaluate(trainee: Trainee, renderer: Renderer, questions: int) -> dict[str, float]:
    """Exact match by kind on the first `questions` held-out questions of each kind. Teacher forcing gives the same
    score as greedy decoding."""
    result = {}
    for kind, example in EXAMPLES.items():
        right = 0
        for start in range(0, questions, 20):
            examples = [example(seed, kind) for seed in range(start, min(start + 20, questions))]
            sequences = [renderer.render(example) for example in examples]
            logits, labels, _ = trainee(renderer.collate(sequences))
            hits = (logits.argmax(-1) == labels).split([sum(sequence.answer) for sequence in sequences])
            right += sum(bool(hit.all()) for hit in hits)
        result[kind] = right / questions
    return result


def train(run: Run, minutes: float, report_minutes: float) -> None:
    """Trains until `minutes` are spent, reporting and checkpointing every `report_minutes`.

    The minutes are processor time over threads, so that a machine that is busy or asleep does not shorten the training.
    """
    fast.install()
    run.trainee.model.set_attn_implementation("eager")  # its backward is twice as fast on a CPU
    losses: list[tuple[float, ...]] = []
    next_report = run.seconds + 60 * report_minutes
    next_line = run.steps + 50
    while run.seconds < 60 * minutes:
        started = time.process_time()
        losses.append(run.step(run.seconds / (60 * minutes)))
        run.seconds += (time.process_time() - started) / torch.get_num_threads()
        if run.steps >= next_line:
            means = [sum(column) / len(losses) for column in zip(*losses, strict=True)]
            rate = run.sequences / run.seconds
            log.info(
                "step %d  %.1f min  %.1f sequences/s  answer %.3f  auxiliary %.3f  focus %.3f",
                run.steps, run.seconds / 60, rate, *means,
            )  # fmt: skip
            losses.clear()
            next_line += 50
        if run.seconds >= next_report:
            run.save()
            _log_accuracy(run, EVALUATION_QUESTIONS)
            next_report += 60 * report_minutes
    run.save()
    _log_accuracy(run, 500)


def _log_accuracy(run: Run, questions: int) -> None:
    accuracy = run.evaluate(questions)
    mean = sum(accuracy.values()) / len(accuracy)
    log.info("held out %.3f  %s", mean, json.dumps({kind: round(share, 3) for kind, share in accuracy.items()}))


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it: fresh pages cost a third of the time on some machines."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8
        for option, value in ((trim_threshold, 2**31 - 1), (mmap_threshold, 32 * 2**20), (arena_max, 1)):
            libc.mallopt(option, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/saccade/demo"), help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=100, help="total training time, including resumed runs")
    parser.add_argument("--report-minutes", type=float, default=5, help="minutes between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("demo/model"), help="where to write the model at the end")
    parser.add_argument("--start", type=Path, help="exported model to start from if --work has no checkpoint")
    parser.add_argument("--decoder-only", action="store_true", help="do not train the vision tower and projector")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of conversations in a step")
    parser.add_argument("--export", action="store_true", help="only write --out from the newest checkpoint")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    work = arguments.work.expanduser()
    work.mkdir(parents=True, exist_ok=True)
    run = Run(work, arguments.seed, arguments.start, arguments.decoder_only, arguments.rate, arguments.scale)
    if not arguments.export:
        train(run, arguments.minutes, arguments.report_minutes)
    export(run.average.model, run.tokenizer, arguments.out)
    log.info("wrote %s", arguments.out)


if __name__ == "__main__":
    main()
