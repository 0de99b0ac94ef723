"""Drafting heads with gated, normalised, rotary attention and MLPs or experts: maths, positions, and effects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from compiled import needs_compiled
from gated_decoder import gated_config, grid_positions, published_attention
from speculation import watch_drafts
from tiny_decoder import FakeSource, greedy_params, make_runner, preempt, random_weights, request, run, tokens
from torch import Tensor
from torch.nn import functional as F

from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.experts import ExpertsMixer
from decoder.layers.mlp import mlp_of
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams

BASE: dict[str, Any] = {
    "speculative": "mtp", "draft_policy": "fixed", "draft_tokens": 3, "page_size": 4, "state_block": 4,
    "max_len": 96, "max_seqs": 4,
}  # fmt: skip
HIDDEN = 32
REST: dict[str, Any] = {
    "gated": Mlp(HIDDEN, 40, "silu", gated=True),
    "plain": Mlp(HIDDEN, 40),
    "experts": Experts(HIDDEN, 4, 2, 24, None, mlp_hidden_act="silu", gated=True, routing="softmax"),
}
ROWS = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(3))
SHARED = list(range(40, 53))


def config_of(kind: str = "gated", pattern: str = "M*-M") -> DecoderConfig:
    """The head's attention has a window where experts follow it."""
    config = gated_config(pattern, mtp=True)
    attention = config.mtp[0]
    assert isinstance(attention, Attention)
    return replace(config, mtp=(replace(attention, window=3 if kind == "experts" else None), REST[kind]))


@cache
def weights_of(config: DecoderConfig) -> dict[str, Tensor]:
    return dict(random_weights(config, seed=5))


def with_image(name: str, grid: tuple[int, int], after: list[int], **rest: Any) -> DecoderRequest:
    prompt = [30, 31, *[1] * 12, *after]
    spans = [FakeSource(2, 12, b"image", ROWS)]
    return request(name, prompt, greedy_params(10), spans, positions=grid_positions(len(prompt), (2, *grid)), **rest)


def requests() -> list[DecoderRequest]:
    """Some share a beginning; equal images have different grids; one is sampled."""
    drawn = SamplingParams(max_tokens=12, seed=3, temperature=1.0)
    return [
        request("a", [*SHARED, 7, 8], greedy_params(14), checkpoint_at=(13,)),
        request("b", [*SHARED, 9], greedy_params(14), checkpoint_at=(13,)),
        with_image("wide", (3, 4), [32]),
        with_image("high", (4, 3), [32]),
        with_image("end", (2, 6), []),
        request("drawn", [50], drawn),
    ]


class Naive:
    """One sequence at a time, the head recomputed for each draft: transformers' attention over all entries at once. The
    trunk's hidden states of a sequence are also those of its beginnings."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config, weights = config, weights_of(config)
        self.weights = {name.removeprefix("mtp.layers."): w for name, w in weights.items() if name.startswith("mtp.")}
        self.head, self.table = weights["lm_head.weight"], weights["model.embeddings.weight"]
        attention, rest = config.mtp
        assert isinstance(attention, Attention)
        self.attend = published_attention(attention, self._of("0.mixer."))
        options = DecoderOptions(native="off")
        self.rest: Callable[[Tensor], Tensor] = (
            ExpertsMixer(rest, options, self._of("1.mixer.")) if isinstance(rest, Experts)
            else mlp_of(rest, options, self._of("1.mixer."))  # type: ignore[arg-type]
        )  # fmt: skip
        self.trunk, self.seen = make_runner(config, weights, native="off", state_cache="none"), list[Tensor]()
        self.known: dict[str, tuple[list[int], Tensor]] = {}
        forward = self.trunk.execution.forward

        def recorded(*given: Any, **named: Any) -> Any:
            computed = forward(*given, **{**named, "all_rows": True})
            self.seen.append(computed.hidden_TD.clone())
            return computed

        self.trunk.execution.forward = recorded  # type: ignore[assignment]

    def _of(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config.norm_eps)

    def hidden(self, item: DecoderRequest, known: list[int]) -> Tensor:
        """`[T, d]` of the trunk after its final norm, computed whole and operation by operation. Fast for the beginning
        of a sequence that was asked for before."""
        longer, found = self.known.get(item.request_id, ([], torch.empty(0)))
        if longer[: len(known)] == known:
            return found[: len(known)]
        prompt = len(item.prompt_ids)
        params = greedy_params(len(known) - prompt + 1)
        self.seen.clear()
        run(self.trunk, replace(item, sampling=params, output_ids=known[prompt:], spans=spans_of(item)))
        found = self.trunk.model.final_norm(self.seen[0])
        self.known[item.request_id] = known, found
        return found

    @torch.no_grad()
    def drafts(self, item: DecoderRequest, known: list[int], count: int) -> list[int]:
        """The likeliest tokens after the known ones."""
        embedded = self.table[torch.tensor(known)].clone()
        for span in item.spans:
            embedded[span.start : span.end] = ROWS
        hidden, found = self.hidden(item, known)[:-1], list[int]()
        given = item.positions
        positions = [(i,) * 3 if given is None else given.at(i, 3) for i in range(len(known) + count)]
        for _ in range(count):
            # The entry of token t, with the hidden state of token t - 1 and its position.
            both = torch.cat((self.norm(embedded[1:], "0.enorm.weight"), self.norm(hidden, "0.hnorm.weight")), 1)
            x = both @ self.weights["0.eh_proj.weight"].T
            x = x + self.attend(self.norm(x, "0.norm.weight"), torch.tensor(positions[: len(x)]))
            x = x + self.rest(self.norm(x, "1.norm.weight"))
            m = self.norm(x, "1.final_layernorm.weight")[-1:]
            found.append(int((m @ self.head.T).argmax()))
            embedded, hidden = torch.cat((embedded, self.table[found[-1:]])), torch.cat((hidden, m))
        return found


def spans_of(item: DecoderRequest) -> tuple[FakeSource, ...]:
    return tuple(span.again() for span in item.spans if isinstance(span, FakeSource))


def make(config: DecoderConfig, **options: Any) -> DecoderRunner:
    runner = make_runner(config, weights_of(config), **(BASE | options))
    runner.arena.buffer.fill_(255)
    return runner


@cache
def plain(config: DecoderConfig) -> dict[str, list[int]]:
    """Without drafts."""
    runner = make(config, speculative="none", native="off", state_cache="none")
    return {name: tokens(events) for name, events in run(runner, *requests()).items()}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("gated", {}, id="replay"),
        pytest.param("gated", {"native": "off"}, id="operations"),
        pytest.param("plain", {"spec_state": "slots", "state_cache": "align"}, id="slots-align"),
        pytest.param("experts", {"max_chunk": 3, "state_cache": "all"}, id="experts-chunks"),
        pytest.param("experts", {"native": "off", "spec_state": "slots", "max_chunk": 5}, id="experts-operations"),
        pytest.param("plain", {"preempted": True, "max_chunk": 5}, id="preempted"),
        pytest.param("gated", {"preempted": True, "host_bytes": 0, "native": "off"}, id="recomputed"),
        pytest.param("gated", {"graphs": "on", "max_capture": 16}, id="graphs"),
        pytest.param("gated", {"seldom": True, "preempted": True, "max_chunk": 3}, id="now-and-then"),
    ],
)
def test_drafts_are_those_of_a_head_written_out_and_change_nothing(kind: str, options: dict[str, Any]) -> None:
    preempted, seldom = options.pop("preempted", False), options.pop("seldom", False)
    config = config_of(kind)
    runner, naive = make(config, **({"host_bytes": 10**9, "memory_bytes": 2**21} | options)), Naive(config)
    assert runner.drafter is not None
    assert (runner.drafter.head.compiled is None) == (runner.model.native is None)
    if seldom:
        assert runner.speculation is not None
        runner.speculation.policy.wanted = lambda record, length, rows: 3 * (length % 4 == 0)  # type: ignore[method-assign]
    seen = watch_drafts(runner)
    for _ in range(2):
        for item in requests():
            runner.add(item)
        early: dict[str, list[int]] = {}
        for number in range(12 if preempted else 0):
            for event in runner.step():
                early.setdefault(event.request_id, []).extend(tokens([event]))
            if number % 3 == 2 and runner.scheduler.running:
                preempt(runner, runner.scheduler.running[0].request_id)
        late = {name: tokens(events) for name, events in run(runner).items()}
        names = [item.request_id for item in requests()]
        assert {name: early.get(name, []) + late.get(name, []) for name in names} == plain(config)
    greedy = [case for case in seen if case[0].sampling.temperature == 0.0]
    assert len(greedy) > (8 if seldom else 20)
    assert {item.request_id for item, _, _ in greedy} >= {"wide", "high", "end"}
    checked = greedy[:: max(1, len(greedy) // 24)]
    for item, known, drafts in sorted(checked, key=lambda one: -len(one[1])):
        assert drafts == naive.drafts(item, known, len(drafts)), (item.request_id, len(known))
    if preempted:
        assert runner.stats()["preemptions"] > 4
    else:
        assert runner.stats()["cache_hits"] > 1


def test_a_head_like_the_trunk_is_mostly_right() -> None:
    """Its layers are the trunk's, and its entries the tokens' embeddings: it only lacks the first token, and its image
    positions are shifted by one token. With a wrong attention it would be right once in 97 times."""
    config = gated_config("*-")
    config = replace(config, mtp=tuple(config.mixers))
    weights = dict(random_weights(config, seed=5))
    table = weights["model.embeddings.weight"]
    table /= table.square().mean(1, keepdim=True).sqrt()
    for index in range(2):
        for name in [name for name in weights if name.startswith(f"model.layers.{index}.")]:
            weights[f"mtp.layers.{name.removeprefix('model.layers.')}"] = weights[name]
    weights["mtp.layers.0.enorm.weight"] = torch.ones(HIDDEN)
    weights["mtp.layers.0.eh_proj.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    weights["mtp.layers.1.final_layernorm.weight"] = weights["model.norm_f.weight"]
    for native in ("auto", "off"):
        runner = make_runner(config, weights, **(BASE | {"native": native}))
        run(runner, *requests())
        stats = runner.stats()
        assert stats["drafted_1"] > 15 and stats["accepted_1"] > 0.7 * stats["drafted_1"]


@needs_compiled
@pytest.mark.parametrize("kind", REST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_compiled_pass_is_a_called_one_in_any_batch(dtype: torch.dtype, kind: str) -> None:
    runner = make(config_of(kind), dtype=dtype, native="on")
    assert runner.drafter is not None and runner.drafter.head.compiled is not None
    head, rows = runner.drafter.head, 5
    given = torch.randn(4, 2, rows, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    tables = torch.tensor([[2 * row, 2 * row + 1] for row in range(rows)])
    positions = torch.randint(0, 90, (4, rows, 3), generator=torch.Generator().manual_seed(4))

    def passes(chosen: list[int], positions: Tensor) -> Tensor:
        """Entries at places 1, 2 and 3 and a pass at 4, in the next page: hidden states and logits."""
        runner.arena.buffer.fill_(255)
        runner.arena.clear_pages(tables.flatten().tolist())
        pages = tables[chosen]
        for place in (1, 2, 3):
            head.enter(*given[place - 1, :, chosen], pages[:, 0] * 4 + place, positions[place - 1, chosen])
        lengths = torch.full((len(chosen),), 5)
        return torch.cat(
            head.predict(*given[3, :, chosen], pages[:, 1] * 4, pages, lengths, 5, positions[3, chosen]), 1
        )

    together = passes([0, 1, 2, 3, 4], positions)
    assert torch.equal(passes([3], positions), together[[3]])
    assert torch.equal(passes([4, 1], positions), together[[4, 1]])
    counted = torch.arange(4)[:, None, None].expand(-1, rows, 3).contiguous()
    assert not torch.allclose(passes([0, 1, 2, 3, 4], counted), together, atol=1e-2), "positions matter"
    head.compiled = None
    allowed = 0.06 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(passes([0, 1, 2, 3, 4], positions).float(), together, rtol=allowed, atol=allowed)


@needs_compiled
def test_positions_outside_the_table_are_refused_by_compiled_code() -> None:
    runner = make(config_of("plain"), native="on")
    assert runner.drafter is not None and runner.drafter.head.compiled is not None
    row = torch.zeros(1, HIDDEN)
    for position in (-1, BASE["max_len"]):
        with pytest.raises(IndexError, match="a position is in no table"):
            runner.drafter.head.enter(row, row, torch.tensor([-1]), torch.tensor([[0, position, 0]]))
    with pytest.raises(IndexError, match="a layer reads positions, and there are none"):
        runner.drafter.head.enter(row, row, torch.tensor([-1]))
