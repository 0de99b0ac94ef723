"""Speculative = plain: the same tokens whatever is drafted, however states are restored, with all other options."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from speculation import AXES, Answers, answers, pairwise
from tiny_decoder import (
    greedy_params,
    make_runner,
    random_weights,
    request,
    run,
    state_content,
    timeless,
    tiny_config,
    tokens,
)

from decoder.arena import ArenaLayout
from decoder.config import DecoderOptions
from decoder.drafting import NgramIndex
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from decoder.sequence import Sequence
from decoder.speculation import Speculation
from decoder.step import Row, Step

CONFIG = tiny_config("M-*EM*")
WEIGHTS = dict(random_weights(CONFIG))
PATTERNS = ("M-*EM*", "MM", "*E*-")
CASES = pairwise(AXES | {"pattern": PATTERNS, "draft_tokens": (1, 3, 7), "seed": (0, 1, 2)})


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], Answers]:
    return {
        (pattern, seed): answers(pattern, seed=seed, state_cache="none") for pattern in PATTERNS for seed in (0, 1, 2)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(case[name]) for name in sorted(case)))
def test_speculative_equals_plain(case: dict[str, Any], plain: dict[tuple[str, int], Answers]) -> None:
    expected = plain[case["pattern"], case["seed"]]
    found = answers(known=expected.drawn, **case)
    assert found.drawn == expected.drawn
    for name, logprobs in expected.logprobs.items():
        assert found.logprobs[name] == pytest.approx(logprobs, abs=1e-4)
    if case["graphs"] == "on":
        names = [name for name, count in found.stats.items() if count]
        assert not [name for name in names if name.startswith("eager_")]
        assert bool([n for n in names if n.startswith("replays_verify")]) == (case["speculative"] != "none")
    waits = case["speculative"] != "none" or case["state_cache"] in ("align", "all")
    assert (found.stats["overlapped_steps"] > 10) == (case["overlap"] == "on") or waits
    if case["speculative"] == "ngram":
        assert sum(found.stats[f"accepted_{place + 1}"] for place in range(case["draft_tokens"])) > 20


class Oracle:
    """Drafts of which the first `right` are what will be drawn."""

    def __init__(self, whole: list[int], right: int) -> None:
        self.whole, self.right = whole, right

    def propose(self, known: Any, count: int) -> list[int]:
        coming = self.whole[len(known) : len(known) + count]
        return [token if place < self.right else (token + 1) % 97 for place, token in enumerate(coming)]


def oracle(whole: list[int], right: int = 99, **options: Any) -> DecoderRunner:
    given = {"speculative": "ngram", "draft_policy": "fixed", "page_size": 4, "state_block": 4} | options
    runner = make_runner(CONFIG, WEIGHTS, **given)
    assert runner.speculation is not None
    runner.speculation.new_index = lambda sequence: Oracle(whole, right)
    return runner


def drawn(prompt: list[int], params: SamplingParams, **rest: Any) -> list[int]:
    return tokens(run(make_runner(CONFIG, WEIGHTS), request("a", prompt, params, **rest))["a"])


PROMPT = list(range(20, 25))


@pytest.mark.parametrize("spec_state", ["replay", "slots"])
@pytest.mark.parametrize("state_cache", ["align", "all"])
def test_behind_a_refused_draft_is_the_state_of_the_last_accepted_token(spec_state: str, state_cache: str) -> None:
    """5 tokens computed, 4 more in a step, of which 2 are accepted: the state continues from 7 tokens, neither from 6
    nor from 9, and the state kept at the boundary 8 a step later equals that of a plain run."""
    whole = PROMPT + drawn(PROMPT, greedy_params(20))
    runner = oracle(whole, right=1, draft_tokens=3, spec_state=spec_state, state_cache=state_cache)
    plain = make_runner(CONFIG, WEIGHTS, page_size=4, state_block=4, state_cache=state_cache)
    runner.add(request("a", PROMPT, greedy_params(20)))
    plain.add(request("a", PROMPT, greedy_params(20)))
    runner.step()
    plain.step()
    (sequence,) = runner.scheduler.running
    computed = []
    for _ in range(4):
        runner.step()
        computed.append(sequence.computed)
        while plain.scheduler.running[0].computed < sequence.computed:
            plain.step()
        assert sequence.tokens == plain.scheduler.running[0].tokens
        assert same_state(runner, plain, sequence.computed)
        assert runner.cache is not None and plain.cache is not None
        assert runner.cache.lengths() == plain.cache.lengths()
        for kept, exact in zip(checkpoints(runner), checkpoints(plain), strict=True):
            torch.testing.assert_close(kept, exact, rtol=1e-4, atol=1e-4)
        runner.check_integrity()
    assert computed == [7, 9, 11, 13]


def same_state(runner: DecoderRunner, plain: DecoderRunner, computed: int) -> bool:
    (one,), (other,) = runner.scheduler.running, plain.scheduler.running
    target = one.slot
    if one.held.replayed:
        target = int(runner.arena.pool.take_slot() or 0)
        runner.states.advance([(one, one.slot, target, one.held.replayed)])
        runner.arena.pool.release_slot(target)
    mine, exact = state_content(runner, target), state_content(plain, other.slot)
    torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)
    return True


def checkpoints(runner: DecoderRunner) -> list[torch.Tensor]:
    assert runner.cache is not None
    live = sorted(runner.cache.order, key=lambda checkpoint: checkpoint.tokens)
    return [state_content(runner, checkpoint.slot) for checkpoint in live]


@pytest.mark.parametrize("spec_state", ["replay", "slots"])
@pytest.mark.parametrize("cut", range(1, 9))
def test_an_end_inside_a_step_is_an_end(spec_state: str, cut: int) -> None:
    """Everything after the end or stop token, or after max_tokens, is as if it had never been drafted."""
    free = drawn(PROMPT, greedy_params(9))
    end = free[cut]
    for params, rest in (
        (greedy_params(9), {"eos_token_ids": frozenset({end})}),
        (greedy_params(9, stop_token_ids=frozenset({end}), min_tokens=2), {}),
        (greedy_params(cut), {}),
    ):
        item = request("a", PROMPT, params, **rest)
        plain = run(make_runner(CONFIG, WEIGHTS), item)["a"]
        runner = oracle(PROMPT + free, draft_tokens=6, spec_state=spec_state)
        found = run(runner, item)["a"]
        assert timeless(found) == timeless(plain)
        assert [event.finish_reason for event in found[:-1]] == [None] * (len(found) - 1)
        answer = [*PROMPT, *tokens(found)]
        again = request("b", [*answer, 30, 31], greedy_params(6))
        event = run(runner, again)["b"]
        assert event[0].cached_tokens == len(answer) - 1 or len(found) < 4
        assert tokens(event) == drawn([*answer, 30, 31], greedy_params(6))


def test_a_swap_saves_one_state_and_the_inputs_on_top_of_it() -> None:
    whole = PROMPT + drawn(PROMPT, greedy_params(40))
    for spec_state in ("replay", "slots"):
        runner = oracle(whole, right=2, draft_tokens=3, spec_state=spec_state, host_bytes=10**9, native="off")
        runner.add(request("a", PROMPT, greedy_params(40)))
        for _ in range(4):
            runner.step()
        (sequence,) = runner.scheduler.running
        replayed, accepted = sequence.held.replayed, sequence.held.accepted
        assert (replayed, accepted) == ((9, 1) if spec_state == "replay" else (0, 3))
        step_type = type(runner.scheduler.schedule())
        step = step_type()
        runner.scheduler.preemption.preempt(sequence, step, {})
        assert sequence.held.slots == [] and sequence.held.accepted == 1 and sequence.held.batch_slot == -1
        runner.states.move(step)
        saved = runner.states.saved["a"]
        assert saved.state is not None and saved.state.numel() == runner.arena.layout.slot_bytes
        assert [ring.shape[0] for ring in saved.ring] == ([9, 9] if spec_state == "replay" else [])
        runner.arena.buffer.fill_(255)
        assert PROMPT + sequence.tokens[5:] + tokens(run(runner)["a"]) == whole
        assert runner.stats()["recomputes"] == 0


def test_slots_are_reserved_before_the_step_and_given_back() -> None:
    runner = oracle(PROMPT + drawn(PROMPT, greedy_params(9)), draft_tokens=4, spec_state="slots", max_seqs=2)
    runner.add(request("a", PROMPT, greedy_params(9)))
    runner.step()
    assert (
        len(runner.scheduler.running[0].held.slots) == 5 == runner.options.slots_per_seq == runner.stats()["used_slots"]
    )
    run(runner)
    runner.flush_cache()
    assert runner.arena.pool.free_blocks == runner.arena.pool.num_blocks


def test_a_step_without_a_slot_for_each_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the scheduler reserves one slot where 1 + K are needed."""
    runner = oracle(PROMPT + drawn(PROMPT, greedy_params(9)), draft_tokens=4, spec_state="slots")
    monkeypatch.setattr(runner.scheduler.memory, "slots_per_seq", 1)
    runner.add(request("a", PROMPT, greedy_params(9)))
    runner.step()
    with pytest.raises(AssertionError, match="5 tokens to verify, but 1 state slots are reserved"):
        runner.step()


def test_memory_counts_every_slot_of_a_request() -> None:
    """Too little memory for 1 + K slots is an error with the number that suffices; that number works."""
    base = {"speculative": "ngram", "spec_state": "slots", "draft_tokens": 3, "max_len": 64, "page_size": 8}
    layout = ArenaLayout.of(CONFIG, DecoderOptions(**base))
    needed = layout.blocks_for(1, 64) * layout.block_bytes
    with pytest.raises(ValueError, match=f"at least {needed} bytes"):
        make_runner(CONFIG, WEIGHTS, memory_bytes=needed - 1, **base)
    runner = make_runner(CONFIG, WEIGHTS, memory_bytes=needed, draft_policy="fixed", **base)
    assert len(tokens(run(runner, request("a", range(20), greedy_params(44)))["a"])) == 44
    replay = ArenaLayout.of(CONFIG, DecoderOptions(**(base | {"spec_state": "replay"})))
    assert replay.blocks_for(1, 64) == layout.blocks_for(1, 64) - 3
    assert replay.ring_bytes == 16 * sum(slot.inputs for slot in CONFIG.slots) * 4


@pytest.mark.parametrize("budget", [1, 2, 3, 9])
def test_drafts_take_no_tokens_from_others(budget: int) -> None:
    """In a step with a small token budget each request gets one token before any gets a draft."""
    wanted = {str(i): [*PROMPT, 30 + i] for i in range(3)}
    plain = {name: drawn(prompt, greedy_params(8)) for name, prompt in wanted.items()}
    runner = make_runner(CONFIG, WEIGHTS, speculative="ngram", draft_policy="fixed", max_batched_tokens=budget)
    assert runner.speculation is not None
    runner.speculation.new_index = lambda s: Oracle([*s.request.prompt_ids, *plain[s.request_id]], 99)
    found = run(runner, *(request(name, prompt, greedy_params(8)) for name, prompt in wanted.items()))
    assert {name: tokens(events) for name, events in found.items()} == plain


def test_nobody_is_preempted_for_a_draft() -> None:
    """Memory for exactly what the requests need in the end: drafts wait, requests do not."""
    whole = PROMPT + drawn(PROMPT, greedy_params(40))
    layout = ArenaLayout.of(CONFIG, DecoderOptions(page_size=4))
    blocks = 2 * layout.blocks_for(1, 46)
    runner = oracle(whole, right=0, memory_bytes=blocks * layout.block_bytes, max_len=64, draft_tokens=15)
    items: list[DecoderRequest] = [request(name, PROMPT, greedy_params(40)) for name in "ab"]
    found = run(runner, *items)
    assert all(PROMPT + tokens(events) == whole for events in found.values())
    assert runner.stats()["preemptions"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "magic"}, "speculative 'magic' is not one of none, ngram, mtp"),
        ({"spec_state": "undo"}, "spec_state 'undo' is not one of replay, slots"),
        ({"draft_policy": "some"}, "draft_policy 'some' is not one of adaptive, fixed"),
        ({"draft_tokens": 0}, "draft_tokens must be at least 1 and at most 15, not 0"),
        ({"draft_tokens": 16}, "at most 15, not 16"),
        ({"speculative": "mtp", "draft_vocab": 0}, "draft_vocab must be at least 1, not 0"),
        ({"speculative": "ngram", "draft_vocab": 40}, "draft_vocab 40 needs speculative 'mtp', not 'ngram'"),
        ({"draft_vocab": 40}, "draft_vocab 40 needs speculative 'mtp', not 'none'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderOptions(**options)


# -- what is counted, and what is kept ---------------------------------------------------------------------------------


def speculation(**options: Any) -> tuple[Speculation, list[Sequence]]:
    """A policy that always drafts, and three sequences of which the last is still prefilling."""
    made = Speculation(DecoderOptions(**({"speculative": "ngram", "draft_policy": "fixed"} | options)))
    sequences = [Sequence(request(str(index), [1, 2, 3] * 4), index, 50) for index in range(3)]
    for sequence in sequences[:2]:
        sequence.computed = len(sequence.tokens) - 1
    return made, sequences


@pytest.mark.parametrize(
    ("accepted", "tried", "hits"),
    [(0, [1, 0, 0], [0, 0, 0]), (1, [1, 1, 0], [1, 0, 0]), (2, [1, 1, 1], [1, 1, 0]), (3, [1, 1, 1], [1, 1, 1])],
)
def test_drafts_behind_a_refused_one_are_not_counted(accepted: int, tried: list[int], hits: list[int]) -> None:
    made, (sequence, *_) = speculation()
    for _ in range(2):
        made.verified(sequence, 3, accepted)
    stats = made.stats()
    assert [stats[f"drafted_{place}"] for place in (1, 2, 3)] == [2 * count for count in tried]
    assert [stats[f"accepted_{place}"] for place in (1, 2, 3)] == [2 * count for count in hits]
    made.verified(sequence, 0, 0)  # a row that is verified only because of its ring
    assert made.stats() == stats


def test_a_request_that_ends_leaves_nothing_behind() -> None:
    """Neither its index nor its record remains; those of others do."""
    made, sequences = speculation()
    asked: list[int] = []

    def new_index(sequence: Sequence) -> NgramIndex:
        asked.append(sequence.arrival)
        return NgramIndex()

    made.new_index = new_index
    made.ask(sequences)
    made.ask(sequences)
    assert asked == [0, 1]
    assert [s.draft.tokens for s in sequences] == [[1, 2, 3], [1, 2, 3], []] and sequences[2].draft.limit == 0
    assert set(made._indices) == set(made._records) == {0, 1}
    made.forget(sequences[0])
    assert set(made._indices) == set(made._records) == {1}
    made.ask(sequences)
    assert asked == [0, 1, 0]
    runner = make_runner(CONFIG, WEIGHTS, speculative="ngram", draft_policy="fixed")
    run(runner, *(request(name, PROMPT, greedy_params(9)) for name in "abc"))
    assert runner.speculation is not None
    assert not runner.speculation._indices and not runner.speculation._records


def test_samples_share_the_index_of_their_prompt() -> None:
    """What each adds is its own, and nothing of the prompt remains after the last sample."""
    made, prompt = Speculation(DecoderOptions(speculative="ngram", draft_policy="fixed")), [1, 2, 3, 4] * 1000
    sample = request("0", prompt)
    sequences = [Sequence(replace(sample, sample_index=index), index, 50) for index in range(3)]
    for sequence in sequences:
        sequence.computed = len(prompt)
        sequence.tokens.append(1 + sequence.arrival)
    made.ask(sequences)
    assert [s.draft.tokens[:2] for s in sequences] == [[2, 3], [], []]
    indices = list(made._indices.values())
    first = indices[0]._prompt
    assert first is not None and all(index._prompt is first for index in indices)
    assert [len(index._before) for index in (first, *indices)] == [len(prompt), 1, 1, 1]
    gone = weakref.ref(first)
    del first, indices
    for sequence in sequences:
        assert gone() is not None
        made.forget(sequence)
    assert gone() is None


class Heads:
    """A head that has enough state of some sequences."""

    def __init__(self, ready: set[int]) -> None:
        self.known, self.attended = ready, list[bool]()

    def attend(self, awake: bool) -> None:
        self.attended.append(awake)

    def ready(self, sequence: Sequence) -> bool:
        return sequence.arrival in self.known

    def draft(self, rows: list[Row]) -> list[tuple[Sequence, list[int]]]:
        return []


def test_only_those_that_a_head_knows_are_to_get_drafts() -> None:
    made, sequences = speculation(speculative="mtp", draft_tokens=2)
    made.head = head = Heads({1, 2})
    made.ask(sequences)
    assert [s.draft.limit for s in sequences] == [0, 2, 0] and head.attended == [True]


def test_a_step_that_is_measured_has_no_drafts_for_anybody() -> None:
    made, sequences = speculation(draft_policy="adaptive")
    for sequence in sequences:
        sequence.draft.limit = 3
    made.ask(sequences)
    assert [s.draft.limit for s in sequences] == [0, 0, 3]  # the last row does not draw


def step_of(sequences: list[Sequence], drafts: list[int], *, prompt: bool = False) -> Step:
    rows = [Row(s, 1 + count, s.computed, count) for s, count in zip(sequences, drafts, strict=False)]
    return Step(rows=rows + ([Row(sequences[2], 4, 0)] if prompt else []))


def test_a_step_lasts_until_the_next_one_and_only_draws_are_measured() -> None:
    made, sequences = speculation(draft_policy="adaptive")
    seen: list[tuple[int, int, float]] = []
    made.policy.timed = lambda *measured: seen.append(measured)  # type: ignore[method-assign]
    made.timed(step_of(sequences, [2, 1]), 10.0)
    made.timed(step_of(sequences, [0, 0], prompt=True), 13.0)  # a request is still prefilling
    made.timed(step_of(sequences, [0, 0]), 17.0)
    made.timed(step_of(sequences, [0]), 18.5)
    assert seen == [(2, 3, 3.0), (2, 0, 1.5)]
    made.forget(sequences[0])  # not all sequences of the previous step continue
    made.timed(step_of(sequences, [0]), 20.0)
    made.timed(Step(), 21.0)
    made.timed(Step(), 22.0)
    assert seen == [(2, 3, 3.0), (2, 0, 1.5), (1, 0, 1.0)]


@pytest.mark.parametrize(
    ("source", "reason"),
    [("unfound", "unfound"), ("unready", "unready"), ("refused", "refused"), ("unwanted", "unwanted")],
)
def test_a_step_without_drafts_says_why(source: str, reason: str) -> None:
    """Nothing was found; the head has too little state; these drafts are rejected and others' are not; no request wants
    any."""
    made, sequences = speculation(speculative="mtp" if source == "unready" else "ngram")
    made.head = Heads(set()) if source == "unready" else None
    policy, told = made.policy, list[str]()
    policy.idle = told.append  # type: ignore[method-assign]
    policy.wanted = lambda *_: int(source in ("unfound", "unready"))  # type: ignore[method-assign]
    policy.best = lambda *_: int(source == "refused")  # type: ignore[method-assign]
    if source == "unfound":
        sequences[0].tokens[-1] = sequences[1].tokens[-1] = 50
    made.ask(sequences)
    assert told == [reason]
    made.ask([])  # no request decodes, so none is idle
    assert told == [reason]
