"""Compiled code computes the last layers of a prompt only for tokens whose rows are read, which changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import needs_compiled
from tiny_decoder import delta_config, greedy_params, make_runner, random_weights, request, run, tiny_config, tokens

from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.spec import Layer
from decoder.runner import DecoderRunner
from kernels.native.structs import Code, Op

pytestmark = needs_compiled
PROMPTS = [[1, 5, 9, 2], [7] * 21, [3], [4, 8] * 9, [6, 6, 6], [2, 1]]


def gated_attention() -> DecoderConfig:
    """A model whose last mixer is attention with a gate for each number of its output."""
    config = delta_config("G-*")
    name, mixer = config.layers[-1].mixers[0]
    return replace(config, layers=(*config.layers[:-1], Layer(((name, replace(mixer, gate=True)),))))


CONFIGS = {
    "mamba": tiny_config("M*-M-"),
    "delta": delta_config("G-*G-"),
    "experts": tiny_config("*MEE"),
    "mixer-last": tiny_config("M-*"),
    "odd": tiny_config("M-M", hidden_size=36, ssm_state_size=20, mamba_head_dim=5, mamba_num_heads=6),
    "gate": gated_attention(),
    "wide-mamba": tiny_config("M-M", mamba_num_heads=16),
    "wide-attention": tiny_config("M*-", num_attention_heads=8, head_dim=24),
    "no-mixer": tiny_config("--"),
}
"""The wide ones have whole panels of 64 outputs that only outputs of the last mixer depend on: gates, queries."""
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {},
    "int8": {"weights": "int8"},
    "int8-int8": {"weights": "int8", "activations": "int8"},
    "int8-32-int8": {"weights": "int8-32", "activations": "int8"},
    "int4-32-int8": {"weights": "int4-32", "activations": "int8"},
}


def answered(
    config: DecoderConfig, *, prompt_logprobs: int | None, prompts: Sequence[list[int]] = PROMPTS, **options: Any
) -> dict[str, Any]:
    """Tokens and log-probabilities, with options of the runner. Log-probabilities of a prompt are computed from the
    rows of all its tokens."""
    small = {"max_seqs": 8, "max_len": 64, "page_size": 4, "dtype": torch.bfloat16}
    runner = DecoderRunner(config, DecoderOptions(**{"native": "on", **small, **options}), random_weights(config))
    params = greedy_params(5, ignore_eos=True, logprobs=2, prompt_logprobs=prompt_logprobs)
    events = run(runner, *(request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)))
    return {name: (tokens(of), [(event.logprob, event.top) for event in of]) for name, of in events.items()}


@pytest.mark.parametrize(("model", "kind"), [
    (model, kind) for model in CONFIGS for kind in KINDS if model != "odd" or "-32" not in kind  # 36 inputs
])  # fmt: skip
def test_rows_that_nobody_reads_change_no_answer(model: str, kind: str) -> None:
    config, options = CONFIGS[model], KINDS[kind]
    read = answered(config, prompt_logprobs=0, **options)
    assert answered(config, prompt_logprobs=None, **options) == read
    assert answered(config, prompt_logprobs=None, max_chunk=3, **options) == read


@pytest.mark.parametrize("kind", ["bfloat16", "int8-int8"])
@pytest.mark.parametrize("model", ["wide-mamba", "delta", "wide-attention"])
def test_prompts_of_several_blocks_of_rows(model: str, kind: str) -> None:
    """Products take up to 192 rows at a time, and rows of one prompt or of several may be in a block."""
    prompts = [[3 + i % 90 for i in range(count)] for count in (250, 3, 190, 1, 60)]
    config, options = CONFIGS[model], {**KINDS[kind], "max_len": 288, "prompts": prompts}
    assert answered(config, prompt_logprobs=None, **options) == answered(config, prompt_logprobs=0, **options)


@pytest.mark.parametrize("routed", [1, 4])
def test_experts_in_blocks(routed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of 4 tokens, the layers after the last mixer compute one block for few prompts; with blocks of 1
    token, all rows are computed."""
    whole = answered(CONFIGS["experts"], prompt_logprobs=None)
    for module in ("native", "operations"):
        monkeypatch.setattr(f"decoder.{module}.MAX_ROUTED", routed)
    for max_seqs in (2, 8):
        assert answered(CONFIGS["experts"], prompt_logprobs=None, max_seqs=max_seqs) == whole


def test_a_layer_that_is_called_at_the_end_gets_all_rows() -> None:
    """Mamba-2 of a second shape has no compiled form: it is called after compiled layers."""
    first, last = tiny_config("M-"), tiny_config("M-", mamba_num_heads=8)
    config = replace(first, layers=(*first.layers, *last.layers))
    assert answered(config, prompt_logprobs=None) == answered(config, prompt_logprobs=0)


def test_a_layer_that_is_called_first_gets_embedded_rows() -> None:
    """Mamba-2 with six taps has no compiled form."""
    config = tiny_config("M-*-", conv_kernel=6)
    given: dict[str, Any] = {"prompt_logprobs": None, "dtype": torch.float32}
    found, expected = (answered(config, native=native, **given) for native in ("on", "off"))
    for name, (ids, scores) in expected.items():
        assert found[name][0] == ids
        assert [score for score, _ in found[name][1]] == pytest.approx([score for score, _ in scores], abs=1e-4)


def test_only_rows_that_are_read_are_computed_to_the_end() -> None:
    config = tiny_config("M-*M-")
    runner = make_runner(config, native="on", page_size=4, max_chunk=8, state_cache="none")
    native, seen = runner.model.native, list[tuple[Code, int]]()
    assert native is not None

    def hear(op: Op, rows: int, seconds: float) -> None:
        if op.code in (Code.MAMBA, Code.ATTENTION, Code.LINEAR):
            seen.append((Code(op.code), rows))

    native.on_operation = hear
    runner.add(request("r", [1, 5, 9, 2, 7, 7, 3, 4, 8, 6, 2], greedy_params(1, ignore_eos=True)))
    product = Code.LINEAR
    layers = [product, Code.MAMBA, product, product, product, product, Code.ATTENTION, product, product, Code.MAMBA]
    assert runner.step() == []
    assert seen == [(code, 8) for code in layers]
    seen.clear()
    assert len(runner.step()) == 1
    output_mlp_and_vocabulary = [(product, 1)] * 4
    assert seen == [(code, 3) for code in layers] + output_mlp_and_vocabulary
