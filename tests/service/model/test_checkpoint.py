"""Model directories as they are published: both naming schemes, shards, and the errors of invalid ones."""

from __future__ import annotations

import json
import logging
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from text_families import make_text_checkpoint
from tiny_checkpoint import make_checkpoint
from transformers import AutoConfig, BambaForCausalLM, NemotronHForCausalLM

from decoder.layers.recurrent_descriptions import Mamba2
from families import CheckpointError, FamilyConfig
from families.files import first, optional_json
from families.nemotron_h.config import NemotronHConfig, published_config
from families.nemotron_h_omni import FAMILY as OMNI
from service.model.assets import sampling_defaults
from service.model.cache import resolve_model
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.modelconfig import load_config
from service.model.weight_sources import EMBEDDINGS as OUR_EMBEDDINGS
from service.model.weight_sources import HEAD as OUR_HEAD


@pytest.mark.parametrize("naming", ["released", "native"])
@pytest.mark.parametrize("shard", [None, "20KB"], ids=["one-file", "shards"])
def test_every_weight_arrives_under_its_native_name(tmp_path: Path, naming: str, shard: str | None) -> None:
    tiny = make_checkpoint(tmp_path, 3, naming=naming, mtp=True, shard=shard, text={"pattern": "ME*-"})
    assert shard is None or len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = Checkpoint(tmp_path)
    state = tiny.model.state_dict()
    seen = {f"language_model.{n}": t for n, t in checkpoint.decoder_weights()} | dict(checkpoint.vision_weights())
    assert set(seen) == {n for n in state if not n.endswith("summary_idxs")}
    for name, tensor in seen.items():
        assert torch.equal(tensor, state[name]), name


def test_text_only_models_have_no_vision_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 5, vision=False, text={"pattern": "M*"})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config.vision is None
    assert list(checkpoint.vision_weights()) == []
    assert dict(checkpoint.decoder_weights())["model.norm_f.weight"].shape == (checkpoint.config.decoder.hidden_size,)


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1, naming="released", text={"pattern": "ME"})  # experts one by one, to be stacked
    seen: list[tuple[int, int]] = []
    list(Checkpoint(tmp_path).decoder_weights(lambda done, total: seen.append((done, total))))
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


def edit_weights(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    weights = load_file(path / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, path / "model.safetensors")


def test_parts_that_are_not_served_are_not_loaded_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    names = [
        "sound_encoder.encoder.layers.0.x", "sound_projection.norm.weight", "mtp.layers.0.enorm.weight",
        "language_model.mtp.layers.0.hnorm.weight", "vision_model.radio_model.input_conditioner.norm_mean",
        "vision_model.radio_model.summary_idxs",
    ]  # fmt: skip
    edit_weights(tmp_path, {name: torch.zeros(2) for name in names})
    with caplog.at_level(logging.INFO):
        Checkpoint(tmp_path)
    assert len([r for r in caplog.records if "are not loaded" in r.message]) == 1


def test_one_error_lists_all_that_does_not_fit(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M*"})
    edit_weights(
        tmp_path,
        {
            "language_model.backbone.norm_f.weight": None,
            "language_model.backbone.layers.0.norm.weight": torch.zeros(3),
            "language_model.backbone.layers.7.norm.weight": torch.zeros(3),
        },
    )
    with pytest.raises(CheckpointError) as error:
        Checkpoint(tmp_path)
    text = str(error.value)
    assert "3 weights" in text
    assert "missing model.norm_f.weight" in text
    assert "unexpected model.layers.7.norm.weight" in text
    assert "model.layers.0.norm.weight has shape [3], not [" in text


def test_an_absent_vision_norm_is_the_identity_and_not_missing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2, mtp=True, text={"pattern": "M"})
    edit_weights(tmp_path, {"vision_final_layernorm.weight": None, "vision_final_layernorm.bias": None})
    names = dict(Checkpoint(tmp_path).vision_weights())
    assert not [n for n in names if "vision_final_layernorm" in n]


def test_missing_expert_is_a_shape_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4, text={"pattern": "E"})
    edit_weights(tmp_path, {"language_model.backbone.layers.0.mixer.experts.1.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"experts\.up_proj has shape"):
        Checkpoint(tmp_path)


def test_experts_of_different_shapes_are_a_shape_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4, naming="released", text={"pattern": "E"})
    name = "language_model.backbone.layers.0.mixer.experts.1.up_proj.weight"
    edit_weights(tmp_path, {name: load_file(tmp_path / "model.safetensors")[name][:-1].contiguous()})
    with pytest.raises(CheckpointError, match=r"experts\.up_proj has shape"):
        Checkpoint(tmp_path)


def test_experts_of_different_dtypes_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4, naming="released", text={"pattern": "E"})
    name = "language_model.backbone.layers.0.mixer.experts.1.up_proj.weight"
    edit_weights(tmp_path, {name: load_file(tmp_path / "model.safetensors")[name].half()})
    match = rf"experts\.up_proj is made of F32 \(.*experts\.0\.up_proj\.weight\) and F16 \({re.escape(name)}\)"
    with pytest.raises(CheckpointError, match=match):
        Checkpoint(tmp_path)


def test_a_fused_weight_of_a_single_number_is_a_shape_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4, naming="released", text={"pattern": "M"})
    name = next(name for name in load_file(tmp_path / "model.safetensors") if name.endswith("attn.qkv.weight"))
    edit_weights(tmp_path, {name: torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has shape \[\], not"):
        Checkpoint(tmp_path)


def test_what_two_hosts_compare_follows_the_numbers_of_the_vision_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4, naming="released", text={"pattern": "M"})
    before = Checkpoint(tmp_path).vision_digest()
    weights = load_file(tmp_path / "model.safetensors")
    edit_weights(tmp_path, {n: t + 1 for n, t in weights.items() if n.startswith("language_model.")})
    assert Checkpoint(tmp_path).vision_digest() == before
    edit_weights(tmp_path, {n: t + 1 for n, t in weights.items() if n.startswith("vision_model.")})
    assert Checkpoint(tmp_path).vision_digest() != before


def test_experts_are_stacked_by_their_numbers(tmp_path: Path) -> None:
    """A file lists its tensors by name, so 10 comes before 2."""
    tiny = make_checkpoint(tmp_path, 4, naming="released", text={"pattern": "E", "n_routed_experts": 12})
    name = "model.layers.0.mixer.experts.up_proj"
    found = dict(Checkpoint(tmp_path).decoder_weights())[name]
    assert torch.equal(found, tiny.model.state_dict()[f"language_model.{name}"])


@pytest.mark.parametrize("keep", [0, 5, 100, -10, -1])
def test_truncated_files_are_named(tmp_path: Path, keep: int) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*(cut short|not a safetensors)"):
        Checkpoint(tmp_path)


EMBEDDINGS, HEAD = "language_model.backbone.embeddings.weight", "language_model.lm_head.weight"
Table = dict[str, dict[str, Any]]


def changed(**fields: object) -> Callable[[Table], object]:
    """Changes the entry of the embeddings."""
    return lambda table: table | {EMBEDDINGS: table[EMBEDDINGS] | fields}


def two_in_one_place(table: Table) -> object:
    assert table[HEAD]["shape"] == table[EMBEDDINGS]["shape"]
    return table | {HEAD: table[EMBEDDINGS]}


def two_bytes_before(table: Table) -> object:
    return changed(data_offsets=[place - 2 for place in table[EMBEDDINGS]["data_offsets"]])(table)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda table: [], "not a JSON object"),
        (lambda table: None, "not a JSON object"),
        (changed(dtype=None), EMBEDDINGS),
        (changed(shape=None), EMBEDDINGS),
        (changed(data_offsets=[0, 0.5]), EMBEDDINGS),
        (two_in_one_place, "begins at byte"),
        (two_bytes_before, "begins at byte"),
        (changed(dtype="I32"), r"embeddings\.weight has dtype I32, not one of F32"),
    ],
)
def test_damaged_tables_are_named(tmp_path: Path, damage: Callable[[Table], object], message: str) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M*"})
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    raw = json.dumps(damage(json.loads(content[8 : 8 + length]))).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_bytes_that_no_tensor_takes_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes() + bytes(100))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes after its table"):
        Checkpoint(tmp_path)


def test_a_table_too_long_for_memory_is_not_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 10**8 + 1))
        stream.truncate(2 * 10**8)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its table has 100000001 bytes; at most 100000000"):
        Checkpoint(tmp_path)


def test_what_is_no_plain_file_is_named_at_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    file = tmp_path / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a plain file"):
        Checkpoint(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a plain file"):
        Checkpoint(tmp_path)


def test_shards_named_by_the_index_must_exist(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, shard="20KB", text={"pattern": "ME*-"})
    lost = sorted(tmp_path.glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_that_is_not_declared_is_that_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path, 1, vision=False, text={"pattern": "M*-"}, naming="native")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.to(dtype) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert NemotronHForCausalLM.from_pretrained(tmp_path).dtype == dtype
    assert Checkpoint(tmp_path).config.dtype == str(dtype).removeprefix("torch.")
    (tmp_path / "model.safetensors").unlink()
    assert Checkpoint(tmp_path, outline=True).config.dtype == "bfloat16"


def test_one_file_goes_before_an_index_as_in_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = make_checkpoint(tmp_path, 1, vision=False, text={"pattern": "M*-"}, shard="20KB", naming="native")
    expected = torch.randn(tiny.model.model.embeddings.weight.shape)
    state = {**tiny.model.state_dict(), "model.embeddings.weight": expected}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    released = NemotronHForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(released.model.embeddings.weight, expected)
    assert torch.equal(dict(Checkpoint(tmp_path).decoder_weights())["model.embeddings.weight"], expected)
    assert "model.safetensors is used, and not the files that model.safetensors.index.json names" in caplog.text


def test_the_revision_follows_the_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", 3, text={"pattern": "M"})
    make_checkpoint(tmp_path / "b", 3, text={"pattern": "M"})
    before, twin = Checkpoint(tmp_path / "a").revision, Checkpoint(tmp_path / "b").revision
    assert before == twin
    weights = load_file(tmp_path / "a" / "model.safetensors")
    for path in ("a", "b"):
        edit_weights(tmp_path / path, {})  # the same numbers under another header
    assert Checkpoint(tmp_path / "a").revision == Checkpoint(tmp_path / "b").revision
    edit_weights(tmp_path / "a", {n: t + 1 for n, t in weights.items()})
    assert Checkpoint(tmp_path / "a").revision != Checkpoint(tmp_path / "b").revision


@pytest.mark.parametrize(
    ("stored", "native"),
    [
        ("language_model.backbone.layers.3.mixer.conv1d.weight", "model.layers.3.mixer.conv1d.weight"),
        ("backbone.norm_f.weight", "model.norm_f.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("mlp1.3.weight", "multi_modal_projector.linear_2.weight"),
        ("vision_model.radio_model.model.blocks.1.ls1.gamma", "vision_model.encoder.layer.1.layer_scale1.lambda1"),
        ("vision_projector.vision_final_layernorm.bias", "vision_final_layernorm.bias"),
        ("model.layers.0.norm.weight", "model.layers.0.norm.weight"),
    ],
)
def test_names(stored: str, native: str) -> None:
    config = FamilyConfig({}, NemotronHConfig(pattern="M", vocab_size=8, hidden_size=8).decoder)
    assert [target.name for target in OMNI.weights(config)(stored)] == [native]


def edit_config(path: Path, change: dict[str, object]) -> None:
    config = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(config))


def test_released_field_names_mean_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, mtp=True, text={"pattern": "ME*-"})
    native = load_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text["hybrid_override_pattern"] = "ME*-"
    del text["layers_block_type"]
    text["time_step_limit"] = [0.0, None]
    config["llm_config"] = text
    config["vit_hidden_size"] = config.pop("vision_hidden_size")
    config["img_context_token_id"] = config.pop("image_token_id")
    config["model_type"] = "NemotronH_Nano_Omni_Reasoning_V3"
    (tmp_path / "config.json").write_text(json.dumps(config))
    released = load_config(tmp_path)
    assert released == native
    mamba = released.decoder.mixers[0]
    assert isinstance(mamba, Mamba2) and mamba.time_step_limit == (0.0, float("inf"))


def test_norms_take_the_epsilon_that_transformers_reads(tmp_path: Path) -> None:
    """Released files have both names, with equal values."""
    make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M"})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_norm_epsilon"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    released = AutoConfig.from_pretrained(tmp_path).layer_norm_epsilon
    assert load_config(tmp_path).decoder.norm_eps == released == 1e-5


def test_vision_args_of_released_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M"})
    (tmp_path / "preprocessor_config.json").unlink()
    args = {
        "model": "vit_small_patch16_224", "min_num_patches": 64, "max_num_patches": 512, "register_multiple": 10,
        "cpe_max_size": 1024, "teachers": [{"name": name} for name in "abca"],
    }  # fmt: skip
    edit_config(tmp_path, {"vision_config": {"args": args, "patch_size": 16}, "vision_hidden_size": 384})
    vision = load_config(tmp_path).vision
    assert vision is not None
    assert (vision.hidden_size, vision.num_layers, vision.num_heads, vision.intermediate_size) == (384, 12, 6, 1536)
    assert (vision.num_cls_tokens, vision.num_registers, vision.max_img_size) == (3, 7, 1024)
    assert (vision.min_num_patches, vision.max_num_patches) == (64, 512)


@pytest.mark.parametrize(("classes", "registers"), [(0, 0), (0, 2), (2, 0)])
def test_a_tower_may_have_no_class_tokens_and_no_registers(tmp_path: Path, classes: int, registers: int) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M"})
    config = json.loads((tmp_path / "config.json").read_text())
    vision = config["vision_config"] | {"num_cls_tokens": classes, "num_registers": registers}
    edit_config(tmp_path, {"vision_config": vision})
    found = load_config(tmp_path).vision
    assert found is not None and found.num_prefix_tokens == classes + registers
    assert AutoConfig.from_pretrained(tmp_path).vision_config.num_summary_tokens == classes + registers


@pytest.mark.parametrize("place", ["preprocessor_config.json", "video_preprocessor_config.json", "section"])
def test_settings_of_clips_are_found_where_transformers_finds_them(tmp_path: Path, place: str) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M"})
    file = tmp_path / ("processor_config.json" if place == "section" else place)
    videos = {"video_target_num_patches": 30, "video_maintain_aspect_ratio": False}
    content = {"video_processor": videos} if place == "section" else optional_json(file) | videos
    file.write_text(json.dumps(content))
    vision = load_config(tmp_path).vision
    assert vision is not None and vision.video_rule is not None
    assert vision.video_rule.tokens(2, 40, 80) == 4, "5 x 5 patches, rounded to multiples of 2"


def test_null_in_the_video_processors_file_is_off(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M"})
    config = json.loads((tmp_path / "config.json").read_text())
    on = {"video_target_num_patches": 30, "video_maintain_aspect_ratio": True}
    edit_config(tmp_path, {"vision_config": config["vision_config"] | on})
    (tmp_path / "video_preprocessor_config.json").write_text('{"video_maintain_aspect_ratio": null}')
    vision = load_config(tmp_path).vision
    assert vision is not None and vision.video_rule is not None
    assert vision.video_rule.tokens(2, 40, 80) == 4, "a square grid"


def test_a_field_that_is_false_or_zero_is_there() -> None:
    assert first({"a": None, "b": 0, "c": 1}, "a", "b", "c") == 0
    assert first({"a": False}, "a", default=True) is False
    assert first({"a": None}, "a", default=3) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "served are nemotron_h_omni, NemotronH_Nano_VL_V2, nemotron_h, granite"),
        ({"downsample_ratio": 0.3}, "downsample_ratio"),
        ({"vision_hidden_size": 7}, r"vision_hidden_size \(7\)"),
        ({"text_config": {"layers_block_type": ["mamba", "conv"]}}, "conv"),
        ({"text_config": {}}, "layers_block_type"),
        ({"text_config": {"hybrid_override_pattern": "MX"}}, "hybrid_override_pattern over .*, got 'MX'"),
        ({"text_config": {"hybrid_override_pattern": "M", "sliding_window": 4}}, "sliding_window is set"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, change: dict[str, object], message: str) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M"})
    edit_config(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("generation_config.json", "eos_token_id", -1),
        ("generation_config.json", "eos_token_id", [2, -1]),
        ("generation_config.json", "eos_token_id", [2, 10**30]),
        ("generation_config.json", "eos_token_id", True),
        ("generation_config.json", "eos_token_id", "2"),
        ("config.json", "image_token_id", -1),
        ("config.json", "image_token_id", 1.5),
        ("config.json", "image_token_id", 2**31),
    ],
)
def test_token_ids_lie_in_the_vocabulary(tmp_path: Path, file: str, field: str, value: object) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    content = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(content | {field: value}))
    with pytest.raises(CheckpointError, match=rf"{file}: {field} .* is not a token id from 0 to \d+"):
        load_config(tmp_path)


def test_the_first_and_the_last_token_may_end(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    last = load_config(tmp_path).decoder.vocab_size - 1
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, last]}))
    assert load_config(tmp_path).eos_token_ids == {0, last}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": last + 1}))
    with pytest.raises(CheckpointError, match=f"from 0 to {last} "):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", "hot"),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("top_k", 1.5),
        ("top_p", "0.9"),
        ("min_p", True),
        ("max_new_tokens", True),
        ("max_new_tokens", 2**31),
        ("do_sample", "false"),
    ],
)
def test_sampling_defaults_that_no_request_could_use_are_named(tmp_path: Path, field: str, value: object) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {field} "):
        sampling_defaults(load_config(tmp_path))


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("num_beams", 4, 1), ("min_new_tokens", 3, 0), ("no_repeat_ngram_size", 2, 0), ("suppress_tokens", [5], []),
        ("bad_words_ids", [[5]], None), ("forced_eos_token_id", 2, None), ("stop_strings", ["end"], None),
        ("sequence_bias", [[[5], 1.0]], None), ("typical_p", 0.9, 1.0), ("guidance_scale", 2.0, 1.0),
        ("guidance_scale", 0, None),
    ],
)  # fmt: skip
def test_fields_that_would_change_answers_and_are_not_served_are_named(
    tmp_path: Path, field: str, value: object, neutral: object
) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {field} is .* not served"):
        sampling_defaults(load_config(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({field: neutral, "temperature": 0.5}))
    assert sampling_defaults(load_config(tmp_path)) == {"temperature": 0.5}


def test_a_top_k_of_minus_one_is_off(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2, text={"pattern": "M"})
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": -1, "top_p": 0.5}))
    assert sampling_defaults(load_config(tmp_path)) == {"top_k": 0, "top_p": 0.5}


@pytest.mark.parametrize(
    "content", ["", "[1]", "{", "\xff", "[" * 100_000, '{"a": {"__float__": "x"}}', '{"architectures": {"a": 1}}']
)
def test_config_that_is_no_json_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_hub_ids_resolve_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    make_checkpoint(repository / "snapshots" / "abc", 1, text={"pattern": "M"})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc\n")
    assert resolve_model("some/model") == repository / "snapshots" / "abc"
    assert open_checkpoint("some/model").config.name == "some/model"
    (repository / "snapshots" / "abd").mkdir()  # as after a download that was cut short
    assert resolve_model("some/model") == repository / "snapshots" / "abc"
    (repository / "refs" / "main").write_text("gone\n")
    assert resolve_model("some/model") == repository / "snapshots" / "abc"
    assert resolve_model("some/model", "abd") == repository / "snapshots" / "abd"
    with pytest.raises(CheckpointError, match="there is no such folder, and .* does not have it$"):
        resolve_model("some/other")


@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp.", "language_model.backbone.mtp.", "model.mtp."])
def test_heads_that_predict_further_tokens_are_found_by_every_name(tmp_path: Path, prefix: str) -> None:
    """Experts one by one, as released, or stacked; mapped to the model's own names."""
    make_checkpoint(tmp_path, 3, mtp=True, text={"pattern": "M*"})
    wanted = Checkpoint(tmp_path).config.decoder.mtp_weights()
    assert not [name for name, _ in Checkpoint(tmp_path).decoder_weights() if name.startswith("mtp.")]
    stored: dict[str, torch.Tensor | None] = {}
    made = {name: torch.randn(shape) for name, shape in wanted.items()}
    for name, tensor in made.items():
        if name.endswith("experts.up_proj"):
            stem = name.removeprefix("mtp.").removesuffix("up_proj")
            stored |= {f"{prefix}{stem}{i}.up_proj.weight": tensor[i] for i in range(len(tensor))}
        else:
            stored[prefix + name.removeprefix("mtp.")] = tensor
    edit_weights(tmp_path, stored)
    checkpoint = Checkpoint(tmp_path)
    found = {name: weight for name, weight in checkpoint.decoder_weights() if name.startswith("mtp.")}
    assert found.keys() == made.keys() and all(torch.equal(made[name], found[name]) for name in made)  # type: ignore
    assert {name: shape for name, shape in checkpoint.decoder_shapes().items() if name in wanted} == wanted


@pytest.mark.parametrize("field", ["mtp_hybrid_override_pattern", "mtp_layers_block_type"])
def test_the_pattern_of_those_heads_is_read_either_way(field: str) -> None:
    value = {"mtp_hybrid_override_pattern": "*EE", "mtp_layers_block_type": ["attention", "moe", "moe"]}[field]
    text = {"vocab_size": 9, "hidden_size": 8, "hybrid_override_pattern": "M", field: value}
    assert published_config(text).mtp_pattern == "*EE"


def test_a_weight_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    """If it is there under two of its possible names, it is unknown which one to use."""
    make_checkpoint(tmp_path, 2, vision=False, text={"pattern": "M"})
    weights = load_file(tmp_path / "model.safetensors")
    [known] = [name for name in weights if name.endswith("norm_f.weight")]
    other = known.replace("backbone", "model") if known.startswith("backbone") else known.replace("model", "backbone")
    edit_weights(tmp_path, {other: weights[known] + 1})
    with pytest.raises(CheckpointError, match=r"norm_f\.weight and .*norm_f\.weight are both model\.norm_f\.weight"):
        Checkpoint(tmp_path)


def test_experts_that_do_not_count_up_are_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1, vision=False, text={"pattern": "E"})
    weights = load_file(tmp_path / "model.safetensors")
    [name] = [name for name in weights if name.endswith("experts.1.up_proj.weight")]
    edit_weights(tmp_path, {name: None, name.replace(".1.", ".77."): weights[name]})
    with pytest.raises(CheckpointError, match=r"experts\.up_proj has entries \[0.*77\], which do not count up from 0"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("stored", ["neither", "copy", "other", "alone"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_projection_is_tied_as_transformers_ties_it(
    tmp_path: Path, stored: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Some tools write a copy of the embeddings under its name, or leave out the embeddings; and some fine-tuned models
    have matrices that differ, although their configuration is that of a tied model."""
    make_text_checkpoint(tmp_path, "bamba", 2)
    edit_config(tmp_path, {"tie_word_embeddings": tied})
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    weights = load_file(tmp_path / "model.safetensors")
    changed = weights[table].clone()
    changed[-1, -1] += 1
    edits: dict[str, dict[str, torch.Tensor | None]] = {
        "neither": {head: None},
        "copy": {head: weights[table].clone()},
        "other": {head: changed},
        "alone": {head: changed, table: None},
    }
    edit_weights(tmp_path, edits[stored])
    if not tied and stored in ("neither", "alone"):
        with pytest.raises(CheckpointError, match=r"missing (lm_head|model\.embeddings)\.weight"):
            Checkpoint(tmp_path)
        return
    checkpoint = Checkpoint(tmp_path)
    found = dict(checkpoint.decoder_weights())
    expected = BambaForCausalLM.from_pretrained(tmp_path)
    ours = found[OUR_EMBEDDINGS], found.get(OUR_HEAD, found[OUR_EMBEDDINGS])
    theirs = expected.get_input_embeddings().weight, expected.get_output_embeddings().weight
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    assert (OUR_HEAD in found) is (not tied or stored == "other")
    assert checkpoint.parameters() == expected.num_parameters()
    warnings = [record for record in caplog.records if record.name == "service.model.checkpoint"]
    assert [record.levelname for record in warnings] == (["WARNING"] if tied and stored == "other" else [])
