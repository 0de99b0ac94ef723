"""Blocks that several layers of Zamba2 share: in files, in memory, and with adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import linear_layers, pair, write_adapter
from published_models import zamba_medium
from safetensors.torch import load_file, save_file
from text_families import make_text_checkpoint
from tiny_decoder import greedy_params, request, run, tokens
from transformers import AutoConfig

from decoder.config import DecoderOptions
from decoder.layers.descriptions import SharedBlock
from decoder.layers.recurrent_descriptions import Mamba2
from decoder.runner import DecoderRunner
from families import CheckpointError
from service.model.adapter import Adapter
from service.model.checkpoint import Checkpoint
from service.model.modelconfig import load_config
from service.model.quantise import quantise_checkpoint

TWO_BLOCKS = 17
"""A seed of a model with four hybrid layers that share two blocks, and with adapters of queries, keys and values."""
OPTIONS = DecoderOptions(max_seqs=1, max_len=64)


def answer(checkpoint: Checkpoint) -> list[int]:
    runner = DecoderRunner(checkpoint.config.decoder, OPTIONS, checkpoint.decoder_weights())
    return tokens(run(runner, request("a", [5, 7, 9, 11], greedy_params(8)))["a"])


def test_layers_hold_the_same_weights(tmp_path: Path) -> None:
    """Whatever is packed for products is there once; keys and values are not shared."""
    make_text_checkpoint(tmp_path, "zamba2", TWO_BLOCKS)
    checkpoint = Checkpoint(tmp_path)
    runner = DecoderRunner(checkpoint.config.decoder, OPTIONS, checkpoint.decoder_weights())
    found = [layer.branch for layer in runner.model.trunk.layers]
    first, second, third, fourth = (branch for branch in found if branch is not None)
    for one, other in ((first, third), (second, fourth)):
        assert one.gate_up is other.gate_up and one.down is other.down and one.norm is other.norm
        assert one.attention.qkv is other.attention.qkv and one.attention.o_proj is other.attention.o_proj
        assert one.attention.kv.data_ptr() != other.attention.kv.data_ptr()
        assert one.adapters is not other.adapters and one.attention.adapters is not other.attention.adapters
    assert first.gate_up is not second.gate_up and first.attention.qkv is not second.attention.qkv


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("kept", ["all", "last"])
def test_files_with_a_block_under_other_layers(tmp_path: Path, kept: str, quantised: bool) -> None:
    """Under each layer that uses it, as older versions of transformers wrote it, or only under the last one."""
    make_text_checkpoint(tmp_path / "model", "zamba2", TWO_BLOCKS)
    base = Checkpoint(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    hybrid = [index for index, layer in enumerate(base.config.decoder.layers) if layer.branch is not None]
    for first, last in zip(hybrid[:2], hybrid[2:], strict=True):
        names = [name for name in stored if name.startswith(f"model.layers.{first}.shared_transformer.")]
        assert names and not any(name.startswith(f"model.layers.{last}.shared_transformer.") for name in stored)
        for name in names:
            copied = name.replace(f"layers.{first}.", f"layers.{last}.", 1)
            stored[copied] = stored.pop(name) if kept == "last" else stored[name].clone()
    shutil.copytree(tmp_path / "model", tmp_path / "changed")
    save_file(stored, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    changed = Checkpoint(tmp_path / "changed")
    if quantised:
        quantise_checkpoint(changed, tmp_path / "small", "int8")
        quantise_checkpoint(base, tmp_path / "expected", "int8")
        changed, base = Checkpoint(tmp_path / "small"), Checkpoint(tmp_path / "expected")
    assert changed.parameters() == base.parameters() and answer(changed) == answer(base)
    if not quantised:
        found, expected = dict(changed.decoder_weights()), dict(base.decoder_weights())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["self_attn.q_proj", "feed_forward.down_proj", "feed_forward.gate_up_proj"])
def test_adapters_of_shared_weights_are_refused(tmp_path: Path, name: str) -> None:
    """They were trained for each layer, and merged they would change all."""
    tiny = make_text_checkpoint(tmp_path / "model", "zamba2", TWO_BLOCKS)
    own = next(iter(linear_layers(tiny.model)))
    modules = [module for module, _ in tiny.model.named_modules() if module.endswith(f"shared_transformer.{name}")]
    assert len(modules) == 4
    for module in modules:
        tensors = pair(own, linear_layers(tiny.model)[own])
        tensors |= pair(module, tiny.model.get_submodule(module).weight.detach())
        adapter = Adapter(write_adapter(tmp_path / "adapter", tensors))
        with pytest.raises(CheckpointError, match=rf"would change {module}\.weight, which several layers share"):
            Checkpoint(tiny.path, adapter=adapter)


def test_sizes_of_published_files(tmp_path: Path) -> None:
    """Those that transformers derives; kinds of layers by either spelling, under either name."""
    file, whole = tmp_path / "config.json", zamba_medium()

    def read(**changes: Any) -> tuple[Any, Any]:
        file.write_text(json.dumps({name: value for name, value in (whole | changes).items() if value is not None}))
        return load_config(tmp_path).decoder, AutoConfig.from_pretrained(tmp_path)

    decoder, oracle = read()
    mamba, block = decoder.mixers[0], decoder.layers[oracle.hybrid_layer_ids[0]].branch[1]
    assert isinstance(mamba, Mamba2) and isinstance(block, SharedBlock)
    assert (mamba.mamba_num_heads, mamba.mamba_head_dim) == (oracle.n_mamba_heads, oracle.mamba_headdim)
    assert (block.attention.input_size, block.attention.head_dim) == (
        oracle.attention_hidden_size, oracle.attention_head_dim
    )  # fmt: skip
    assert [index for index, layer in enumerate(decoder.layers) if layer.branch] == oracle.hybrid_layer_ids
    owners = [layer.branch[1].owner for layer in decoder.layers if layer.branch]
    assert owners == [None, None, *[6, 12] * 3, 6]
    kinds = [{"mamba": "linear_attention"}.get(kind, kind) for kind in whole["layers_block_type"]]
    assert read(layers_block_type=kinds)[0] == read(layers_block_type=None, layer_types=kinds)[0] == decoder
    unset = read(intermediate_size=None, num_key_value_heads=None)
    assert unset[0] == decoder and unset[1].num_key_value_heads == 32


def test_time_steps_have_the_limit_of_the_file(tmp_path: Path) -> None:
    """`time_step_min` is for training, although transformers limits the time steps of prompts by it."""
    for limit, expected in ((None, (0.0, float("inf"))), ([0.01, 0.5], (0.01, 0.5))):
        (tmp_path / "config.json").write_text(json.dumps(zamba_medium() | {"time_step_limit": limit}))
        mamba = load_config(tmp_path).decoder.mixers[0]
        assert isinstance(mamba, Mamba2) and mamba.time_step_limit == expected
