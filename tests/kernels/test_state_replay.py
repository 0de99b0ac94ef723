"""Steps of several tokens, with a state per token or from a ring of inputs; both equal the plain recurrence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.causal_conv1d import causal_conv1d_tokens, causal_conv1d_update
from kernels.selective_state_update import selective_state_update, selective_state_update_tokens
from kernels.state_replay import MambaTerms, replay_advance, replay_tokens

HEADS, WIDTH, GROUPS, STATE, TAPS, RING = 4, 3, 2, 5, 4, 16
CHANNELS = HEADS * WIDTH + 2 * GROUPS * STATE
DTYPES = [torch.float32, torch.bfloat16]
"""Of states. Those in bfloat16 are rounded after every token, in whatever way it is computed: they have equal bits."""


class Layer:
    """A random layer, and pools in which unwritten memory is NaN."""

    def __init__(self, seed: int, slots: int, dtype: torch.dtype = torch.float32) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.terms = MambaTerms(
            self.randn(TAPS, CHANNELS), self.randn(CHANNELS), -self.randn(HEADS).exp(), self.randn(HEADS),
            self.randn(HEADS), GROUPS, STATE, (0.0, 2.0),
        )  # fmt: skip
        self.states = torch.full((slots, HEADS, WIDTH, STATE), float("nan"), dtype=dtype)
        self.windows = torch.full((slots, TAPS - 1, CHANNELS), float("nan"))
        self.rings = torch.full((slots, RING, CHANNELS + HEADS), float("nan"))

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw)

    def fill(self, slot: int) -> None:
        self.states[slot], self.windows[slot] = self.randn(HEADS, WIDTH, STATE), self.randn(TAPS - 1, CHANNELS)

    def split(self, mixed: Tensor) -> list[Tensor]:
        x, b, c = mixed.split([HEADS * WIDTH, GROUPS * STATE, GROUPS * STATE], -1)
        shape = (GROUPS, STATE)
        return [x.unflatten(-1, (HEADS, WIDTH)), b.unflatten(-1, shape), c.unflatten(-1, shape)]

    def plain(self, slot: int, inputs_TX: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Token after token from the state in `slot`: outputs `[T, H, P]`, and (state, window) after each."""
        states, windows = self.states[slot : slot + 1].clone(), self.windows[slot : slot + 1].clone()
        where, outs, kept = torch.zeros(1, dtype=torch.int64), [], []
        terms = self.terms
        for token in inputs_TX:
            conv_in, dt = token[None].split([CHANNELS, HEADS], -1)
            x, b, c = self.split(causal_conv1d_update(conv_in, terms.conv_WC, terms.conv_bias_C, windows, where))
            given = (terms.A_H, b, c, terms.D_H, terms.dt_bias_H, terms.limit)
            outs.append(selective_state_update(states, where, x, dt, *given))
            kept.append((states[0].clone(), windows[0].clone()))
        return torch.cat(outs), kept


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 99),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
)
def test_a_state_for_each_token_is_that_of_the_plain_recurrence(
    seed: int, wanted: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Rows of (accepted, length) with 4 slots each, in one call; accepted 0 means a row of padding."""
    layer = Layer(seed, 4 * len(wanted), dtype)
    inputs = layer.randn(len(wanted), 4, CHANNELS + HEADS)
    slots, expected = [], []
    for row, (accepted, length) in enumerate(wanted):
        slots.append([4 * row + i for i in range(4)] if accepted else [-1] * 4)
        if accepted:
            layer.fill(4 * row + accepted - 1)
            expected.append(layer.plain(4 * row + accepted - 1, inputs[row, :length]))
        else:
            expected.append((torch.empty(0), []))
    before = layer.states.clone(), layer.windows.clone()
    tokens = max(length for _, length in wanted)
    given = (torch.tensor(slots), ints(*(max(1, a) for a, _ in wanted)), ints(*(n for _, n in wanted)))
    conv_in, dt = inputs[:, :tokens].split([CHANNELS, HEADS], -1)
    terms = layer.terms
    mixed = causal_conv1d_tokens(conv_in, terms.conv_WC, terms.conv_bias_C, layer.windows, *given)
    x, b, c = layer.split(mixed)
    last = (terms.A_H, b, c, terms.D_H, terms.dt_bias_H, terms.limit)
    y = selective_state_update_tokens(layer.states, *given, x, dt, *last)
    assert y.isfinite().all()
    for row, ((accepted, length), (out, kept)) in enumerate(zip(wanted, expected, strict=True)):
        if accepted:
            torch.testing.assert_close(y[row, :length], out)
        for i in range(4):
            slot = 4 * row + i
            state, window = kept[i] if accepted and i < length else (before[0][slot], before[1][slot])
            if dtype == torch.float32:
                torch.testing.assert_close(layer.states[slot], state, equal_nan=True)
            else:
                assert torch.equal(layer.states[slot].nan_to_num(9.0), state.nan_to_num(9.0))
            torch.testing.assert_close(layer.windows[slot], window, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 99),
    st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=5), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
)
def test_a_ring_of_inputs_gives_what_states_would(
    seed: int, steps: list[list[tuple[int, int]]], dtype: torch.dtype
) -> None:
    """Each row goes through steps of (tokens, accepted of them) and advances when its ring would not hold the next one;
    at the end its state is that after all accepted tokens. Rows with fewer steps are padding in the others' calls."""
    rows = len(steps)
    layer = Layer(seed, 2 * rows, dtype)
    given_to: list[Tensor] = [torch.empty(0, CHANNELS + HEADS) for _ in steps]
    starts = []
    for row in range(rows):
        layer.fill(row)
        starts.append((layer.states[row].clone(), layer.windows[row].clone()))
    counts = [0] * rows
    for number in range(max(len(of) for of in steps)):
        lengths = [of[number][0] if number < len(of) else 0 for of in steps]
        slots = ints(*(row if lengths[row] else -1 for row in range(rows)))
        full = [row for row in range(rows) if counts[row] + lengths[row] > RING]
        if full:
            index = ints(*full)
            replay_advance(
                layer.states, layer.windows, layer.rings, index, index, index, ints(*(counts[r] for r in full)),
                layer.terms, RING,
            )  # fmt: skip
            for row in full:
                counts[row] = 0
        inputs = layer.randn(rows, 5, CHANNELS + HEADS)
        y = replay_tokens(
            layer.states, layer.windows, layer.rings, ints(*range(rows)), slots, ints(*counts), ints(*lengths), inputs,
            layer.terms, max(a + b for a, b in zip(counts, lengths, strict=True)),
        )  # fmt: skip
        for row, length in enumerate(lengths):
            if length == 0:
                continue
            reference = Layer(seed, 1, dtype)
            reference.states[0], reference.windows[0] = starts[row]
            out, _ = reference.plain(0, torch.cat((given_to[row], inputs[row, :length])))
            torch.testing.assert_close(y[row, :length], out[given_to[row].shape[0] :], rtol=1e-4, atol=1e-4)
            accepted = min(steps[row][number][1], length)
            given_to[row] = torch.cat((given_to[row], inputs[row, :accepted]))
            counts[row] += accepted
    used = [row for row in range(rows) if given_to[row].shape[0]]
    kept = layer.states.clone()
    if used:
        index, targets = ints(*used, -1), ints(*(rows + row for row in used), -1)
        replay_advance(
            layer.states, layer.windows, layer.rings, index, index, targets, ints(*(counts[row] for row in used), 0),
            layer.terms, RING,
        )  # fmt: skip
    assert torch.equal(layer.states[:rows], kept[:rows])
    for row in used:
        reference = Layer(seed, 1, dtype)
        reference.states[0], reference.windows[0] = starts[row]
        _, after = reference.plain(0, given_to[row])
        if dtype == torch.float32:
            torch.testing.assert_close(layer.states[rows + row], after[-1][0], rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(layer.states[rows + row], after[-1][0])
        torch.testing.assert_close(layer.windows[rows + row], after[-1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_is_read_in_its_own_dtype(dtype: torch.dtype) -> None:
    """Inputs are stored in the ring unrounded, so the replayed values are those computed first."""
    layer = Layer(0, 1)
    layer.fill(0)
    layer.rings = layer.rings.to(dtype)
    inputs = layer.randn(1, 6, CHANNELS + HEADS).to(dtype)
    row = ints(0)
    given = (layer.states, layer.windows, layer.rings, row, row)
    whole = replay_tokens(*given, ints(0), ints(6), inputs, layer.terms, 6)
    first = replay_tokens(*given, ints(0), ints(3), inputs[:, :3], layer.terms, 3)
    rest = replay_tokens(*given, ints(3), ints(3), inputs[:, 3:], layer.terms, 6)
    torch.testing.assert_close(torch.cat((first, rest), 1), whole)
    assert torch.equal(layer.rings[0, :6], inputs[0])
