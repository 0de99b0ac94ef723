"""A compiled layer with memory in slots (Mamba-2, gated delta rule, short convolution): the definition in float64, and
the same bits however a row is divided and batched."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mamba_inputs import Inputs, by_definition, recurrence
from tiny_decoder import delta_config, greedy_params, make_runner, random_weights, request, run, tiny_config, tokens
from torch import Tensor

from decoder.config import RING, DecoderConfig, DecoderOptions
from decoder.layers.build import BuiltLayer
from decoder.layers.gated_delta import GatedDeltaMixer
from decoder.layers.mamba2 import Mamba2Mixer
from decoder.layers.recurrent_descriptions import GatedDelta, Mamba2, ShortConv
from decoder.layers.short_conv import ShortConvMixer
from decoder.layers.spec import Layer as DecoderLayer
from decoder.operations import Operations
from kernels.native.structs import BLOCK_TOKENS, Form, Step

DELTA: dict[str, dict[str, Any]] = {
    "delta": {},
    "delta-wide": {"key_head_dim": 24, "value_head_dim": 144, "num_value_heads": 2, "beta_scale": 2.0},
    "delta-odd": {"num_key_heads": 1, "num_value_heads": 3, "key_head_dim": 7, "value_head_dim": 37, "conv_kernel": 2},
}
SHAPES = {
    "registers": {"ssm_state_size": 32, "mamba_head_dim": 8, "mamba_num_heads": 8},
    "wide": {"ssm_state_size": 128, "mamba_head_dim": 16, "conv_kernel": 3},
    "odd": {"ssm_state_size": 20, "mamba_head_dim": 5, "mamba_num_heads": 6, "conv_kernel": 2, "use_conv_bias": False},
}
SHORT: dict[str, ShortConv] = {
    "short": ShortConv(32),
    "short-wide": ShortConv(300, 4, True),
    "short-odd": ShortConv(37, 2),
    "short-long": ShortConv(37, 7),
}
MIXERS = {Mamba2: Mamba2Mixer, GatedDelta: GatedDeltaMixer, ShortConv: ShortConvMixer}
MAMBA: dict[str, dict[str, Any]] = {
    "norm-first": {"gated_norm": "norm_first", "scales": (0.4, 1.7, 0.6, 1.2)},
    "gate-only": {"gated_norm": "gate_only", "scales": (1.3, 0.5, 1.0, 0.8)},
}
"""Further fields of the description of "registers"."""
SLOTS, TOKENS = 8, 160


class Layer:
    """One layer with its own pools, in which unwritten memory is NaN."""

    def __init__(self, shape: str, options: DecoderOptions) -> None:
        if shape in SHORT:
            layer = DecoderLayer((("mixer", SHORT[shape]),))
            self.config = config = DecoderConfig(97, SHORT[shape].hidden_size, (layer,))
        elif shape in DELTA:
            self.config = config = delta_config("G", DELTA[shape])
        else:
            config = tiny_config("M", **SHAPES.get(shape, SHAPES["registers"]))  # type: ignore[arg-type]
            [(name, spec)] = config.layers[0].mixers
            mixer = dataclasses.replace(spec, **MAMBA.get(shape, {}))  # type: ignore[type-var]
            self.config = config = dataclasses.replace(config, layers=(DecoderLayer(((name, mixer),)),))
        prefix = "model.layers.0."
        self.weights = {n.removeprefix(prefix): w for n, w in random_weights(config) if n.startswith(prefix)}
        weights = {name.removeprefix("mixer."): tensor.to(options.dtype) for name, tensor in self.weights.items()}
        [spec] = config.mixers
        assert isinstance(spec, Mamba2 | GatedDelta | ShortConv)
        self.windows = torch.empty(SLOTS, *spec.memory.window, dtype=options.dtype)
        memory = spec.memory
        size = memory.state_bytes(options.dtype.itemsize, options.state_dtype.itemsize, True)
        self.room = torch.empty(SLOTS, max(size, 4), dtype=torch.uint8)  # a short convolution has no state
        numbers = self.room.view(options.state_dtype)
        self.states = numbers[:, : math.prod(memory.state)].unflatten(1, memory.state)
        """The states as torch operations see them; their contents have to be converted first (`memory`)."""
        self.ring = torch.empty(2, RING, spec.memory.inputs)
        given = (options, weights, self.windows, self.states, self.ring)
        self.mixer: Any = MIXERS[type(spec)](spec, *given)
        self.compiled = Operations(config, options, config.mixers)
        ops = self.compiled.layer(BuiltLayer(self.weights["norm.weight"], [self.mixer], config.norm_eps))
        self.range = range(len(ops))
        self.compiled.complete(ops, TOKENS)
        self.forget()

    def forget(self) -> None:
        self.windows.fill_(float("nan"))
        self.room.fill_(255)  # numbers that are NaN
        self.ring.fill_(float("nan"))

    def step(
        self,
        rows: list[tuple[Tensor, int, bool]],
        saves: list[tuple[int, int, int]] = (),  # type: ignore[assignment]
        threads: int = 1,
        rewound: list[tuple[int, int, int]] | None = None,
    ) -> list[Tensor]:
        """What the layer adds to rows of (inputs, slot, continues); saves: (row, its tokens before, slot); rewound: for
        each row the slot that it starts from, its batch slot or -1, and the number of valid steps in that one's
        ring."""
        lengths = [x.shape[0] for x, _, _ in rows]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        slots = torch.tensor([slot for _, slot, _ in rows])
        initial = torch.tensor([int(on) for _, _, on in rows])
        kept = torch.tensor([(row, int(starts[row]) + end, slot) for row, end, slot in saves], dtype=torch.int64)
        x = torch.cat([x for x, _, _ in rows])
        self.compiled.x[: x.shape[0]] = x
        step = Step(
            tokens=x.shape[0], rows=len(rows), starts=starts.data_ptr(), slots=slots.data_ptr(),
            initial=initial.data_ptr(), save_count=len(saves), saves=kept.data_ptr(),
        )  # fmt: skip
        origins = torch.tensor(rewound or [], dtype=torch.int64).view(-1, 3).t().contiguous()
        if rewound is not None:
            step.origins, step.batch_slots, step.counts = (column.data_ptr() for column in origins)
        torch.set_num_threads(threads)
        self.compiled.run(self.range, step)
        torch.set_num_threads(1)
        return list((self.compiled.x[: x.shape[0]] - x).split(lengths))

    def memory(self, slot: int) -> tuple[Tensor, Tensor]:
        """Window and state, with its pending tokens if it has any."""
        before = self.room[slot].clone()
        self.compiled.convert_states(Form.PLAIN, torch.tensor([slot]))
        state = self.states[slot].clone()
        self.room[slot] = before
        return self.windows[slot].clone(), state

    def untouched(self, slots: Iterable[int]) -> bool:
        return all(self.windows[slot].isnan().all() and (self.room[slot] == 255).all() for slot in slots)


def inputs(config: DecoderConfig, tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def exact(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """(what the layer adds, final state) by the definitions, float64."""
    if isinstance(layer.mixer, GatedDeltaMixer):
        return exact_delta(layer, x)
    if isinstance(layer.mixer, ShortConvMixer):
        return exact_short(layer, x), torch.empty(layer.mixer.spec.memory.state, dtype=torch.float64)
    config, mixer, eps = layer.mixer.spec, layer.mixer, layer.config.norm_eps
    weights = {name: tensor.double() for name, tensor in layer.weights.items()}
    x = x.double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights["norm.weight"]
    gate, conv_in, dt = (normed @ weights["mixer.in_proj.weight"].T).split(mixer.sizes, -1)
    window = torch.zeros(config.conv_kernel - 1, config.conv_dim, dtype=torch.float64)
    bc = config.n_groups * config.ssm_state_size
    factors = torch.tensor(config.scales).double().repeat_interleave(torch.tensor([config.inner, config.inner, bc, bc]))
    gate, conv_in = gate * factors[: config.inner], conv_in * factors[config.inner :]
    mixed = by_definition(conv_in, window, weights["mixer.conv1d.weight"][:, 0].T, mixer.conv_bias_C)
    row = Inputs(1)
    row.heads, row.width, row.groups, row.state = (
        config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size,
    )  # fmt: skip
    row.x, row.b, row.c = mixer._split(mixed)
    row.dt, row.bias, row.A, row.D = dt, mixer.dt_bias_H, mixer.A_H, mixer.D_H
    start = torch.zeros(row.heads, row.width, row.state)
    y, state = recurrence(row, slice(0, x.shape[0]), start, config.time_step_limit)
    silu, out, order = torch.nn.functional.silu(gate), y.flatten(1), config.gated_norm
    out = out if order == "norm_first" else out * silu
    if order != "gate_only":
        groups = out.unflatten(1, (config.n_groups, -1))
        out = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(1)
        out = out * weights["mixer.norm.weight"]
    return (out * silu if order == "norm_first" else out) @ weights["mixer.out_proj.weight"].T, state


def exact_delta(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    spec, eps = layer.mixer.spec, layer.config.norm_eps
    weights = {name.removeprefix("mixer."): tensor.double() for name, tensor in layer.weights.items()}
    x = x.double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * layer.weights["norm.weight"]
    conv_in, z, b, a = (normed @ weights[f"in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
    window = torch.zeros(spec.conv_kernel - 1, spec.conv_dim, dtype=torch.float64)
    mixed = by_definition(conv_in, window, weights["conv1d.weight"][:, 0].T, None)
    q, k, v = layer.mixer.terms.split(mixed)
    each = spec.num_value_heads // spec.num_key_heads
    q, k = (
        (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(each, 1) for part in (q, k)
    )  # fmt: skip
    decay = torch.exp(-weights["A_log"].exp() * torch.nn.functional.softplus(a + weights["dt_bias"]))
    state = torch.zeros(spec.num_value_heads, spec.key_head_dim, spec.value_head_dim, dtype=torch.float64)
    outs = []
    for t in range(x.shape[0]):
        state = state * decay[t, :, None, None]
        change = spec.beta_scale * b[t, :, None].sigmoid() * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * change[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * spec.key_head_dim**-0.5)
    y = torch.stack(outs)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + spec.norm_eps) * layer.weights["mixer.norm.weight"]
    return (y.flatten(1) * torch.nn.functional.silu(z)) @ weights["out_proj.weight"].T, state


def exact_short(layer: Layer, x: Tensor) -> Tensor:
    weights = {name.removeprefix("mixer."): tensor.double() for name, tensor in layer.weights.items()}
    x = x.double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.config.norm_eps) * weights["norm.weight"]
    before, after, inner = (normed @ weights["in_proj.weight"].T + weights.get("in_proj.bias", 0)).chunk(3, -1)
    taps = weights["conv1d.weight"].shape[-1]
    padded = torch.nn.functional.pad((before * inner).t()[None], (taps - 1, 0))
    mixed = torch.nn.functional.conv1d(
        padded, weights["conv1d.weight"], weights.get("conv1d.bias"), groups=x.shape[1]
    )[0].t()  # fmt: skip
    return (after * mixed) @ weights["out_proj.weight"].T + weights.get("out_proj.bias", 0)


@pytest.mark.parametrize("tokens", [1, 31, 33, 100])
@pytest.mark.parametrize("shape", [*SHAPES, *MAMBA, *DELTA, *SHORT])
def test_float32_is_the_definition(shape: str, tokens: int) -> None:
    layer = Layer(shape, DecoderOptions())
    x = inputs(layer.config, tokens)
    (found,) = layer.step([(x, 3, False)])
    added, state = exact(layer, x)
    torch.testing.assert_close(found.double(), added, rtol=1e-5, atol=1e-5 * added.abs().max().item())
    ours = layer.memory(3)[1].double()
    torch.testing.assert_close(ours, state, rtol=1e-5, atol=1e-5 * max(state.abs().flatten().tolist(), default=0.0))
    assert layer.untouched(slot for slot in range(SLOTS) if slot != 3)


STATES = {"state_dtype": torch.bfloat16}
KINDS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "weights": "int8"},
    "float32-states16": STATES,
    "bfloat16-states16": {"dtype": torch.bfloat16} | STATES,
}
LAYERS = {
    (shape, kind): Layer(shape, DecoderOptions(**KINDS[kind]))  # type: ignore[arg-type]
    for shape, kind in [
        ("registers", "float32"),
        ("registers", "bfloat16"),
        ("wide", "bfloat16"),
        ("odd", "float32"),
        ("odd", "int8"),
        ("norm-first", "bfloat16"),
        ("gate-only", "int8"),
        ("delta", "bfloat16"),
        ("delta-wide", "float32"),
        ("delta-odd", "bfloat16"),
        ("delta-odd", "int8"),
        ("short", "bfloat16"),
        ("short-wide", "float32"),
        ("short-odd", "int8"),
        ("registers", "bfloat16-states16"),
        ("wide", "bfloat16-states16"),
        ("odd", "float32-states16"),
        ("delta", "bfloat16-states16"),
        ("delta-wide", "float32-states16"),
        ("delta-odd", "bfloat16-states16"),
    ]
}


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(LAYERS)),
    st.lists(st.integers(1, 40), min_size=1, max_size=6).filter(lambda parts: sum(parts) <= 100),
    st.lists(st.integers(1, 12), max_size=4),
    st.sampled_from([1, 2, 3]),
)
def test_a_row_is_the_same_however_it_is_cut_and_in_any_batch(
    which: tuple[str, str], parts: list[int], company: list[int], threads: int
) -> None:
    layer = LAYERS[which]
    layer.forget()
    x = inputs(layer.config, sum(parts))
    ends = torch.tensor(parts).cumsum(0).tolist()
    saves = [(0, end, 1) for end in ends[:1] if end < ends[-1]]
    (whole,) = layer.step([(x, 0, False)], saves)
    found = []
    for part, begin in zip(x.split(parts), [0, *ends], strict=False):
        beside = [(inputs(layer.config, count, count), 4 + i, False) for i, count in enumerate(company)]
        place = min(len(beside), 1)  # the row is not always the first of its step
        out = layer.step([*beside[:place], (part, 2, begin > 0), *beside[place:]], threads=threads)
        found.append(out[place])
        if begin == 0 and saves:
            assert equal(layer.memory(1), layer.memory(2))
    assert torch.equal(torch.cat(found), whole)
    assert equal(layer.memory(2), layer.memory(0))


@pytest.mark.parametrize("which", sorted(LAYERS), ids=str)
def test_a_prompt_is_the_same_token_after_token(which: tuple[str, str]) -> None:
    layer = LAYERS[which]
    layer.forget()
    x = inputs(layer.config, 40)
    (whole,) = layer.step([(x, 0, False)])
    alone = [layer.step([(token, 2, index > 0)])[0] for index, token in enumerate(x.split(1))]
    assert torch.equal(torch.cat(alone), whole)
    assert equal(layer.memory(2), layer.memory(0))


@pytest.mark.parametrize("which", sorted(LAYERS), ids=str)
@pytest.mark.parametrize("kept", [1, 2, 4])
@pytest.mark.parametrize("replayed", [True, False], ids=["replay", "slots"])
def test_drafts_that_are_rejected_change_no_bit(which: tuple[str, str], kept: int, replayed: bool) -> None:
    """Steps of four tokens, of which the first `kept` are accepted each time, next to another row."""
    layer = LAYERS[which]
    layer.forget()
    x, other = inputs(layer.config, 40), inputs(layer.config, 40, seed=2)
    (whole,) = layer.step([(x, 0, False)])
    layer.forget()
    slots, accepted, computed = [5, 2, 7, 1], 0, 6
    found = layer.step([(x[:computed], 5, False), (other[:computed], 3, False)])[:1]
    state = 0  # index in `slots` of the one with the current state
    for step in range(4):
        wrong = inputs(layer.config, 4 - kept, seed=9 + step)
        drafted = torch.cat((x[computed : computed + kept], wrong))
        beside = (other[computed : computed + 1], 3, True)
        if replayed:
            rewound = [(3, -1, -1), (5, 1, accepted)]
            (_, out) = layer.step([beside, (drafted, 5, True)], rewound=rewound)
            accepted = kept
        else:
            saves = [(1, token + 1, slots[token]) for token in range(3)]
            rewound = [(3, -1, -1), (slots[state], -1, -1)]
            (_, out) = layer.step([beside, (drafted, slots[3], True)], saves, rewound=rewound)
            state = kept - 1
        found.append(out[:kept])
        computed += kept
    current = 5 if replayed else slots[state]
    if replayed:
        job = torch.tensor([[1, 5, 6, accepted], [1, 5, 5, accepted]])
        for row in job:
            layer.compiled.library.saccade_advance(
                ctypes.byref(layer.compiled.model), ctypes.c_int64(1), ctypes.c_void_p(row.data_ptr())
            )
        assert equal(layer.memory(5), layer.memory(6))
    found += layer.step([(x[computed:], current, True)])
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("shape", [*SHAPES, *DELTA])
def test_states_in_bfloat16_are_rounded_where_they_are_stored(shape: str) -> None:
    """A prompt with such states has the bits of float32 states that are rounded between steps of one block."""
    exact, rounded = Layer(shape, DecoderOptions()), Layer(shape, DecoderOptions(state_dtype=torch.bfloat16))
    x = inputs(exact.config, 48)
    (found,) = rounded.step([(x, 0, False)])
    slot = torch.tensor([0])
    for index, (part, ours) in enumerate(zip(x.split(BLOCK_TOKENS), found.split(BLOCK_TOKENS), strict=True)):
        (expected,) = exact.step([(part, 0, index > 0)])
        assert torch.equal(ours, expected)
        exact.compiled.convert_states(Form.PLAIN, slot)
        exact.states[0] = exact.states[0].bfloat16().float()
        exact.compiled.convert_states(Form.BLOCKS, slot)
    assert torch.equal(rounded.memory(0)[1].float(), exact.memory(0)[1])


@pytest.mark.parametrize("which", sorted(LAYERS), ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
def test_states_are_converted_to_and_from_what_torch_operations_have(which: tuple[str, str], tokens: int) -> None:
    """Without pending tokens no bit of a state changes; with some, what follows changes by roundings only."""
    layer = LAYERS[which]
    layer.forget()
    x = inputs(layer.config, 40)
    layer.step([(x[:tokens], slot, False) for slot in (2, 5)]) if tokens else layer.step([(x, 5, False)])
    both = torch.tensor([2, 5])
    if not tokens:  # a state that torch operations write from zeros
        layer.compiled.convert_states(Form.WRITTEN, both[:1])
        layer.windows[2], layer.states[2] = 0, 0
    else:
        layer.compiled.convert_states(Form.PLAIN, both[:1])
        assert equal(layer.memory(2), layer.memory(5))
    layer.compiled.convert_states(Form.PLAIN, both[:1])  # nothing is left to do
    layer.compiled.convert_states(Form.BLOCKS, both[:1])
    layer.compiled.convert_states(Form.BLOCKS, both)
    found, expected = layer.step([(x[tokens:], 2, True), (x[tokens:], 5, tokens > 0)])
    if tokens % BLOCK_TOKENS == 0:
        assert torch.equal(found, expected) and equal(layer.memory(2), layer.memory(5))
    else:
        error = 1e-5 if which[1] == "float32" else 3e-2
        torch.testing.assert_close(found, expected, rtol=error, atol=error * expected.abs().max().item())


@pytest.mark.parametrize("which", [("registers", "bfloat16"), ("delta", "bfloat16"), ("short", "bfloat16")], ids=str)
def test_padding_touches_nothing(which: tuple[str, str]) -> None:
    layer = LAYERS[which]
    layer.forget()
    x = inputs(layer.config, 1)
    alone = layer.step([(x, 5, False)])[0]
    layer.forget()
    padded = layer.step([(x, -1, True), (x, 5, False), (x, -1, True)])
    assert torch.equal(padded[1], alone) and padded[0].isfinite().all()
    assert layer.untouched(slot for slot in range(SLOTS) if slot != 5)


def test_layers_without_a_compiled_form_are_called() -> None:
    """Such layers between compiled ones: a convolution that is too long, and a second Mamba layer of another shape."""
    config = tiny_config("MM", conv_kernel=5)
    runner = make_runner(config, native="on")
    assert runner.model.native is not None
    assert all(runner.model.native.calls(mixer) for layer in runner.model.trunk.layers for mixer in layer.mixers)
    plain, other = tiny_config("M"), tiny_config("M", ssm_state_size=20)
    mixed = dataclasses.replace(plain, layers=plain.layers + other.layers + plain.layers)
    for speculative in ("none", "ngram"):
        answers = []
        for native in ("on", "off"):
            runner = make_runner(mixed, native=native, speculative=speculative, draft_policy="fixed")
            answers.append(tokens(run(runner, request("a", [3, 5] * 20, greedy_params(16)))["a"]))
            if runner.model.native is not None:
                called = [runner.model.native.calls(layer.mixers[0]) for layer in runner.model.trunk.layers]
                assert called == [False, True, False]
        assert answers[0] == answers[1]
