"""Single compiled layers: experts compared with their mixer, attention with float64."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoder import random_weights, tiny_config
from torch import Tensor

from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.descriptions import Experts
from decoder.layers.experts import ExpertsMixer
from decoder.operations import Operations
from kernels.native.structs import AttentionShape, Code, Kind, Op, Step
from kernels.rms_norm import rms_norm

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "single-groups": {"n_routed_experts": 5, "n_group": 5, "topk_group": 3, "num_experts_per_tok": 2},
    "scaled": {
        "n_routed_experts": 130,
        "num_experts_per_tok": 7,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
    },
    "latent": {"moe_latent_size": 21, "mlp_bias": True},
    "odd": {"hidden_size": 67, "moe_intermediate_size": 131, "moe_shared_expert_intermediate_size": 77},
}


class Layer:
    """One layer of experts: `mixer` in torch, and compiled."""

    def __init__(self, shape: str, options: DecoderOptions) -> None:
        self.config = config = tiny_config("E", **SHAPES[shape])
        prefix = "model.layers.0."
        weights = {n.removeprefix(prefix): w for n, w in random_weights(config) if n.startswith(prefix)}
        self.norm, self.options = weights.pop("norm.weight"), options
        weights = {name.removeprefix("mixer."): tensor.to(options.dtype) for name, tensor in weights.items()}
        [spec] = config.mixers
        assert isinstance(spec, Experts)
        self.mixer = ExpertsMixer(spec, options, weights)
        self.exact = ExpertsMixer(spec, replace(options, dtype=torch.float32, weights=None), weights)
        self.compiled = Operations(config, options, config.mixers)
        ops = self.compiled.mixer(self.norm, self.mixer)
        self.range = range(len(ops))
        self.compiled.complete(ops, 64)

    def __call__(self, x: Tensor) -> Tensor:
        """What the compiled layer adds to `x`."""
        self.compiled.x[: x.shape[0]] = x
        self.compiled.run(self.range, Step(tokens=x.shape[0]))
        return self.compiled.x[: x.shape[0]] - x

    def called(self, mixer: ExpertsMixer, x: Tensor) -> Tensor:
        return mixer(rms_norm(x, self.norm, self.config.norm_eps, mixer.gate_ED.dtype))


def rows(config: DecoderConfig, count: int) -> Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_in_float32(shape: str, tokens: int) -> None:
    layer = Layer(shape, DecoderOptions())
    x = rows(layer.config, tokens)
    expected = layer.called(layer.mixer, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_in_fewer_bits_are_no_further_off_than_the_mixer(shape: str, weights: str | None) -> None:
    layer = Layer(shape, DecoderOptions(dtype=torch.bfloat16, weights=weights))
    x = rows(layer.config, 48)
    exact = layer.called(layer.exact, x)
    given = rms_norm(x, layer.norm, layer.config.norm_eps, torch.bfloat16)
    allowed = (layer.mixer(given).float() - exact).square().mean().sqrt()
    assert 0 < (layer(x) - exact).square().mean().sqrt() <= 1.2 * allowed


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("shape", ["groups", "latent", "odd"])
def test_a_token_is_the_same_in_any_batch_and_with_any_threads(shape: str, weights: str | None) -> None:
    layer = Layer(shape, DecoderOptions(dtype=torch.bfloat16, weights=weights))
    x = rows(layer.config, 64)
    together = layer(x).clone()
    torch.set_num_threads(2)
    assert torch.equal(layer(x), together)
    torch.set_num_threads(1)
    for token in range(0, 64, 9):
        assert torch.equal(layer(x[token : token + 1])[0], together[token])
    some = torch.tensor([5, 63, 17, 2, 40])
    assert torch.equal(layer(x[some]), together[some])


def test_what_is_not_a_number_stays_in_its_row() -> None:
    layer = Layer("groups", DecoderOptions())
    x = rows(layer.config, 6)
    clean = layer(x).clone()
    x[2, 3] = float("nan")
    found = layer(x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])


class Attention:
    """One attention operation over scattered pages; memory outside the rows is NaN. `window`: 0 for none."""

    def __init__(
        self, heads: tuple[int, int], width: int, dtype: torch.dtype, page: int, first_key: int = 0, window: int = 0
    ) -> None:
        self.q_heads, self.kv_heads = heads
        self.width, self.page, self.first, self.window = width, page, first_key, window
        config = tiny_config("*")
        self.shape = AttentionShape(*heads, width, width**-0.5, window=window)
        self.operations = Operations(config, DecoderOptions(dtype=dtype, page_size=page), config.mixers)
        self.order = torch.randperm(200, generator=torch.Generator().manual_seed(page))
        self.clear()
        size = (heads[0] + 2 * heads[1]) * width
        stride = self.pages.stride(0)
        op = Op(
            Code.ATTENTION, Kind.F32, size, kv=self.pages.data_ptr(), kv_stride=stride, first_key=first_key,
            attention=ctypes.addressof(self.shape),
        )  # fmt: skip
        behind = Op(Code.CONVERT, Kind.F32, heads[0] * width)  # what reads the outputs
        self.operations.complete([op, behind], 2048)

    def clear(self) -> None:
        shape = (200, 2, self.page, self.kv_heads, self.width)
        if not hasattr(self, "pages"):
            self.pages = torch.empty(shape, dtype=self.operations.options.dtype)
        self.pages.fill_(torch.nan)

    def inputs(self, tokens: int, deviation: float = 1.0) -> Tensor:
        """`[tokens, heads, width]`: queries, keys and values."""
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, self.q_heads + 2 * self.kv_heads, self.width, generator=generator)
        x[:, : self.q_heads] *= deviation
        return x

    def exact(self, x: Tensor) -> Tensor:
        """In float64, from the stored keys and values."""
        stored = x[:, self.q_heads :].to(self.pages.dtype).double()
        k, v = (part.repeat_interleave(self.q_heads // self.kv_heads, 1) for part in stored.split(self.kv_heads, dim=1))
        scores = torch.einsum("thw,shw->hts", x[:, : self.q_heads].double(), k) * self.width**-0.5
        places = torch.arange(len(x))
        behind = places[:, None] - places
        scores.masked_fill_((behind < 0) | (behind >= (self.window or len(x))) | (places < self.first), -torch.inf)
        return torch.einsum("hts,shw->thw", scores.softmax(-1).nan_to_num(0.0), v)

    def run(self, rows: list[tuple[Tensor, int, int, int]], scans: int) -> list[Tensor]:
        """Rows of (inputs of a whole sequence, its number, first and last token of this step); the last `scans` rows
        are passed as scanned ones. Returns each row's outputs."""
        o, counts = self.operations, [end - begin for _, _, begin, end in rows]
        tokens, width = sum(counts), (self.q_heads + 2 * self.kv_heads) * self.width
        pages = 200 // (max(number for _, number, _, _ in rows) + 1)
        table_of = [self.order[number * pages : (number + 1) * pages] for _, number, _, _ in rows]
        o.wide[:tokens, :width] = torch.cat([x[begin:end].flatten(1) for x, _, begin, end in rows])
        o._mid.fill_(torch.nan)
        positions = [torch.arange(begin, end) for _, _, begin, end in rows]
        places = torch.cat([t[p // self.page] * self.page + p % self.page for t, p in zip(table_of, positions)])
        for table, (_, _, begin, _) in zip(table_of, rows):
            if self.window:  # pages before the window of the first token
                self.pages[table[: max(begin + 1 - self.window, 0) // self.page]] = torch.nan
        alone = len(rows) - scans
        lengths = torch.cat([*positions[:alone], torch.zeros(0, dtype=torch.int64)]) + 1
        owners = [table.expand(count, -1) for table, count in zip(table_of[:alone], counts)]
        tables = torch.cat([*owners, torch.zeros(0, pages, dtype=torch.int64)])
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        computed = torch.tensor([begin for _, _, begin, _ in rows[alone:]], dtype=torch.int64)
        scanned = torch.stack(table_of[alone:]) if scans else computed
        step = Step(
            tokens, len(rows), starts.data_ptr(), lengths=lengths.data_ptr(), tables=tables.data_ptr(),
            places=places.data_ptr(), table_stride=pages, scans=scans, scan_computed=computed.data_ptr(),
            scan_tables=scanned.data_ptr(), scan_table_stride=pages,
        )  # fmt: skip
        o.run(range(1), step)
        out = o._mid[:tokens, : self.q_heads * self.width].view(tokens, self.q_heads, self.width).clone()
        return list(out.split(counts))


HEADS = [pytest.param((12, 4), id="gqa"), pytest.param((3, 3), id="mha"), pytest.param((20, 1), id="mqa")]
DTYPES = [torch.bfloat16, torch.float32]
THREADS = [1, 2, 3, 64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("width", "page", "window"),
    [(64, 16, 0), (8, 4, 0), (72, 5, 0), (5, 16, 0), (256, 16, 0), (64, 16, 33), (8, 4, 1), (5, 16, 8), (72, 5, 149)],
)
def test_attention_of_a_prompt(heads: tuple[int, int], width: int, page: int, window: int, dtype: torch.dtype) -> None:
    attention = Attention(heads, width, dtype, page, window=window)
    x = attention.inputs(150, deviation=3.0)
    expected = attention.exact(x)
    (found,) = attention.run([(x, 0, 0, 150)], scans=1)
    tolerance = 0.03 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * expected.abs().max().item())


PLACES = [
    (64, 16, 0, 0), (8, 4, 1, 0), (5, 16, 0, 0), (24, 7, 9, 0), (256, 16, 0, 0),
    (64, 16, 0, 5), (8, 4, 0, 32), (5, 16, 0, 20), (24, 7, 9, 30), (256, 16, 0, 1),
]  # fmt: skip
"""Width of a head, size of a page, first key, window."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "threads", "width", "page", "first_key", "window"),
    [  # each number of threads with each kind of heads and with each place
        pytest.param(heads.values[0], THREADS[(kind + index) % 4], *place, id="-".join(map(str, (heads.id, *place))))
        for kind, heads in enumerate(HEADS)
        for index, place in enumerate(PLACES)
    ],
)
def test_attention_of_a_token_does_not_depend_on_how_it_came(
    heads: tuple[int, int], width: int, page: int, first_key: int, window: int, dtype: torch.dtype, threads: int
) -> None:
    """Bit by bit: whole, in chunks, token by token, as a row of drafts, next to another row, with any number of
    threads. Pages before a row's window are NaN."""
    attention = Attention(heads, width, dtype, page, first_key, window)
    x, y = attention.inputs(141, deviation=4.0), attention.inputs(30)
    (whole,) = attention.run([(x, 0, 0, 141)], scans=1)
    assert not whole.isnan().any() and (whole[:first_key] == 0).all()
    torch.set_num_threads(threads)
    attention.clear()
    (other,) = attention.run([(y, 1, 0, 30)], scans=1)
    attention.clear()
    kept, others = [], []
    for begin, end, scans in (
        (0, 1, 0),
        (1, 50, 1),
        (50, 51, 1),
        (51, 57, 0),
        (57, 58, 0),
        (58, 139, 1),
        (139, 141, 0),
    ):
        step = len(others) * 4
        company = (y, 1, step, step + 4)
        rows = [company, (x, 0, begin, end)] if scans else [(x, 0, begin, end), company]
        found = attention.run(rows, scans)
        kept.append(found[1 if scans else 0])
        others.append(found[0 if scans else 1])
    assert torch.equal(torch.cat(kept), whole)
    assert torch.equal(torch.cat(others), other[: 4 * len(others)])


def test_padding_writes_no_page_and_has_zeros() -> None:
    attention = Attention((6, 2), 8, torch.bfloat16, 4)
    x = attention.inputs(3)
    attention.operations.wide[:3, :80] = x.flatten(1)
    attention.operations._mid.fill_(torch.nan)
    starts, none = torch.arange(4), torch.full((3,), -1)
    lengths, tables = torch.zeros(3, dtype=torch.int64), torch.full((3, 2), -1)
    step = Step(
        3, 3, starts.data_ptr(), lengths=lengths.data_ptr(), tables=tables.data_ptr(), places=none.data_ptr(),
        table_stride=2,
    )  # fmt: skip
    attention.operations.run(range(1), step)
    assert (attention.operations._mid[:3, :48] == 0).all() and attention.pages.isnan().all()


def test_more_keys_than_are_packed_at_once() -> None:
    attention = Attention((2, 1), 16, torch.bfloat16, 16)
    x = attention.inputs(1500)
    (found,) = attention.run([(x, 0, 0, 1500)], scans=1)
    expected = attention.exact(x)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)
    (last,) = attention.run([(x, 0, 1499, 1500)], scans=0)
    assert torch.equal(last[0], found[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 31, 123, 128, 129, 700, 1500, 4000])
def test_windows_in_long_prompts(window: int, dtype: torch.dtype) -> None:
    """Whole, and in parts that begin anywhere; a window that holds all keys changes no bit. With 123, the first keys of
    tokens 600 to 606 are on both sides of a multiple of 32."""
    attention = Attention((2, 1), 16, dtype, 16, window=window)
    x = attention.inputs(1500)
    (whole,) = attention.run([(x, 0, 0, 1500)], scans=1)
    expected = attention.exact(x)
    tolerance = 0.03 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=tolerance * expected.abs().max().item())
    bounds = [0, 1, 140, 141, 600, 607, 1024, 1400, 1499, 1500]
    parts = [attention.run([(x, 0, begin, end)], scans=end - begin > 8) for begin, end in zip(bounds, bounds[1:])]
    assert torch.equal(torch.cat([part for (part,) in parts]), whole)
    if window >= 1500:
        assert torch.equal(Attention((2, 1), 16, dtype, 16).run([(x, 0, 0, 1500)], scans=1)[0], whole)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 320), st.lists(st.integers(1, 299), max_size=4, unique=True), st.sampled_from(DTYPES),
    st.sampled_from([(2, 1), (6, 2)]),
)  # fmt: skip
def test_any_window_and_division(window: int, cuts: list[int], dtype: torch.dtype, heads: tuple[int, int]) -> None:
    attention = Attention(heads, 16, dtype, 16, window=window)
    x = attention.inputs(300, deviation=2.0)
    (whole,) = attention.run([(x, 0, 0, 300)], scans=1)
    expected = attention.exact(x)
    tolerance = 0.03 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=tolerance * expected.abs().max().item())
    bounds = [0, *sorted(cuts), 300]
    parts = [attention.run([(x, 0, begin, end)], scans=end - begin > 4) for begin, end in zip(bounds, bounds[1:])]
    assert torch.equal(torch.cat([part for (part,) in parts]), whole)
