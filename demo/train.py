"""Trains the demo model on pictures and conversations drawn as it goes, with `transformers`' own modules.

    python -m demo.train --work ~/.cache/saccade/demo --minutes 100     # resumes if --work holds a checkpoint
    python -m demo.train --work ~/.cache/saccade/demo --start demo/model            # a new run from exported weights
    python -m demo.train --work ~/.cache/saccade/demo --export --out demo/model

The loss is the cross-entropy of the answers' tokens plus two that only help to learn:

- an auxiliary linear head on the projected image tokens names which colour, shape or digit covers each patch, in which
  of the nine places the token lies and whether it holds the centre of something. The head is thrown away.
- two attention heads are taught where to look: at the image tokens that show what the next word is about.
"""

import argparse
import ctypes
import json
import logging
import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers.models.nemotron_h.modeling_nemotron_h as nemotron_h
from tokenizers import Tokenizer
from torch import nn
from transformers import NemotronH_Omni_Reasoning_V3

from demo import data, fast
from demo.architecture import export, new_model, patch_grid, pixel_values
from demo.json_questions import JSON_KINDS, json_example, with_json
from demo.tokenizer import IMAGE_ID, PAD_ID, extended, render_system, render_tools, render_user, train_tokenizer
from demo.tool_questions import TOOL_KINDS, tool_example, tool_question

log = logging.getLogger("demo.train")

IGNORE = -100
SCENES, SCENE_TURNS = 8, 4
GLYPHS = 10
PAIRS, PAIR_TURNS = 12, 3
TOOLS = 10
JSON_SHARE = 0.3
"""Share of the questions without tools that ask for JSON."""
SHEETS = 4
"""Practice sheets per step: pictures for the auxiliary loss only."""
MUON_RATE, ADAM_RATE = 0.008, 1e-3
WARMUP_STEPS = 100
SMALL_SIDE = 104
"""Most batches have pictures with sides of at most this many pixels, because they cost less; their share decreases
towards the end."""
DECAY_SHARE = 0.6
"""Share of the training time, at its end, over which the learning rate falls to zero."""
EMA_DECAY = 0.99
FOCUS_HEADS = 2
"""Heads of the last attention layer that get the focus loss."""
EVALUATION_QUESTIONS = 40
"""Questions of each kind in the evaluations during training."""


# Batches -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversation:
    """Token ids of one conversation, and for each id whether the model has to predict it."""

    ids: list[int]
    answer: list[bool]
    pictures: tuple[data.Picture, ...]
    focus: list[tuple[int, list[int], bool]]
    """(position, positions of the tokens that show what the next token is about, whether attention should be equal on
    all)."""


@dataclass(frozen=True)
class Batch:
    """Right-padded conversations `[B, L]`; `labels` are `IGNORE` except on answers; pictures in the order of their
    tokens."""

    ids: torch.Tensor
    labels: torch.Tensor
    pictures: list[data.Picture]
    focus_at: torch.Tensor
    """`[F, 2]`: row and position of each `focus` of a conversation."""
    focus_on: torch.Tensor
    """`[F, L]` bool: the tokens to attend to from there."""
    focus_alike: torch.Tensor
    """`[F]` bool: whether attention should be equal on these tokens."""


class Renderer:
    """Turns examples into token ids exactly as the chat template renders them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def render(self, example: data.Example, rng: random.Random | None = None) -> Conversation:
        """The conversation of `example`; with `rng`, some have a system prompt, some ask before they show."""
        grids = [patch_grid(p.image.height, p.image.width) for p in example.pictures]
        text = rng.choice(data.SYSTEM_PROMPTS) if rng and rng.random() < 0.15 else ""
        if example.tools:
            text = render_tools(example.tools, text)
        elif text:
            text = render_system(text)
        conversation = Conversation([], [], example.pictures, [])
        starts: list[int] = []
        for number, turn in enumerate(example.turns):
            pictures = [None] * len(example.pictures) if number == 0 else []
            late = rng is not None and rng.random() < 0.15
            text += render_user([turn.question, *pictures] if late else [*pictures, turn.question])
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
            positions = []
            for token in encoded.ids:
                positions.append(len(conversation.ids))
                count = 1
                if token == IMAGE_ID:
                    rows, columns = grids[len(starts)]
                    starts.append(len(conversation.ids))
                    count = rows * columns // 4
                conversation.ids.extend([token] * count)
            conversation.answer.extend([False] * (len(conversation.ids) - len(conversation.answer)))
            copied = [
                (start, end, _tokens_of(text, patterns, encoded.offsets, positions))
                for start, end, patterns in turn.copied
            ]
            self._answer(conversation, turn, grids, starts, copied)
            text = "\n"
        return conversation

    def _answer(
        self, conversation: Conversation, turn: data.Turn, grids: list[tuple[int, int]], starts: list[int],
        copied: list[tuple[int, int, list[int]]],
    ) -> None:  # fmt: skip
        """Appends the answer of `turn` and its focus; `copied`: parts of the answer and the tokens that they repeat."""
        places: dict[int, list[int]] = {}
        for picture, grid, start in zip(conversation.pictures, grids, starts, strict=True):
            for thing in picture.things:
                row, column = _centre(picture, thing, grid)
                cells = [row * (grid[1] // 2) + column] if turn.counts else _cells(picture, thing.box, grid)
                places[id(thing)] = [start + cell for cell in cells]
        reply = self.tokenizer.encode(f"{turn.answer}<|im_end|>", add_special_tokens=False)
        for start, end, things in turn.focus():
            tokens = sorted({place for thing in things for place in places[id(thing)]})
            if turn.counts:  # the first token stands for one thing more, so that shares tell how many there are
                tokens = [0, *tokens]
            if turn.empty_place:
                picture = conversation.pictures[0]
                box = data.place_box(turn.empty_place, picture.image)
                tokens = [starts[0] + cell for cell in _cells(picture, box, grids[0])]
            for index, (_, last) in enumerate(reply.offsets):
                if tokens and start < last <= end:
                    conversation.focus.append((len(conversation.ids) + index - 1, tokens, turn.counts))
        for start, end, tokens in copied:
            for index, (first, last) in enumerate(reply.offsets):
                decides = first <= start or any(letter.isalpha() for letter in reply.tokens[index])
                if start < last <= end and decides:
                    conversation.focus.append((len(conversation.ids) + index - 1, tokens, False))
        conversation.ids.extend(reply.ids)
        conversation.answer.extend([True] * len(reply.ids))

    def collate(self, conversations: Sequence[Conversation]) -> Batch:
        """One batch, padded on the right: a causal model needs no mask for that."""
        length = max(len(conversation.ids) for conversation in conversations)
        ids = torch.full((len(conversations), length), PAD_ID)
        labels = torch.full((len(conversations), length), IGNORE)
        at, on, alike = [], [], []
        for row, conversation in enumerate(conversations):
            ids[row, : len(conversation.ids)] = torch.tensor(conversation.ids)
            chosen = torch.tensor(conversation.answer)
            labels[row, : len(conversation.ids)][chosen] = ids[row, : len(conversation.ids)][chosen]
            for position, tokens, each in conversation.focus:
                at.append((row, position))
                alike.append(each)
                on.append(torch.zeros(length, dtype=torch.bool).index_fill_(0, torch.tensor(tokens), True))
        return Batch(
            ids=ids,
            labels=labels,
            pictures=[picture for conversation in conversations for picture in conversation.pictures],
            focus_at=torch.tensor(at).view(-1, 2),
            focus_on=torch.stack(on) if on else torch.zeros(0, length, dtype=torch.bool),
            focus_alike=torch.tensor(alike, dtype=torch.bool),
        )


def _tokens_of(
    text: str, patterns: Sequence[str], offsets: Sequence[tuple[int, int]], positions: Sequence[int]
) -> list[int]:
    """The positions of the tokens of `text` that hold group 1 of the last of `patterns`, which are searched one after
    the other; offsets are in characters."""
    begin = end = at = 0
    for pattern in patterns:
        match = re.compile(pattern).search(text, at)
        assert match, (pattern, text)
        begin, end = match.span(match.lastindex or 0)
        at = match.end()
    return [where for (first, last), where in zip(offsets, positions, strict=True) if first < end and last > begin]


def _centre(picture: data.Picture, thing: data.Thing, grid: tuple[int, int]) -> tuple[int, int]:
    """(row, column) of the image token of `picture` that holds the centre of `thing`."""
    rows, columns = grid[0] // 2, grid[1] // 2
    left, top, right, bottom = thing.box
    row = int((top + bottom) / 2 * rows / picture.image.height)
    column = int((left + right) / 2 * columns / picture.image.width)
    return min(row, rows - 1), min(column, columns - 1)


def _cells(picture: data.Picture, box: data.Box, grid: tuple[int, int]) -> list[int]:
    """The image tokens of `picture`, counted row by row, that show a part of `box`."""
    rows, columns = grid[0] // 2, grid[1] // 2
    across, down = columns / picture.image.width, rows / picture.image.height
    left, top, right, bottom = box
    first_row, first_column = max(0, int(top * down + 0.2)), max(0, int(left * across + 0.2))
    last_row = min(rows - 1, max(first_row, math.ceil(bottom * down - 0.2) - 1))
    last_column = min(columns - 1, max(first_column, math.ceil(right * across - 0.2) - 1))
    return [
        row * columns + column
        for row in range(min(first_row, rows - 1), last_row + 1)
        for column in range(min(first_column, columns - 1), last_column + 1)
    ]


class Generator:
    """Draws training batches; the pictures of one batch share a patch grid, so that the encoder runs densely."""

    def __init__(self, renderer: Renderer, seed: int, scale: float = 1.0) -> None:
        """`scale`: factor of the number of conversations in a step."""
        self.renderer, self.scale = renderer, scale
        self.rng = random.Random(seed)
        self.progress = 0.0
        """Share of the training that is done, set by the run."""
        self.sizes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for _ in range(20_000):
            size = data.any_size(self.rng)
            self.sizes[patch_grid(*size)].append(size)

    def _one_grid(self) -> data.Sizes:
        """A source of picture sizes with one common patch grid, which is drawn like `any_size`."""
        small = self.rng.random() < (0.8 if self.progress < 0.8 else 0.3)
        size = data.any_size(self.rng)
        while small and max(size) > SMALL_SIDE:
            size = data.any_size(self.rng)
        sizes = self.sizes[patch_grid(*size)] or [size]  # a grid so rare that none of the drawn sizes has it
        return lambda rng: rng.choice(sizes)

    def step(self) -> Iterator[Batch]:
        """The batches of one optimiser step: shapes twice, digits, pairs, tools and sometimes small talk."""
        rng = self.rng
        for _ in range(2):
            sizes = self._one_grid()
            yield self._batch([data.scene_example(rng, SCENE_TURNS, sizes=sizes) for _ in self._some(SCENES)])
        sizes = self._one_grid()
        yield self._batch([data.glyph_example(rng, sizes=sizes) for _ in self._some(GLYPHS)])
        sizes = self._one_grid()
        yield self._batch([data.pair_example(rng, PAIR_TURNS, sizes=sizes) for _ in self._some(PAIRS)])
        sizes = self._one_grid()
        yield self._batch([tool_example(rng, sizes=sizes) for _ in self._some(TOOLS)])
        if rng.random() < 0.05:
            turns = [data.Turn("chat", *rng.choice(data.CHAT)) for _ in range(8)]
            yield self._batch([data.Example((), (turn,)) for turn in turns])

    def _some(self, number: int) -> range:
        return range(max(1, round(number * self.scale)))

    def sheets(self) -> list[data.Picture]:
        """The practice sheets of one optimiser step."""
        sizes = self._one_grid()
        return [data.practice_sheet(self.rng, sizes(self.rng)) for _ in range(SHEETS)]

    def _batch(self, examples: Sequence[data.Example]) -> Batch:
        mixed = [example if example.tools else with_json(self.rng, example, JSON_SHARE) for example in examples]
        return self.renderer.collate([self.renderer.render(example, self.rng) for example in mixed])


# Model ---------------------------------------------------------------------------------------------------------------


class AuxiliaryHead(nn.Module):
    """Predicts, for each image token, the objects on its four patches, its place, and whether the centre of an object
    is on it (which makes objects countable, whatever their size). Used only in training."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.colours, self.glyphs = len(data.COLOURS) + 1, len(data.GLYPHS) + 1
        self.patches = nn.Linear(hidden, 4 * (self.colours + self.glyphs))
        self.place = nn.Linear(hidden, len(data.PLACES))
        self.centre = nn.Linear(hidden, 1)

    def forward(self, features: torch.Tensor, pictures: Sequence[data.Picture], grid: tuple[int, int]) -> torch.Tensor:
        """Mean loss over `features` `[B, tokens, hidden]` of `pictures`, all of patch grid `grid`."""
        rows, columns = grid
        labels = torch.stack([_patch_labels(picture, grid) for picture in pictures])  # [B, rows, columns, 2]
        labels = labels.unflatten(2, (columns // 2, 2)).unflatten(1, (rows // 2, 2)).transpose(2, 3).reshape(-1, 2)
        logits = self.patches(features).float().reshape(len(labels), -1)
        colour = F.cross_entropy(logits[:, : self.colours], labels[:, 0], reduction="none")
        glyph = F.cross_entropy(logits[:, self.colours :], labels[:, 1], reduction="none", ignore_index=IGNORE)
        covered = labels[:, 1] > 0
        what = (colour + glyph)[covered].mean() + 0.5 * (colour + glyph)[~covered].mean()
        third = [torch.arange(side // 2) * 3 // (side // 2) for side in grid]
        places = (third[0][:, None] * 3 + third[1][None, :]).flatten().repeat(len(pictures))
        where = F.cross_entropy(self.place(features).float().flatten(0, 1), places)
        centres = torch.stack([_centre_labels(picture, grid) for picture in pictures]).flatten()
        centred = F.binary_cross_entropy_with_logits(self.centre(features).float().flatten(), centres, reduction="none")
        return what + 0.3 * where + 2 * centred[centres > 0].mean() + 2 * centred[centres == 0].mean()


def _patch_labels(picture: data.Picture, grid: tuple[int, int]) -> torch.Tensor:
    """`[rows, columns, 2]`: colour and glyph of the thing on each patch, counted from 1; 0 where there is none."""
    rows, columns = grid
    labels = torch.zeros(rows, columns, 2, dtype=torch.long)
    across, down = columns / picture.image.width, rows / picture.image.height
    for thing in picture.things:
        left, top, right, bottom = thing.box
        top, bottom = round(top * down), max(round(bottom * down), round(top * down) + 1)
        left, right = round(left * across), max(round(right * across), round(left * across) + 1)
        cells = labels[max(0, top) : bottom, max(0, left) : right]
        cells[..., 0] = list(data.COLOURS).index(thing.colour) + 1 if thing.colour else 0
        cells[..., 1] = data.GLYPHS.index(thing.glyph) + 1
    return labels


def _centre_labels(picture: data.Picture, grid: tuple[int, int]) -> torch.Tensor:
    """`[rows / 2, columns / 2]`: 1.0 for the image tokens that hold the centre of a thing, else 0.0."""
    labels = torch.zeros(grid[0] // 2, grid[1] // 2)
    for thing in picture.things:
        labels[_centre(picture, thing, grid)] = 1.0
    return labels


class Trainee(nn.Module):
    """The model with its auxiliary head, and the two losses of a batch."""

    def __init__(self, seed: int, decoder_only: bool = False) -> None:
        """`decoder_only`: image features do not change, and there is no auxiliary loss."""
        super().__init__()
        self.model = new_model(seed)
        self.decoder_only = decoder_only
        if decoder_only:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.startswith("language_model."))
        text_config = self.model.config.get_text_config()
        self.auxiliary = AuxiliaryHead(text_config.hidden_size)
        layers = text_config.layers_block_type
        last_attention = max(index for index, kind in enumerate(layers) if kind == "full_attention")
        self.attention: torch.Tensor | None = None
        """`[B, heads, L, L]` of the last attention layer in the last forward pass, if it was kept."""
        self.model.language_model.model.layers[last_attention].mixer.register_forward_hook(self._keep_attention)

    def _keep_attention(self, _: nn.Module, __: object, output: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        self.attention = output[1]

    def focus_loss(self, batch: Batch) -> torch.Tensor:
        """Loss of the first `FOCUS_HEADS` heads: the mean -log of their attention to what each answer is about. For
        counts, of the geometric mean of the attention to the objects, which is largest if all get the same."""
        assert self.attention is not None, "only eager attention returns its weights"
        row, position = batch.focus_at.unbind(1)
        shares_FHL = self.attention[row, :FOCUS_HEADS, position].float()
        number = batch.focus_on.sum(-1)[:, None]
        together = (shares_FHL * batch.focus_on[:, None]).sum(-1).clamp(min=1e-5).log()
        each = (shares_FHL.clamp(min=1e-5).log() * batch.focus_on[:, None]).sum(-1) / number + number.log()
        return -torch.where(batch.focus_alike[:, None], each, together).mean()

    def image_features(self, pictures: Sequence[data.Picture]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Each picture's `[tokens, hidden]` features, and the mean auxiliary loss."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, picture in enumerate(pictures):
            groups[patch_grid(picture.image.height, picture.image.width)].append(index)
        features: list[torch.Tensor] = [torch.empty(0)] * len(pictures)
        losses = []
        for grid, indices in groups.items():
            group = [pictures[index] for index in indices]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.decoder_only):
                tower = self.model.vision_model(pixel_values([picture.image for picture in group], grid))
                projected = self.model.project_vision_features(tower.features, *grid)
            losses.append(torch.zeros(()) if self.decoder_only else self.auxiliary(projected, group, grid))
            for index, rows in zip(indices, projected, strict=True):
                features[index] = rows
        return features, torch.stack(losses).mean()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits `[answer tokens, vocabulary]` fp32, their labels, auxiliary loss)."""
        decoder = self.model.language_model
        embedded = decoder.get_input_embeddings()(batch.ids)
        auxiliary = torch.zeros(())
        if batch.pictures:
            features, auxiliary = self.image_features(batch.pictures)
            mask = (batch.ids == IMAGE_ID)[..., None].expand_as(embedded)
            embedded = embedded.masked_scatter(mask, torch.cat(features).to(embedded.dtype))
        hidden = decoder.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        labels = batch.labels[:, 1:]
        chosen = labels != IGNORE
        return decoder.lm_head(hidden[:, :-1][chosen]).float(), labels[chosen], auxiliary


class Balance:
    """Balances the use of experts without a loss: the routing bias of an expert rises while it is used too little."""

    RATE = 1e-3

    def __init__(self, model: nn.Module) -> None:
        self.load: dict[nn.Module, torch.Tensor] = {}
        for module in model.modules():
            if isinstance(module, nemotron_h.NemotronHTopkRouter):
                self.load[module] = torch.zeros(module.num_experts)
                module.register_forward_hook(self._count)

    def _count(self, router: nn.Module, _: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        if router.training:
            self.load[router] += torch.bincount(output[2].flatten(), minlength=len(self.load[router]))

    def step(self) -> None:
        for router, load in self.load.items():
            router.get_buffer("e_score_correction_bias").add_(self.RATE * (load.mean() - load).sign())
            load.zero_()


# Optimiser -----------------------------------------------------------------------------------------------------------


def orthogonalise(update: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices to `[..., m, n]`, by five quintic Newton-Schulz steps in bf16 (Muon)."""
    x = update.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix-shaped updates are orthogonalised. Parameters are `[..., m, n]`."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.03) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(momentum, group["momentum"]))
                scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)


def optimisers(trainee: Trainee) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices; Adam for embeddings, head, router, patch projection, norms and vectors."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    by_adam = ("embedding", "lm_head", "patch_projection", "gate", "conv1d", "auxiliary", "cls_register_token")
    for name, parameter in trainee.named_parameters():
        if not parameter.requires_grad or "video_patch_projection" in name:
            continue
        (others if parameter.ndim < 2 or any(part in name for part in by_adam) else matrices).append(parameter)
    return [Muon(matrices, MUON_RATE), torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.97), weight_decay=0.0)]


# Training ------------------------------------------------------------------------------------------------------------


def _tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that `path` holds, trained and written there if there is none: a resumed run keeps its own."""
    if not path.exists():
        train_tokenizer(data.sentences()).save(str(path))
    return Tokenizer.from_file(str(path))


class Run:
    """A training run: everything in a checkpoint."""

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
        """The vectors of each token that `old` lacks become the mean of those that `old` writes its text with."""
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


EXAMPLES: dict[str, Callable[[int, str], data.Example]] = {
    **dict.fromkeys(data.KINDS, data.question_example),
    **dict.fromkeys(JSON_KINDS, json_example),
    **dict.fromkeys(TOOL_KINDS, tool_question),
}
"""What makes the held-out questions of each kind."""


@torch.no_grad()
def evaluate(trainee: Trainee, renderer: Renderer, questions: int) -> dict[str, float]:
    """Exact match by kind on the first `questions` held-out questions of each; the same as greedy decoding scores."""
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
    parser.add_argument("--minutes", type=float, default=100, help="training time in all, resumed time included")
    parser.add_argument("--report-minutes", type=float, default=5, help="minutes between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("demo/model"), help="where to write the model in the end")
    parser.add_argument("--start", type=Path, help="exported model to begin from where --work has no checkpoint")
    parser.add_argument("--decoder-only", action="store_true", help="train no part of the vision tower and projector")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the conversations in a step")
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
