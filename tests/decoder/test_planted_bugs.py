"""Five bugs that servers of such models have shipped, each planted in our code by changing one line. Each check has to
pass on the original code and to fail with the bug; otherwise it would be useless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from planting import planted
from tiny_decoder import greedy_params, make_runner, random_weights, request, run, tiny_config, tokens

from decoder.capture import _strides, capture_sizes, decode_sizes
from decoder.config import DecoderOptions
from decoder.graphs import DecoderGraphs, capture_plan
from decoder.metadata import prefilling_rows
from decoder.runner import DecoderRunner
from kernels.graphs import ReplayError

CONFIG = tiny_config("M*M")
WEIGHTS = dict(random_weights(CONFIG))


def runner_of(**options: Any) -> DecoderRunner:
    return make_runner(CONFIG, WEIGHTS, **{"graphs": "on", "max_seqs": 4, **options})


def decode_steps_replay_decode_graphs() -> None:
    """Rows left by an aborted prefill do not turn a decode step into a mixed one."""
    runner = runner_of()
    runner.add(request("stays", [1, 2, 3], greedy_params(9)))
    runner.step()
    for name in "bc":
        runner.add(request(name, range(40), greedy_params(2)))
    runner.step()
    for name in "bc":
        runner.abort(name)
    before = sum(count for name, count in runner.stats().items() if name.startswith("replays_mixed"))
    run(runner)
    after = sum(count for name, count in runner.stats().items() if name.startswith("replays_mixed"))
    assert after == before, "a decode step was taken for a mixed one"


def every_kind_has_buffers_of_its_own() -> None:
    """Storage and values: interleaved decode and mixed steps give the results of eager ones."""
    found = []
    for graphs in ("off", "on"):
        runner = runner_of(graphs=graphs, max_chunk=3)
        requests = [request(str(i), range(i, i + 9 + i), greedy_params(6)) for i in range(6)]
        found.append({name: tokens(events) for name, events in run(runner, *requests).items()})
    assert found[0] == found[1]


def the_largest_size_is_captured(largest: int) -> None:
    """On the stride or off it, and a step of that size is a replay."""
    assert capture_sizes(largest, 1024)[-1] == largest == decode_sizes(largest, 1024)[-1]
    runner = make_runner(tiny_config("M"), graphs="on", max_batched_tokens=largest, max_capture=1024, max_len=1024)
    runner.add(request("a", [3] * largest, greedy_params(1)))
    runner.step()
    assert runner.stats().get("eager_larger", 0) == 0, "a step of the largest size ran eagerly"


def the_lists_are_whole() -> None:
    """The captured sizes are those of the options, and mixed sizes exceed the number of requests."""
    runner = runner_of(max_batched_tokens=100)
    plan = runner.forward.graphs.plan if runner.forward.graphs else None
    assert plan is not None
    assert list(plan.mixed) == capture_sizes(100, 512) and list(plan.decode) == decode_sizes(4, 512)
    runner.forward.graphs.check_integrity()  # type: ignore[union-attr]


def a_row_to_verify_has_a_slot_for_each_token() -> None:
    """Under `slots` every sequence reserves 1 + K slots before the step."""
    runner = make_runner(CONFIG, WEIGHTS, speculative="ngram", draft_policy="fixed", spec_state="slots", draft_tokens=3)
    run(runner, request("a", [1, 2, 3, 4] * 6, greedy_params(12, logit_bias={1: 50.0})))
    assert runner.stats()["drafted_1"] > 0, "nothing was drafted"


class Bug(NamedTuple):
    function: Callable[..., Any]
    line: str
    bug: str
    check: Callable[[], None]
    fails: type[Exception]
    message: str | None = None


SLOTS_PER_SEQ = DecoderOptions.slots_per_seq.fget  # type: ignore[attr-defined]

BUGS = [
    pytest.param(
        Bug(
            prefilling_rows, "row < num_reqs and done < total", "done < total",
            decode_steps_replay_decode_graphs, AssertionError, "taken for a mixed one",
        ),
        id="stale-is-prefilling-rows",
    ),
    pytest.param(
        Bug(
            DecoderGraphs.__init__,
            "self.padded_tokens = 0",
            "self.padded_tokens = 0; self.buffers['mixed'].tensors['slots'] = self.buffers['decode'].tensors['slots']",
            every_kind_has_buffers_of_its_own, ReplayError, "share memory",
        ),
        id="buffers-shared-between-groups",
    ),
    *[
        pytest.param(
            Bug(
                _strides, "sizes.add(cap)", "pass",
                lambda largest=largest: the_largest_size_is_captured(largest), AssertionError, str(largest),
            ),
            id=f"off-stride-maximum-{largest}",
        )
        for largest in (257, 700)
    ],
    pytest.param(
        Bug(
            capture_plan, "tuple(capture_sizes(options.max_batched_tokens, options.max_capture))",
            "tuple(s for s in capture_sizes(options.max_batched_tokens, options.max_capture) if s <= options.max_seqs)",
            the_lists_are_whole, AssertionError,
        ),
        id="list-shortened-to-the-number-of-requests",
    ),
    pytest.param(
        Bug(
            DecoderGraphs._capture, "self.plan.buckets", "self.plan.buckets[2:]",
            the_lists_are_whole, ReplayError, "captured graphs are",
        ),
        id="list-shortened-while-it-is-captured",
    ),
    pytest.param(
        Bug(
            SLOTS_PER_SEQ, "1 + self.num_drafts", "1",
            a_row_to_verify_has_a_slot_for_each_token, AssertionError, "1 state slots are reserved",
        ),
        id="draft-slots-not-reserved",
    ),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_fails_with_its_bug_and_passes_without(bug: Bug) -> None:
    bug.check()
    with planted(bug.function, bug.line, bug.bug), pytest.raises(bug.fails, match=bug.message):
        bug.check()
    bug.check()
