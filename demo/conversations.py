"""Renders examples of the demo model's world as token ids with labels, and collates them into batches."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from demo import questions, world
from demo.architecture import patch_grid
from demo.tokenizer import IMAGE_ID, PAD_ID, render_system, render_tools, render_user

IGNORE = -100


@dataclass(frozen=True)
class Conversation:
    """Token ids of one conversation, and for each id whether the model has to predict it."""

    ids: list[int]
    answer: list[bool]
    pictures: tuple[world.Picture, ...]
    focus: list[tuple[int, list[int], bool]]
    """(position, positions of the tokens that show what the next token is about, whether attention should be equal on
    all)."""


@dataclass(frozen=True)
class Batch:
    """Right-padded conversations `[B, L]`; `labels` are `IGNORE` except on answers; pictures in the order of their
    tokens."""

    ids: torch.Tensor
    labels: torch.Tensor
    pictures: list[world.Picture]
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

    def render(self, example: world.Example, rng: random.Random | None = None) -> Conversation:
        """The conversation of `example`. With `rng`, some get a system prompt, and in some a question comes before its
        pictures."""
        grids = [patch_grid(p.image.height, p.image.width) for p in example.pictures]
        text = rng.choice(questions.SYSTEM_PROMPTS) if rng and rng.random() < 0.15 else ""
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
        self, conversation: Conversation, turn: world.Turn, grids: list[tuple[int, int]], starts: list[int],
        copied: list[tuple[int, int, list[int]]],
    ) -> None:  # fmt: skip
        """Appends the answer of `turn` and its focus. `copied`: (start, end) of parts of the answer, and the positions
        of the tokens that they repeat."""
        places: dict[int, list[int]] = {}
        for picture, grid, start in zip(conversation.pictures, grids, starts, strict=True):
            for thing in picture.things:
                row, column = centre(picture, thing, grid)
                cells = [row * (grid[1] // 2) + column] if turn.counts else _cells(picture, thing.box, grid)
                places[id(thing)] = [start + cell for cell in cells]
        reply = self.tokenizer.encode(f"{turn.answer}<|im_end|>", add_special_tokens=False)
        for start, end, things in turn.focus():
            tokens = sorted({place for thing in things for place in places[id(thing)]})
            if turn.counts:  # the first token counts as one more thing, so that shares show how many things there are
                tokens = [0, *tokens]
            if turn.empty_place:
                picture = conversation.pictures[0]
                box = world.place_box(turn.empty_place, picture.image)
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


def centre(picture: world.Picture, thing: world.Thing, grid: tuple[int, int]) -> tuple[int, int]:
    """(row, column) of the image token of `picture` that holds the centre of `thing`."""
    rows, columns = grid[0] // 2, grid[1] // 2
    left, top, right, bottom = thing.box
    row = int((top + bottom) / 2 * rows / picture.image.height)
    column = int((left + right) / 2 * columns / picture.image.width)
    return min(row, rows - 1), min(column, columns - 1)


def _cells(picture: world.Picture, box: world.Box, grid: tuple[int, int]) -> list[int]:
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
