"""Drafting heads compute the same as a direct implementation token by token, whatever happens to the sequence."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from speculation import watch_drafts
from tiny_decoder import (
    greedy_params,
    image,
    make_runner,
    oracle,
    preempt,
    random_weights,
    request,
    run,
    tiny_config,
    tokens,
    weights_of,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import NemotronHForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.descriptions import Attention
from decoder.mtp_head import check_mtp
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from decoder.token_constraints import AllowedTokens
from kernels.linear import quantise
from kernels.native.structs import SampleParams
from kernels.sample.compiled import packed

BASE: dict[str, Any] = {
    "speculative": "mtp", "draft_policy": "fixed", "draft_tokens": 3, "page_size": 4, "state_block": 4,
    "max_len": 96, "max_seqs": 3,
}  # fmt: skip


class Naive:
    """One sequence at a time, the head recomputed for each draft, on transformers' trunk, whose hidden states of a
    sequence are also those of its beginnings."""

    def __init__(
        self, config: DecoderConfig, trunk: NemotronHForCausalLM, weights: dict[str, Tensor], draft_vocab: int | None
    ) -> None:
        """`draft_vocab`: only ids below it are drafted."""
        self.config, self.trunk, self.draft_vocab = config, trunk, draft_vocab
        self.weights = {name.removeprefix("mtp.layers."): tensor for name, tensor in weights.items()}
        self.experts = NemotronHMoE(trunk.config)
        prefix = "1.mixer."
        self.experts.load_state_dict(
            {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}
        )
        self.known: list[tuple[Tensor, Tensor]] = []

    def hidden(self, embedded_ND: Tensor) -> Tensor:
        """`[N, D]` behind the trunk. Fast for the beginning of a sequence that was asked for before."""
        count = embedded_ND.shape[0]
        for embedded, found in self.known:
            if torch.equal(embedded[:count], embedded_ND):
                return found[:count]
        found = self.trunk.model(inputs_embeds=embedded_ND[None], use_cache=False).last_hidden_state[0]
        self.known.append((embedded_ND, found))
        return found

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config.norm_eps)

    @torch.no_grad()
    def drafts(self, embedded_ND: Tensor, count: int, first: int = 1) -> list[int]:
        """The likeliest tokens after a prefix, given its embedded tokens, from the entries of places `first` on."""
        entries = self.enter(embedded_ND[first:], self.hidden(embedded_ND)[first - 1 : -1])
        found: list[int] = []
        for _ in range(count):
            m = self.look(entries)
            found.append(int(self.trunk.lm_head(m)[: self.draft_vocab].argmax()))
            entries = torch.cat((entries, self.enter(self.trunk.model.embeddings.weight[found[-1:]], m[None])))
        return found

    def enter(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        both = torch.cat((self.norm(tokens, "0.enorm.weight"), self.norm(hidden, "0.hnorm.weight")), 1)
        return both @ self.weights["0.eh_proj.weight"].T

    def look(self, entries: Tensor) -> Tensor:
        config, x = self.config, entries[-1]
        normed = self.norm(entries, "0.norm.weight")
        attention = config.mtp[0]
        assert isinstance(attention, Attention)
        heads, groups = attention.num_attention_heads, attention.num_attention_heads // attention.kv_heads
        q = (self.weights["0.mixer.q_proj.weight"] @ normed[-1]).view(heads, -1)
        k, v = (
            (normed @ self.weights[f"0.mixer.{part}_proj.weight"].T)
            .unflatten(1, (attention.kv_heads, -1))
            .repeat_interleave(groups, 1)
            for part in "kv"
        )
        shares = torch.einsum("hp,shp->hs", q, k).mul(attention.head_dim**-0.5).softmax(-1)
        x = x + self.weights["0.mixer.o_proj.weight"] @ torch.einsum("hs,shp->hp", shares, v).flatten()
        x = x + self.experts(self.norm(x, "1.norm.weight")[None, None])[0, 0]
        return self.norm(x, "1.final_layernorm.weight")


def make(pattern: str, **options: Any) -> tuple[DecoderRunner, Naive]:
    config = tiny_config(pattern, num_nextn_predict_layers=1)
    trunk = oracle(config)
    head = {name: w for name, w in random_weights(config, seed=5) if name.startswith("mtp.")}
    runner = DecoderRunner(
        config, DecoderOptions(**(BASE | options)), [*weights_of(trunk, config).items(), *head.items()]
    )
    runner.arena.buffer.fill_(255)
    return runner, Naive(config, trunk, head, options.get("draft_vocab"))


IMAGE = torch.randn(7, 32, generator=torch.Generator().manual_seed(3))
SHARED = list(range(40, 53))


def requests() -> list[DecoderRequest]:
    """Some share a beginning, in the middle of a page and at its end; one has an image, twice."""
    return [
        request("a", [*SHARED, 7, 8], greedy_params(14), checkpoint_at=(13,)),
        request("b", [*SHARED, 9], greedy_params(14), checkpoint_at=(13,)),
        request("c", [*SHARED[:12], 3, 4, 5], greedy_params(12), checkpoint_at=(12,)),
        request("d", [30, 31, *[1] * 7, 32], greedy_params(10), [image(2, IMAGE)]),
        request("e", [30, 31, *[1] * 7, 33, 34], greedy_params(10), [image(2, IMAGE)]),
        request("f", [50], greedy_params(12)),
    ]


def embedded(naive: Naive, item: DecoderRequest, known: list[int]) -> Tensor:
    x = naive.trunk.model.embeddings.weight[torch.tensor(known)].detach().clone()
    for span in item.spans:
        x[span.start : span.end] = IMAGE
    return x


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        pytest.param("M*-M", {}, id="replay"),
        pytest.param("M*-M", {"spec_state": "slots", "state_cache": "align"}, id="slots-align"),
        pytest.param("M*-M", {"max_chunk": 3, "state_cache": "all", "memory_bytes": 2**21}, id="chunks-all"),
        pytest.param("M*-M", {"spec_state": "slots", "preempted": True, "max_chunk": 5}, id="preempted-slots"),
        pytest.param("M*-M", {"preempted": True}, id="preempted-replay"),
        pytest.param("M*-M", {"preempted": True, "host_bytes": 0, "state_cache": "none"}, id="recomputed"),
        pytest.param("MM", {"draft_tokens": 1}, id="no-attention"),
        pytest.param("*-*", {"state_cache": "auto"}, id="no-mamba"),
        pytest.param("M*-M", {"seldom": True}, id="now-and-then"),
        pytest.param("M*-M", {"seldom": True, "preempted": True, "max_chunk": 3}, id="now-and-then-preempted"),
        pytest.param("M*-M", {"native": "off", "preempted": True, "max_chunk": 5}, id="operations"),
        pytest.param("M*E", {"native": "off", "graphs": "on", "max_capture": 16}, id="graphs"),
        pytest.param("M*-M", {"draft_vocab": 40}, id="some-ids"),
        pytest.param("M*-M", {"draft_vocab": 64, "native": "off"}, id="some-ids-operations"),
    ],
)
def test_drafts_are_those_of_a_head_written_out(pattern: str, options: dict[str, Any]) -> None:
    preempted, seldom = options.pop("preempted", False), options.pop("seldom", False)
    runner, naive = make(pattern, **({"host_bytes": 10**9} | options))
    if seldom:
        assert runner.speculation is not None
        runner.speculation.policy.wanted = lambda record, length, rows: 3 * (length % 4 == 0)  # type: ignore[method-assign]
    seen = watch_drafts(runner)
    for _ in range(2):
        for item in requests():
            runner.add(item)
        for number in range(14 if preempted else 0):
            runner.step()
            if number % 3 == 2:
                preempt(runner, runner.scheduler.running[0].request_id)
        run(runner)
    assert len(seen) > (15 if seldom else 30)
    checked = seen[:: max(1, len(seen) // 40)]
    for item, known, drafts in sorted(checked, key=lambda one: -len(one[1])):
        assert drafts == naive.drafts(embedded(naive, item, known), len(drafts))
    if preempted:
        assert runner.stats()["preemptions"] > 4
        assert (runner.stats()["recomputes"] > 0) == ("host_bytes" in options)
    elif options.get("state_cache") != "none":
        assert runner.stats()["cache_hits"] > 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"memory_bytes": 2**21}, id="replay"),
        pytest.param({"spec_state": "slots", "preempted": True, "max_chunk": 5}, id="slots-preempted"),
        pytest.param({"graphs": "on", "max_capture": 16, "native": "off", "state_cache": "all"}, id="graphs-all"),
    ],
)
def test_after_a_rest_drafts_look_at_what_came_since(options: dict[str, Any]) -> None:
    """The answers are those of plain decoding, whatever the drafts are."""
    preempted = options.pop("preempted", False)
    runner, naive = make("M*-M", **({"host_bytes": 10**9} | options))
    assert runner.speculation is not None and runner.drafter is not None
    policy, drafter, step = runner.speculation.policy, runner.drafter, 0

    def awake() -> bool:
        nonlocal step
        step += 1
        policy.paused = 9 <= step % 23 < 14
        return not policy.paused

    policy.awake = awake  # type: ignore[method-assign]
    policy.wanted = lambda record, length, rows: 2 * (step % 23 != 8)  # type: ignore[method-assign]
    seen: list[tuple[DecoderRequest, list[int], list[int], int]] = []
    draft = drafter.draft

    def recorded(rows: Any) -> Any:
        found = draft(rows)
        for s, drafts in found:
            seen.append((s.request, list(s.tokens), list(drafts), drafter.pages.first_of(s) * drafter.page + 1))
        return found

    drafter.draft = recorded  # type: ignore[method-assign]
    plain = make_runner(naive.config, weights_of(naive.trunk, naive.config))
    for _ in range(3):
        expected = run(plain, *requests())
        for item in requests():
            runner.add(item)
        for number in range(14 if preempted else 0):
            runner.step()
            if number % 3 == 2:
                preempt(runner, runner.scheduler.running[0].request_id)
        found = run(runner)
        assert preempted or {name: tokens(of) for name, of in found.items()} == {
            n: tokens(e) for n, e in expected.items()
        }
    windows = {first for *_, first in seen}
    assert 1 in windows and len(windows) > 3
    for item, known, drafts, first in seen[:: max(1, len(seen) // 40)]:
        assert drafts == naive.drafts(embedded(naive, item, known), len(drafts), first)


def test_a_head_that_says_what_the_model_says_is_always_right() -> None:
    """Here both give every token the same probability: with the same random number they draw the same one."""
    config = tiny_config("M", num_nextn_predict_layers=1)
    weights = dict(random_weights(config))
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    runner = DecoderRunner(config, DecoderOptions(**BASE), weights.items())
    for params in (greedy_params(16), type(greedy_params())(max_tokens=16, seed=4, temperature=1.0)):
        before = runner.stats()["steps"]
        assert len(tokens(run(runner, request("a", [3, 4, 5], params))["a"])) == 16
        assert runner.stats()["steps"] - before == 5
    stats = runner.stats()
    assert [stats[f"accepted_{place}"] for place in (1, 2, 3)] == [stats[f"drafted_{place}"] for place in (1, 2, 3)]
    assert stats["accepted_1"] == 8


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_compiled_pass_is_a_called_one_in_any_batch(dtype: torch.dtype, weights: str | None) -> None:
    runner = make("M*", dtype=dtype, weights=weights, native="on")[0]
    assert runner.drafter is not None
    head, size, rows = runner.drafter.head, runner.config.hidden_size, 5
    given = torch.randn(4, 2, rows, size, generator=torch.Generator().manual_seed(2)).to(dtype)
    tables = torch.tensor([[2 * row, 2 * row + 1] for row in range(rows)])

    def passes(chosen: list[int]) -> Tensor:
        """Entries at places 1, 2 and 3 and a pass at 4, in the next page: hidden states and logits."""
        runner.arena.buffer.fill_(255)
        runner.arena.clear_pages(tables.flatten().tolist())
        pages = tables[chosen]
        for place in (1, 2, 3):
            head.enter(*given[place - 1, :, chosen], pages[:, 0] * 4 + place)
        lengths = torch.full((len(chosen),), 5)
        return torch.cat(head.predict(*given[3, :, chosen], pages[:, 1] * 4, pages, lengths, 5), 1)

    together = passes([0, 1, 2, 3, 4])
    assert torch.equal(passes([3]), together[[3]])
    assert torch.equal(passes([4, 1]), together[[4, 1]])
    head.compiled = None
    # Rows for quantised weights are rounded to 16 bits: what differs in float32's last bits may be a step apart.
    allowed = 0.06 if dtype == torch.bfloat16 else 1e-4 if weights is None else 5e-4
    torch.testing.assert_close(passes([0, 1, 2, 3, 4]).float(), together, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("counts", [[1, 3, 2], [3, 1, 1], [2, 2, 2], [1, 1, 3]], ids=str)
def test_rows_of_one_call_draft_as_many_as_each_wants(counts: list[int]) -> None:
    """In compiled code: each row's drafts equal those that it would get alone, and there are no entries of unrequested
    drafts. Rows cross page boundaries while they draft; a row that has all its drafts is padding in the others'
    passes."""
    runner = make("M*", native="on", dtype=torch.float32)[0]
    assert runner.drafter is not None and runner.drafter.head.compiled is not None
    compiled, size = runner.drafter.head.compiled, runner.config.hidden_size
    kv = runner.arena.kv[len(runner.config.pages)]
    given = torch.randn(len(counts), size, generator=torch.Generator().manual_seed(2))
    tables = torch.tensor([[3 * row, 3 * row + 1] for row in range(len(counts))])
    params = SampleParams(0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, 0, -1)

    def drafts(chosen: list[int]) -> tuple[list[list[int]], Tensor]:
        """The last token of a row is at place 3, the last of its first page: (drafts, content of the pages
        afterwards)."""
        runner.arena.buffer.fill_(255)
        runner.arena.clear_pages(tables[:, 0].tolist())
        kv[tables[:, 1]] = float("nan")
        rows = [(7 + row, 4 * 3 * row + 3, 4, counts[row]) for row in chosen]
        draws = packed([(ctypes.addressof(params), 5, 0, 0, 0, 0, 0)] * len(chosen))
        found = compiled.draft(given[chosen], [], rows, [], tables[chosen], draws)
        return found, kv.clone()

    together, pages = drafts(list(range(len(counts))))
    written = pages[:, 0, :, 0, 0].isfinite()
    assert [len(of) for of in together] == counts
    for row, count in enumerate(counts):
        alone, own = drafts([row])
        assert alone == [together[row]]
        torch.testing.assert_close(own[tables[row]], pages[tables[row]], rtol=0, atol=0, equal_nan=True)
        assert written[3 * row + 1].tolist() == [place < count - 1 for place in range(4)]
    others = [page for page in range(kv.shape[0]) if page % 3 == 2 or page >= 3 * len(counts)]
    assert not written[others].any()


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_a_head_reads_a_tied_table_out_of_the_packed_projection(kind: str | None) -> None:
    """Drafts of the same weights, tied and untied: in one case the table is a packed weight, in the other a separate
    tensor."""
    found = []
    for tied in (True, False):
        config = tiny_config("M*", num_nextn_predict_layers=1, tie_word_embeddings=tied)
        weights = dict(random_weights(config, seed=7))
        weights["lm_head.weight"] = weights["model.embeddings.weight"].bfloat16()
        if kind is not None and not tied:
            weights["model.embeddings.weight"] = quantise(weights["lm_head.weight"], kind).dequantise()
        given = [(name, weights[name]) for name in config.expected_weights()]
        options = DecoderOptions(**(BASE | {"native": "on", "dtype": torch.bfloat16, "weights": kind}))
        runner = DecoderRunner(config, options, given)
        assert (runner.model.trunk.embeddings.packed is not None) == tied
        seen = watch_drafts(runner)
        run(runner, request("a", [5, 9, 33, 64, 90], greedy_params(12, ignore_eos=True)))
        found.append([(before, drafts) for _, before, drafts in seen])
    assert found[0] == found[1] and any(drafts for _, drafts in found[0])


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_of_ids_that_cannot_be_drafted(native: str, temperature: float) -> None:
    """Answers do not depend on `draft_vocab`, either: ids beyond it are biased, or the only ones that a constraint
    allows."""
    config = tiny_config("M*-M", num_nextn_predict_layers=1)
    weights = dict(random_weights(config, seed=5))

    def asked() -> tuple[list[DecoderRequest], list[DecoderRequest]]:
        def params(**changes: Any) -> SamplingParams:
            return SamplingParams(max_tokens=12, temperature=temperature, seed=3, **changes)

        far = request("far", [3, 4, 5], params(), constraint=AllowedTokens([50, 60, 90]))
        mixed = request("mixed", [3, 4, 5], params(), constraint=AllowedTokens([7, 8, 60, 90]))
        free = request("free", [9, 10], params(repetition_penalty=1.3))
        biased = [request(str(token), [6, 7, 8], params(logit_bias={token: 100.0})) for token in (7, 90)]
        return [far, mixed, free], biased

    def answers(**options: Any) -> tuple[dict[str, list[int]], dict[str, int]]:
        options = {"native": native, "page_size": 4, "state_block": 4, "max_len": 96, "max_seqs": 5} | options
        runner = DecoderRunner(config, DecoderOptions(**options), weights.items())
        found = {name: events for together in asked() for name, events in run(runner, *together).items()}
        return {name: tokens(events) for name, events in found.items()}, runner.stats()

    expected, _ = answers()
    for draft_vocab in (None, 40):
        found, stats = answers(speculative="mtp", draft_policy="fixed", draft_vocab=draft_vocab)
        assert found == expected and set(expected["90"]) == {90} and set(expected["far"]) <= {50, 60, 90}
        assert stats["drafted_1"] > 20 and stats["accepted_1"] >= 3  # at least those of the request biased to 7


def test_what_is_missing_is_named() -> None:
    config = tiny_config("M*", num_nextn_predict_layers=1)
    weights = dict(random_weights(config))
    for name in ("mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.weight"):
        del weights[name]
    DecoderRunner(config, DecoderOptions(max_len=32), weights.items())
    options = DecoderOptions(speculative="mtp", max_len=32)
    with pytest.raises(
        ValueError, match=r"does not have: mtp\.layers\.0\.eh_proj\.weight, mtp\.layers\.1\.mixer\.gate\.weight"
    ):
        DecoderRunner(config, options, weights.items())
    with pytest.raises(ValueError, match="draft_vocab is 98, and the vocabulary has 97 ids"):
        make("M*", draft_vocab=98)
    plain = tiny_config("M*")
    with pytest.raises(ValueError, match="this one's configuration has none; 'ngram' works with any model"):
        DecoderRunner(plain, options, random_weights(plain))
    with pytest.raises(ValueError, match="attention and then MLPs or experts, not Experts, Experts"):
        check_mtp(tiny_config("M*", num_nextn_predict_layers=1, mtp_pattern="EE"), {})
