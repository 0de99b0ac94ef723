"""The family's decoder against transformers in float32, on random tiny checkpoints, with every option."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import NATIVE
from qwen_checkpoint import NAMINGS, make_qwen
from safetensors.torch import load_file, save_file
from speculation import pairwise
from tiny_checkpoint import VOCAB
from tiny_decoder import greedy_params, request, run, tokens

from decoder.config import DecoderOptions
from decoder.runner import DecoderRunner
from families import CheckpointError
from service.commands.plan import weight_bytes
from service.common.config import EngineOptions
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.quantise import quantise_checkpoint

SEEDS = 24
STEPS = 20


OPTIONS = pairwise(
    {
        "state_cache": ["none", "align", "all", "auto"],
        "speculative": ["none", "ngram", "mtp"],
        "spec_state": ["replay", "slots"],
        "max_chunk": [None, 5],
        "graphs": ["off", "on"],
        "native": NATIVE,
        "preempt_every": [0, 3],
    }
)


def runner_of(checkpoint: Checkpoint, **options: Any) -> DecoderRunner:
    common = {
        "max_seqs": 3,
        "max_len": 160,
        "max_batched_tokens": 64,
        "page_size": 4,
        "host_bytes": 2**24,
        "memory_bytes": 2**25,
    }
    chosen = DecoderOptions(**{**common, "draft_policy": "fixed", **options})
    return DecoderRunner(checkpoint.config.decoder, chosen, checkpoint.decoder_weights())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_tokens_and_logprobs_with_any_options(tmp_path: Path, seed: int) -> None:
    """Prompts with a common beginning, one after the other: the second shows where they differ."""
    chosen: dict[str, Any] = dict(OPTIONS[seed % len(OPTIONS)])
    heads = seed % 2 == 0 or chosen["speculative"] == "mtp"
    tiny = make_qwen(tmp_path, seed, naming=NAMINGS[seed % len(NAMINGS)], mtp=heads)
    checkpoint = Checkpoint(tmp_path)
    preempt_every = chosen.pop("preempt_every")
    block = {"state_block": 8} if chosen["state_cache"] in ("align", "all") else {}
    runner = runner_of(checkpoint, **block, **chosen)
    native, mixers = runner.model.native, [mixer for layer in runner.model.trunk.layers for mixer in layer.mixers]
    assert native is None or not any(native.calls(mixer) for mixer in mixers), "compiled code has every layer"
    rng = random.Random(seed)
    common = [rng.randint(3, 9) for _ in range(rng.choice([9, 33, 70]))]
    found = []
    for name, steps in (("first", STEPS), ("second", 2), ("third", STEPS)):
        ids = [*common, *(rng.randint(3, VOCAB - 2) for _ in range(rng.randint(1, 12)))]
        events = run(runner, request(name, ids, greedy_params(steps, logprobs=VOCAB)), preempt_every=preempt_every)[
            name
        ]
        drawn = tokens(events)
        found.append(events[0].cached_tokens)
        oracle = tiny.logits(ids + drawn[:-1])[len(ids) - 1 :]
        scale = max(1.0, float(oracle.abs().max()))
        for row, event in zip(torch.log_softmax(oracle, -1), events, strict=True):
            every = torch.empty_like(row)
            for token, logprob in event.top:
                every[token] = logprob
            assert len(event.top) == VOCAB and float((every - row).abs().max()) <= 1e-4 * scale
            assert float(row.max() - row[event.token_id]) <= 1e-4 * scale
    assert found[0] == 0 and (found[2] > 0) == (chosen["state_cache"] != "none")
    runner.check_integrity()


@pytest.mark.parametrize("moe", [False, True])
def test_every_naming_is_the_same_model(tmp_path: Path, moe: bool) -> None:
    """Also with experts one by one; and norms get their 1 in float32, whatever their stored dtype."""
    tensors = []
    for index, naming in enumerate(NAMINGS):
        path = tmp_path / str(index)
        make_qwen(path, 3, moe=moe, tied=False, naming=naming, mtp=True, one_by_one=index % 2 == 0)
        tensors.append(dict(Checkpoint(path).decoder_weights()))
    for found in tensors[1:]:
        assert found.keys() == tensors[0].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors[0].items())


def test_a_released_file_in_bfloat16_keeps_the_bits_of_its_norms_and_decays(tmp_path: Path) -> None:
    make_qwen(tmp_path, 0, mtp=True)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    found = dict(Checkpoint(tmp_path).decoder_weights())
    centred = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    layers = Checkpoint(tmp_path).config.decoder.layers
    assert {f"model.layers.{index}.norm.weight" for index in range(len(layers))} < centred
    assert {f"mtp.layers.{name}.weight" for name in ("0.enorm", "0.hnorm", "1.norm", "1.final_layernorm")} < centred
    assert {name for name in found if name.endswith(("q_norm.weight", "k_norm.weight", "norm_f.weight"))} < centred
    assert not any("mixer.norm" in name or "proj" in name or "A_log" in name for name in centred)
    [stored] = [tensor for name, tensor in weights.items() if name.endswith("language_model.norm.weight")] or [
        tensor for name, tensor in weights.items() if name.endswith("model.norm.weight")
    ]
    assert torch.equal(found["model.norm_f.weight"], 1 + stored.float())


def test_leftover_tensors_are_errors(tmp_path: Path) -> None:
    make_qwen(tmp_path, 1, moe=False, naming="model.")
    weights = load_file(tmp_path / "model.safetensors")
    extra = {
        "model.layers.0.mlp.gate_proj.weight_x": torch.ones(1),
        "model.layers.0.linear_attn.in_proj_ba.weight": torch.ones(1),
        "model.layers.0.shared_mlp.x": torch.ones(1),
        "mtp.layers.1.input_layernorm.weight": torch.ones(1),
    }
    save_file(weights | extra, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="3 weights do not fit") as caught:
        Checkpoint(tmp_path)
    assert all(name.split(".")[-2] in str(caught.value) for name in list(extra)[:3])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"unexpected mtp\.layers\.1\.input_layernorm"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("moe", [False, True])
def test_quantised_files_are_read_back(tmp_path: Path, moe: bool) -> None:
    """Fused tensors are quantised as stored and split when they are read."""
    make_qwen(tmp_path / "model", 5, moe=moe, text={"layer_types": ["linear_attention", "full_attention"],
              "num_hidden_layers": 2})  # fmt: skip
    checkpoint = Checkpoint(tmp_path / "model")
    written = quantise_checkpoint(checkpoint, tmp_path / "small", "int8")
    for model, kind in ((tmp_path / "model", "int8"), (tmp_path / "small", None)):
        options = EngineOptions(model=str(model), weights=kind, dtype="float32")
        assert weight_bytes(options, open_checkpoint(options.model)) == written.after

    def answer(of: Checkpoint, weights: str | None) -> list[int]:
        return tokens(run(runner_of(of, weights=weights), request("a", [5, 7, 9], greedy_params(12)))["a"])

    assert answer(Checkpoint(tmp_path / "small"), None) == answer(checkpoint, "int8")


@pytest.mark.parametrize("only", ["language_model_only", "model_type"])
def test_a_tower_that_is_not_asked_for_is_left_out(tmp_path: Path, only: str) -> None:
    """Its weights are in the file, but not loaded; answers are those of the whole model."""
    tower = {"hidden_size": 16, "num_heads": 2, "depth": 1, "intermediate_size": 24, "patch_size": 4,
             "num_position_embeddings": 16}  # fmt: skip
    tiny = make_qwen(tmp_path, 2, moe=False, vision=tower)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    flat = config["text_config"] | {"tie_word_embeddings": config["tie_word_embeddings"]}
    file.write_text(json.dumps(config | {only: True} if only == "language_model_only" else flat))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config.vision is None and checkpoint.config.decoder.position_axes == 1
    ids = [5, 7, 11, 13]
    drawn = tokens(run(runner_of(checkpoint), request("a", ids, greedy_params(8)))["a"])
    assert drawn == tiny.logits(ids + drawn[:-1])[len(ids) - 1 :].argmax(-1).tolist()
