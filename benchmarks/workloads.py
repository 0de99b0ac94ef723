"""The workloads of comparisons: checkpoints, and requests that start together."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import lfm_model, models, qwen_model, sized_models
from benchmarks.floors import Floor, Machine
from benchmarks.noise import noise_png

PROMPT = 128
"""Tokens of a prompt, in workloads that do not measure prompts."""
TOGETHER = 32768
"""Maximum total tokens of a workload of prompts whose length is given by `--prompt`; larger workloads are skipped,
except those of one prompt."""
TEXT_BEHIND = 32
"""Tokens after an image."""
MIXED = ((224, 224), (512, 512), (320, 240), (256, 384), (448, 448), (224, 320), (384, 512), (336, 336))


@dataclass(frozen=True)
class Subject:
    """The checkpoints of a family, and its requests."""

    text: Callable[[Path], Path]
    """Writes the checkpoint for text prompts unless it exists: folder -> its path."""
    omni: Callable[[Path], Path]
    """The same for prompts with images."""
    words: int
    """Ids from 3 to below this one are text."""
    image: tuple[int, ...]
    """Token ids that stand for an image in a prompt."""
    prompts: tuple[tuple[int, int], ...]
    """(number of requests, tokens of each) of the prompt workloads."""
    single: tuple[int, int]
    """(width, height) of the image of the single-image workload."""
    several: tuple[tuple[int, int], ...]
    """(width, height) of the images of the workload with several images."""


SUBJECTS = {
    "nemotron_h": Subject(
        models.text_model, models.omni_model, models.VOCAB - 1, (models.IMAGE_TOKEN,), ((1, 128), (32, 128)),
        (512, 384), MIXED,
    ),
    "qwen3_5": Subject(
        qwen_model.qwen_model, qwen_model.qwen_model, qwen_model.WORDS, qwen_model.IMAGE,
        ((1, 128), (8, 128), (1, 1024), (8, 1024)), (768, 768),
        ((256, 256), (512, 512), (320, 256), (256, 384), (448, 448), (256, 320), (384, 512), (352, 352)),
    ),
    "lfm2_vl": Subject(
        lfm_model.lfm_model, lfm_model.lfm_model, lfm_model.WORDS, lfm_model.IMAGE,
        ((1, 128), (8, 128), (1, 1024), (8, 1024)), (1024, 768), MIXED,  # the single image has six tiles
    ),
}  # fmt: skip


def sized(family: str, shape: str) -> Subject:
    """A family's requests on its model of this size (`sized_models.SHAPES`). Raises ValueError if it has none."""
    if shape == sized_models.SMALLEST:
        return SUBJECTS[family]
    if family != "nemotron_h":
        raise ValueError(f"--shape {shape} needs --family nemotron_h")
    return replace(SUBJECTS[family], text=partial(sized_models.sized_model, shape))


def prompt_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """`1x128,32x128` -> `Subject.prompts`."""
    return tuple((int(count), int(tokens)) for count, tokens in (each.split("x") for each in text.split(",")))


@dataclass(frozen=True)
class Workload:
    """Requests that start together, with `new_tokens` output tokens each."""

    name: str
    prompts: list[list[int]]
    images: list[list[Path]]
    new_tokens: int
    sizes: tuple[tuple[int, int], ...] = ()
    """Width and height of the images."""

    @property
    def output_tokens(self) -> int:
        return len(self.prompts) * self.new_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(map(len, self.prompts)) + self.new_tokens

    def floor(self, floor: Floor, machine: Machine) -> float | None:
        """Lower bound in seconds; None for images if the tower's work is not known."""
        tokens, requests, tower = self.prompt_tokens, len(self.prompts), floor.tower
        seconds = (self.new_tokens - 1) * floor.step(machine, requests)
        if self.sizes:
            if tower is None:
                return None
            tokens += tower.tokens(self.sizes) - len(self.sizes)
            seconds += tower.seconds(machine, self.sizes)
        return seconds + floor.prompt(machine, tokens, requests)


def text_workload(subject: Subject, name: str, requests: int, tokens: int, new_tokens: int) -> Workload:
    rng = random.Random(requests)
    prompts = [[rng.randrange(3, subject.words) for _ in range(tokens)] for _ in range(requests)]
    return Workload(name, prompts, [[] for _ in prompts], new_tokens)


def image_workload(
    subject: Subject, name: str, folder: Path, sizes: Sequence[tuple[int, int]], new_tokens: int
) -> Workload:
    rng = random.Random(len(sizes))
    prompts, images = [], []
    for i, (width, height) in enumerate(sizes):
        file = folder / f"{name.replace(' ', '-')}-{i}.png"
        file.write_bytes(noise_png(rng, width, height))
        prompts.append([*subject.image, *(rng.randrange(3, subject.words) for _ in range(TEXT_BEHIND))])
        images.append([file])
    return Workload(name, prompts, images, new_tokens, tuple(sizes))


def workloads(
    subject: Subject,
    folder: Path,
    only: set[str],
    concurrent: Sequence[int],
    new_tokens: int,
    prompt: int | None = None,
) -> tuple[list[Workload], list[Workload]]:
    """(text workloads, image workloads). `prompt`: tokens of each text prompt, instead of the subject's."""
    text, omni = [], []
    prompts = subject.prompts
    if prompt is not None:
        prompts = tuple((count, prompt) for count, _ in prompts if count == 1 or count * prompt <= TOGETHER)
        prompts = tuple(dict.fromkeys(prompts))
    if "decode" in only:
        text += [
            text_workload(subject, f"decode {c}", c, prompt or PROMPT, 2 * new_tokens if c == 1 else new_tokens)
            for c in concurrent
        ]
    if "prefill" in only:
        text += [text_workload(subject, f"prefill {n}x{size}", n, size, 1) for n, size in prompts]
    if "omni" in only:
        some = new_tokens // 2 + 1
        omni.append(image_workload(subject, "image 1", folder, [subject.single], some))
        omni.append(image_workload(subject, "images 8", folder, subject.several, some))
    return text, omni
