"""Published configurations, in their published nesting, and configurations that are errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_qwen import PUBLISHED, published
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from decoder.arena import ArenaLayout
from decoder.config import DecoderOptions
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.recurrent_descriptions import GatedDelta
from families import CheckpointError
from families.qwen3_5.vision import QwenVision
from kernels.rotary import rope_table
from service.commands.plan import plan, size
from service.common.config import ServerOptions
from service.model.modelconfig import ModelConfig, load_config


def load(path: Path, config: dict[str, Any]) -> ModelConfig:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return load_config(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(tmp_path: Path, name: str) -> None:
    hidden, layers, heads, kv, inner, values, tied = PUBLISHED[name]
    found = load(tmp_path, published(name))
    decoder = found.decoder
    assert (decoder.vocab_size, decoder.hidden_size, len(decoder.layers)) == (248320, hidden, 2 * layers)
    assert decoder.tie_word_embeddings is tied
    assert decoder.position_axes == 3
    assert found.dtype == "bfloat16" and found.eos_token_ids == {248044}
    kinds = ["*" if isinstance(spec, Attention) else "G" for spec in decoder.mixers[::2]]
    assert "".join(kinds) == "GGG*" * (layers // 4)
    delta = decoder.mixers[0]
    assert delta == GatedDelta(hidden, 16, values, 128, 128, 4, 64, 1e-6)
    attention = decoder.mixers[6]
    assert isinstance(attention, Attention) and attention.rope is not None
    assert (attention.num_attention_heads, attention.kv_heads, attention.head_dim) == (heads, kv, 256)
    assert attention.gate and attention.qk_norm == 1e-6 and not attention.attention_bias
    assert (attention.rope.dims, attention.rope.theta) == (64, 1e7)
    feed_forward = decoder.mixers[1]
    if isinstance(inner, int):
        assert feed_forward == Mlp(hidden, inner, "silu", gated=True)
    else:
        experts, chosen, width, shared = inner
        assert feed_forward == Experts(
            hidden,
            experts,
            chosen,
            width,
            shared,
            mlp_hidden_act="silu",
            gated=True,
            routing="softmax",
            shared_gate=True,
        )
    assert decoder.mtp == (attention, feed_forward)


def test_axes_of_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    """Rows take 1, 4, .. 31, columns 2, 5, .. 29, time the rest."""
    rope = load(tmp_path, published("0.8B")).decoder.mixers[6].rope  # type: ignore[attr-defined]
    assert [i for i, axis in enumerate(rope.axes) if axis == 1] == list(range(1, 32, 3))
    assert [i for i, axis in enumerate(rope.axes) if axis == 2] == list(range(2, 30, 3))


def change(config: dict[str, Any], section: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration with other fields at the top level or in a section; None removes a field."""
    part = config if section == "" else config[section]
    for name, value in fields.items():
        part.pop(name, None)
        if value is not None:
            part[name] = value
    return config


OLDER_ROPE = {
    "rope_parameters": None, "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        pytest.param("text_config", {"layer_types": None}, id="interval"),
        pytest.param("text_config", {"full_attention_interval": None}, id="layer-types"),
        pytest.param("text_config", OLDER_ROPE, id="older-rope-fields"),
        pytest.param("text_config", {"model_type": None, "output_gate_type": None}, id="no-types"),
        pytest.param("vision_config", {"model_type": "qwen3_5_vision"}, id="newer-vision-type"),
        pytest.param("", {"tie_word_embeddings": None}, id="tied-in-the-text-only"),
        pytest.param("text_config", {"tie_word_embeddings": None}, id="tied-at-the-top-only"),
        pytest.param("", {"model_type": None}, id="architecture-only"),
    ],
)
def test_the_same_model_written_otherwise(tmp_path: Path, section: str, fields: dict[str, Any]) -> None:
    expected = load(tmp_path / "a", published("0.8B")).decoder
    assert load(tmp_path / "b", change(published("0.8B"), section, fields)).decoder == expected


NESTED, IMAGES, VIDEOS = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"


@pytest.mark.parametrize(
    "files",
    [
        {IMAGES: {"size": 1}},
        {IMAGES: {"size": 1}, VIDEOS: {"size": 2}},
        {IMAGES: {"size": 1}, VIDEOS: {"size": 2}, NESTED: {"video_processor": {"size": 3}}},
        {IMAGES: {"size": 1}, NESTED: {"image_processor": {"size": 3}}},
    ],
    ids=["images", "own", "nested", "images-nested"],
)
def test_settings_of_clips_are_found_where_transformers_finds_them(
    tmp_path: Path, files: dict[str, dict[str, Any]]
) -> None:
    """In each file, `size` stands for two numbers."""

    def written(content: dict[str, Any]) -> dict[str, Any]:
        size = content.get("size")
        if size is None:
            return {name: written(part) for name, part in content.items()}
        return {"size": {"shortest_edge": 4096 * size, "longest_edge": 16777216 * size}}

    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(written(content)))
    found, _ = Qwen3VLVideoProcessor.get_video_processor_dict(tmp_path)
    vision = load(tmp_path, published("0.8B")).vision
    assert isinstance(vision, QwenVision)
    assert found["size"] == {"shortest_edge": vision.video.min_pixels, "longest_edge": vision.video.max_pixels}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "axial", "rope_theta": 70.0}},
        {"rope_scaling": {"type": "axial", "rope_theta": 70.0}},
        {"rope_scaling": {"rope_theta": 70.0}, "rope_parameters": {"rope_theta": 500.0}},
    ],
    ids=str,
)
def test_the_tower_s_rotations_are_read_from_every_field_that_transformers_reads(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    config = change(published("0.8B"), "vision_config", fields)
    vision = load(tmp_path, config).vision
    wanted = Qwen3_5VisionConfig.from_dict(config["vision_config"]).rope_parameters
    assert isinstance(vision, QwenVision) and vision.rope_theta == wanted["rope_theta"]


@pytest.mark.parametrize(("name", "kind"), [("4B", "qwen3_5_text"), ("35B-A3B", "qwen3_5_moe_text")])
def test_text_only_files_hold_their_fields_at_the_top(tmp_path: Path, name: str, kind: str) -> None:
    whole = published(name)
    tied = whole["tie_word_embeddings"]
    flat = load(tmp_path / "a", {**whole["text_config"], "model_type": kind, "tie_word_embeddings": tied})
    alone = load(tmp_path / "b", whole | {"language_model_only": True})
    assert flat.decoder == alone.decoder
    assert flat.decoder.position_axes == 1 and flat.decoder.mixers[6].rope.axes == ()  # type: ignore[attr-defined]
    assert flat.vision is None and alone.vision is None and alone.image_token_id is None


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("text_config", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not served"),
        ("text_config", {"rope_parameters": {"rope_type": "llama3"}}, "rope_type 'llama3' is not served"),
        ("text_config", {"rope_parameters": 3}, "rope_parameters must be an object, not 3"),
        ("text_config", {"rope_scaling": 3}, "rope_scaling must be an object, not 3"),
        ("text_config", {"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' is not served"),
        ("text_config", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention is an object"),
        ("text_config", {"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved is False"),
        ("text_config", {"rope_parameters": {"mrope_section": [11, 11]}}, r"mrope_section must be three .* \[11, 11\]"),
        ("text_config", {"rope_parameters": {"partial_rotary_factor": 0.001}}, "partial_rotary_factor is 0; it must"),
        (
            "text_config",
            {"rope_parameters": {"partial_rotary_factor": 2}},
            "partial_rotary_factor must be at most 1, not 2",
        ),
        ("text_config", {"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a number above 0, not 0"),
        ("text_config", {"vocab_size": None, "num_attention_heads": None}, "lacks vocab_size, num_attention_heads"),
        ("text_config", {"intermediate_size": None}, "lacks intermediate_size"),
        ("text_config", {"hidden_size": "1024"}, "hidden_size must be a whole number of at least 1, not '1024'"),
        ("text_config", {"head_dim": 0}, "head_dim must be a whole number of at least 1, not 0"),
        ("text_config", {"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        (
            "text_config",
            {"linear_num_value_heads": 17},
            "linear_num_value_heads 17 is not a multiple of linear_num_key_heads 16",
        ),
        ("text_config", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2, not 1"),
        ("text_config", {"layer_types": ["linear_attention", "sliding_attention"]}, "sliding_attention"),
        ("text_config", {"layer_types": ["linear_attention"] * 9}, "names 9 layers and num_hidden_layers is 24"),
        ("text_config", {"full_attention_interval": 0, "layer_types": None}, "full_attention_interval must be"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("text_config", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("text_config", {"is_causal": False}, "is_causal is False; this family is served with True"),
        ("text_config", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ("text_config", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2; 0 and 1 are served"),
        ("text_config", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
        ("text_config", {"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0, not 0"),
        ("text_config", {"rms_norm_eps": float("inf")}, "rms_norm_eps must be a number above 0, not inf"),
        ("text_config", {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number above 0, not '1e-6'"),
        ("text_config", {"attention_bias": "no"}, "attention_bias must be true or false, not 'no'"),
        ("", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ("", {"language_model_only": 1}, "language_model_only must be true or false, not 1"),
        ("text_config", {"rope_parameters": {"mrope_section": 3}}, "mrope_section must be three"),
        (
            "text_config",
            {"rope_parameters": {"partial_rotary_factor": "all"}},
            "partial_rotary_factor must be a number",
        ),
        ("text_config", {"layer_types": [["a"]]}, "config.json: "),
        ("", {"image_token_id": 999999}, "image_token_id 999999 is not a token id"),
        ("", {"video_token_id": -1}, "video_token_id -1 is not a token id"),
        ("", {"video_token_id": 248056}, "image_token_id and video_token_id are both 248056"),
        ("text_config", {"model_type": "qwen3_next"}, "text_config.model_type is 'qwen3_next'"),
        ("vision_config", {"model_type": "siglip"}, "vision_config.model_type is 'siglip'"),
        ("vision_config", {"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' is not served; 'axial' is"),
        ("", {"text_config": []}, r"text_config must be an object, not \[\]"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, section: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, change(published("0.8B"), section, fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 257}, "num_experts_per_tok 257 is above the 256 experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be a whole number"),
        ({"model_type": "qwen3_5_text"}, "text_config.model_type is 'qwen3_5_text'; qwen3_5_moe_text"),
    ],
)
def test_experts_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, change(published("35B-A3B"), "text_config", fields))


@pytest.mark.parametrize(
    ("name", "states", "page", "parameters"),
    [("0.8B", 18, "192.0 KiB", 773), ("4B", 48, "512.0 KiB", 4326), ("27B", 144, "1.0 MiB", 27321),
     ("35B-A3B", 60, "320.0 KiB", 34660)],
)  # fmt: skip
def test_the_plan_says_what_each_needs_before_its_weights_are_there(
    tmp_path: Path, name: str, states: int, page: str, parameters: int
) -> None:
    """States of one sequence in MiB (compiled code adds the tokens of an unfinished block), decoder parameters in
    millions, without prediction heads; a budget in bytes limits the states that are kept."""
    (tmp_path / "config.json").write_text(json.dumps(published(name)))
    common: dict[str, Any] = {"model": str(tmp_path), "max_seqs": 4, "max_len": 4096, "memory_bytes": 16 * 2**30}
    options = ServerOptions(**common, dtype="bfloat16", device="cpu")
    memory, plain = plan(options)[0], plan(replace(options, native="off"))[0]
    assert "as config.json describes it, without weights" in memory.title
    rows = {row[0].strip(): row[1:] for row in memory.rows}
    [slot_row] = [row for row in plain.rows if row[0].strip() == "a state slot"]
    assert f"states {states}.0 MiB" in slot_row[2]
    assert states < float(rows["a state slot"][1].split("states ")[1].split(" MiB")[0]) < 1.3 * states
    assert rows["a KV page"][0] == page
    [rope] = load_config(tmp_path).decoder.ropes
    assert rows["rotations"][0] == size(rope_table(rope, 4096, "cpu").nbytes) == "1.0 MiB"
    assert float(rows["weights"][1].split()[0]) >= parameters - 1
    free = int(rows["checkpoints"][1].split()[2])
    small = plan(replace(options, checkpoint_bytes=3 * 160 * 2**20))[0]
    [kept] = [row[2] for row in small.rows if row[0].strip() == "checkpoints"]
    slot = ArenaLayout.of(load_config(tmp_path).decoder, DecoderOptions(dtype=torch.bfloat16)).slot_bytes
    assert kept.startswith(f"at most {3 * 160 * 2**20 // slot} states kept") and free > 3 * 160 * 2**20 // slot
