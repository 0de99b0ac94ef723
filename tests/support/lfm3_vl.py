"""Random tiny LFM3-VL checkpoints with a tokenizer; transformers' own model and processors are the oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from minicpm import Frames, Media, byte_tokenizer
from PIL import Image
from qwen_vision import image_processor, oracle_patches, video_pixels
from safetensors.torch import load_file, save_file
from text_families import lfm3
from tiny_checkpoint import randomise
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.lfm3_vl.configuration_lfm3_vl import Lfm3VlConfig
from transformers.models.lfm3_vl.modeling_lfm3_vl import Lfm3VlForConditionalGeneration
from transformers.models.lfm3_vl.processing_lfm3_vl import Lfm3VlProcessor

from encoder.item import EncoderItem
from families.lfm3_vl.vision import GridVision
from service.model.modelconfig import load_config

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
SPECIALS = ("<|startoftext|>", "<|im_start|>", "<|im_end|>", IMAGE, VIDEO, START, END)
TEMPLATE = (
    "<|startoftext|>{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}" + START + IMAGE + END + "{% elif part.type == 'video' %}" + VIDEO
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\\n' }}"
)  # fmt: skip
RELEASED = {".patch_embed.": ".patchifier.", ".q_norm.": ".q_layernorm.", ".k_norm.": ".k_layernorm."}
"""Names of the tower's weights in transformers -> those in the released files."""


def rendered(content: Sequence[Media | str]) -> str:
    """One user message, as the checkpoint's template writes it."""
    inner = "".join(
        part if isinstance(part, str) else VIDEO if isinstance(part, list) else START + IMAGE + END for part in content
    )
    return f"<|startoftext|><|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class TinyLfm3:
    """A model directory, and the transformers model that wrote it, in float32 and eval mode."""

    path: Path
    model: Any
    processor: Any

    @property
    def vision(self) -> GridVision:
        found = load_config(self.path).vision
        assert isinstance(found, GridVision)
        return found

    def inputs(self, text: str, media: Sequence[Media], monkeypatch: Any) -> dict[str, Any]:
        """The released processors' output for a prompt with one token per image and one per clip, whose frames are at
        the default rate."""
        vision, found = self.vision, {}
        images = [np.array(item) for item in media if isinstance(item, Image.Image)]
        clips = [item for item in media if isinstance(item, list)]
        if images:
            found |= dict(image_processor(vision)(images=images, return_tensors="pt"))
        if clips:
            found |= self._clip_inputs(vision, clips, monkeypatch)
        stills = [self.processor.replace_image_token(found, index) for index in range(len(images))]
        films = [self.processor.replace_video_token(found, index) for index in range(len(clips))]
        (text,), _ = self.processor.get_text_with_replacements([text], stills, films)
        return found | {"input_ids": self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]}

    def _clip_inputs(self, vision: GridVision, clips: Sequence[Frames], monkeypatch: Any) -> dict[str, Any]:
        # The processor refuses clips of fewer frames than a patch has.
        full = [clip + clip[-1:] * (vision.temporal_patch_size - len(clip)) for clip in clips]
        made = [video_pixels(vision, clip, monkeypatch) for clip in full]
        told = [SimpleNamespace(fps=None, frames_indices=list(range(len(clip)))) for clip in clips]
        return {
            "pixel_values_videos": torch.cat([pixels for pixels, _ in made]),
            "video_grid_thw": torch.tensor([grid for _, grid in made]),
            "video_metadata": told,
        }

    @torch.no_grad()
    def rows(self, item: EncoderItem) -> torch.Tensor:
        """`[N, row_width]` of one image or clip with float patches."""
        grid = torch.tensor([[item.num_sequences, *item.grid]])
        return torch.cat(self.model.get_image_features(oracle_patches(self.vision, item), grid).pooler_output)

    @torch.no_grad()
    def logits(self, ids: list[int], inputs: dict[str, Any]) -> torch.Tensor:
        """`[len(ids), V]` of one whole forward pass."""
        names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        given = {name: inputs[name] for name in names if name in inputs}
        return self.model(input_ids=torch.tensor([ids]), **given, use_cache=False).logits[0].float()


def released_processor(tokenizer: Tokenizer, merge: int, together: int) -> Any:
    """transformers' own processor, built without its constructor, whose video processor needs torchvision."""
    made: Any = object.__new__(Lfm3VlProcessor)
    made.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|startoftext|>", eos_token="<|im_end|>", pad_token="<|startoftext|>"
    )
    made.image_token, made.video_token, made.vision_start_token, made.vision_end_token = IMAGE, VIDEO, START, END
    made.image_processor = SimpleNamespace(merge_size=merge)
    made.video_processor = SimpleNamespace(merge_size=merge, temporal_patch_size=together)
    return made


def make_lfm3(path: Path, seed: int, **vision_changes: Any) -> TinyLfm3:
    """Writes a random tiny model. `vision_changes`: fields of `vision_config` that are fixed instead of random."""
    rng = random.Random(seed)
    tokenizer = byte_tokenizer(SPECIALS)
    text = lfm3(random.Random(seed)).config.to_dict() | {
        "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"), "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    kv, patch, together = rng.choice([1, 2, 3]), rng.choice([2, 4]), rng.choice([2, 2, 3])
    heads, layers, merge = kv * rng.choice([1, 2, 3]), rng.randint(2, 4), rng.choice([2, 2, 2, 1, 3])
    kinds = ["conv", "full_attention"]
    vision = {
        "hidden_size": heads * rng.choice([8, 20]), "intermediate_size": rng.choice([20, 36]),
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "patch_size": patch,
        "spatial_merge_size": merge, "temporal_patch_size": together, "norm_eps": rng.choice([1e-5, 1e-6]),
        "conv_kernel_size": rng.choice([3, 3, 5, 1]),
        "layer_types": rng.choice([None, [rng.choice(kinds) for _ in range(layers)]]),
        "rope_parameters": rng.choice([None, {"rope_type": "axial", "rope_theta": 1e3}]), **vision_changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = Lfm3VlConfig(
        text_config=text, vision_config=vision, projector_hidden_size=rng.choice([24, 40]),
        projector_bias=rng.random() < 0.7, projector_hidden_act=rng.choice(["gelu", "gelu", "silu"]),
        tie_word_embeddings=rng.random() < 0.5, image_token_id=tokenizer.token_to_id(IMAGE),
        video_token_id=tokenizer.token_to_id(VIDEO), vision_start_token_id=tokenizer.token_to_id(START),
        vision_end_token_id=tokenizer.token_to_id(END),
    )  # fmt: skip
    model = Lfm3VlForConditionalGeneration(config).float().eval()
    randomise(model, seed)
    if config.tie_word_embeddings:
        model.tie_weights()
    model.save_pretrained(path)
    _rename(path / "model.safetensors", rng.random() < 0.5)
    shared = {
        "patch_size": patch, "merge_size": merge, "temporal_patch_size": together, "image_mean": [0.5, 0.45, 0.4],
        "image_std": [0.5, 0.25, 0.3],
    }  # fmt: skip
    area = (patch * merge) ** 2
    image = {**shared, "size": {"shortest_edge": 2 * area, "longest_edge": 20 * area}}
    video = {**shared, "size": {"shortest_edge": 4 * area, "longest_edge": 50 * area}}
    (path / "preprocessor_config.json").write_text(json.dumps(image))
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(path / "tokenizer.json"))
    return TinyLfm3(path, model, released_processor(tokenizer, merge, together))


def _rename(file: Path, released: bool) -> None:
    """Gives the tower's weights the released names, or those of transformers."""
    renamed = {}
    for name, weight in load_file(file).items():
        for known, published in RELEASED.items():
            pair = (known, published) if released else (published, known)
            name = name.replace(*pair) if "vision_tower." in name else name
        renamed[name] = weight
    save_file(renamed, file, metadata={"format": "pt"})
