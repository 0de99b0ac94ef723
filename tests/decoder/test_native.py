"""The compiled decode step compared with the same model computed operation by operation."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import needs_compiled
from speculation import answers
from tiny_decoder import (
    both_norms,
    delta_config,
    greedy_params,
    image,
    parallel_config,
    random_weights,
    request,
    run,
    tiny_config,
)

from decoder.config import WEIGHT_KINDS, DecoderConfig, DecoderOptions
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.experts import ExpertsMixer
from decoder.layers.mlp import MlpMixer
from decoder.layers.recurrent_descriptions import Mamba2
from decoder.layers.spec import Layer, MixerSpec
from decoder.native import NativeStep
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from kernels.linear import quantise
from kernels.native.instruction_sets import compact_weights
from kernels.native.structs import Kind, Step

pytestmark = needs_compiled
DELTA_ODD = {"num_key_heads": 1, "num_value_heads": 3, "key_head_dim": 9, "value_head_dim": 21}
PROMPTS = [[1, 5, 9, 2], [7] * 21, [3], [4, 8] * 9, [6, 6, 6], [2, 1]]


def _logits(config: DecoderConfig, options: DecoderOptions, steps: int = 6) -> tuple[list[torch.Tensor], DecoderRunner]:
    """The logits of each decode step of all prompts together; every runner is fed the same tokens."""
    runner = DecoderRunner(config, options, random_weights(config))
    found: list[torch.Tensor] = []
    sample = runner.sampler.sample

    def keep(logits: torch.Tensor, sequences: object, *rest: object) -> object:
        found.append(logits.float().clone())
        return sample(logits, sequences, *rest)  # type: ignore[arg-type]

    runner.sampler.sample = keep  # type: ignore[assignment,method-assign]
    for index, prompt in enumerate(PROMPTS):
        bias = {(index + 3) % config.vocab_size: 1e6}  # every runner draws the same tokens, whatever it computes
        params = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True, logit_bias=bias)
        runner.add(DecoderRequest(f"r{index}", prompt, params))
    while runner.has_work:
        runner.step()
    return found, runner


@pytest.mark.parametrize("pattern", ["M*-M", "M", "*-", "-", "MEE*E"])
@pytest.mark.parametrize("groups", [1, 2])
def test_float32_equals_the_operations(pattern: str, groups: int) -> None:
    config = tiny_config(pattern=pattern, n_groups=groups)
    options = DecoderOptions(max_seqs=8, max_len=64, page_size=4)
    (fast, runner), (slow, plain) = (_logits(config, replace(options, native=mode)) for mode in ("on", "off"))
    assert runner.model.native is not None and plain.model.native is None
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


OWN = {"scales": (0.4, 1.7, 0.6, 1.2)}


@pytest.mark.parametrize(
    ("config", "called"),
    [
        pytest.param(parallel_config("P-P", OWN | {"gated_norm": "norm_first"}), False, id="norm-first"),
        pytest.param(parallel_config("*P", OWN | {"gated_norm": "gate_only", "n_groups": 1}), False, id="gate-only"),
        pytest.param(parallel_config("P*-", {"conv_kernel": 5}), True, id="called"),
    ],
)
def test_mixers_in_parallel(config: DecoderConfig, called: bool) -> None:
    """They are compiled, unless the convolution has too many taps: then the layer is called."""
    options = DecoderOptions(max_seqs=8, max_len=64, page_size=4)
    (fast, runner), (slow, _) = (_logits(config, replace(options, native=mode)) for mode in ("on", "off"))
    native = runner.model.native
    assert native is not None
    for layer in runner.model.trunk.layers:
        assert any(map(native.calls, layer.mixers)) == (called and len(layer.mixers) == 2)
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("before", [False, True], ids=["after", "before-and-after"])
def test_norms_after_layers(before: bool) -> None:
    """They are compiled for all mixers but experts, whose layers are called."""
    plain = delta_config("M*-EGS*", hidden_size=48)
    how = {"residual_scale": 0.7, "norm_before": before, "norm_after": True}
    config = replace(plain, layers=tuple(replace(layer, **how) for layer in plain.layers))
    options = DecoderOptions(max_seqs=8, max_len=64, page_size=4)
    (fast, runner), (slow, _) = (_logits(config, replace(options, native=mode)) for mode in ("on", "off"))
    native = runner.model.native
    assert native is not None
    called = [native.calls(layer.mixers[0]) for layer in runner.model.trunk.layers]
    assert called == [False, False, False, True, False, False, False]
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


BUFFERS = """
import torch
from kernels.host_memory import keep_freed_memory
from resident import pages_in_memory
from tiny_decoder import make_runner, tiny_config

assert keep_freed_memory()
freed = [torch.ones(1 << 20) for _ in range(20)]  # 80 MiB of the C allocator's memory, and a piece behind them
behind = torch.ones(16)
del freed
native = make_runner(tiny_config(pattern="M*-M"), max_batched_tokens=1 << 15, native="on").model.native
buffers = (native.x, native.wide, native.operand)
assert sum(buffer.nbytes for buffer in buffers) > 16 << 20
print(sum(map(pages_in_memory, buffers)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux which pages are in memory")
def test_buffers_take_no_memory_before_a_step_fills_them() -> None:
    """Also if the C allocator has freed memory, as after loading: buffers in it would be resident by chance."""
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])])
    told = subprocess.run(
        [sys.executable, "-c", BUFFERS], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert not told.returncode, told.stderr
    assert int(told.stdout) == 0


def test_experts_take_many_tokens_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(pattern="ME*E")
    options = DecoderOptions(max_seqs=8, max_len=64, page_size=4, native="on", dtype=torch.bfloat16)
    whole, _ = _logits(config, options)
    for module in ("native", "operations"):
        monkeypatch.setattr(f"decoder.{module}.MAX_ROUTED", 4)
    blocks, runner = _logits(config, options)
    native = runner.model.native
    assert native is not None and not any(
        native.calls(mixer) for layer in runner.model.trunk.layers for mixer in layer.mixers
    )
    for ours, theirs in zip(blocks, whole, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not compact_weights(), reason="the instruction set in use has no compact weights")
def test_experts_that_are_compact_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights whose exponents are far apart stay in 16 bits."""
    config = tiny_config(pattern="ME*E")
    weights = dict(random_weights(config))
    for name in (name for name in weights if name.endswith("experts.up_proj")):
        weights[name][1, ::2] *= 2.0**-40
    prompts = [[1, 5, 9, 2], [7] * 21, [4, 8] * 9]

    def answered() -> tuple[set[Kind], dict[str, list[tuple[int | None, float | None]]]]:
        options = DecoderOptions(max_seqs=8, max_len=64, page_size=4, native="on", dtype=torch.bfloat16)
        runner = DecoderRunner(config, options, weights.items())
        params = greedy_params(6, ignore_eos=True, logprobs=0)
        events = run(runner, *(request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)))
        mixers = [
            mixer for layer in runner.model.trunk.layers for mixer in layer.mixers if isinstance(mixer, ExpertsMixer)
        ]
        packed = [expert.up.packed for mixer in mixers for expert in mixer.experts]
        return {one.stored for one in packed}, {n: [(e.token_id, e.logprob) for e in of] for n, of in events.items()}

    kinds, found = answered()
    assert kinds == {Kind.COMPACT_BF16, Kind.BF16}
    monkeypatch.setattr("kernels.linear.layouts.compact_weights", lambda: False)
    assert answered() == ({Kind.BF16}, found)


def mixed_config(kind: str, attention: bool) -> DecoderConfig:
    """A model for the test below: `plain`, `biased`, `parallel` (mixers in one layer, then, with `attention`, norms
    after a mixer) or `both-norms` (with short convolutions)."""
    if kind in ("plain", "biased"):
        biased = kind == "biased"
        return tiny_config("M-*-", hidden_size=160, intermediate_size=200, mlp_bias=biased, use_bias=biased)
    if kind == "parallel":
        own = OWN | {"gated_norm": "gate_only"}
        config = parallel_config("P-P*-" if attention else "P-P", own, hidden_size=160)
        last = [replace(layer, norm_before=i == 1, norm_after=True) for i, layer in enumerate(config.layers[3:])]
        return replace(config, layers=(*config.layers[:3], *last))
    return both_norms(delta_config("S-*S-", hidden_size=160, intermediate_size=200))


@pytest.mark.parametrize(("options", "kind"), [
    ({}, "plain"), ({}, "biased"), ({"dtype": torch.float32}, "plain"),
    ({"weights": "int8", "activations": "int8"}, "biased"), ({"weights": "int8"}, "plain"),
    ({"weights": "int8-32", "activations": "int8"}, "biased"), ({"weights": "int4-32", "activations": "int8"}, "plain"),
    ({"weights": "fp8"}, "biased"),
    ({}, "parallel"), ({"weights": "int8", "activations": "int8"}, "parallel"), ({"dtype": torch.bfloat16}, "parallel"),
    ({}, "both-norms"), ({"weights": "int8", "activations": "int8"}, "both-norms"),
])  # fmt: skip
def test_a_prompt_in_one_step_has_the_bits_of_one_in_small_steps(options: dict[str, Any], kind: str) -> None:
    """Products of many rows are computed in another way than those of few, in panels of 64 outputs and behind them."""
    config = mixed_config(kind, bool(options))
    prompts = [[3 + (7 * i + count) % 90 for i in range(count)] for count in (229, 3, 60)]

    def answered(rows: int) -> dict[str, list[tuple[int | None, float | None]]]:
        fixed = {"dtype": torch.bfloat16, "max_seqs": 4, "max_len": 288, "page_size": 4, "native": "on"}
        given = DecoderOptions(**{**fixed, **options, "max_batched_tokens": rows})
        runner = DecoderRunner(config, given, random_weights(config))
        params = greedy_params(4, ignore_eos=True, logprobs=0)
        events = run(runner, *(request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)))
        return {name: [(event.token_id, event.logprob) for event in of] for name, of in events.items()}

    whole = answered(512)
    assert [len(of) for of in whole.values()] == [4, 4, 4]
    assert answered(7) == whole and answered(40) == whole


def test_scaled_embeddings_and_layers_are_compiled() -> None:
    mixers: list[tuple[tuple[str, MixerSpec], ...]] = [
        (("mixer", Mamba2(32, 4, 8, 2, 16, chunk_size=8)),),
        (("moe", Experts(32, 4, 2, 24, None, mlp_hidden_act="silu", gated=True, routing="softmax")),
         ("shared_mlp", Mlp(32, 24, "silu", gated=True))),
        (("mixer", Attention(32, 4, 2, 8)),),
        (("mixer", Mlp(32, 48, "silu", gated=True, mlp_bias=True)),),
    ]  # fmt: skip
    layers = tuple(Layer(mixer, 0.22) for mixer in mixers)
    config = DecoderConfig(97, 32, layers, embedding_scale=12.3, logits_scale=0.125)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        options = DecoderOptions(max_seqs=8, max_len=64, page_size=4, dtype=dtype)
        (fast, runner), (slow, _) = (_logits(config, replace(options, native=mode)) for mode in ("on", "off"))
        assert runner.model.native is not None and runner.model.native.max_singles > 0
        for ours, theirs in zip(fast, slow, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


def test_scaled_embeddings_have_the_bits_of_those_that_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(tiny_config("M*-"), embedding_scale=12.3)
    options = DecoderOptions(max_seqs=8, max_len=64, page_size=4, native="on", dtype=torch.bfloat16)
    compiled, _ = _logits(config, options)
    monkeypatch.setattr(NativeStep, "single", None)
    monkeypatch.setattr("decoder.native.MAX_ROUTED", 0)  # no step runs as a single compiled call
    called, _ = _logits(config, options)
    for ours, theirs in zip(compiled, called, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("state", [32, 64, 128, 20])
def test_state_sizes(state: int) -> None:
    config = tiny_config(pattern="MM", ssm_state_size=state)
    (fast, _), (slow, _) = (
        _logits(config, DecoderOptions(max_seqs=8, max_len=64, page_size=4, native=mode)) for mode in ("on", "off")
    )
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("weights", "activations"), [(None, None), *((weights, "int8") for weights in ("int8", "int8-32", "int4-32"))]
)
@pytest.mark.parametrize("model", ["mamba", "delta"])
def test_fewer_bits_are_no_further_from_float32_than_the_operations(
    model: str, weights: str | None, activations: str | None
) -> None:
    config = tiny_config("M*-M*-") if model == "mamba" else delta_config("G*-G*-")
    options = DecoderOptions(max_seqs=8, max_len=64, page_size=4, state_cache="none")
    exact, _ = _logits(config, options)
    low = replace(options, dtype=torch.bfloat16, weights=weights, activations=activations)
    (fast, _), (slow, _) = (_logits(config, replace(low, native=mode)) for mode in ("on", "off"))

    def error(found: list[torch.Tensor]) -> float:
        return sum((f - e).square().mean().item() for f, e in zip(found[1:], exact[1:], strict=True)) ** 0.5

    assert 0 < error(fast) <= 1.5 * error(slow)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_a_row_is_the_same_in_any_batch(weights: str | None) -> None:
    config = tiny_config(pattern="M*-M")
    options = DecoderOptions(dtype=torch.bfloat16, max_seqs=8, max_len=64, page_size=4, native="on", weights=weights)
    runners = [DecoderRunner(config, options, random_weights(config)) for _ in range(2)]
    logits: list[dict[str, list[torch.Tensor]]] = [{}, {}]
    for kept, runner in zip(logits, runners, strict=True):
        sample = runner.sampler.sample

        def keep(
            found: torch.Tensor, sequences: list, *rest: object, kept: dict = kept, sample: object = sample
        ) -> object:  # type: ignore[type-arg]
            for row, sequence in zip(found, sequences, strict=True):
                kept.setdefault(sequence.request_id, []).append(row.clone())
            return sample(found, sequences, *rest)  # type: ignore[operator]

        runner.sampler.sample = keep  # type: ignore[assignment,method-assign]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        runners[0].add(DecoderRequest(f"r{index}", prompt, params))
    while runners[0].has_work:
        runners[0].step()
    for index, prompt in enumerate(PROMPTS):
        runners[1].add(DecoderRequest(f"r{index}", prompt, params))
        while runners[1].has_work:
            runners[1].step()
    for name, alone in logits[1].items():
        for ours, theirs in zip(logits[0][name][1:], alone[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


@pytest.mark.parametrize("weights", ["int8", "int8-32", "int4-32"])
def test_no_option_changes_an_answer_with_int8_activations(weights: str) -> None:
    config = tiny_config("M-*E", hidden_size=64, intermediate_size=64, moe_intermediate_size=32)
    given: dict[str, Any] = {
        "config": config, "dtype": torch.bfloat16, "weights": weights, "activations": "int8", "native": "on",
        "output": 12,
    }  # fmt: skip
    plain = answers(state_cache="none", **given)
    assert plain.logprobs != answers(state_cache="none", **{**given, "activations": None}).logprobs
    for options in (
        {"max_seqs": 1},
        {"max_chunk": 5, "state_cache": "all"},
        {"speculative": "ngram", "spec_state": "replay", "max_chunk": 7, "known": plain.drawn},
        {"preempted": True, "state_cache": "align"},
    ):
        found = answers(**given, **options)
        assert found.drawn == plain.drawn and found.logprobs == plain.logprobs, options


@pytest.mark.parametrize("pattern", ["G-*G", "M-*M", "MG"])
def test_drafts_are_verified_by_layers_that_are_called_between_compiled_ones(pattern: str) -> None:
    """Compiled code has no convolution of five taps; of "MG" it has the first layer."""
    config = delta_config(pattern, {"conv_kernel": 5}, conv_kernel=4 if pattern == "MG" else 5)
    given: dict[str, Any] = {"config": config, "native": "on", "output": 24}
    plain = answers(state_cache="none", **given)
    drafted: dict[str, Any] = {"speculative": "ngram", "spec_state": "replay", "known": plain.drawn}
    for options in ({"state_cache": "none"}, {"state_cache": "all", "max_chunk": 7}, {"preempted": True}):
        found = answers(**given, **drafted, **options)
        assert found.drawn == plain.drawn, options
        for name, logprobs in plain.logprobs.items():
            assert found.logprobs[name] == pytest.approx(logprobs, abs=1e-4), options


STATES = {
    "mamba": tiny_config("M-*EM*", num_nextn_predict_layers=1, ssm_state_size=64, n_groups=1),
    "odd": tiny_config("M-*M", num_nextn_predict_layers=1, ssm_state_size=20, mamba_head_dim=13, mamba_num_heads=6),
    "delta": delta_config("G-*G", num_nextn_predict_layers=1),
    "delta-odd": delta_config("G-*G", DELTA_ODD, num_nextn_predict_layers=1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model", STATES)
def test_no_option_changes_an_answer_with_states_in_bfloat16(model: str, dtype: torch.dtype) -> None:
    given: dict[str, Any] = {
        "config": STATES[model], "dtype": dtype, "state_dtype": torch.bfloat16, "native": "on",
        "output": 40,  # states are rounded after 16 tokens
    }  # fmt: skip
    plain = answers(state_cache="none", **given)
    assert plain.logprobs != answers(state_cache="none", **{**given, "state_dtype": torch.float32}).logprobs
    for options in (
        {"max_seqs": 1},
        {"max_chunk": 5, "state_cache": "all"},
        {"max_chunk": 1, "state_cache": "auto"},
        {"speculative": "ngram", "spec_state": "replay", "max_chunk": 7, "known": plain.drawn},
        {"speculative": "mtp", "spec_state": "slots"},
        {"preempted": True, "state_cache": "align", "speculative": "ngram", "known": plain.drawn},
    ):
        found = answers(**given, **options)
        assert found.drawn == plain.drawn and found.logprobs == plain.logprobs, options


def test_states_in_bfloat16_are_rounded_at_the_same_places_in_graphs_and_beside_them() -> None:
    given: dict[str, Any] = {"state_dtype": torch.bfloat16, "graphs": "on", "output": 32}
    plain = answers(state_cache="none", max_seqs=1, **given)
    options: tuple[dict[str, Any], ...] = ({"max_capture": 1}, {"max_batched_tokens": 5})
    for other in options:
        assert answers(**given, **other).drawn == plain.drawn, other
    with pytest.raises(ValueError, match="native: 'on' is not possible: with graphs, states in bfloat16"):
        answers(native="on", **given)


@pytest.mark.parametrize("model", STATES)
def test_states_in_bfloat16_operation_by_operation(model: str) -> None:
    """Products of torch round differently for each number of rows, and a state near a tie is then rounded otherwise."""
    given: dict[str, Any] = {
        "config": STATES[model], "dtype": torch.float32, "state_dtype": torch.bfloat16, "native": "off", "output": 16,
        "count": 4,
    }  # fmt: skip
    plain = answers(state_cache="none", **given)
    for options in (  # without compiled code, where states are rounded less often
        {"max_chunk": 5},
        {"max_seqs": 1, "max_chunk": 7},
        {"speculative": "ngram", "spec_state": "replay", "known": plain.drawn, "state_cache": "all"},
        {"speculative": "mtp", "spec_state": "slots", "preempted": True},
        {"speculative": "mtp", "spec_state": "replay", "graphs": "on", "overlap": "on"},
    ):
        found = answers(**given | options)
        assert found.drawn == plain.drawn, options
        for name, logprobs in plain.logprobs.items():
            assert found.logprobs[name] == pytest.approx(logprobs, abs=5e-3), options


@pytest.mark.parametrize(
    ("weights", "inside", "head"),
    [("int8", Kind.BYTES, Kind.INT8), *((each, Kind.SUMMED_BYTES, Kind.BF16) for each in ("int8-32", "int4"))],
)
def test_rows_before_the_vocabulary_stay_in_16_bits(weights: str, inside: Kind, head: Kind) -> None:
    config = tiny_config("M-", hidden_size=64)
    options = DecoderOptions(max_seqs=2, max_len=64, dtype=torch.bfloat16, weights=weights, activations="int8")
    model = DecoderRunner(config, options, random_weights(config)).model
    inner = model.trunk.layers[1].mixers[0]
    assert isinstance(inner, MlpMixer) and inner.up.packed is not None and model.trunk.head.packed is not None
    assert (inner.up.packed.kind, model.trunk.head.packed.kind) == (inside, head)


def test_what_has_no_compiled_step_says_why() -> None:
    config = tiny_config("M")
    options = DecoderOptions(max_seqs=2, max_len=64, native="on", dtype=torch.float64)
    with pytest.raises(ValueError, match="native: 'on' is not possible: the dtype is torch.float64; 'auto' would work"):
        DecoderRunner(config, options, random_weights(config))
    assert DecoderRunner(config, replace(options, native="auto"), random_weights(config)).model.native is None


def test_an_image_s_row_that_comes_alone_is_not_taken_for_its_id() -> None:
    """A step of one token that draws, and whose embedding is a row of an image."""
    config = tiny_config(pattern="M*-M")
    rows = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(3))
    found = []
    for native, max_chunk in (("on", 5), ("on", None), ("off", 5)):
        options = DecoderOptions(
            max_seqs=2, max_len=64, page_size=4, state_cache="none", native=native, max_chunk=max_chunk
        )
        runner = DecoderRunner(config, options, random_weights(config))
        events = run(runner, request("r", [1, 5, 9, 0, 0, 0], greedy_params(12, ignore_eos=True), [image(3, rows)]))
        found.append([event.token_id for event in events["r"]])
    assert found[0] == found[1] == found[2]


def test_greedy_and_other_draws_share_a_step() -> None:
    """The largest logits come from the step itself only if all rows are greedy; both ways give the same tokens."""
    config = tiny_config(pattern="M*-M")
    options = DecoderOptions(max_seqs=4, max_len=64, page_size=4, native="on")
    wished = [
        greedy_params(20, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.9, seed=5, ignore_eos=True),
    ]
    requests = [request(f"r{i}", prompt, wished[i % 2]) for i, prompt in enumerate(PROMPTS[:4])]

    def tokens(*asked: DecoderRequest) -> dict[str, list[int | None]]:
        events = run(DecoderRunner(config, options, random_weights(config)), *asked)
        return {name: [event.token_id for event in of] for name, of in events.items()}

    alone = {name: of for asked in requests for name, of in tokens(asked).items()}
    assert tokens(*requests) == alone


@pytest.mark.parametrize("broken", [0, 2, 3])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (2, 1), (4, 2)])
def test_a_router_that_gives_no_number_is_seen_in_the_answer(broken: int, groups: int, kept: int) -> None:
    """An expert whose score is NaN is chosen first, as in the torch operations, and makes the output NaN; it must not
    be silently replaced by experts with valid scores."""
    config = tiny_config(pattern="E", n_group=groups, topk_group=kept, num_experts_per_tok=1)
    weights = dict(random_weights(config))
    weights["model.layers.0.mixer.gate.weight"][broken] = float("nan")
    for mode in ("on", "off"):
        options = DecoderOptions(max_seqs=2, max_len=64, page_size=4, native=mode)
        (event,) = run(
            DecoderRunner(config, options, weights.items()), request("a", [3], greedy_params(1, logprobs=0))
        )["a"]
        assert event.logprob is not None and event.logprob != event.logprob, mode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [32, 33])
def test_a_tied_table_is_the_packed_projection(hidden: int, dtype: torch.dtype) -> None:
    """Its rows equal those of the given table; a step that embeds in compiled code reads the same ones."""
    config = tiny_config(pattern="M*-", hidden_size=hidden, tie_word_embeddings=True, vocab_size=197)
    options = DecoderOptions(max_seqs=8, max_len=64, page_size=4, native="on", dtype=dtype)
    runner = DecoderRunner(config, options, random_weights(config))
    model = runner.model
    assert model.native is not None and (model.trunk.embeddings.packed is not None) == (dtype == torch.bfloat16)
    table = dict(random_weights(config))["model.embeddings.weight"].to(dtype)
    assert torch.equal(model.embed_ids(torch.arange(197)), table)
    assert model.native.max_singles > 0
    ids = torch.tensor([0, 63, 64, 130, 196])
    step = Step(tokens=5, ids=ids.data_ptr())
    model.native.run(range(1), step)
    assert torch.equal(model.native.x[:5], table[ids].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [32, 128])
def test_a_table_of_its_own(hidden: int, dtype: torch.dtype) -> None:
    """The table is stored compactly if its rows allow it; compiled steps and torch operations read the given
    numbers."""
    config = tiny_config(pattern="M*-", hidden_size=hidden, vocab_size=197, tie_word_embeddings=False)
    table = dict(random_weights(config))["model.embeddings.weight"].to(dtype)
    options = DecoderOptions(max_seqs=8, max_len=64, page_size=4, native="on", dtype=dtype)
    model = DecoderRunner(config, options, random_weights(config)).model
    assert (model.trunk.embeddings.packed is not None) == (hidden == 128 and dtype == torch.bfloat16)
    assert (model.trunk.embeddings.nbytes < table.nbytes) == (model.trunk.embeddings.packed is not None)
    assert torch.equal(model.embed_ids(torch.arange(197)), table)
    assert model.native is not None
    ids = torch.tensor([0, 63, 64, 130, 196])
    model.native.run(range(1), Step(tokens=5, ids=ids.data_ptr()))
    assert torch.equal(model.native.x[:5], table[ids].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_a_tied_table_has_the_numbers_of_the_quantised_projection(kind: str, dtype: torch.dtype) -> None:
    """However the projection is stored; nothing is stored beside it."""
    config = tiny_config(pattern="M*-", hidden_size=176, tie_word_embeddings=True, vocab_size=197)
    weights = dict(random_weights(config))
    expected = quantise(weights["model.embeddings.weight"], kind).dequantise(dtype)
    for native in ("on", "off"):
        options = DecoderOptions(max_seqs=8, max_len=64, page_size=4, native=native, dtype=dtype, weights=kind)
        model = DecoderRunner(config, options, weights.items()).model
        assert torch.equal(model.embed_ids(torch.arange(197)), expected) and not model.trunk.embeddings.nbytes
        if model.native is not None:
            ids = torch.tensor([0, 63, 64, 130, 196])
            model.native.run(range(1), Step(tokens=5, ids=ids.data_ptr()))
            assert torch.equal(model.native.x[:5], expected[ids].float())
        for wrong in (-1 if native == "on" else 198, 197):
            with pytest.raises(IndexError):
                model.embed_ids(torch.tensor([5, wrong]))


@pytest.mark.parametrize(("kind", "hidden"), [("fp8", 36), ("int4-32", 36), ("nvfp4", 40)])
def test_a_tied_table_that_cannot_be_packed_is_read_without_compiled_code(kind: str, hidden: int) -> None:
    """Rows of these widths have no compiled product, so the whole step runs in torch."""
    config = tiny_config(pattern="M*-", hidden_size=hidden, tie_word_embeddings=True, vocab_size=197)
    weights = dict(random_weights(config))
    options = DecoderOptions(max_seqs=8, max_len=64, page_size=4, weights=kind)
    model = DecoderRunner(config, options, weights.items()).model
    assert model.native is None
    expected = quantise(weights["model.embeddings.weight"], kind).dequantise(torch.float32)
    assert torch.equal(model.embed_ids(torch.arange(197)), expected)
    with pytest.raises(ValueError, match="native: 'on' is not possible: compiled code reads quantised embeddings"):
        DecoderRunner(config, replace(options, native="on"), weights.items())
