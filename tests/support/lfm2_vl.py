"""Random tiny LFM2-VL checkpoints with a tokenizer; transformers' own model and processor are the oracle."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers.image_processing_backends
from minicpm import byte_tokenizer
from PIL import Image
from safetensors.torch import load_file, save_file
from text_families import lfm2
from tiny_checkpoint import randomise
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.lfm2_vl.configuration_lfm2_vl import Lfm2VlConfig
from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlForConditionalGeneration
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from encoder.item import EncoderItem

IMAGE = "<image>"
SPECIALS = (
    "<|startoftext|>", "<|im_start|>", "<|im_end|>", IMAGE, "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
)  # fmt: skip
TEMPLATE = (
    "<|startoftext|>{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}" + IMAGE
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\\n' }}"
)  # fmt: skip
NAMES = {"released": "vision_tower.vision_model.", "saved": "vision_tower."}
"""Prefixes of the tower: in the released files, and as transformers saves them."""


def _image_processor() -> Any:
    """transformers' own class. Its module imports torchvision, which `replace_torchvision` replaces where it is used.
    Whether torchvision is installed has been asked, and its answer kept, by the module that this one has imported."""
    assert transformers.image_processing_backends
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    added = {name: ModuleType(name) for name in names if name not in sys.modules}
    if added:
        added[names[-1]].functional = SimpleNamespace()  # type: ignore[attr-defined]
    sys.modules.update(added)
    try:
        return importlib.import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl").Lfm2VlImageProcessor
    finally:
        for name in added:
            del sys.modules[name]


@dataclass(frozen=True)
class TinyLfm:
    """A model directory, and the transformers model that wrote it, in float32 and eval mode."""

    path: Path
    model: Any
    processor: Any
    settings: dict[str, Any]
    """Of the image processor: those in its file, and the defaults of the others."""
    special: bool
    """Whether the prompt has tokens around images."""

    def inputs(self, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        """The released processor's output for a prompt with one image token per image; needs `replace_torchvision`."""
        found = released_pixels(self.processor, self.settings, images) if images else {}
        words = [
            self.processor.replace_image_token(
                found, index, use_image_special_tokens=self.special, **self.settings
            )
            for index in range(len(images))
        ]  # fmt: skip
        (text,), _ = self.processor.get_text_with_replacements([text], words)
        return {**found, "input_ids": self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]}

    @torch.no_grad()
    def rows(self, item: EncoderItem) -> torch.Tensor:
        """`[N, row_width]` of one image with float patches, its parts in one padded batch."""
        longest = max(rows * columns for rows, columns in item.grids)
        parts = [sequence.patches for sequence in item.sequences]
        padded = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, longest - len(part))) for part in parts])
        mask = torch.stack([(torch.arange(longest) < len(part)).int() for part in parts])
        return torch.cat(self.model.get_image_features(padded, torch.tensor(item.grids), mask).pooler_output)

    @torch.no_grad()
    def logits(self, ids: list[int], inputs: dict[str, Any]) -> torch.Tensor:
        """`[len(ids), V]` of one whole forward pass."""
        names = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
        given = {name: inputs[name] for name in names if name in inputs}
        return self.model(input_ids=torch.tensor([ids]), **given, use_cache=False).logits[0].float()


def released_pixels(processor: Any, settings: dict[str, Any], images: Sequence[Image.Image]) -> dict[str, Any]:
    """The released image processor's output; needs `replace_torchvision`."""
    tensors = [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in images]
    per_channel = {name: tuple(settings[name]) for name in ("image_mean", "image_std")}
    return dict(
        processor.image_processor._preprocess(
            tensors, do_resize=True, resample=2, do_rescale=True, rescale_factor=1 / 255, do_normalize=True,
            do_pad=True, return_row_col_info=True, return_tensors=None, disable_grouping=None, **settings | per_channel,
        )
    )  # fmt: skip


def released_processor(tokenizer: Tokenizer, settings: dict[str, Any]) -> Any:
    """transformers' own processor, built without its constructor, and thereby without torchvision."""
    made: Any = object.__new__(Lfm2VlProcessor)
    made.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|startoftext|>", eos_token="<|im_end|>", pad_token="<|startoftext|>"
    )
    made.image_token, made.image_token_id = IMAGE, tokenizer.token_to_id(IMAGE)
    made.image_start_token, made.image_end_token = "<|image_start|>", "<|image_end|>"
    made.image_thumbnail_token = "<|img_thumbnail|>"
    made.image_processor = object.__new__(_image_processor())
    made.image_processor.use_thumbnail = settings["use_thumbnail"]
    return made


def random_settings(rng: random.Random, patch: int, merge: int) -> dict[str, Any]:
    """Settings of the image processor. No image of an aspect of at most 8 gets more tokens than `max_image_tokens`,
    which transformers cannot encode."""
    least, tiles = rng.choice([1, 2, 3]), rng.choice([2, 2, 3])
    return {
        "encoder_patch_size": patch, "downsample_factor": merge, "tile_size": patch * merge * rng.choice([1, 2, 3]),
        "min_image_tokens": least, "max_image_tokens": least + rng.choice([13, 20]), "min_tiles": tiles,
        "max_tiles": tiles + rng.choice([0, 2, 8]), "max_pixels_tolerance": rng.choice([1.0, 2.0, 0.7]),
        "do_image_splitting": rng.random() < 0.8, "use_thumbnail": rng.random() < 0.7,
        "image_mean": [0.5, 0.45, 0.4], "image_std": [0.5, 0.25, 0.3],
    }  # fmt: skip


def make_lfm(
    path: Path, seed: int, *, special: bool | None = None, released: bool | None = None, **processor: Any
) -> TinyLfm:
    """Writes a random tiny model. `special`: whether the prompt has tokens around images; `released`: whether the
    tower's weights have the released names, and the settings are all in one file; None: random. `processor`: settings
    of the image processor that are fixed instead of random."""
    rng = random.Random(seed)
    tokenizer = byte_tokenizer(SPECIALS)
    text = lfm2(random.Random(seed)).config.to_dict() | {
        "model_type": "lfm2", "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"), "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    heads, patch, merge = rng.choice([1, 2, 4]), rng.choice([2, 4]), rng.choice([2, 2, 2, 1, 3])
    vision = {
        "model_type": "siglip2_vision_model", "hidden_size": heads * rng.choice([8, 18]),
        "intermediate_size": rng.choice([20, 36]), "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads, "patch_size": patch, "num_patches": rng.choice([16, 25]),
        "layer_norm_eps": rng.choice([1e-6, 1e-5]), "vision_use_head": rng.random() < 0.3,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = Lfm2VlConfig(
        text_config=text, vision_config=vision, downsample_factor=merge, image_token_id=tokenizer.token_to_id(IMAGE),
        projector_hidden_size=rng.choice([24, 40]), projector_bias=rng.random() < 0.7,
        projector_use_layernorm=rng.random() < 0.6, projector_hidden_act=rng.choice(["gelu", "gelu", "silu"]),
        tie_word_embeddings=rng.random() < 0.5,
    )  # fmt: skip
    model = Lfm2VlForConditionalGeneration(config).float().eval()
    randomise(model, seed)
    if config.tie_word_embeddings:
        model.tie_weights()
    settings = random_settings(rng, patch, merge) | processor
    special = rng.random() < 0.85 if special is None else special
    model.save_pretrained(path)
    released = rng.random() < 0.5 if released is None else released
    if released:
        file = path / "model.safetensors"
        old, new = NAMES["saved"], NAMES["released"]
        renamed = {name.replace(old, new): weight for name, weight in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    nested = {"image_processor": settings} if released else {}
    (path / "processor_config.json").write_text(json.dumps(nested | {"use_image_special_tokens": special}))
    if not nested:
        (path / "preprocessor_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(path / "tokenizer.json"))
    return TinyLfm(path, model, released_processor(tokenizer, settings), settings, special)
