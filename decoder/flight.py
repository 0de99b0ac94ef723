"""A step between its launch and the reading of its results.

On an asynchronous device the next step is launched before this one is read. For a request that draws in both steps, the
host then knows everything except the id of its last token: how many tokens it has, and where its state and keys go. The
id is taken from this step's tokens on the device. The device also checks whether it is an end token: if so, the
request's row in the next step is padding, like unused rows of a graph, and its state stays as it was at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoder.sampler import Drawn
from decoder.sampling import Choice
from decoder.sequence import UNREAD, Sequence
from decoder.step import Row, Step
from kernels.sample import accept_drafts
from kernels.transfer import Download, upload


@dataclass
class Flight:
    """A launched step. Its results are on the host, or being copied there."""

    step: Step
    started: float
    choices: list[Choice] = field(default_factory=list)
    """The results of a step that was read as soon as it was launched."""
    tokens_L: Tensor | None = None
    """The tokens on the device, in the order of `choices`."""
    ended_L: Tensor | None = None
    """`[L]` bool: which of these tokens end their sequence; `None`: none can."""
    _drawn: Drawn | None = None
    _accepted: bool = False
    _download: Download | None = None

    def send(self, device: str, drawn: Drawn | None, ended_L: Tensor | None, accepted_V: Tensor | None) -> None:
        """Starts copying the tokens, and the number of accepted drafts of each verified row, to the host."""
        self._drawn, self.ended_L, self._accepted = drawn, ended_L, accepted_V is not None
        self.tokens_L = None if drawn is None else drawn.tokens_L
        given = (() if drawn is None else drawn.tensors, () if accepted_V is None else (accepted_V,))
        self._download = Download(device, [tensor for of in given for tensor in of])

    def wait(self) -> None:
        """Waits until the device has executed the step."""
        if self._download is not None:
            self._download.wait()

    def read(self) -> tuple[list[Choice], list[int]]:
        """The drawn tokens, and the number of accepted drafts of each verified row. Waits for the device."""
        tensors = () if self._download is None else self._download.wait()
        if self._drawn is None:
            return self.choices, []
        accepted = tensors[-1].tolist() if self._accepted else []
        return self._drawn.choices(*tensors[: len(self._drawn.tensors)]), accepted


def expect(owners: Iterable[Sequence]) -> None:
    """Adds one unread token to each sequence, in the order of a step's tokens."""
    for place, owner in enumerate(owners):
        owner.tokens.append(UNREAD)
        owner.unread += 1
        owner.place = place


def accepted_drafts(tokens_L: Tensor, rows: Iterable[Row]) -> Tensor:
    """`[V]` int64: number of accepted drafts of each verified row, given the tokens that all sampling rows of the step
    have drawn. Computed on the device."""
    verified: list[tuple[int, Row]] = []
    first = 0
    for row in rows:
        if row.samples:
            if row.verified:
                verified.append((first, row))
            first += row.drafts + 1
    width = max(row.drafts for _, row in verified)
    if width == 0:
        return tokens_L.new_zeros(len(verified))
    table = [
        [
            *(first + min(place, row.drafts) for place in range(width + 1)),
            *(row.sequence.draft.tokens[place] if place < row.drafts else UNREAD for place in range(width)),
            row.acceptable,
        ]
        for first, row in verified
    ]
    places_VT, drafts_VK, counts_V1 = upload(table, torch.int64, tokens_L.device).split([width + 1, width, 1], 1)
    tokens_VT = tokens_L.index_select(0, places_VT.reshape(-1)).view(places_VT.shape)
    return accept_drafts(tokens_VT, drafts_VK, counts_V1[:, 0].contiguous())
