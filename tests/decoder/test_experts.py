"""Layers of experts against transformers' in float32."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.lfm2_moe.configuration_lfm2_moe import Lfm2MoeConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from decoder.config import DecoderOptions
from decoder.layers.descriptions import Experts
from decoder.layers.experts import ExpertsMixer
from decoder.layers.linear import stored_stack
from families.lfm2.config import experts
from kernels.linear import Quantised, Stack, quantise


@pytest.mark.parametrize("seed", range(8))
def test_softmax_routing_and_gated_shared_expert(seed: int) -> None:
    """Softmax over all experts, the chosen divided by their sum; a sigmoid times the shared expert."""
    rng = random.Random(seed)
    hidden, inner, shared = rng.choice([24, 40]), rng.choice([8, 24, 33]), rng.choice([16, 31])
    experts = rng.choice([4, 16, 130])
    chosen = rng.randint(1, 4)
    torch.manual_seed(seed)
    block = Qwen3_5MoeSparseMoeBlock(
        Qwen3_5MoeTextConfig(
            hidden_size=hidden, moe_intermediate_size=inner, shared_expert_intermediate_size=shared,
            num_experts=experts, num_experts_per_tok=chosen, hidden_act="silu",
        )
    )  # fmt: skip
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    gate, up = block.experts.gate_up_proj.detach().chunk(2, 1)
    names = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    weights = {
        "gate.weight": block.gate.weight.detach(),
        "experts.gate_proj": gate,
        "experts.up_proj": up,
        "experts.down_proj": block.experts.down_proj.detach(),
        "shared_expert_gate.weight": block.shared_expert_gate.weight.detach(),
        **{f"shared_experts.{name}": block.shared_expert.get_parameter(name).detach() for name in names},
    }
    spec = Experts(
        hidden, experts, chosen, inner, shared, mlp_hidden_act="silu", gated=True, routing="softmax", shared_gate=True
    )
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == spec.weights()
    x = torch.randn(50, hidden)
    with torch.no_grad():
        expected = block(x[None])[0]
        found = ExpertsMixer(spec, DecoderOptions(), weights)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_sigmoid_routing_of_lfm2(corrected: bool, normalised: bool) -> None:
    """With scores so small that what is added to their sum matters."""
    torch.manual_seed(3)
    config = Lfm2MoeConfig(
        hidden_size=24, moe_intermediate_size=8, num_experts=6, num_experts_per_tok=2, use_expert_bias=corrected,
        norm_topk_prob=normalised, routed_scaling_factor=2.5, num_hidden_layers=1, layer_types=["conv"],
    )  # fmt: skip
    block = Lfm2MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    with torch.no_grad():
        block.gate.weight -= 0.8
    gate, up = block.experts.gate_up_proj.detach().chunk(2, 1)
    weights = {
        "gate.weight": block.gate.weight.detach(),
        "experts.gate_proj": gate,
        "experts.up_proj": up,
        "experts.down_proj": block.experts.down_proj.detach(),
    }
    if corrected:
        weights["gate.e_score_correction_bias"] = block.expert_bias.normal_(0.0, 1e-6)
    published = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "routed_scaling_factor": 2.5}
    spec = experts({**published, "use_expert_bias": corrected, "norm_topk_prob": normalised}, 24)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == spec.weights()
    x = torch.randn(50, 24) + 0.7
    with torch.no_grad():
        expected = block(x[None])[0]
        found = ExpertsMixer(spec, DecoderOptions(), weights)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    plain = ExpertsMixer(replace(spec, weight_epsilon=1e-20), DecoderOptions(), weights)(x)
    assert torch.allclose(plain, expected, rtol=1e-3) is not normalised


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_shared_expert_intermediate_size": None, "shared_gate": True}, "shared_gate needs a shared expert"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be True with softmax routing"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor must be 1.0 with softmax routing"),
        ({"correction": False}, "correction must be True with softmax routing"),
        ({"n_group": 2, "topk_group": 1}, "n_group must be 1 with softmax routing"),
    ],
)
def test_what_softmax_routing_does_not_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Experts(64, routing="softmax"), **changes)


@pytest.mark.parametrize("weights", [None, "int8", "nvfp4"])
def test_stored_experts_are_read_and_quantised_one_by_one(weights: str | None) -> None:
    """At most two experts are in memory in their stored form at a time, because all experts of a layer together are
    much larger."""
    read: list[weakref.ref[Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(6, 32, 64, generator=generator)

    def expert(index: int) -> Tensor:
        assert sum(each() is not None for each in read) <= 2
        found = plain[index].clone()
        read.append(weakref.ref(found))
        return found

    found = stored_stack(Stack(expert, plain.shape), DecoderOptions(dtype=torch.float32, weights=weights))
    assert len(read) == 6 and found.shape == plain.shape
    for index in range(6):
        wanted = plain[index] if weights is None else quantise(plain[index], weights).dequantise()
        each = found[index]
        assert torch.equal(each.dequantise() if isinstance(each, Quantised) else each, wanted)
