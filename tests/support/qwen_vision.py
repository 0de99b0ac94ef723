"""Random tiny Qwen towers; transformers' own model and processors are the oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from encoder.item import VIDEO, EncoderItem
from families.qwen3_5.vision import QwenVision
from families.qwen3_5.vision_config import vision_fields
from families.qwen_media import QwenMedia, Resizing


@dataclass(frozen=True)
class TinyQwen:
    """The oracle, and our runner's inputs for the same weights."""

    oracle: Any
    config: QwenVision
    weights: dict[str, Tensor]

    @torch.no_grad()
    def rows(self, items: Sequence[EncoderItem]) -> list[Tensor]:
        """transformers' rows of each item, all in one call."""
        grids = torch.tensor([[item.num_sequences, *item.grid] for item in items])
        pixels = torch.cat([oracle_patches(self.config, item) for item in items]).to(self.oracle.dtype)
        found = self.oracle(pixels, grid_thw=grids).pooler_output
        return list(found.split([item.tokens for item in items]))


def oracle_patches(config: QwenMedia, item: EncoderItem) -> Tensor:
    """Float patches in transformers' layout: an image's frame appears twice."""
    patches = item.patches.float()
    if item.kind == VIDEO:
        return patches
    planes = patches.view(len(patches), 3, 1, -1).expand(-1, -1, config.temporal_patch_size, -1)
    return planes.reshape(len(patches), -1)


def tiny_qwen(seed: int = 0, *, dtype: torch.dtype = torch.float32, text_hidden: int = 40, **changes: Any) -> TinyQwen:
    """A tower of a few layers whose every weight is random. `changes`: Qwen3_5VisionConfig fields."""
    given = {
        "hidden_size": 48, "depth": 2, "num_heads": 3, "intermediate_size": 56, "patch_size": 4,
        "num_position_embeddings": 49, "out_hidden_size": text_hidden, **changes,
    }  # fmt: skip
    oracle_config = Qwen3_5VisionConfig(**given)
    oracle_config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    oracle = Qwen3_5VisionModel(oracle_config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            matrix = weight.dim() >= 2 and "pos_embed" not in name
            around_one = "norm" in name and name.endswith("weight")
            weight.copy_(noise * weight[0].numel() ** -0.5 if matrix else 0.3 * noise + float(around_one))
    oracle = oracle.to(dtype)
    fields = vision_fields(oracle_config.to_dict(), text_hidden, {}, {}) | {
        "image": Resizing(64, 4096), "video": Resizing(64, 16384)
    }  # fmt: skip
    weights = {f"visual.{name}": tensor for name, tensor in oracle.state_dict().items()}
    return TinyQwen(oracle, QwenVision(**fields), weights)


def random_item(config: QwenMedia, grid: tuple[int, int], seed: int = 0, *, pairs: int = 0) -> EncoderItem:
    """Normal noise, float32: a clip of `pairs` temporal patches, or an image."""
    kind = "video" if pairs else "image"
    generator = torch.Generator().manual_seed(seed)
    count = max(pairs, 1) * grid[0] * grid[1]
    patches = torch.randn(count, config.patch_widths[kind], generator=generator)
    return EncoderItem(
        grid, patches, kind=kind, num_sequences=max(pairs, 1), num_frames=pairs * config.temporal_patch_size,
        merge_size=config.merge_size, order=config.patch_order,
    )  # fmt: skip


def image_processor(config: QwenMedia) -> Qwen2VLImageProcessorPil:
    """transformers' own image processor, with Pillow."""
    numbers = config.image
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": numbers.min_pixels, "longest_edge": numbers.max_pixels}, image_mean=list(numbers.mean),
        image_std=list(numbers.std), patch_size=config.patch_size, temporal_patch_size=config.temporal_patch_size,
        merge_size=config.merge_size,
    )  # fmt: skip


def video_processor(config: QwenMedia) -> Any:
    """transformers' own video processor, built without its constructor, which needs torchvision, and with torchvision's
    resize of uint8 images in torch."""
    made: Any = object.__new__(Qwen3VLVideoProcessor)
    made.patch_size, made.merge_size = config.patch_size, config.merge_size
    made.temporal_patch_size = config.temporal_patch_size
    made.size = SizeDict(shortest_edge=config.video.min_pixels, longest_edge=config.video.max_pixels)
    made.fps, made.min_frames = config.sampling.fps, config.sampling.min_frames
    made.max_frames, made.max_video_tokens = config.sampling.max_frames, config.sampling.frame_tokens or 768
    return made


def replace_torchvision(monkeypatch: Any) -> None:
    """Gives transformers' processors torchvision's resize of uint8 images and its normalisation, in torch."""
    from transformers import image_processing_backends as backends

    def resize(image: Tensor, size: Sequence[int], *, interpolation: str, **_: Any) -> Tensor:
        if tuple(image.shape[-2:]) == tuple(size):
            return image
        flat = image.reshape(-1, *image.shape[-3:])
        out = F.interpolate(flat, size=list(size), mode=interpolation, antialias=True, align_corners=False)
        return out.reshape(*image.shape[:-2], *out.shape[-2:])

    def normalize(image: Tensor, mean: Tensor, std: Tensor, inplace: bool = False) -> Tensor:
        return (image - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)

    names = SimpleNamespace(resize=resize, normalize=normalize, InterpolationMode=SimpleNamespace(LANCZOS="lanczos"))
    monkeypatch.setattr(backends, "tvF", names, raising=False)
    monkeypatch.setattr(backends, "pil_torch_interpolation_mapping", {2: "bilinear", 3: "bicubic"}, raising=False)


def video_pixels(config: QwenMedia, frames: Sequence[Tensor], monkeypatch: Any) -> tuple[Tensor, list[int]]:
    """Patches and (t, h, w) of a clip of `[H, W, 3]` uint8 frames, as the released processor makes them."""
    replace_torchvision(monkeypatch)
    made = video_processor(config)
    found = made._preprocess(
        [torch.stack(list(frames)).permute(0, 3, 1, 2)], do_resize=True, size=made.size, resample=3, do_rescale=True,
        rescale_factor=1 / 255, do_normalize=True, image_mean=config.video.mean,
        image_std=config.video.std, patch_size=config.patch_size, merge_size=config.merge_size,
        temporal_patch_size=config.temporal_patch_size, cap_pixels_per_frame=config.sampling.frame_tokens is not None,
    )  # fmt: skip
    return found["pixel_values_videos"].flatten(0, -2), found["video_grid_thw"].reshape(-1).tolist()


def random_grids(rng: random.Random, count: int, most: int = 6, merge: int = 2) -> list[tuple[int, int]]:
    return [(merge * rng.randint(1, most), merge * rng.randint(1, most)) for _ in range(count)]


def random_tower(rng: random.Random) -> dict[str, Any]:
    """Fields of a tower of a random shape, including heads of 64 and 72."""
    heads, width = rng.choice([(1, 64), (2, 72), (2, 16), (3, 8), (4, 12)])
    return {
        "hidden_size": heads * width, "num_heads": heads, "depth": rng.randint(1, 3),
        "intermediate_size": rng.choice([24, 56]), "patch_size": rng.choice([4, 8]),
        "num_position_embeddings": rng.choice([16, 49]),
        "hidden_act": rng.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "gelu"]),
    }  # fmt: skip


def write_rules(path: Path, tower: dict[str, Any]) -> None:
    """Writes size limits that give images few tokens; in one file or in two, as released models have them."""
    shared = {"patch_size": tower["patch_size"], "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3,
              "image_std": [0.5] * 3}  # fmt: skip
    image = {**shared, "size": {"shortest_edge": 256, "longest_edge": 1536 * tower["patch_size"] // 4}}
    video = {**shared, "size": {"shortest_edge": 128, "longest_edge": 2048 * tower["patch_size"] // 4}}
    if tower["depth"] % 2:
        (path / "processor_config.json").write_text(json.dumps({"image_processor": image, "video_processor": video}))
    else:
        (path / "preprocessor_config.json").write_text(json.dumps(image))
        (path / "video_preprocessor_config.json").write_text(json.dumps(video))
