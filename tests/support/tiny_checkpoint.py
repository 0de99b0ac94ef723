"""Random tiny checkpoints on disk, written by transformers, the oracle of the end-to-end tests."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3

from encoder.images import decode_image
from encoder.item import EncoderItem
from service.model.checkpoint import Checkpoint

VOCAB = 97
IMAGE_TOKEN = 96
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True)
class TinyCheckpoint:
    """A model directory, and the transformers model that wrote it, in fp32 and eval mode."""

    path: Path
    model: Any
    vision: bool

    @property
    def patch_size(self) -> int:
        return int(self.model.config.vision_config.patch_size)

    @torch.no_grad()
    def logits(self, ids: list[int], images: list[tuple[tuple[int, int], torch.Tensor]] = ()) -> torch.Tensor:
        """`[len(ids), V]` of one forward pass over the whole sequence; `images` are (grid, patches)."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if images:
            inputs["pixel_values"] = torch.cat([patches.float() for _, patches in images])
            inputs["image_grid_hw"] = torch.tensor([grid for grid, _ in images])
        return self.model(**inputs, use_cache=False).logits[0].float()

    def greedy(self, ids: list[int], images: list[Any], count: int) -> tuple[list[int], torch.Tensor]:
        """`count` greedy tokens by full forward passes, and their logits `[count, V]`."""
        sequence, rows = list(ids), []
        for _ in range(count):
            rows.append(self.logits(sequence, images)[-1])
            sequence.append(int(rows[-1].argmax()))
        return sequence[len(ids) :], torch.stack(rows)


def oracle_images(path: Path, files: list[bytes]) -> list[EncoderItem]:
    """Patches by our own image rule, which has its own tests; tests of towers compare the encoder's output."""
    vision = Checkpoint(path).config.vision
    assert vision is not None
    return [vision.image_rule.patchify(decode_image(file), torch.float32) for file in files]


def random_text_config(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    """A text configuration with a random shape: pattern, groups, heads, experts."""
    pattern = fixed.pop("pattern", None) or "".join(rng.choice("MM*-E") for _ in range(rng.randint(1, 6)))
    groups = rng.choice([1, 2, 4])
    heads = groups * rng.choice([1, 2, 3])
    kv = rng.choice([1, 2])
    expert_groups = rng.choice([1, 2])
    experts = expert_groups * rng.choice([2, 4])
    topk_group = rng.randint(1, expert_groups)
    return {
        "vocab_size": VOCAB,
        "hidden_size": rng.choice([16, 32, 48]),
        "layers_block_type": [KINDS[k] for k in pattern],
        "num_attention_heads": kv * rng.choice([1, 2, 3]),
        "num_key_value_heads": kv,
        "head_dim": rng.choice([8, 16]),
        "intermediate_size": rng.choice([24, 64]),
        "ssm_state_size": rng.choice([4, 8, 16]),
        "mamba_num_heads": heads,
        "mamba_head_dim": rng.choice([4, 8]),
        "n_groups": groups,
        "conv_kernel": rng.choice([2, 3, 4]),
        "chunk_size": rng.choice([4, 8, 32]),
        "use_conv_bias": rng.random() < 0.7,
        "use_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
        "time_step_min": 1e-9,
        "time_step_floor": 1e-9,
        "n_routed_experts": experts,
        "num_experts_per_tok": rng.randint(1, topk_group * (experts // expert_groups)),
        "n_group": expert_groups,
        "topk_group": topk_group,
        "moe_intermediate_size": rng.choice([8, 24]),
        "moe_shared_expert_intermediate_size": rng.choice([8, 24]),
        "moe_latent_size": rng.choice([None, 12]),
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
        **fixed,
    }


def random_vision_config(rng: random.Random) -> dict[str, Any]:
    """A RADIO tower with a random shape."""
    heads = rng.choice([1, 2, 4])
    return {
        "hidden_size": heads * rng.choice([8, 16]),
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads,
        "mlp_ratio": rng.choice([2.0, 4.0]),
        "patch_size": rng.choice([4, 8]),
        "max_img_size": rng.choice([32, 64]),
        "num_cls_tokens": rng.randint(1, 3),
        "num_registers": rng.randint(0, 4),
        "use_swiglu_ffn": rng.random() < 0.2,
        "layerscale_value": rng.choice([1.0, 0.7]),
        "video_temporal_patch_size": 2,
    }


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough for every part to matter; freshly initialised models are close to the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("mup_vector"):  # constants of the configuration
                continue
            if name.endswith("A_log"):
                parameter.copy_(torch.log(1 + 3 * noise.abs()))
            elif name.endswith("dt_bias"):
                parameter.copy_(noise - 2.0)
            elif name.endswith("e_score_correction_bias"):
                parameter.copy_(0.1 * noise)
            elif name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "norm_f.weight", ".D", "lambda1")):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() >= 2 and parameter.is_floating_point():
                fan_in = parameter.shape[-1] if "conv1d" not in name else parameter.shape[-1] * 2
                parameter.copy_(noise * fan_in**-0.5)
            elif parameter.is_floating_point() and not name.endswith(("norm_mean", "norm_std", "inv_freq")):
                parameter.copy_(0.1 * noise)


def changed(settings: Path, path: Path, file: str, changes: dict[str, Any]) -> Path:
    """A copy of the folder with changed fields of one file; a section named as one of its objects is merged."""
    shutil.copytree(settings, path, dirs_exist_ok=True)
    content = json.loads((path / file).read_text())
    for name, value in changes.items():
        content[name] = {**content[name], **value} if isinstance(content.get(name), dict) else value
    (path / file).write_text(json.dumps(content))
    return path


def make_checkpoint(
    path: Path, seed: int, *, vision: bool = True, naming: str = "released", text: dict[str, Any] | None = None,
    mtp: bool = False, shard: str | None = None, image_token: int = IMAGE_TOKEN,
) -> TinyCheckpoint:  # fmt: skip
    """Writes a random tiny model. `naming`: `released` (NVIDIA's names) or `native` (transformers' own)."""
    rng = random.Random(seed)
    text_config = random_text_config(rng, **(text or {}), num_nextn_predict_layers=int(mtp))
    torch.manual_seed(seed)
    if vision:
        vision_config = random_vision_config(rng)
        config = NemotronH_Omni_Reasoning_V3_Config(
            text_config=text_config,
            vision_config={"model_type": "radio", **vision_config},
            audio_config=None,
            projector_hidden_size=rng.choice([16, 40]),
            vision_hidden_size=vision_config["hidden_size"],
            image_token_id=image_token,
        )
        model: Any = NemotronH_Omni_Reasoning_V3(config)
    else:
        model = NemotronHForCausalLM(NemotronHConfig(**text_config))
    model = model.float().eval()
    randomise(model, seed)
    if text_config.get("tie_word_embeddings"):  # which transformers ignores in this family
        decoder = model.language_model if vision else model
        with torch.no_grad():
            decoder.get_output_embeddings().weight.copy_(decoder.get_input_embeddings().weight)
    model.save_pretrained(path, save_original_format=naming == "released", max_shard_size=shard or "1GB")
    if vision:
        rule = {"patch_size": vision_config["patch_size"], "min_num_patches": 4, "max_num_patches": 64}
        (path / "preprocessor_config.json").write_text(json.dumps(rule))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": False}))
    return TinyCheckpoint(path, model, vision)
