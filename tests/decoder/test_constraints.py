"""Constrained answers equal those of plain masked decoding under any options; an error ends its own request only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from constrained import END, KINDS, VOCAB, Machine, branching, constraints, spelled
from gated_decoder import gated_config
from speculation import AXES, Answers, answers, pairwise
from tiny_decoder import (
    delta_config,
    greedy_params,
    make_runner,
    oracle,
    random_weights,
    request,
    run,
    tiny_config,
    tokens,
    weights_of,
)  # fmt: skip

from decoder.arena import ArenaLayout
from decoder.config import DecoderOptions
from decoder.constraints import FULL, ConstraintError, Mask
from decoder.guide import Guide
from decoder.request import DecoderRequest
from decoder.sampling import SamplingParams
from decoder.token_constraints import AllowedTokens
from kernels.sample import uniform

CONFIG = tiny_config("M-*EM*", num_nextn_predict_layers=1)
WEIGHTS = dict(random_weights(CONFIG))
EOS = frozenset({END})
SPREAD = [*KINDS, None, "branching", None]
CONFIGS = {
    "M-*EM*": CONFIG,
    "G-*G-": delta_config("G-*G-", num_nextn_predict_layers=1),
    "*E*-": tiny_config("*E*-", num_nextn_predict_layers=1),
    "gated": gated_config("G*-M", mtp=True),
}
CASES = pairwise(
    AXES
    | {
        "pattern": tuple(CONFIGS),
        "max_chunk": (7, None),
        "forced_tokens": ("on", "off"),
        "draft_tokens": (2, 7),
        "first": (0, 1),
    }
)
"""`first`: which kind of constraint the first request has: those of even ones are greedy, the others are drawn."""


def constrained(pattern: str, first: int, **options: Any) -> Answers:
    kinds = SPREAD[first:] + SPREAD[:first]
    return answers(config=CONFIGS[pattern], count=len(kinds), output=14, constrained=kinds, **options)


Plain = Callable[[str, int], Answers]


@pytest.fixture(scope="module")
def plain() -> Plain:
    """The answers with which all others are compared: computed operation by operation, without drafts, on first use."""
    return cache(lambda pattern, first: constrained(pattern, first, native="off"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(case[name]) for name in sorted(case)))
def test_no_option_changes_a_constrained_answer(case: dict[str, Any], plain: Plain) -> None:
    expected = plain(case["pattern"], case["first"])
    found = constrained(known=expected.drawn, **case)
    assert found.drawn == expected.drawn
    for name, logprobs in expected.logprobs.items():
        assert found.logprobs[name] == pytest.approx(logprobs, abs=1e-4)
    if case["forced_tokens"] == "on":
        assert 0 < found.stats["forced_accepted"] < found.stats["forced_drafted"]


def test_the_answers_compared_are_of_all_sorts(plain: Plain) -> None:
    """Some have ended by themselves, one has reached a state in which nothing is allowed, and each satisfies its
    constraint."""
    reasons = set()
    for first in (0, 1):
        for name, (drawn, reason) in plain("M-*EM*", first).drawn.items():
            kind = SPREAD[(int(name) + first) % len(SPREAD)]
            assert reason != "error" or kind == "both"
            text = drawn[:-1] if reason == "stop" else drawn
            assert kind is None or constraints(kind).valid_prefix(text) == len(text)
            reasons.add(reason)
    assert reasons == {"stop", "length", "error"}


# -- against a model that masks its logits token by token --------------------------------------------------------------


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_those_of_masked_logits_of_a_plain_model(temperature: float, native: str) -> None:
    """The reference is transformers with one forward pass of the whole text for each token; log-probabilities are of
    unmasked logits."""
    config = tiny_config("M*-E")
    model = oracle(config)
    runner = make_runner(config, weights_of(model, config), native=native)
    for kind in ("branching", "spelled", "words", "both"):
        params = SamplingParams(max_tokens=10, temperature=temperature, seed=4, logprobs=0, logit_bias={40: 2.0})
        prompt, constraint = [7, 8, 9], constraints(kind)
        item = request("a", prompt, params, constraint=constraint, eos_token_ids=EOS)
        events = run(runner, item)["a"]
        expected, logprobs = list[int](), list[float]()
        while len(expected) < len(events):
            text = prompt + expected
            with torch.no_grad():
                logits = model(torch.tensor([text])).logits[0, -1].double()
            token = masked_draw(logits, constraint, params, len(text))
            logprobs.append(logits.log_softmax(-1)[token].item())
            expected.append(token)
            if token != END:
                constraint.accept(token)
        assert tokens(events) == expected
        assert [event.logprob for event in events] == pytest.approx(logprobs, abs=1e-3)


def masked_draw(logits: torch.Tensor, constraint: Any, params: SamplingParams, position: int) -> int:
    adjusted = logits.clone()
    for token, bias in params.logit_bias.items():
        adjusted[token] += bias
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    constraint.fill_mask(Mask.over(words))
    for token in range(VOCAB):
        if not int(words[token // 32]) >> token % 32 & 1:
            adjusted[token] = -torch.inf
    if params.greedy:
        return int(adjusted.argmax())
    weights = ((adjusted - adjusted.max()) / params.temperature).exp().cumsum(-1)
    target = uniform(params.seed, 0, position, 1).item() * weights[-1].item()
    return int((weights > target).nonzero()[0])


# -- ends --------------------------------------------------------------------------------------------------------------


def chain(length: int) -> Machine:
    return Machine([{10 + at: at + 1} for at in range(length)] + [{}], frozenset({length}))


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize(
    "changes", [{"min_tokens": 9}, {"ignore_eos": True}, {"min_tokens": 12, "ignore_eos": True}], ids=str
)
def test_a_constraint_that_can_only_end_ends(changes: dict[str, Any], native: str) -> None:
    """Also before `min_tokens` and under `ignore_eos`, if it must end; where it may continue, it continues."""
    may_end = Machine([{10: 0, 11: 0}], frozenset({0}))
    certain = {"logit_bias": {END: 100.0}, "stop_token_ids": frozenset({11})}
    runner = make_runner(CONFIG, WEIGHTS, native=native)
    items = {
        "must": request("must", [3, 4], greedy_params(12, **changes), constraint=chain(3), eos_token_ids=EOS),
        "may": request("may", [3, 4], greedy_params(12, **changes, **certain), constraint=may_end, eos_token_ids=EOS),
    }
    events = run(runner, *items.values())
    assert tokens(events["must"]) == [10, 11, 12, END] and events["must"][-1].stop_token == END
    early = changes.get("min_tokens", 0)
    drawn = tokens(events["may"])
    assert all(token == 10 for token in drawn[:early])
    if changes.get("ignore_eos"):
        assert END not in drawn
    else:
        assert drawn == [10] * early + [END] and events["may"][-1].finish_reason == "stop"


# -- errors ------------------------------------------------------------------------------------------------------------


LOOPS = [
    pytest.param({}, id="plain"),
    pytest.param({"native": "off"}, id="operations"),
    pytest.param({"overlap": "on"}, id="overlapped"),
    pytest.param({"speculative": "ngram", "draft_policy": "fixed"}, id="ngram"),
    pytest.param({"speculative": "mtp", "draft_policy": "fixed", "spec_state": "slots"}, id="mtp"),
    pytest.param({"forced_tokens": "on", "draft_policy": "fixed"}, id="forced"),
]


@pytest.mark.parametrize("options", LOOPS)
def test_an_error_of_a_constraint_ends_its_request_alone(options: dict[str, Any]) -> None:
    """One that raises, one that allows nothing, one whose mask disagrees with what it accepts."""

    class Liar(Machine):
        def copy(self) -> Liar:
            return Liar(self.moves, self.accepting, self.preferred, list(self.path))

        def fill_mask(self, mask: Mask) -> None:
            mask.words.fill(FULL)

        def forced(self) -> list[int]:
            return []

    broken = branching(0)
    broken.fails_after = 4
    stuck = Machine([{10: 1}, {11: 2}, {}])
    items = [
        request("raises", [3, 4], greedy_params(12), constraint=broken),
        request("stuck", [3, 4, 5], greedy_params(12), constraint=stuck),
        request("liar", [5, 6], greedy_params(12), constraint=Liar([{96: 0}])),
    ]
    others = [
        request("free", [7, 8, 9], SamplingParams(max_tokens=14, seed=1)),
        request("good", [7, 8, 9], greedy_params(14), constraint=branching(2), eos_token_ids=EOS),
    ]
    expected = run(make_runner(CONFIG, WEIGHTS), *others)
    runner = make_runner(CONFIG, WEIGHTS, **options)
    events = run(runner, *items, *others)
    for other in others:
        assert tokens(events[other.request_id]) == tokens(expected[other.request_id])
    reasons = {item.request_id: events[item.request_id][-1] for item in items}
    assert {event.finish_reason for event in reasons.values()} == {"error"}
    assert all(isinstance(event.error, ConstraintError) and event.token_id is None for event in reasons.values())
    assert "out of order" in str(reasons["raises"].error) and len(events["raises"]) == 5
    assert str(reasons["stuck"].error) == "no token is allowed after 2 output tokens" and len(events["stuck"]) == 3
    assert "AssertionError" in str(reasons["liar"].error)
    assert runner.stats()["failed"] == 3
    runner.close()
    runner.check_integrity()


# -- samples, resumed answers, steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", LOOPS)
def test_samples_of_a_prompt_follow_copies(options: dict[str, Any]) -> None:
    """One constraint object for all samples; each behaves as if it were alone."""
    shared = branching(5)

    def sample(index: int) -> DecoderRequest:
        params = SamplingParams(max_tokens=12, seed=7)
        rest: dict[str, Any] = {"constraint": shared, "eos_token_ids": EOS, "sample_index": index}
        return request(f"s{index}", range(20, 31), params, **rest)

    alone = [tokens(run(make_runner(CONFIG, WEIGHTS), sample(index))[f"s{index}"]) for index in range(3)]
    runner = make_runner(CONFIG, WEIGHTS, **options)
    first, *others = map(sample, range(3))
    runner.add(first, *others)
    drawn: dict[str, list[int]] = {f"s{index}": [] for index in range(3)}
    while runner.has_work:
        for event in runner.step():
            drawn[event.request_id] += tokens([event])
    assert list(drawn.values()) == alone and len({tuple(of) for of in alone}) == 3
    assert runner.stats()["forks"] == 2 and shared.path == [0]


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_resumed_answer_goes_on_as_it_would_have(cut: int) -> None:
    params = SamplingParams(max_tokens=12, seed=2)
    item = request("a", [3, 4, 5], params, constraint=spelled(2), eos_token_ids=EOS)
    whole = tokens(run(make_runner(CONFIG, WEIGHTS), item)["a"])
    constraint = spelled(2)
    for token in whole[:cut]:
        constraint.accept(token)
    again = replace(item, output_ids=whole[:cut], constraint=constraint)
    assert tokens(run(make_runner(CONFIG, WEIGHTS), again)["a"]) == whole[cut:]


def test_forced_tokens_save_steps_and_are_refused_where_the_model_spells_otherwise() -> None:
    def steps(constraint: Machine, **options: Any) -> tuple[list[int], dict[str, int]]:
        runner = make_runner(CONFIG, WEIGHTS, draft_policy="fixed", draft_tokens=7, **options)
        item = request("a", [3, 4], greedy_params(40), constraint=constraint, eos_token_ids=EOS)
        return tokens(run(runner, item)["a"]), runner.stats()

    for constraint in (chain(30), spelled(1, 40)):
        slow, before = steps(constraint)
        fast, after = steps(constraint, forced_tokens="on")
        assert fast == slow and "forced_drafted" not in before
        assert after["steps"] < before["steps"]
    _, certain = steps(chain(30), forced_tokens="on")
    assert certain["steps"] == 5 and certain["forced_accepted"] == certain["forced_drafted"] == 26
    assert after["forced_accepted"] < after["forced_drafted"]


def test_forced_tokens_that_are_refused_are_not_proposed_for_long() -> None:
    """A model that writes everything in single letters. Each token of a step takes a second: on a loaded machine,
    drafts may be measured to cost nothing, and are then worth their place although most of them are refused."""
    letters = spelled(1, 200)
    single = {token: 50.0 for of in letters.moves[:-1] for token in list(of)[:1]}
    twos = {token for of in letters.moves[:-1] for token in list(of)[1:]} - single.keys()
    params = greedy_params(150, logit_bias=single | dict.fromkeys(twos, -50.0))
    runner = make_runner(CONFIG, WEIGHTS, forced_tokens="on")
    runner.timer.clock = lambda: float(runner.execution.counters["batched_tokens"])
    run(runner, request("a", [3, 4], params, constraint=letters, eos_token_ids=EOS))
    assert 0 < runner.stats()["forced_drafted"] < 40


def test_memory_for_forced_tokens_is_planned() -> None:
    """`on` plans as much as for n-gram drafts; `auto` plans nothing if nothing drafts."""

    def planned(**options: Any) -> tuple[int, int]:
        layout = ArenaLayout.of(CONFIG, DecoderOptions(**options))
        return layout.ring_bytes, layout.slots_per_seq

    assert planned() == planned(forced_tokens="off") == (0, 1)
    for spec_state in ("replay", "slots"):
        drafting = planned(speculative="ngram", spec_state=spec_state)
        assert planned(forced_tokens="on", spec_state=spec_state) == drafting != (0, 1)
    assert not DecoderOptions(speculative="ngram", forced_tokens="off").forced_on
    with pytest.raises(ValueError, match="forced_tokens 'yes' is not one of auto, on, off"):
        DecoderOptions(forced_tokens="yes")


@pytest.mark.parametrize("native", ["auto", "off"])
def test_a_head_has_entries_of_forced_tokens_too(native: str) -> None:
    """The head's keys are the same as if it had drafted every token itself."""

    def entries(forced: str) -> torch.Tensor:
        runner = make_runner(
            CONFIG, WEIGHTS, speculative="mtp", forced_tokens=forced, draft_policy="fixed", page_size=4, native=native
        )
        runner.arena.buffer.fill_(255)
        runner.add(request("a", [3, 4, 5, 6, 7], greedy_params(40), constraint=chain(30), eos_token_ids=EOS))
        while not runner.scheduler.running or runner.scheduler.running[0].computed < 21:
            runner.step()
        assert runner.drafter is not None and bool(runner.stats()["forced_accepted"]) == (forced == "on")
        runner.drafter.flush()
        return runner.arena.kv[len(CONFIG.pages)][runner.scheduler.running[0].held.pages[:5]]

    torch.testing.assert_close(entries("on"), entries("off"), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_drafts_end_before_what_cannot_follow_and_before_an_end() -> None:
    constraint = Machine([{10: 1, 11: 0}, {12: 2}, {}], frozenset({1, 2}))
    guide = Guide(
        request("a", [3], greedy_params(stop_token_ids=frozenset({11})), constraint=constraint, eos_token_ids=EOS)
    )
    assert guide.cut([10, 12, 12]) == [10, 12] and guide.cut([10, END, 12]) == [10] and guide.cut([11, 10]) == []
    assert guide.cut([12]) == guide.forced() == []
    guide.accept(10)
    assert guide.cut([12]) == [12] and guide.cut([10]) == [] and constraint.path == [0]


@pytest.mark.parametrize("options", [{}, {"graphs": "on"}], ids=["eager", "graphs"])
def test_constrained_rows_advance_in_every_overlapped_step(options: dict[str, Any]) -> None:
    for others in ([], [request("free", [3, 4], greedy_params(24))]):
        runner = make_runner(CONFIG, WEIGHTS, overlap="on", state_cache="none", **options)
        held = request("held", [5, 6], SamplingParams(max_tokens=24, seed=1), constraint=AllowedTokens(range(50)))
        found = run(runner, held, *others)
        assert len(tokens(found["held"])) == 24 and runner.stats()["overlapped_steps"] >= 23
        assert runner.stats()["steps"] <= 26
        runner.close()


def test_a_batch_without_constraints_makes_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a batch whose constrained requests have ended."""
    runner = make_runner(CONFIG, WEIGHTS, native="off")
    run(runner, request("held", [5, 6], greedy_params(3), constraint=chain(9)))
    filled = runner.sampler._masks.fill
    results: list[Any] = []
    monkeypatch.setattr(runner.sampler._masks, "fill", lambda *given: results.append(filled(*given)) or results[-1])
    run(runner, request("free", [5, 6], SamplingParams(max_tokens=4)), request("plain", [5], greedy_params(4)))
    assert results and not any(results)


@pytest.mark.parametrize("options", LOOPS)
def test_a_preempted_request_goes_on_in_its_state(options: dict[str, Any]) -> None:
    items = [
        request(f"r{index}", range(3, 9 + index), SamplingParams(max_tokens=18, seed=index), constraint=spelled(index),
                eos_token_ids=EOS)
        for index in range(3)
    ]  # fmt: skip
    expected = {name: tokens(of) for name, of in run(make_runner(CONFIG, WEIGHTS), *items).items()}
    for host_bytes in (0, 10**9):  # computed again, or saved
        runner = make_runner(CONFIG, WEIGHTS, host_bytes=host_bytes, **options)
        found = run(runner, *items, preempt_every=3)
        assert {name: tokens(of) for name, of in found.items()} == expected and runner.stats()["preemptions"] > 2
