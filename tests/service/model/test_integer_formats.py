"""Published integers in 4 and 8 bits: zero points at the end of their range, rows as one group, other input orders, and
both kinds in one checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from quantised_checkpoint import NAME, entries, read_back
from quantised_files import gptq, in_32, int8_rows, integers_in_groups, packed, signed, words

from service.model.formats.declared import disagreements, read_declared
from service.model.formats.tensors import find_weights

MATRIX = np.random.default_rng(0).standard_normal((72, 160)).astype(np.float32) * 0.05


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptqs_zero_points_may_be_0(version: int, bits: int) -> None:
    """Version 1 stores it as the highest number of its bits, and the next one of the word one lower."""
    w = MATRIX.copy()
    w[::2] = abs(w[::2])
    tensors, meant = gptq(NAME, w, bits=bits, version=version)
    layout = {1: "gptq", 2: "gptq_v2"}[version]
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": layout}
    weight = read_back(tensors, config)
    assert weight.zeros is not None and bool((weight.zeros[::2] == 0).all())
    assert np.array_equal(weight.dequantise().numpy(), meant)


@pytest.mark.parametrize("layout", ["gptq", "pack-quantized", "int-quantized"])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_row_of_8_bits_may_be_one_group(layout: str, zeros: bool) -> None:
    w = MATRIX
    config: dict[str, object] = {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True}
    if layout == "gptq":
        tensors, meant = gptq(NAME, w, 160, bits=8)
    else:
        weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": not zeros}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
        tensors, meant = {
            "pack-quantized": lambda: packed(NAME, w, None, bits=8, zeros=zeros),
            "int-quantized": lambda: int8_rows(NAME, w, zeros=zeros),
        }[layout]()
    weight = read_back(tensors, config)
    assert weight.kind == "int8" and weight.group == 160
    assert (weight.zeros is not None) == (zeros or layout == "gptq")
    assert np.array_equal(weight.dequantise().numpy(), meant)


@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
def test_inputs_of_8_bits_may_be_in_another_order(layout: str) -> None:
    """compressed-tensors' `actorder: group`: columns stay where they are, and g_idx has their groups."""
    group_of = np.random.default_rng(3).permutation(np.arange(160) // 32)
    order, w = np.argsort(group_of, kind="stable"), MATRIX
    numbers, point, scale, meant = integers_in_groups(w[:, order], 32, 8, zeros=True)
    there = np.argsort(order)
    numbers, meant = numbers[:, there], meant[:, there]
    tensors = {f"{NAME}.weight_scale": scale, f"{NAME}.weight_g_idx": torch.from_numpy(group_of).int()}
    if layout == "int-quantized":
        tensors |= {f"{NAME}.weight": signed(numbers), f"{NAME}.weight_zero_point": signed(point)}
    else:
        tensors |= {f"{NAME}.weight_packed": words(numbers, 1, bits=8), f"{NAME}.weight_shape": torch.tensor(w.shape)}
        tensors[f"{NAME}.weight_zero_point"] = words(point, 0, bits=8)
    config = json.loads(json.dumps(in_32(layout, 8, symmetric=False)))
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    weight = read_back(tensors, config)
    assert weight.order is not None and np.array_equal(weight.dequantise().numpy(), meant)
    del tensors[f"{NAME}.weight_g_idx"]
    with pytest.raises(AssertionError, match=f"{NAME} has no g_idx"):
        read_back(tensors, config)


def test_gptqs_rules_may_mix_4_and_8_bits() -> None:
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 64,
        "dynamic": {r"+:.*\.o_proj": {"bits": 8, "group_size": 32}, r".*\.gate_proj": {"group_size": 32}},
    }  # fmt: skip
    declared = read_declared({"quantization_config": config}, {})
    assert declared is not None
    tensors: dict[str, torch.Tensor] = {}
    for module, bits, group in (("q_proj", 4, 64), ("o_proj", 8, 32), ("gate_proj", 4, 32)):
        tensors |= gptq(f"model.layers.3.{module}", MATRIX[:, :128], group, bits=bits)[0]
    found, _ = find_weights(entries(tensors), group_of=declared.group_of, packed_of=declared.packed_of)
    assert not disagreements(declared, found)
    schemes = {weight.module.rpartition(".")[2]: weight.scheme for weight in found.values()}
    assert schemes == {"q_proj": "gptq", "o_proj": "gptq-int8", "gate_proj": "gptq"}
    eight = read_declared({"quantization_config": {**config, "bits": 8}}, {})
    assert disagreements(eight, found) == [
        f"model.layers.3.{module} is stored as gptq, but config.json: quantization_config says gptq-int8"
        for module in ("gate_proj", "q_proj")
    ]
