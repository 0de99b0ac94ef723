"""Our decoder against the implementation in transformers, float32, on random tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_decoder import greedy_params, image, make_runner, oracle, request, run, tiny_config, tokens, weights_of

from decoder.config import DecoderConfig

STEPS = 10

SHAPES: list[Any] = [
    pytest.param("M", {}, 37, id="mamba-only"),
    pytest.param("*", {}, 37, id="attention-only"),
    pytest.param("-", {}, 5, id="mlp-only"),
    pytest.param("E-", {}, 9, id="no-state-at-all"),
    pytest.param("M-*EM", {}, 1, id="one-token-prompt"),
    pytest.param("M-*EM", {}, 8, id="one-whole-chunk"),
    pytest.param("*-M*", {}, 63, id="two-attention-layers"),
    pytest.param(
        "MEM*", {"n_groups": 1, "mamba_num_heads": 3, "mamba_head_dim": 5, "conv_kernel": 2}, 20, id="odd-mamba"
    ),
    pytest.param("MM*", {"n_groups": 4, "conv_kernel": 3, "use_conv_bias": False}, 21, id="group-per-head"),
    pytest.param("M*-E", {"use_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, 30, id="biases-tied"),
    pytest.param("*E", {"num_key_value_heads": 1, "num_attention_heads": 3}, 18, id="multi-query"),
    pytest.param("*M", {"num_key_value_heads": 4}, 18, id="multi-head"),
    pytest.param(
        "EM", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}, 25, id="moe-groups"
    ),
    pytest.param(
        "E*", {"moe_latent_size": 12, "mlp_bias": True, "routed_scaling_factor": 2.5}, 25, id="moe-latent-biased"
    ),
    pytest.param("E*", {"norm_topk_prob": False, "num_experts_per_tok": 1}, 25, id="moe-top-1-unnormalised"),
    pytest.param("M-*", {"mlp_hidden_act": "silu"}, 12, id="silu-mlp"),
    pytest.param("M-*E", {"vocab_size": 1000, "layer_norm_epsilon": 1e-3}, 33, id="larger-vocabulary"),
]


def assert_equal_to_oracle(config: DecoderConfig, prompt: list[int], **options: Any) -> None:
    model = oracle(config)
    runner = make_runner(config, weights_of(model, config), **options)
    events = run(runner, request("a", prompt, greedy_params(STEPS, logprobs=4)))["a"]
    drawn = tokens(events)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + drawn[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    expected = torch.log_softmax(logits, -1)
    assert drawn == logits.argmax(-1).tolist()
    scale = logits.abs().max().item()
    for row, event in zip(expected, events, strict=True):
        assert event.logprob == pytest.approx(row[event.token_id].item(), abs=1e-4 * scale)
        ids, values = zip(*event.top, strict=True)
        assert values == pytest.approx(row.topk(4)[0].tolist(), abs=1e-4 * scale)
        assert row[list(ids)].tolist() == pytest.approx(values, abs=1e-4 * scale)


@pytest.mark.parametrize(("pattern", "changes", "length"), SHAPES)
def test_prefill_and_decode(pattern: str, changes: dict[str, Any], length: int) -> None:
    config = tiny_config(pattern, **changes)
    prompt = torch.randint(0, config.vocab_size, (length,)).tolist()
    assert_equal_to_oracle(config, prompt)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 16, 30])
def test_prefill_in_chunks(chunk: int) -> None:
    config = tiny_config("M-*EM")
    assert_equal_to_oracle(config, torch.randint(0, config.vocab_size, (37,)).tolist(), max_chunk=chunk)


def test_logits_of_every_prompt_row() -> None:
    """For any prefix as the prompt, the next-token logits equal those of the whole sequence."""
    config = tiny_config("M*E-M")
    model = oracle(config)
    ids = torch.randint(0, config.vocab_size, (23,))
    with torch.no_grad():
        expected = torch.log_softmax(model(ids[None], use_cache=False).logits[0], -1)
    runner = make_runner(config, weights_of(model, config))
    requests = [request(str(n), ids[:n].tolist(), greedy_params(1, logprobs=0)) for n in range(1, 24)]
    events = run(runner, *requests)
    for n in range(1, 24):
        event = events[str(n)][0]
        assert event.token_id == expected[n - 1].argmax().item()
        assert event.logprob == pytest.approx(expected[n - 1].amax().item(), abs=1e-4)


@pytest.mark.parametrize("chunk", [None, 4])
def test_image_rows_replace_embeddings(chunk: int | None) -> None:
    config = tiny_config("M*-")
    model = oracle(config)
    ids = torch.randint(0, config.vocab_size, (30,))
    first, second = torch.randn(6, config.hidden_size), torch.randn(9, config.hidden_size)
    embedded = model.model.embeddings(ids).detach().clone()
    embedded[3:9], embedded[15:24] = first, second
    with torch.no_grad():
        expected = torch.log_softmax(model(inputs_embeds=embedded[None], use_cache=False).logits[0, -1], -1)
    runner = make_runner(config, weights_of(model, config), max_chunk=chunk)
    spans = [image(3, first), image(15, second)]
    event = run(runner, request("a", ids.tolist(), greedy_params(1, logprobs=0), spans))["a"][0]
    assert event.token_id == expected.argmax().item()
    assert event.logprob == pytest.approx(expected.amax().item(), abs=1e-4)
    assert [span.releases for span in spans] == [1, 1]


def test_bfloat16_stays_close_to_float32() -> None:
    """The error of bfloat16 against float32 is at most twice that of transformers in bfloat16."""
    config = tiny_config("M-*EM-", hidden_size=64, intermediate_size=128)
    model = oracle(config)
    weights = {name: tensor.clone() for name, tensor in weights_of(model, config).items()}
    prompt = torch.randint(0, config.vocab_size, (1, 40))
    with torch.no_grad():
        exact = torch.log_softmax(model(prompt, use_cache=False).logits[0, -1], -1)
        theirs = torch.log_softmax(model.bfloat16()(prompt, use_cache=False).logits[0, -1].float(), -1)
    runner = make_runner(config, weights, dtype=torch.bfloat16)
    params = greedy_params(1, logprobs=config.vocab_size)
    top = run(runner, request("a", prompt[0].tolist(), params))["a"][0].top
    ours = torch.empty(config.vocab_size)
    for token, value in top:
        ours[token] = value
    error, allowed = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert 0 < error <= 2 * allowed


def test_time_step_limit_is_the_only_clamp() -> None:
    """Small steps are not raised to `time_step_min`; a limit applies in prefill and in decode."""
    config = tiny_config("M", time_step_limit=(0.2, 0.5))
    weights = weights_of(oracle(config), config)
    prompt = torch.randint(0, config.vocab_size, (20,)).tolist()
    whole = run(make_runner(config, weights), request("a", prompt, greedy_params(4, logprobs=0)))["a"]
    single = run(make_runner(config, weights, max_chunk=1), request("a", prompt, greedy_params(4, logprobs=0)))["a"]
    free = tiny_config("M")
    other = run(make_runner(free, weights), request("a", prompt, greedy_params(4, logprobs=0)))["a"]
    assert [e.logprob for e in whole] == pytest.approx([e.logprob for e in single], abs=1e-5)
    assert [e.logprob for e in whole] != pytest.approx([e.logprob for e in other], abs=1e-3)
