"""GGUF files become the model directories from which llama.cpp's converter would make them."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from gguf_files import info, pair, raw, string, vocabulary
from lfm2_vl import make_lfm
from qwen_checkpoint import make_qwen
from qwen_prompt import TEMPLATE, write_prompting
from safetensors.torch import load_file
from text_families import make_text_checkpoint
from tiny_checkpoint import VOCAB, TinyCheckpoint, make_checkpoint, randomise
from transformers import (
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from decoder.config import DecoderOptions
from decoder.runner import DecoderRunner
from families import CheckpointError
from kernels.linear import GatedLinear, Linear, LinearParts, Quantised, quantise
from kernels.weight_forms import FORMS, STORED
from service.commands.cli import main
from service.commands.plan import plan
from service.common.config import ConfigError, ServerOptions
from service.model.assets import ModelAssets
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.formats.unpack import load
from service.model.gguf.convert import REPORT, convert
from service.model.gguf.file import StoredTensor, open_gguf
from service.model.gguf.tensors import PACKED, packed, rounded

Weights = dict[str, torch.Tensor]


def natives(path: Path) -> Weights:
    """All weights as the server uses them, in float32; quantised ones dequantised."""
    checkpoint = Checkpoint(path)
    found = dict(checkpoint.decoder_weights()) | dict(checkpoint.vision_weights())
    return {
        name: weight.dequantise() if isinstance(weight, Quantised) else weight.float() for name, weight in found.items()
    }


def check_equal(original: Path, converted: Path) -> None:
    """Compares all weights bit by bit, with those of the original in bfloat16, and all that config.json says."""
    theirs, ours = natives(original), natives(converted)
    assert theirs.keys() == ours.keys() and theirs
    centred = {name for name, weight in theirs.items() if weight.dim() == 1 and "norm" in name}
    for name, weight in theirs.items():
        exact = weight.bfloat16().float()
        if name in centred:  # the 1 of a published weight minus 1 is added after its rounding
            exact = torch.where(ours[name] == exact, exact, (weight - 1).bfloat16().float() + 1)
        assert torch.equal(ours[name], exact), name
    one, other = (Checkpoint(path).config for path in (original, converted))
    assert plain(one.decoder) == plain(other.decoder)
    assert repr(one.vision) == repr(other.vision)


def plain(decoder: Any) -> str:
    """What a decoder is, without the size of chunks, which only affects rounding, and the length of training."""
    return re.sub(r"(chunk_size|max_position_embeddings)=\d+", "", repr(decoder))


def hf_weights(model: Any) -> Weights:
    """The state of a transformers model in bfloat16, as released, without a copy of the embeddings."""
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return {
        name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight") and not name.endswith("mup_vector")
    }  # fmt: skip


def text_gguf(
    path: Path, model: Any, kind: Type = Type.BF16, types: dict[str, Type] | None = None, **more: Any
) -> Path:
    """`kind`, `types`: as in `gguf_files.write`. `more`: further metadata."""
    w, config = hf_weights(model), model.config
    qwen = gguf_files.qwen_metadata, gguf_files.qwen_tensors
    name, metadata, tensors = {
        "lfm2": ("lfm2", gguf_files.lfm_metadata, lambda w, _: gguf_files.lfm_tensors(w)),
        "lfm2_moe": ("lfm2moe", gguf_files.lfm_metadata, lambda w, _: gguf_files.lfm_tensors(w)),
        "granitemoehybrid": ("granitehybrid", gguf_files.granite_metadata, gguf_files.granite_tensors),
        "falcon_h1": ("falcon-h1", gguf_files.falcon_metadata, gguf_files.falcon_tensors),
        "qwen3_next": ("qwen3next", qwen[0], partial(qwen[1], reordered=False)),
        "qwen3_5_text": ("qwen35", *qwen),
        "qwen3_5_moe_text": ("qwen35moe", *qwen),
        "nemotron_h": (
            "nemotron_h_moe" if "moe" in getattr(config, "layers_block_type", ()) else "nemotron_h",
            gguf_files.nemotron_metadata, gguf_files.nemotron_tensors,
        ),
    }[config.model_type]  # fmt: skip
    pairs = metadata(config) | vocabulary(config.vocab_size) | more
    if "block_ffn_dim_multiplier" in config.to_dict():  # the file has the adjusted width
        pairs["feed_forward_length"] = next(x.shape[0] for n, x in w.items() if n.endswith("w1.weight"))
    return gguf_files.write(path, name, pairs, tensors(w, config), kind, types)


def made(family: str, path: Path, seed: int) -> Any:
    """A random tiny model with what a GGUF file of its architecture can say, in `path`."""
    wanted = {"lfm2_moe": "lfm2_moe", "lfm2": "lfm2"}.get(family)
    for found in _candidates(family, path, seed):
        if _fits(found.model.config) and wanted in (None, found.model.config.model_type):
            return found
    raise AssertionError(family)


def _candidates(family: str, path: Path, seed: int) -> Iterator[TinyCheckpoint]:
    for attempt in range(seed, seed + 400, 10):
        if family.startswith("qwen3_5"):
            moe = family.endswith("moe")
            yield make_qwen(path, attempt, moe=moe, naming="model.", text={"attention_bias": False})
        elif family.startswith("nemotron_h"):
            pattern = "M*E*M" if family.endswith("moe") else "M*-M"
            text = {"pattern": pattern, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
            yield make_checkpoint(path, attempt, vision=False, text=text)
        else:
            yield make_text_checkpoint(path, family.removesuffix("_moe"), attempt)


def _fits(config: Any) -> bool:
    """Whether the converter keeps all that the configuration says; it loses what released models do not have."""
    text = config.to_dict()
    kinds = set(text.get("layer_types") or ["linear_attention", "full_attention"])
    lost = {
        "lfm2_moe": text.get("norm_topk_prob") is not True or text.get("routed_scaling_factor") != 1.0,
        "granitemoehybrid": text.get("position_embedding_type") == "rope" or len(kinds) < 2,
        "falcon_h1": text.get("mamba_rms_norm") and text.get("mamba_norm_before_gate") or text["tie_word_embeddings"],
        "qwen3_next": not text.get("num_experts") or text.get("num_nextn_predict_layers"),
    }
    biased = config.model_type == "falcon_h1" and any(
        text.get(name) for name in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
    )
    return not lost.get(config.model_type) and not biased and (text.get("time_step_limit") or (0.0,))[0] == 0


TEXT = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "granitemoehybrid", "falcon_h1", "nemotron_h",
    "nemotron_h_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", TEXT)
def test_a_text_model_comes_back(family: str, tmp_path: Path) -> None:
    checkpoint = made(family, tmp_path / "original", 0)
    file = text_gguf(tmp_path / "model.gguf", checkpoint.model)
    converted = convert(file, None, tmp_path / "back")
    assert {form for _, form in converted.kinds} == {"bfloat16"} or family == "falcon_h1"
    assert not converted.errors and not converted.unused
    if family != "falcon_h1":
        check_equal(checkpoint.path, tmp_path / "back")
        return
    # Its constants are in the matrices, so only what the model computes can be compared.
    loaded = FalconH1ForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in checkpoint.model.parameters():
            parameter.copy_(parameter.bfloat16())
        ids = torch.arange(3, 40)[None]
        logits = [model(ids, use_cache=False).logits for model in (checkpoint.model, loaded)]
    assert (logits[0] - logits[1]).norm() < 0.02 * logits[0].norm()


def test_a_prediction_head_comes_back(tmp_path: Path) -> None:
    checkpoint = make_qwen(
        tmp_path / "original", 3, moe=False, naming="model.", mtp=True, text={"attention_bias": False}
    )
    head = {n: w.bfloat16().float() for n, w in load_file(checkpoint.path / "model.safetensors").items() if "mtp" in n}
    config = checkpoint.model.config
    tensors = gguf_files.qwen_tensors(hf_weights(checkpoint.model) | head, config)
    metadata = gguf_files.qwen_metadata(config, heads=1) | vocabulary(VOCAB)
    convert(gguf_files.write(tmp_path / "model.gguf", "qwen35", metadata, tensors), None, tmp_path / "back")
    check_equal(checkpoint.path, tmp_path / "back")
    assert Checkpoint(tmp_path / "back").config.decoder.mtp


def qwen_vision(tmp_path: Path, seed: int = 5) -> tuple[Path, Path, Path]:
    """(a model directory with a tower, tokenizer and template, the GGUF files of its text and its tower)."""
    original = tmp_path / "original"
    tokenizer = write_prompting(original)
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
                            ("vision_end", "vision_end"))
    }  # fmt: skip
    tower = {"hidden_size": 48, "depth": 2, "num_heads": 3, "intermediate_size": 56, "patch_size": 4,
             "num_position_embeddings": 49}  # fmt: skip
    text = {"vocab_size": len(tokenizer), "attention_bias": False}
    made = make_qwen(original, seed, moe=False, naming="model.language_model.", vision=tower, text=text, ids=ids)
    weights, config = hf_weights(made.model), made.model.config
    decoder = {n.replace("language_model.", ""): w for n, w in weights.items() if "visual" not in n}
    pairs = gguf_files.qwen_metadata(config.text_config) | tokenizer_pairs(original / "tokenizer.json", "qwen35")
    pairs |= {"tokenizer.chat_template": TEMPLATE, "general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    files = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    gguf_files.write(files[0], "qwen35", pairs, gguf_files.qwen_tensors(decoder, config.text_config))
    visual = {n.removeprefix("model.visual."): w for n, w in weights.items() if "visual" in n}
    about = gguf_files.qwen_tower_metadata(config.vision_config, config.text_config.hidden_size)
    gguf_files.write(files[1], "clip", about, gguf_files.qwen_tower(visual))
    return original, *files


def tokenizer_pairs(file: Path, pre: str) -> dict[str, Any]:
    """The metadata of a `tokenizer.json`."""
    content = json.loads(file.read_text())
    vocabulary, added = dict(content["model"]["vocab"]), {e["content"]: e for e in content["added_tokens"]}
    vocabulary |= {name: entry["id"] for name, entry in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert [vocabulary[token] for token in tokens] == list(range(len(tokens)))
    kinds = [(3 if added[token]["special"] else 4) if token in added else 1 for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"), "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


TEXTS = (
    "what is in the image? 12345 3.14 it's WE'LL", "Straße naïve 写真 사진\n\n  x\r\n\t\ty",
    "e\u0301 \u00a0क्षि ١٢٣ 🚀😶\u200d🌫️", "<|im_start|>user\nhi<|im_end|> <think>a</think><tool_call>",
    "    indent\n   \n \n",
)  # fmt: skip


def test_a_model_with_a_tower_comes_back_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original, text, tower = qwen_vision(tmp_path)
    back = tmp_path / "back"
    assert main(["convert", str(text), str(back), "--mmproj", str(tower)]) == 0
    said = capsys.readouterr().out
    assert "weights of BF16" in said and "unchanged" in said and "of memory for weights" in said
    assert "not in the file, so as the released models have it: images of 65536 to 16777216 pixels" in said
    check_equal(original, back)
    one, other = (Checkpoint(path).config for path in (original, back))
    assert (one.image_token_id, one.model.video_token_id) == (other.image_token_id, other.model.video_token_id)
    assets = [ModelAssets(config, config.vision) for config in (one, other)]
    for line in TEXTS:
        theirs, ours = (each.tokenizer.encode(line) for each in assets if each.tokenizer)
        assert ours == theirs, line
        assert len({each.tokenizer.decode(ours) for each in assets if each.tokenizer}) == 1
    assert assets[1].template.source == TEMPLATE
    assert assets[1].sampling_defaults == {"temperature": 0.7, "top_k": 20}
    names = {assets[1].tokenizer.token(index) for index in other.eos_token_ids if assets[1].tokenizer}
    assert names == {"<|im_end|>", "<|endoftext|>"}
    report = json.loads((back / REPORT).read_text())
    assert report["files"] == ["model.gguf", "mmproj.gguf"] and not report["relative_error"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_tower_of_tiles_comes_back(tmp_path: Path) -> None:
    made = make_lfm(tmp_path / "original", 4, special=True)
    config, settings = made.model.config, made.settings
    assert config.projector_hidden_act == "gelu", "the seed makes a projector that no released model has"
    weights = hf_weights(made.model)
    visual = {n: w for n, w in weights.items() if ".vision" in n or "multi" in n}
    decoder = {n.replace("language_model.", ""): w for n, w in weights.items() if n not in visual}
    about = gguf_files.lfm_metadata(config.text_config) | tokenizer_pairs(made.path / "tokenizer.json", "lfm2")
    width = next(w.shape[0] for n, w in decoder.items() if n.endswith("w1.weight"))
    text = gguf_files.write(
        tmp_path / "model.gguf", "lfm2", about | {"feed_forward_length": width}, gguf_files.lfm_tensors(decoder)
    )
    tower = {n.removeprefix("model."): w for n, w in visual.items() if ".head." not in n}
    metadata = gguf_files.lfm_tower_metadata(config, settings["image_mean"], settings["image_std"])
    mmproj = gguf_files.write(
        tmp_path / "mmproj.gguf", "clip", metadata, gguf_files.lfm_tower(tower, config.vision_config.patch_size)
    )
    convert(text, mmproj, tmp_path / "back")
    theirs, ours = natives(made.path), natives(tmp_path / "back")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], weight.bfloat16().float()) for name, weight in theirs.items())
    vision = Checkpoint(tmp_path / "back").config.vision
    assert vision is not None and "mean 0.5 0.45 0.4, deviation 0.5 0.25 0.3" in vision.describe_preprocessing()


# -- quantised files --------------------------------------------------------------------------------------------------


def wide_lfm(path: Path, *, superblocks: bool = False) -> TinyCheckpoint:
    """A model whose matrices have whole blocks of 32 inputs, or, with tied embeddings, of 256."""
    hidden, inner = (256, 512) if superblocks else (64, 96)
    config = Lfm2Config(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
        max_position_embeddings=512, tie_word_embeddings=superblocks,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).float().eval()
    randomise(model, 1)
    model.save_pretrained(path)
    return TinyCheckpoint(path, model, False)


def expected(model: Any, kind: Type) -> Weights:
    """By name in the file, what the `gguf` package makes of a quantised weight."""
    return {
        name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), kind), kind))
        for name, w in hf_weights(model).items() if w.dim() == 2
    }  # fmt: skip


def test_a_type_with_minima_is_rounded_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = wide_lfm(tmp_path / "original")
    file, back = text_gguf(tmp_path / "model.gguf", checkpoint.model, Type.Q5_1), tmp_path / "back"
    assert main(["convert", str(file), str(back)]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"14 weights of Q5_1, .* -> bfloat16, .*; rounded: relative error 1\.\de-03, of a weight at most 1\.\de-03",
        said,
    )
    stored = load_file(back / "model-00001.safetensors")
    for name, exact in expected(checkpoint.model, Type.Q5_1).items():
        assert torch.equal(stored[name], exact.bfloat16()), name
    errors = json.loads((back / REPORT).read_text())["relative_error"]
    name = "model.layers.0.conv.in_proj.weight"
    exact = expected(checkpoint.model, Type.Q5_1)[name]
    assert errors[name] == pytest.approx(float((stored[name].float() - exact).norm() / exact.norm()), rel=1e-4)
    assert main(["convert", str(file), str(tmp_path / "exact"), "--dtype", "float32"]) == 0
    assert "Q5_1" in (said := capsys.readouterr().out) and "; rounded" not in said
    stored = load_file(tmp_path / "exact" / "model-00001.safetensors")
    assert all(torch.equal(stored[name], w) for name, w in expected(checkpoint.model, Type.Q5_1).items())
    assert Checkpoint(tmp_path / "exact").config.dtype == "float32"


@pytest.mark.parametrize(("kind", "form"), [(Type.Q4_0, "int4-32"), (Type.Q8_0, "int8-32")])
def test_integers_times_a_scale_stay_packed(kind: Type, form: str, tmp_path: Path) -> None:
    """In linear layers; the table of embeddings, which is not one here, is dequantised."""
    checkpoint = wide_lfm(tmp_path / "original")
    converted = convert(text_gguf(tmp_path / "m.gguf", checkpoint.model, kind), None, tmp_path / "back")
    kinds = converted.kinds
    assert kinds[kind.name, form].tensors == 13 and kinds[kind.name, "bfloat16"].tensors == 1
    assert kinds[kind.name, form].after == kinds[kind.name, form].before, "scales are in float16"
    back = Checkpoint(tmp_path / "back")
    assert back.config.stored_forms == (form,) == back.formats
    found, exact = dict(back.decoder_weights()), expected(checkpoint.model, kind)
    packed = {name: weight for name, weight in found.items() if isinstance(weight, Quantised)}
    assert len(packed) == 13 and "lm_head.weight" in packed
    assert all(back.weight_bytes(name, 2) == weight.nbytes for name, weight in packed.items())
    assert torch.equal(natives(tmp_path / "back")["lm_head.weight"], exact["lm_head.weight"])
    whole = natives(tmp_path / "back")["model.layers.1.mixer.down_proj.weight"]
    assert torch.equal(whole, exact["model.layers.0.feed_forward.w2.weight"])
    runner = DecoderRunner(back.config.decoder, DecoderOptions(max_seqs=2, max_len=64), back.decoder_weights())
    assert runner.model


def test_each_weight_of_a_file_of_several_types_keeps_its_own(tmp_path: Path) -> None:
    """Also weights that the decoder joins: queries in Q8_0 beside keys in Q4_0, gates in F16."""
    checkpoint = wide_lfm(tmp_path / "original")
    types = {"blk.1.attn_k": Type.Q4_0, "blk.0.ffn_gate": Type.F16, "blk.1.ffn_up": Type.Q4_0}
    file = text_gguf(tmp_path / "m.gguf", checkpoint.model, Type.Q8_0, types=types)
    convert(file, None, tmp_path / "back")
    back = Checkpoint(tmp_path / "back")
    assert back.config.stored_forms == ("int8-32", "int4-32") and back.formats == ("int8-32", "int4-32")
    content = json.loads((tmp_path / "back" / "config.json").read_text())
    assert content["saccade_weights"] == {"format": 2, "kinds": ["int8-32", "int4-32"]}
    prefix, attention = "model.layers.", "model.layers.2.mixer."
    names = {"q_proj": "int8-32", "k_proj": "int4-32", "v_proj": "int8-32"}
    assert {name: back.kind_of(f"{attention}{name}.weight") for name in names} == {
        name: form.partition("-")[0] for name, form in names.items()
    }
    kinds = [back.kind_of(f"{prefix}{place}.mixer.{name}_proj.weight") for place in (1, 3) for name in ("gate", "up")]
    assert kinds == ["plain", "int8", "int8", "int4"]
    w, stored = hf_weights(checkpoint.model), natives(tmp_path / "back")
    for name, theirs, kind in (("q_proj", "q_proj", Type.Q8_0), ("k_proj", "k_proj", Type.Q4_0)):
        exact = gguf.quants.dequantize(
            gguf.quants.quantize(w[f"model.layers.1.self_attn.{theirs}.weight"].numpy(), kind), kind
        )
        assert torch.equal(stored[f"{attention}{name}.weight"], torch.from_numpy(exact))
    rows = torch.randn(3, 64)
    options = DecoderOptions(max_seqs=2, max_len=64)
    model = DecoderRunner(back.config.decoder, options, back.decoder_weights()).model
    mixer: Any = model.trunk.layers[2].mixers[0]
    wanted = rows @ torch.cat([stored[f"{attention}{name}.weight"] for name in names]).t()
    assert torch.allclose(mixer.qkv(rows), wanted, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_cannot_be_kept_are_quantised_again_on_request(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the file's numbers, without rounding them first. Others stay as they are."""
    monkeypatch.setattr("service.model.gguf.tensors.AT_ONCE", 20 * 64)  # in more than one step
    checkpoint = wide_lfm(tmp_path / "original")
    types = {"blk.0.ffn_down": Type.F16, "blk.1.attn_q": Type.Q8_0, "output": Type.Q4_0}
    file, back = text_gguf(tmp_path / "m.gguf", checkpoint.model, Type.Q4_1, types), tmp_path / "back"
    assert main(["convert", str(file), str(back), "--weights", form]) == 0
    said = capsys.readouterr().out
    counted = rf"10 weights of Q4_1, .* -> {form}, .*; quantised again: relative error (\S+), of a weight at most (\S+)"
    overall, worst = map(float, re.search(counted, said).groups())  # type: ignore[union-attr]
    assert re.search(r"1 weights of Q4_1, .* -> bfloat16, .*; rounded", said), "the table of embeddings"
    assert re.search(r"1 weights of Q8_0, .* -> int8-32, .*; unchanged", said)
    opened = Checkpoint(back)
    assert opened.config.stored_forms == tuple(each for each in FORMS if each in (form, "int8-32", "int4-32"))
    report = json.loads((back / REPORT).read_text())
    errors, total, error = report["relative_error"], 0.0, 0.0
    for name, exact in expected(checkpoint.model, Type.Q4_1).items():
        if name not in errors or "embed_tokens" in name:
            continue
        found, wanted = load(opened.weights[name], opened.files.read), quantise(exact, form)
        assert isinstance(found, Quantised) and torch.equal(found.dequantise(), wanted.dequantise())
        change = found.dequantise() - exact
        assert errors[name] == pytest.approx(float(change.norm() / exact.norm()), rel=1e-4) and errors[name] > 0
        error, total = error + float(change.square().sum()), total + float(exact.square().sum())
    assert len(errors) == 11
    row = next(row for row in report["tensors"] if row["type"] == "Q4_1" and row["as"] == form)
    assert row["relative_error"] == pytest.approx((error / total) ** 0.5, rel=1e-4)
    assert row["largest_error"] == max(errors[name] for name in errors if "embed_tokens" not in name)
    assert overall == pytest.approx(row["relative_error"], rel=0.05) and worst == pytest.approx(
        row["largest_error"], rel=0.05
    )
    DecoderRunner(opened.config.decoder, DecoderOptions(max_seqs=2, max_len=64), opened.decoder_weights())


def products(model: Any) -> list[Any]:
    """All products with weights of layers, and that with the vocabulary."""
    mixers = [mixer for layer in model.trunk.layers for mixer in layer.mixers]
    kinds = (Linear, LinearParts, GatedLinear)
    return [model.trunk.head, *(each for mixer in mixers for each in vars(mixer).values() if isinstance(each, kinds))]


def test_groups_of_16_and_32_are_served_side_by_side(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Types of files that llama.cpp names after the most frequent one: Q3_K_M, Q5_0, Q6_K, IQ4_XS, MXFP4."""
    checkpoint = wide_lfm(tmp_path / "original", superblocks=True)
    types = {
        "token_embd": Type.Q6_K, "blk.0.ffn_down": Type.Q6_K, "blk.0.ffn_up": Type.IQ4_XS, "blk.0.shortconv": Type.Q5_0,
        "blk.1.attn_v": Type.Q6_K, "blk.1.attn_q": Type.IQ4_NL, "blk.1.ffn_gate": Type.MXFP4,
    }  # fmt: skip
    file = text_gguf(tmp_path / "m.gguf", checkpoint.model, Type.Q3_K, types=types)
    converted = convert(file, None, tmp_path / "back")
    assert not converted.errors and {form for _, form in converted.kinds} == {
        "int4-16", "int8-16", "int8-32", "bfloat16"
    }  # fmt: skip
    back, tensors = Checkpoint(tmp_path / "back"), open_gguf(file).tensors
    stored = natives(tmp_path / "back")
    for name, theirs in {
        "embeddings": "token_embd", "layers.0.mixer.in_proj": "blk.0.shortconv.in_proj",
        "layers.1.mixer.down_proj": "blk.0.ffn_down", "layers.2.mixer.k_proj": "blk.1.attn_k",
        "layers.2.mixer.v_proj": "blk.1.attn_v", "layers.3.mixer.gate_proj": "blk.1.ffn_gate",
    }.items():  # fmt: skip
        of = tensors[f"{theirs}.weight"]
        exact = torch.from_numpy(gguf.quants.dequantize(of.data, of.type))
        assert torch.equal(stored[f"model.{name}.weight"], exact), name
    options, rows = DecoderOptions(max_seqs=2, max_len=64), torch.randn(3, 512)
    packed, plain = (
        DecoderRunner(back.config.decoder, options, weights).model
        for weights in (back.decoder_weights(), stored.items())
    )
    pairs = list(zip(products(packed), products(plain), strict=True))
    assert len(pairs) == 9
    for one, other in pairs:
        width = next(size for size in (256, 512) if size == getattr(other, "in_features", 256))
        found, wanted = (each(rows[:, :width].contiguous()) for each in (one, other))
        assert torch.allclose(found, wanted, atol=1e-5 * float(wanted.abs().max()))
    caplog.set_level("INFO")
    tables = plan(ServerOptions(model=str(tmp_path / "back"), activations="int8", device="cpu"))
    assert f"format they are stored in: {', '.join(back.formats)}" in str(tables[0]) and len(back.formats) == 3
    assert re.search(r"7 of \d+ weights keep rows of 16 bits: .* has groups of 16 inputs, not of a mult", caplog.text)


@pytest.mark.parametrize(
    ("kind", "works", "fails"), [(Type.Q6_K, "int4", (None, "int8", "int8-32")), (Type.Q3_K, "int8", (None, "int4-32"))]
)
def test_rows_in_int8_need_other_weights_than_those_in_groups_of_16(
    kind: Type, works: str, fails: tuple[str | None, ...], tmp_path: Path
) -> None:
    """`--weights` of the same kind keeps the groups of 16."""
    checkpoint = wide_lfm(tmp_path / "original", superblocks=True)
    convert(text_gguf(tmp_path / "m.gguf", checkpoint.model, kind), None, tmp_path / "back")
    options = ServerOptions(model=str(tmp_path / "back"), activations="int8", device="cpu")
    message = f"int8 would have no effect: .* groups of 16 inputs, not of a multiple of 32; with --weights {works} it"
    for weights in fails:
        with pytest.raises(ConfigError, match=message):
            plan(replace(options, weights=weights))
    plan(replace(options, weights=works))
    back = Checkpoint(tmp_path / "back")
    numbers = DecoderOptions(max_seqs=2, max_len=64, weights=works, activations="int8")
    *_, last = products(DecoderRunner(back.config.decoder, numbers, back.decoder_weights()).model)
    assert last.int8_rows


@pytest.mark.parametrize(("kind", "form"), [(Type.Q4_1, "int8"), (Type.Q4_1, "int8-32"), (Type.Q8_0, "nvfp4")])
def test_value_heads_are_reordered_before_they_are_quantised_again(kind: Type, form: str, tmp_path: Path) -> None:
    """Heads are half a group wide, and a scale for each output is not reordered at all."""
    text = {
        "hidden_size": 64, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "intermediate_size": 64,
        "attention_bias": False,
    }  # fmt: skip
    checkpoint = make_qwen(tmp_path / "original", 1, moe=False, naming="model.", text=text)
    file = text_gguf(tmp_path / "m.gguf", checkpoint.model, kind)
    for name, dtype, weights in (("exact", torch.float32, None), ("back", torch.bfloat16, form)):
        convert(file, None, tmp_path / name, dtype, weights)
    exact, found = (
        dict(Checkpoint(tmp_path / name).decoder_weights())["model.layers.0.mixer.out_proj.weight"]
        for name in ("exact", "back")
    )
    assert isinstance(exact, torch.Tensor) and isinstance(found, Quantised)
    assert torch.equal(found.dequantise(), quantise(exact, form).dequantise())


@pytest.mark.parametrize(("kind", "width"), [(Type.Q4_0, 32), (Type.Q8_0, 32), (Type.Q8_0, 16)])
def test_value_heads_are_reordered_in_their_packed_form(kind: Type, width: int, tmp_path: Path) -> None:
    """Heads whose inputs are half a group cannot be, so that weight is dequantised."""
    text = {
        "hidden_size": 64, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": width, "intermediate_size": 64,
        "attention_bias": False,
    }  # fmt: skip
    checkpoint = make_qwen(tmp_path / "original", 1, moe=False, naming="model.", text=text)
    file = text_gguf(tmp_path / "m.gguf", checkpoint.model, kind)
    convert(file, None, tmp_path / "back")
    stored, exact = natives(tmp_path / "back"), expected(checkpoint.model, kind)
    packed = dict(Checkpoint(tmp_path / "back").decoder_weights())
    for ours in ("in_proj_qkv", "in_proj_z", "out_proj"):
        name, wanted = f"model.layers.0.mixer.{ours}.weight", exact[f"model.layers.0.linear_attn.{ours}.weight"]
        whole = ours != "out_proj" or width == 32
        assert isinstance(packed[name], Quantised) == whole
        error = (stored[name] - wanted).norm() / wanted.norm()
        assert error == 0 if whole else 0 < error < 0.01, ours  # the file's groups have inputs of two heads


def test_rows_that_belong_to_a_key_head_are_joined_in_their_packed_form(tmp_path: Path) -> None:
    """Queries, keys and values, and gates, each a tensor of the file, are one published weight of Qwen3-Next."""
    config = Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, layer_types=["linear_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, norm_topk_prob=True,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).float().eval()
    randomise(model, 1)
    converted = convert(text_gguf(tmp_path / "m.gguf", model, Type.Q8_0), None, tmp_path / "back")
    assert {form for kind, form in converted.kinds if kind == "Q8_0"} == {"int8-32", "bfloat16"}
    stored, name = Checkpoint(tmp_path / "back"), "model.layers.0.linear_attn.in_proj_qkvz.weight"
    found, exact = load(stored.weights[name], stored.files.read), expected(model, Type.Q8_0)[name]
    assert isinstance(found, Quantised) and torch.equal(found.dequantise(), exact)
    assert natives(tmp_path / "back")["model.layers.0.mixer.in_proj_z.weight"].shape == (32, 64)


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_packed_numbers_are_those_of_the_package(kind: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of random bytes, which have all integers and scales of the type, and in more than one step."""
    monkeypatch.setattr("service.model.gguf.tensors.AT_ONCE", 100 * 512)
    data = gguf_files.random_blocks((2, 400, 512), kind)
    exact = torch.from_numpy(gguf.quants.dequantize(data, kind))
    found = packed(StoredTensor("x", kind, (2, 400, 512), data))
    assert torch.equal(found.dequantise(), exact)
    form, group = PACKED[kind][0], found.group
    assert form == f"{found.kind}-{group}" and form in STORED and found.scale.unique().numel() > 200
    lowest, highest = {
        "Q4_0": (-8, 7), "Q3_K": (-4, 3), "Q8_0": (-128, 127), "Q5_0": (-16, 15), "Q6_K": (-32, 31), "MXFP4": (-12, 12),
    }.get(kind.name, (-127, 113))  # fmt: skip
    assert (found.integers().min(), found.integers().max()) == (lowest, highest)


def test_scales_that_are_no_numbers_are_named() -> None:
    half = np.array([np.inf], np.float16).view(np.uint8)
    for kind, place, scale in ((Type.Q8_0, 0, half), (Type.Q6_K, 208, half), (Type.MXFP4, 0, [255])):
        data = gguf_files.random_blocks((2, 512), kind)
        data[1, place : place + len(scale)] = scale
        with pytest.raises(CheckpointError, match="blk.0.x: [1-9]+ of [0-9]+ numbers are NaN or infinite"):
            packed(StoredTensor("blk.0.x", kind, (2, 512), data))


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.Q4_K, Type.Q6_K, Type.Q5_1, Type.IQ4_XS], ids=lambda kind: kind.name)
def test_other_types_are_what_the_package_makes_of_them(kind: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.model.gguf.tensors.AT_ONCE", 3 * 512)  # in more than one step
    data = gguf_files.random_blocks((7, 512), kind)
    exact = torch.from_numpy(gguf.quants.dequantize(data, kind))
    found, rounding = rounded(StoredTensor("x", kind, (7, 512), data), torch.bfloat16)
    assert torch.equal(found, exact.bfloat16())
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    assert rounding.relative == pytest.approx(error, rel=1e-9)
    assert rounded(StoredTensor("x", kind, (7, 512), data), torch.float32)[1].relative == 0


# -- files that are damaged or made to do damage ----------------------------------------------------------------------


ARCHITECTURE = pair("general.architecture", Value.STRING, string("lfm2"))
F32 = int(Type.F32)


def listed(kind: Value, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


BAD = {
    "short": (b"GGUF", "is not a GGUF file: it has 4 bytes"),
    "magic": (b"GGML" + bytes(60), "magic invalid"),
    "version": (raw([ARCHITECTURE], version=9), "version 9"),
    "other machine": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "the byte order of another kind of machine"),
    "keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), f"{2**40} keys; at most 65536"),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), f"{2**40} tensors; at most 262144"),
    "key length": (raw([string(b"ab", 2**60)]), f"has {2**60} bytes; at most 16777216"),
    "string length": (raw([pair("a", Value.STRING, string(b"ab", 10**6))]), "1000000 bytes at 45, 19 are left"),
    "list length": (raw([pair("a", Value.ARRAY, listed(Value.UINT8, 2**62))]), f"{2**62} entries; at most 2097152"),
    "list beyond the end": (raw([pair("a", Value.ARRAY, listed(Value.UINT64, 10**6))]), "8 bytes at 57, 7 are left"),
    "lists in lists": (raw([pair("a", Value.ARRAY, listed(Value.ARRAY, 9))]), "lists as entries"),
    "kind of a value": (raw([string("a") + struct.pack("<IQ", 77, 1)]), "77"),
    "no architecture": (raw([pair("a", Value.UINT8, b"1")]), "general.architecture is None"),
    "not utf-8": (raw([pair("a", Value.STRING, string(b"\xff"))]), "utf-8"),
    "same key": (raw([ARCHITECTURE, ARCHITECTURE]), "general.architecture"),
    "same tensor": (raw([ARCHITECTURE], [info("x", [1], F32, 0)] * 2, bytes(64)), "x"),
    "type": (raw([ARCHITECTURE], [info("x", [1], 250, 0)], bytes(64)), "x: its type 250 is not known"),
    "dimensions": (raw([ARCHITECTURE], [info("x", [1] * 9, F32, 0)], bytes(64)), "x has shape [1, 1, 1"),
    "empty": (raw([ARCHITECTURE], [info("x", [0], F32, 0)], bytes(64)), "x has shape [0]"),
    "blocks": (raw([ARCHITECTURE], [info("x", [33], int(Type.Q8_0), 0)], bytes(64)), "33 inputs, which are not whole"),
    "size": (raw([ARCHITECTURE], [info("x", [2**40], F32, 0)], bytes(64)), f"bytes 0 to {2**42} of the data"),
    "product": (raw([ARCHITECTURE], [info("x", [2**33] * 4, F32, 0)], bytes(64)), f"bytes 0 to {2**134} of the data"),
    "offset": (raw([ARCHITECTURE], [info("x", [1], F32, 2**63)], bytes(64)), f"at bytes {2**63} to {2**63 + 4}"),
    "alignment": (raw([ARCHITECTURE, pair("general.alignment", Value.UINT32, struct.pack("<I", 3))]), "alignment"),
    "split": (raw([ARCHITECTURE, pair("split.count", Value.UINT16, b"\3\0")]), "the first, ...-00001-of-00003.gguf"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_file_is_named(case: str, tmp_path: Path) -> None:
    content, problem = BAD[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(problem)) as error:
        open_gguf(file)
    assert "model.gguf" in str(error.value)


def test_cut_and_changed_files_raise_nothing_else(tmp_path: Path) -> None:
    whole = text_gguf(tmp_path / "m.gguf", wide_lfm(tmp_path / "original").model).read_bytes()
    rng, file = random.Random(0), tmp_path / "changed.gguf"
    header = whole.index(b"blk.1.ffn") + 200
    refused = 0
    for _ in range(60):
        changed = bytearray(whole[: rng.randrange(header)] if rng.random() < 0.3 else whole)
        for _ in range(rng.choice([1, 4])):
            changed[rng.randrange(min(header, len(changed)))] = rng.choice([0, 1, 127, 255])
        file.write_bytes(bytes(changed))
        try:
            convert(file, None, tmp_path / "out")
        except CheckpointError:
            refused += 1
        else:
            shutil.rmtree(tmp_path / "out")
    assert refused > 30 and not (tmp_path / "out").exists()


def changed_metadata(tmp_path: Path, **changes: Any) -> Path:
    """A file with changed keys (`.` is written `__`); None: without the key."""
    checkpoint = wide_lfm(tmp_path / "original")
    config = checkpoint.model.config
    pairs = gguf_files.lfm_metadata(config) | vocabulary(config.vocab_size)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del pairs[name]
        else:
            pairs[name] = value
    return gguf_files.write(tmp_path / "m.gguf", "lfm2", pairs, gguf_files.lfm_tensors(hf_weights(checkpoint.model)))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"embedding_length": None}, "m.gguf: the key lfm2.embedding_length is missing"),
    "kind": ({"embedding_length": "64"}, "lfm2.embedding_length must be a whole number from 1 to"),
    "layers": ({"block_count": 2**31}, f"lfm2.block_count must be a whole number from 1 to 4096, not {2**31}"),
    "list": ({"attention__head_count_kv": [0, 2, 2]}, "lfm2.attention.head_count_kv has 3 entries, not 2"),
    "two": ({"attention__head_count": [4, 8]}, "the same in all layers that have one, not [4, 8]"),
    "scaling": ({"rope__scaling__type": "yarn"}, "lfm2.rope.scaling.type is 'yarn'"),
    "shape": ({"embedding_length": 32}, "weights do not fit its metadata"),
    "pre": ({"tokenizer__ggml__pre": "unheard"}, "tokenizer.ggml.pre 'unheard' is not known; known are llama3"),
    "model": ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model is 'llama'; only byte-level BPE"),
    "kinds": ({"tokenizer__ggml__token_type": [1]}, f"tokenizer.ggml.token_type has 1 entries, not {VOCAB}"),
    "merges": ({"tokenizer__ggml__merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', which is not two tokens"),
    "unknown merge": ({"tokenizer__ggml__merges": ["q z"]}, "tokenizer.ggml.merges and its tokens do not fit"),
    "end": ({"tokenizer__ggml__eos_token_id": VOCAB}, f"eos_token_id must be a whole number from 0 to {VOCAB - 1}"),
    "twice": ({"tokenizer__ggml__tokens": ["a"] * VOCAB}, "tokenizer.ggml.tokens has 'a' as 0 and as 1"),
    "template": ({"tokenizer__chat_template": "{% if %}"}, "m.gguf: tokenizer_config.json: chat template, line 1"),
    "top_k": ({"general__sampling__top_k": "many"}, "general.sampling.top_k must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_metadata_is_named(case: str, tmp_path: Path) -> None:
    changes, problem = WRONG[case]
    file = changed_metadata(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        convert(file, None, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "original"]


def test_what_cannot_be_converted_says_what_can(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", "llama", vocabulary(VOCAB), {})
    with pytest.raises(
        CheckpointError, match="general.architecture 'llama' cannot be converted; those that can are qwen35"
    ):
        convert(file, None, tmp_path / "out")
    tower = gguf_files.write(
        tmp_path / "t.gguf", "clip", {"has_vision_encoder": True, "projector_type": "gemma3"}, {"v.x": torch.zeros(4)}
    )
    text = changed_metadata(tmp_path)
    with pytest.raises(CheckpointError, match="t.gguf: clip.projector_type 'gemma3' .* those that can are: lfm2"):
        convert(text, tower, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is a vision tower .mmproj.: name the model's file"):
        convert(tower, None, tmp_path / "out")
    with pytest.raises(CheckpointError, match="--mmproj: .*m.gguf is no vision tower: its .* is 'lfm2'"):
        convert(text, text, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(ConfigError, match="OUT: .* is not empty"):
        convert(text, None, tmp_path / "full")


def test_unknown_and_missing_tensors_are_named(tmp_path: Path) -> None:
    checkpoint = wide_lfm(tmp_path / "original")
    config, tensors = checkpoint.model.config, gguf_files.lfm_tensors(hf_weights(checkpoint.model))
    pairs = gguf_files.lfm_metadata(config) | vocabulary(config.vocab_size)
    for name, changed, problem in (
        ("more", tensors | {"blk.0.attn_sinks.weight": torch.ones(4)}, "1 tensors are not known:\n  blk.0.attn_sinks"),
        ("fewer", {n: w for n, w in tensors.items() if "blk.1.attn_v" not in n}, "missing model.layers.2.mixer.v_proj"),
        ("nan", tensors | {"blk.0.ffn_norm.weight": torch.full((64,), torch.nan)}, "64 of 64 numbers are NaN"),
    ):  # fmt: skip
        file = gguf_files.write(tmp_path / f"{name}.gguf", "lfm2", pairs, changed)
        with pytest.raises(CheckpointError, match=re.escape(problem)):
            convert(file, None, tmp_path / "out")


def test_a_split_model_is_read_from_all_its_files(tmp_path: Path) -> None:
    checkpoint = wide_lfm(tmp_path / "original")
    config, tensors = checkpoint.model.config, gguf_files.lfm_tensors(hf_weights(checkpoint.model))
    halves = dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])
    pairs = gguf_files.lfm_metadata(config) | vocabulary(config.vocab_size) | {"split.count": 2}
    first = gguf_files.write(tmp_path / "m-00001-of-00002.gguf", "lfm2", pairs, halves[0])
    with pytest.raises(CheckpointError, match="m-00002-of-00002.gguf is not a file"):
        convert(first, None, tmp_path / "out")
    gguf_files.write(tmp_path / "m-00002-of-00002.gguf", "lfm2", {"split.count": 2}, halves[1])
    convert(first, None, tmp_path / "out")
    check_equal(checkpoint.path, tmp_path / "out")


def test_serving_a_file_names_the_command(tmp_path: Path) -> None:
    file = changed_metadata(tmp_path)
    with pytest.raises(CheckpointError, match="is a GGUF file: `saccade convert .*m.gguf FOLDER` writes a folder"):
        open_checkpoint(str(file))
    with pytest.raises(CheckpointError, match="has no config.json, but m.gguf: `saccade convert"):
        Checkpoint(tmp_path)
