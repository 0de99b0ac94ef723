"""Positions that differ from token indices: every way of computing a request gives its result alone, whole and
uncached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from gated_decoder import gated_config, grid_positions
from tiny_decoder import FakeSource, greedy_params, make_runner, preempt, random_weights, request, run, tokens
from torch import Tensor

from decoder.positions import Positions
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams

CONFIG = gated_config("M*-M*")
SHARP = {"q_norm.weight": 2.0, "k_norm.weight": 2.0}
"""Attention on few tokens, so that positions matter."""
WEIGHTS = {
    name: tensor * SHARP.get(name.partition("mixer.")[2], 1.0) for name, tensor in random_weights(CONFIG, seed=6)
}
ROWS = torch.randn(12, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3))
OPTIONS: dict[str, Any] = {"page_size": 4, "state_block": 8, "max_len": 96, "max_seqs": 4, "memory_bytes": 2**19}


def image(start: int, rows: Tensor = ROWS) -> FakeSource:
    """An image whose key does not depend on its grid."""
    return FakeSource(start, rows.shape[0], b"image", rows)


def prompt_with(name: str, before: list[int], grid: tuple[int, int], after: list[int], **rest: Any) -> DecoderRequest:
    """A prompt of text, an image of 12 tokens in a grid, and text."""
    prompt, start = [*before, *[0] * 12, *after], len(before)
    positions = grid_positions(len(prompt), (start, *grid))
    return request(name, prompt, rest.pop("params", greedy_params(14)), [image(start)], positions=positions, **rest)


SYSTEM = list(range(40, 50))


def requests() -> list[DecoderRequest]:
    """Equal tokens and keys with different grids; images in the middle and at an end; text without given positions."""
    return [
        prompt_with("wide", SYSTEM, (3, 4), [7, 8, 9], checkpoint_at=(10,)),
        prompt_with("high", SYSTEM, (4, 3), [7, 8, 9], checkpoint_at=(10,)),
        prompt_with("flat", SYSTEM, (1, 12), [7, 8, 9, 3], checkpoint_at=(10,)),
        prompt_with("end", [5, 21, 9], (6, 2), []),
        request("text", [*SYSTEM, 7, 8, 9], greedy_params(12), checkpoint_at=(10,)),
        prompt_with("drawn", [5, 5], (6, 2), [4] * 7, params=SamplingParams(max_tokens=12, seed=4, temperature=1.0)),
    ]


def runner_with(**options: Any) -> DecoderRunner:
    runner = make_runner(CONFIG, WEIGHTS, **(OPTIONS | options))
    runner.arena.buffer.fill_(255)
    return runner


@cache
def expected() -> dict[str, list[int]]:
    """Operation by operation, alone, whole, uncached."""
    return {
        item.request_id: tokens(run(runner_with(native="off", state_cache="none"), item)[item.request_id])
        for item in requests()
    }


class Knows:
    """Drafts that are right except for every third token."""

    def __init__(self, request: DecoderRequest) -> None:
        self.answer, self.prompt = expected()[request.request_id], len(request.prompt_ids)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        first = len(tokens) - self.prompt
        return [
            token if (first + i) % 3 else (token + 1) % 97 for i, token in enumerate(self.answer[first : first + count])
        ]


def test_positions_matter() -> None:
    """Without this, the other tests of this file would show nothing."""
    counted = [replace(item, positions=None) for item in requests()]
    found = {item.request_id: tokens(run(runner_with(), item)[item.request_id]) for item in counted}
    assert [name for name, of in expected().items() if of == found[name]] == ["text"]
    assert len({tuple(expected()[name]) for name in ("wide", "high", "flat")}) == 3


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="cached"),
        pytest.param({"native": "off", "state_cache": "all"}, id="operations-all"),
        pytest.param({"max_chunk": 3, "state_cache": "align"}, id="chunks-align"),
        pytest.param({"max_chunk": 5, "native": "off"}, id="operations-chunks"),
        pytest.param({"max_batched_tokens": 7}, id="mixed"),
        pytest.param({"graphs": "on", "max_capture": 32}, id="graphs"),
        pytest.param({"graphs": "on", "max_capture": 32, "native": "off", "max_chunk": 6}, id="graphs-operations"),
        pytest.param({"overlap": "on"}, id="overlapped"),
        pytest.param({"overlap": "on", "graphs": "on", "max_chunk": 5}, id="overlapped-graphs"),
        pytest.param({"speculative": "ngram"}, id="drafts-replay"),
        pytest.param({"speculative": "ngram", "spec_state": "slots", "native": "off"}, id="drafts-slots"),
        pytest.param({"speculative": "ngram", "graphs": "on", "max_chunk": 5}, id="drafts-graphs"),
        pytest.param({"preempt_every": 3}, id="swapped"),
        pytest.param({"preempt_every": 8, "host_bytes": 0, "max_chunk": 5}, id="recomputed"),
        pytest.param({"preempt_every": 4, "max_chunk": 9, "speculative": "ngram", "overlap": "on"}, id="all-of-it"),
    ],
)
def test_in_any_way_of_computing(options: dict[str, Any]) -> None:
    often = options.pop("preempt_every", 0)
    if options.get("speculative"):
        options |= {"draft_policy": "fixed", "draft_tokens": 3}
    runner = runner_with(**({"host_bytes": 10**9} | options))
    if runner.speculation is not None:
        runner.speculation.new_index = lambda sequence: Knows(sequence.request)
    for number in range(3):
        found = run(runner, *requests(), preempt_every=often)
        assert {name: tokens(events) for name, events in found.items()} == expected(), f"round {number}"
    stats = runner.stats()
    assert stats["cache_hits"] > 6
    if often:
        assert stats["preemptions"] > 4 and (stats["recomputes"] > 0) == (options.get("host_bytes") == 0)
    if "graphs" in options:
        assert sum(count for name, count in stats.items() if name.startswith("replays_")) > 10
    if "speculative" in options:
        assert 20 < stats["accepted_1"] and stats["accepted_3"] < stats["drafted_3"], "some are rejected"


def test_equal_images_of_other_grids_share_what_is_before_them() -> None:
    runner = runner_with()
    wide, high, *_ = requests()
    assert run(runner, wide)["wide"][0].cached_tokens == 0
    events = run(runner, high)["high"]
    assert (events[0].cached_tokens, tokens(events)) == (10, expected()["high"])
    again = run(runner, replace(high, request_id="again", spans=(image(10),)))["again"]
    assert again[0].cached_tokens > 22 and tokens(again) == expected()["high"]


def test_what_follows_an_image_is_not_shared_either() -> None:
    """A page of text only: equal tokens, after images with the same key and number of tokens but other grids."""
    runner = runner_with(state_cache="all", state_block=8)
    for grid in ((3, 4), (4, 3), (2, 6)):
        item = prompt_with("a", SYSTEM, grid, list(range(60, 80)))
        events = run(runner, item)["a"]
        assert events[0].cached_tokens <= 10
        alone = prompt_with("a", SYSTEM, grid, list(range(60, 80)))
        assert tokens(events) == tokens(run(runner_with(native="off", state_cache="none"), alone)["a"])


def test_counted_positions_are_those_of_text() -> None:
    """A prompt with explicit default positions shares its cache entries with one without positions, in both
    directions."""
    runner = runner_with()
    prompt = list(range(3, 40))
    counted = Positions([(index,) * 3 for index in range(37)], 0)
    first, second = request("first", prompt), request("second", prompt, positions=counted)
    before, after = run(runner, first)["first"], run(runner, second)["second"]
    assert after[0].cached_tokens >= 32 and tokens(before) == tokens(after)


@pytest.mark.parametrize("options", [{}, {"native": "off"}, {"graphs": "on"}, {"speculative": "ngram"}], ids=str)
def test_samples_of_one_prompt(options: dict[str, Any]) -> None:
    def samples() -> list[DecoderRequest]:
        params = SamplingParams(max_tokens=10, seed=7, temperature=1.0)
        return [prompt_with(f"s{i}", SYSTEM, (3, 4), [7, 8], params=params, sample_index=i) for i in range(3)]

    runner = runner_with(**options)
    first, *others = samples()
    runner.add(first, *others)
    found = {name: tokens(events) for name, events in run(runner).items()}
    assert runner.stats()["forks"] == 2
    alone = {s.request_id: tokens(run(runner_with(state_cache="none"), s)[s.request_id]) for s in samples()}
    assert found == alone and len({tuple(of) for of in found.values()}) == 3


@pytest.mark.parametrize("options", [{}, {"native": "off", "max_chunk": 4}], ids=str)
@pytest.mark.parametrize("cut", [1, 6, 11])
def test_a_resumed_answer_goes_on(cut: int, options: dict[str, Any]) -> None:
    for item in requests()[:3]:
        whole = expected()[item.request_id]
        events = run(runner_with(**options), replace(item, output_ids=whole[:cut]))[item.request_id]
        assert tokens(events) == whole[cut:]


def test_preempted_before_its_image_is_there() -> None:
    """It is computed up to the image, swapped out, and continues with the image's positions."""
    for host_bytes in (0, 10**9):
        runner = runner_with(host_bytes=host_bytes)
        source = FakeSource(10, 12, b"image", ROWS, ready=False)
        item = replace(requests()[0], spans=(source,))
        runner.add(item)
        runner.step()
        preempt(runner, "wide")
        runner.step()
        source.ready = True
        assert tokens(run(runner)["wide"]) == expected()["wide"]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        pytest.param(Positions([(0,) * 3] * 4, 0), "for 4 tokens, but the prompt has 5", id="tokens"),
        pytest.param(Positions([(0,) * 2] * 5, 0), "have 2 axes, but the model reads 3", id="axes"),
        pytest.param(Positions([(0, -1, 0)] * 5, 0), "from -1 to 12, but must be between 0 and 95", id="negative"),
        pytest.param(Positions([(0, 96, 0)] * 5, 0), "from 0 to 96, but must be between 0 and 95", id="large"),
        pytest.param(Positions([(0,) * 3] * 5, -6), "from -1 to 6, but must be between 0 and 95", id="drawn-low"),
        pytest.param(Positions([(0,) * 3] * 5, 84), "from 0 to 96, but must be between 0 and 95", id="drawn-high"),
    ],
)
def test_positions_that_no_token_can_have_are_refused(positions: Positions, message: str) -> None:
    runner = runner_with()
    with pytest.raises(ValueError, match=message):
        runner.add(request("a", [1, 2, 3, 4, 5], positions=positions))
    assert not runner.has_work
    runner.check_integrity()


def test_a_model_that_reads_no_positions_refuses_them() -> None:
    runner = make_runner(gated_config("*", rope=None).__class__(97, 32, CONFIG.layers[:1]))
    with pytest.raises(ValueError, match="but the model reads none"):
        runner.add(request("a", [1], positions=Positions([()], 0)))
