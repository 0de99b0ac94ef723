"""Random inputs of the gated delta rule, and their results by the definition, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.chunk_scan import plan_chunks
from kernels.gated_delta import delta_gates, gated_delta_scan


class Inputs:
    """Random tokens with `key_heads` keys of size `key` and `heads` values of size `value`."""

    beta_scale = 1.0

    def __init__(self, tokens: int, key_heads: int = 2, heads: int = 4, key: int = 8, value: int = 6, seed: int = 0):
        self.draw = torch.Generator().manual_seed(seed)
        self.heads, self.key, self.value = heads, key, value
        self.q, self.k = self.randn(tokens, key_heads, key), self.randn(tokens, key_heads, key)
        self.v, self.a, self.b = self.randn(tokens, heads, value), self.randn(tokens, heads), self.randn(tokens, heads)
        self.A, self.bias = -self.randn(heads).exp(), self.randn(heads)

    def to(self, device: torch.device) -> Inputs:
        """The same inputs on another device."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw)

    def pool(self, slots: int = 9) -> Tensor:
        return self.randn(slots, self.heads, self.key, self.value)

    def recurrence(self, part: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and the final state by the definition, float64."""
        q, k, v, a, b = (x[part].double() for x in (self.q, self.k, self.v, self.a, self.b))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        each = self.heads // q.shape[1]
        q, k = (x.repeat_interleave(each, 1) for x in (q * self.key**-0.5, k))
        decay = (self.A.double() * (1 + (a + self.bias).exp()).log()).exp()
        outs, s = [], state.double()
        for t in range(v.shape[0]):
            s = s * decay[t, :, None, None]
            change = self.beta_scale * b[t, :, None].sigmoid() * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + k[t, :, :, None] * change[:, None]
            outs.append(torch.einsum("hkv,hk->hv", s, q[t]))
        return torch.stack(outs), s

    def scan(self, pool: Tensor, slots: list[int], lengths: list[int], computed: list[int], chunk: int) -> Tensor:
        initial = torch.tensor([old > 0 for old in computed])
        given = (self.q, self.k, self.v, *delta_gates(self.b, self.a, self.A, self.bias, self.beta_scale))
        return gated_delta_scan(pool, torch.tensor(slots), initial, *given, plan_chunks(lengths, computed, chunk))
