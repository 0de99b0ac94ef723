"""Compiled attention with all options gives the results of torch operations, and the same bits however tokens are
batched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import needs_compiled
from gated_decoder import gated, gated_config, grid_positions
from tiny_decoder import FakeSource, make_runner, random_weights, request, run

from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.descriptions import Attention
from decoder.layers.spec import Layer
from decoder.request import DecoderRequest, TokenEvent
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from kernels.rope import Rope

pytestmark = needs_compiled
WIDE = Rope(64, 1e7, (0, 1, 2) * 10 + (1, 0))
PLAIN: dict[str, Any] = {"rope": None, "gate": False, "qk_norm": None}
CHANGES: dict[str, dict[str, Any]] = {
    "all": {},
    "rope": PLAIN | {"rope": Rope(8, 50.0)},
    "gate": PLAIN | {"gate": True},
    "norms": PLAIN | {"qk_norm": 1e-5},
    "whole norms": PLAIN | {"qk_norm": 1e-5, "qk_norm_whole": True, "rope": Rope(8, 50.0)},
    "biases": {"attention_bias": True},
    "wide": {"head_dim": 256, "rope": WIDE},
    "window": {"window": 5, "gate": False, "head_gate": True},
    "window of one": PLAIN | {"window": 1, "head_gate": True, "attention_bias": True},
}


def config_of(pattern: str = "*-M*", **changes: Any) -> DecoderConfig:
    """Its second attention has another shape than its first."""
    config = gated_config(pattern, **({"head_dim": 12} | changes))
    layers = [*config.layers]
    at = max(index for index, mixer in enumerate(config.mixers) if isinstance(mixer, Attention))
    other = Attention(config.hidden_size, 3, 3, 72 if "head_dim" in changes else 16)
    layers[at] = Layer((("mixer", gated(other, **{k: v for k, v in changes.items() if k != "head_dim"})),))
    return replace(config, layers=tuple(layers))


def scored(runner: DecoderRunner) -> dict[str, list[TokenEvent]]:
    """Events of prompts with images and without, in one step and in several."""
    rows = torch.randn(6, runner.config.hidden_size, generator=torch.Generator().manual_seed(3))
    runner.arena.buffer.fill_(255)

    def asked(name: str, before: int, grid: tuple[int, int] | None, after: int, bias: int) -> DecoderRequest:
        params = SamplingParams(
            max_tokens=7, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0, logit_bias={bias: 1e6}
        )
        prompt = [(7 * index + bias) % 97 for index in range(before + 6 * bool(grid) + after)]
        if grid is None:
            return request(name, prompt, params)
        spans = [FakeSource(before, 6, name.encode(), rows)]
        return request(name, prompt, params, spans, positions=grid_positions(len(prompt), (before, *grid)))

    return run(
        runner,
        asked("a", 5, (2, 3), 30, 4),
        asked("b", 1, (3, 2), 3, 9),
        asked("c", 20, None, 0, 7),
        asked("d", 1, None, 0, 7),
    )


def numbers(events: dict[str, list[TokenEvent]]) -> torch.Tensor:
    """Every log-probability, in order."""
    each = [events[name] for name in sorted(events)]
    found = [[score.logprob for event in of for score in event.prompt_scores] for of in each]
    found += [[event.logprob for event in of if event.logprob is not None] for of in each]
    return torch.tensor([number for of in found for number in of], dtype=torch.float64)


@pytest.mark.parametrize("changes", CHANGES)
def test_float32_equals_the_operations(changes: str) -> None:
    config = config_of(**CHANGES[changes])
    weights = dict(random_weights(config))
    fast, slow = (make_runner(config, weights, native=mode, page_size=4, max_chunk=9) for mode in ("on", "off"))
    assert fast.model.native is not None and fast.model.native.max_singles > 0, "nothing is called"
    torch.testing.assert_close(numbers(scored(fast)), numbers(scored(slow)), rtol=0, atol=2e-5)


def test_bfloat16_is_no_further_from_float32_than_the_operations() -> None:
    config = config_of("*-*-M*-")
    weights = dict(random_weights(config))
    exact = numbers(scored(make_runner(config, weights, native="off")))
    fast, slow = (
        numbers(scored(make_runner(config, weights, native=mode, dtype=torch.bfloat16))) for mode in ("on", "off")
    )
    assert 0 < (fast - exact).square().mean() <= 1.5 * (slow - exact).square().mean()


@pytest.mark.parametrize(
    ("changes", "dtype", "kind"),
    [
        pytest.param("all", torch.float32, None, id="fp32"),
        pytest.param("all", torch.bfloat16, None, id="bf16"),
        pytest.param("all", torch.bfloat16, "int8", id="int8"),
        pytest.param("all", torch.float32, "int4", id="int4"),
        pytest.param("wide", torch.float32, None, id="wide-fp32"),
        pytest.param("wide", torch.bfloat16, None, id="wide-bf16"),
        pytest.param("window", torch.float32, None, id="window-fp32"),
        pytest.param("window", torch.bfloat16, "int8", id="window-int8"),
    ],
)
def test_bits_do_not_depend_on_how_a_token_came(changes: str, dtype: torch.dtype, kind: str | None) -> None:
    """Whole, in chunks, token by token, in a batch, as drafts, with several threads."""
    config = config_of(**CHANGES[changes])
    weights = dict(random_weights(config))

    def found(**options: Any) -> torch.Tensor:
        given: dict[str, Any] = {"native": "on", "dtype": dtype, "weights": kind, "page_size": 4, "max_len": 256}
        return numbers(scored(DecoderRunner(config, DecoderOptions(**(given | options)), weights.items())))

    whole = found(max_seqs=1)
    assert whole.isfinite().all()
    for options in (
        {"max_chunk": 1}, {"max_chunk": 5}, {"max_batched_tokens": 6, "max_seqs": 4},
        {"speculative": "ngram", "draft_policy": "fixed", "spec_state": "slots"}, {"speculative": "ngram"},
    ):  # fmt: skip
        assert torch.equal(found(**options), whole), options
    torch.set_num_threads(3)
    assert torch.equal(found(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("width", "window"), [(40, None), (256, None), (40, 150)])
def test_bits_do_not_depend_on_chunks_where_scores_of_any_size_come_late(
    width: int, window: int | None, dtype: torch.dtype
) -> None:
    """Over several windows of keys; a chunk is up to 16 queries of a key/value head, or more."""
    config = gated_config("*", head_dim=width, **PLAIN, window=window)
    weights = dict(random_weights(config))
    weights["model.layers.0.mixer.q_proj.weight"] *= 4000 / width
    prompt = torch.randint(97, (410,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = []
    for chunk in (512, 1, 3, 8, 33):
        runner = make_runner(config, weights, native="on", dtype=dtype, max_len=512, page_size=16, max_chunk=chunk)
        found.append(numbers(run(runner, request("a", prompt, params))))
    assert found[0].isfinite().all() and len(found[0].unique()) > 100
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_more_axes_than_positions_have_are_refused() -> None:
    config = gated_config("*")
    with pytest.raises(ValueError, match="position_axes 2 is below the 3 that layers read"):
        replace(config, position_axes=2)
