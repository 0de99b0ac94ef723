"""A whole tiny decoder on the Triton kernels, in the interpreter where there is no GPU, against the references."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from gated_decoder import gated_config
from tiny_decoder import (
    both_norms,
    delta_config,
    greedy_params,
    make_runner,
    random_weights,
    request,
    run,
    tiny_config,
    tokens,
)
from triton.runtime.interpreter import InterpretedFunction
from triton_kernels import DEVICE

from decoder.request import DecoderRequest
from decoder.sampler import Sampler
from decoder.sampling import SamplingParams
from decoder.sequence import Sequence
from kernels.dispatch import forced
from kernels.launch import recording

PROMPTS = {"a": [5, 9, 2, 5, 9, 2, 5, 9, 2, 5], "b": [4, 4, 4, 4]}


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        pytest.param("M*E", {"graphs": "off"}, id="eager"),
        pytest.param(
            "M*", {"graphs": "on", "state_cache": "all", "state_block": 8, "page_size": 8}, id="graphs-checkpoints"
        ),
        pytest.param("MM", {"speculative": "ngram", "draft_tokens": 2, "spec_state": "slots"}, id="drafts-in-slots"),
        pytest.param("MM", {"speculative": "ngram", "draft_tokens": 2, "spec_state": "replay"}, id="drafts-replayed"),
        pytest.param(
            "G*", {"graphs": "on", "state_cache": "all", "state_block": 8, "page_size": 8}, id="delta-checkpoints"
        ),
        pytest.param("GG", {"speculative": "ngram", "draft_tokens": 2, "spec_state": "slots"}, id="delta-slots"),
        pytest.param("G*", {"speculative": "ngram", "draft_tokens": 2, "spec_state": "replay"}, id="delta-replayed"),
        pytest.param(
            "S*", {"graphs": "on", "state_cache": "all", "state_block": 8, "page_size": 8}, id="short-checkpoints"
        ),
        pytest.param("SS", {"speculative": "ngram", "draft_tokens": 2, "spec_state": "slots"}, id="short-slots"),
        pytest.param("SM", {"speculative": "ngram", "draft_tokens": 2, "spec_state": "replay"}, id="short-replayed"),
    ],
)
def test_kernels_give_what_the_references_give(pattern: str, options: dict[str, Any]) -> None:
    # With the gated delta rule, attention is gated, normed and has positions of three axes; with short convolutions it
    # has a window and a gate per head, both have norms on both sides, and the convolutions have seven taps.
    config = delta_config(pattern)
    if "G" in pattern or pattern == "S*":
        config = gated_config(pattern, **({} if "G" in pattern else {"gate": False, "head_gate": True, "window": 5}))
    config = both_norms(config) if pattern == "S*" else config
    weights = dict(random_weights(config))
    device = str(DEVICE)

    def answers(choice: Any) -> dict[str, tuple[list[int], list[float]]]:
        with forced(choice):
            small = {"max_seqs": 2, "max_len": 16, "max_batched_tokens": 16}
            runner = make_runner(config, weights, native="off", device=device, **small, **options)
            requests = [request(name, prompt, greedy_params(3, logprobs=0)) for name, prompt in PROMPTS.items()]
            events = run(runner, *requests)
        return {name: (tokens(row), [event.logprob or 0.0 for event in row]) for name, row in events.items()}

    with torch.no_grad():
        expected, found = answers("reference"), answers("triton")
    assert found.keys() == expected.keys()
    for name, (ids, logprobs) in expected.items():
        assert found[name][0] == ids
        assert found[name][1] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("pattern", ["M*", "G*"])
def test_rings_of_several_sequences_are_emptied_together(pattern: str) -> None:
    """Their states are written to the slot from which they continue, and to another one."""
    config = gated_config(pattern) if "G" in pattern else tiny_config(pattern)
    weights = dict(random_weights(config))

    def emptied(choice: Any) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        with forced(choice):
            runner = make_runner(
                config, weights, native="off", device=str(DEVICE), max_seqs=3, max_len=16, max_batched_tokens=16,
                speculative="ngram", draft_tokens=2, spec_state="replay", graphs="off",
            )  # fmt: skip
            arena = runner.arena
            held = (*arena.states, *arena.windows)
            for tensor in (*held, *arena.rings):
                tensor.copy_(torch.randn(tensor.shape, generator=draw))
            runner.model.advance([(0, 1, 1, 3), (2, 0, 2, 5), (1, 3, 3, 2)])
        return [tensor.cpu() for tensor in held]

    with torch.no_grad():
        expected, found = emptied("reference"), emptied("triton")
    for exact, state in zip(expected, found, strict=True):
        torch.testing.assert_close(state, exact, rtol=1e-4, atol=1e-5)


def test_draws_are_compiled_before_the_first_step() -> None:
    """Without masks and with masks, for any number of rows: how their numbers are aligned must not matter."""
    rows = []
    for slot in range(5):
        rows.append(Sequence(DecoderRequest(str(slot), [1], SamplingParams(seed=slot)), slot, 16))
        rows[-1].held.batch_slot = rows[-1].held.admission = slot
    with forced("triton"), recording("sm_90") as launches:
        sampler = Sampler(97, len(rows), DEVICE, compiled=False)
        compiled = {(launch.kernel.__name__, launch.arguments["MASKED"]) for launch in launches}
        for count in range(1, len(rows) + 1):
            sampler.draw(torch.zeros(count, 97, device=DEVICE), rows[:count])
    kernels = {launch.kernel.__name__: launch.kernel for launch in launches}
    assert compiled == {(name, masked) for name in kernels for masked in (False, True)}
    varying = set()
    for name, kernel in kernels.items():
        drawn = [each.arguments for each in launches if each.kernel.__name__ == name and not each.arguments["MASKED"]]
        pointers = [argument for argument in drawn[0] if argument.startswith("p_")]
        varied = {pointer for pointer in pointers if len({each[pointer].data_ptr() % 16 == 0 for each in drawn}) > 1}
        assert varied <= set(getattr(kernel, "kwargs", vars(kernel))["do_not_specialize_on_alignment"])
        varying |= varied
    assert varying == {"p_top_p", "p_seeds", "p_positions", "p_masks"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter, not a GPU")
def test_no_kernel_is_compiled_again_for_another_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each set of constants Triton compiles a kernel for each class of an integer (1, multiples of 16, others) and
    alignment of a pointer, when a step meets it. Here pointers to integers: small models have rows of odd sizes."""
    seen, varied = defaultdict[Any, set[Any]](set), defaultdict[str, set[bool]](set)
    run_kernel = InterpretedFunction.run

    def watched(self: Any, *args: Any, **given: Any) -> Any:
        constants = {name for name, kind in self.fn.__annotations__.items() if "constexpr" in str(kind)}
        key = (self.fn.__module__, self.fn.__name__, *((name, given[name]) for name in sorted(constants)))
        fixed, unaligned = (
            self.kwargs[f"do_not_specialize{of}"] or () for of in ("", "_on_alignment")
        )  # fmt: skip
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                varied[name].add(value.data_ptr() % 16 == 0)
                if name not in unaligned:
                    seen[key, name].add(value.data_ptr() % 16 == 0)
            elif type(value) is int and name in self.arg_names and name not in {*constants, *fixed}:
                seen[key, name].add((value == 1, value % 16 == 0))
        return run_kernel(self, *args, **given)

    monkeypatch.setattr(InterpretedFunction, "run", watched)
    small: dict[str, Any] = {"max_seqs": 3, "max_len": 16, "max_batched_tokens": 16, "graphs": "off", "native": "off"}
    drafts = {"speculative": "ngram", "draft_tokens": 2, "spec_state": "replay"}
    with torch.no_grad(), forced("triton"):
        runner = make_runner(gated_config("MG*"), **small, **drafts)
        for name, prompt in {"a": [5, 9, 2], "b": [4, 4], "c": [7]}.items():
            runner.add(request(name, prompt, greedy_params(3)))
            runner.step()
        while runner.has_work:
            runner.step()
        for ring in runner.arena.rings:
            ring.zero_()
        for rows in (1, 2, 3):
            runner.model.advance([(row, row, row, 2) for row in range(rows)])
    assert {name for name, alignments in varied.items() if len(alignments) > 1} >= {"p_slots", "p_lengths", "p_counts"}
    assert not [key for key, classes in seen.items() if len(classes) > 1]
