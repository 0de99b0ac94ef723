"""Random inputs of a Mamba-2 layer, and their results by the definitions, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

NO_LIMIT = (0.0, float("inf"))


@dataclass
class Inputs:
    """Random inputs of `tokens` tokens, with decays from almost none to almost complete."""

    tokens: int
    heads: int = 6
    width: int = 5
    groups: int = 2
    state: int = 8

    def __post_init__(self) -> None:
        self.x = torch.randn(self.tokens, self.heads, self.width)
        self.dt = torch.randn(self.tokens, self.heads) * 2
        self.bias = torch.randn(self.heads)
        self.A = -torch.exp(torch.randn(self.heads) * 2)
        self.b = torch.randn(self.tokens, self.groups, self.state)
        self.c = torch.randn(self.tokens, self.groups, self.state)
        self.D = torch.randn(self.heads)

    def to(self, device: torch.device) -> Inputs:
        """The same inputs on another device."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def pool(self, slots: int = 9) -> Tensor:
        """A pool whose slots are not contiguous, as in the arena."""
        size = self.heads * self.width * self.state
        flat = torch.randn(slots, size + 64, device=self.x.device)
        return flat[:, :size].unflatten(1, (self.heads, self.width, self.state))


def recurrence(i: Inputs, part: slice, h: Tensor, limit: tuple[float, float] = NO_LIMIT) -> tuple[Tensor, Tensor]:
    """(outputs, final state) of one row by the definition, float64."""
    h, per, outs = h.double().clone(), i.heads // i.groups, []
    dt = torch.log1p(torch.exp(i.dt[part].double() + i.bias.double())).clamp(*limit)
    for t in range(dt.shape[0]):
        x, b, c = i.x[part][t].double(), i.b[part][t].double(), i.c[part][t].double()
        y = torch.empty(i.heads, i.width, dtype=torch.float64, device=h.device)
        for head in range(i.heads):
            decay = torch.exp(dt[t, head] * i.A[head].double())
            h[head] = h[head] * decay + dt[t, head] * torch.outer(x[head], b[head // per])
            y[head] = h[head] @ c[head // per] + i.D[head].double() * x[head]
        outs.append(y)
    return torch.stack(outs), h


def by_definition(inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One row: silu(bias + sum_j w[j] x[t - W + 1 + j]), earlier inputs from the window."""
    taps, history = weight.shape[0], torch.cat((window, inputs)).double()
    rows = []
    for t in range(inputs.shape[0]):
        total = (
            torch.zeros(inputs.shape[1], dtype=torch.float64, device=inputs.device) if bias is None else bias.double()
        )
        for j in range(taps):
            total = total + weight[j].double() * history[t + j]
        rows.append(F.silu(total))
    return torch.stack(rows)
