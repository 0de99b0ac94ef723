"""Random tiny checkpoints in the released layout of `NemotronH_Nano_VL_V2`, with a tokenizer.

transformers has no such model: its RADIO tower, with the projector and the decoder of Nemotron Omni, is the oracle of
rows and answers, with one tile as an image. The released processor is written out here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from minicpm import Media, byte_tokenizer
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_checkpoint import TinyCheckpoint, random_text_config, random_vision_config, randomise
from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3,
    compute_retention_mask,
)

from encoder.item import EncoderItem
from families.nemotron_h_nano_vl.vision import TiledVision
from service.model.modelconfig import load_config
from service.model.tokenizer import Tokenizer

IMAGE, VIDEO, START, END = "<image>", "<video>", "<img>", "</img>"
SPECIALS = ("<s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", IMAGE, VIDEO, START, END, "<think>", "</think>")
TEMPLATE = (
    "<s><SPECIAL_10>System\n\n{% for message in messages %}<SPECIAL_11>User\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% set ns = namespace(images=0, videos=0, text='') %}"
    "{% for part in message.content %}{% if part.type == 'image' %}{% set ns.images = ns.images + 1 %}"
    "{% elif part.type == 'video' %}{% set ns.videos = ns.videos + 1 %}"
    "{% else %}{% set ns.text = ns.text + part.text %}{% endif %}{% endfor %}"
    "{% if ns.images == 1 %}<image>{{ '\n' }}{% elif ns.images > 1 %}{% for i in range(ns.images) %}"
    "{{ ' ' if i else '' }}<image {{ i + 1 }}><image>{% endfor %}{{ '\n' }}{% endif %}"
    "{{ '<video>\n' * ns.videos }}{{ ns.text }}{% endif %}{{ '\n' }}{% endfor %}"
    "<SPECIAL_11>Assistant\n<think></think>"
)
"""Like the released one, images and videos before a message's text, and several images with numbers."""
VIDEO_WEIGHT = "vision_model.radio_model.model.patch_generator.video_embedder.weight"


def rendered(media: Sequence[Media], text: str) -> str:
    """One user message, as the template writes it."""
    stills = sum(isinstance(item, Image.Image) for item in media)
    named = " ".join(f"<image {number}>{IMAGE}" for number in range(1, stills + 1)) if stills > 1 else IMAGE * stills
    before = named + "\n" * (stills > 0) + f"{VIDEO}\n" * (len(media) - stills)
    return f"<s><SPECIAL_10>System\n\n<SPECIAL_11>User\n{before}{text}\n<SPECIAL_11>Assistant\n<think></think>"


def released_tiles(height: int, width: int, most: int, side: int) -> tuple[int, int]:
    """Columns and rows of tiles of the released image processor: of all grids of up to `most` tiles the one nearest to
    the image's aspect ratio; a later one, with as many or more tiles, replaces one that is as near if the image has
    more than half of its pixels."""
    grids = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if 1 <= i * j <= most}
    chosen, nearest = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and width * height > 0.5 * side * side * columns * rows):
            chosen, nearest = (columns, rows), distance
    return chosen


def released_pixels(image: Image.Image, settings: dict[str, Any], most: int | None = None) -> torch.Tensor:
    """`[tiles, 3, side, side]` of the released image processor: bytes are scaled to 0..1, resized by torchvision's
    bicubic filter for floats, cut, and normalised. `most`: largest number of tiles; 1 for a video's frame."""
    side = settings["image_size"]
    pixels_CHW = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
    columns, rows = released_tiles(image.height, image.width, most or settings["max_num_tiles"], side)

    def resized(height: int, width: int) -> torch.Tensor:
        if tuple(pixels_CHW.shape[1:]) == (height, width):
            return pixels_CHW
        size = (height, width)
        return F.interpolate(pixels_CHW[None], size=size, mode="bicubic", align_corners=False, antialias=True)[0]

    whole = resized(rows * side, columns * side)
    tiles = [
        whole[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
        for row in range(rows)
        for column in range(columns)
    ]
    if settings["use_thumbnail"] and len(tiles) > 1:
        tiles.append(resized(side, side))
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("norm_mean", "norm_std"))
    return (torch.stack(tiles) - mean) / std


def flattened(pixels_NCSS: torch.Tensor, patch: int) -> torch.Tensor:
    """`[N * patches, C * p * p]`: patches row by row, channels outermost."""
    number, channels, side, _ = pixels_NCSS.shape
    cut = pixels_NCSS.reshape(number, channels, side // patch, patch, side // patch, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * patch**2)


def clip_text(counts: Sequence[int], moments: Sequence[str] = ()) -> str:
    """A video's part of a prompt. `counts`: rows of each frame; `moments`: the text about each frame's time."""
    padded = [*moments, *[""] * (len(counts) - len(moments))]
    lines = (f"Frame {i + 1}{when}: {START}{VIDEO * n}{END}\n" for i, (n, when) in enumerate(zip(counts, padded)))
    return "This is a video:\n" + "".join(lines)


@dataclass(frozen=True)
class TinyNano(TinyCheckpoint):
    """A model directory, and transformers' Nemotron Omni with its weights, in float32 and eval mode."""

    settings: dict[str, Any]
    """Of the image processor."""

    @property
    def vision_spec(self) -> TiledVision:
        found = load_config(self.path).vision
        assert isinstance(found, TiledVision)
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.path / "tokenizer.json")

    @torch.no_grad()
    def features(self, patches: torch.Tensor) -> torch.Tensor:
        """`[tiles, tokens, D]` of flattened patches of tiles."""
        side = self.settings["image_size"] // self.settings["patch_size"]
        grids = torch.full((len(patches) // side**2, 2), side)
        return torch.stack(self.model.get_image_features(patches, grids).pooler_output)

    def rows(self, item: EncoderItem) -> torch.Tensor:
        """`[N, D]` of an item with float patches, before pruning."""
        return self.features(item.patches).flatten(0, 1)

    def expected(self, media: Sequence[Media], text: str, rate: float = 0.0) -> tuple[list[int], torch.Tensor]:
        """The prompt's ids and the rows of its images and clips, of the released processor and transformers' tower.
        `rate`: share of a clip's rows that is pruned."""
        rows, stills, clips = [], [], []
        patch = self.settings["patch_size"]
        for image in (item for item in media if isinstance(item, Image.Image)):
            found = self.features(flattened(released_pixels(image, self.settings), patch))
            rows.append(found.flatten(0, 1))
            stills.append(START + IMAGE * len(rows[-1]) + END)
        for clip in (item for item in media if isinstance(item, list)):
            frames = [released_pixels(Image.fromarray(frame.numpy()), self.settings, 1) for frame in clip]
            found = self.features(flattened(torch.cat(frames), patch))
            kept = torch.ones(found.shape[:2], dtype=torch.bool)
            if rate:
                sizes = torch.tensor([*found.shape[:2], 1])
                flat = compute_retention_mask(video_embeds=found.flatten(0, 1), thw=sizes, spatial_merge_size=1, q=rate)
                kept = flat.view(kept.shape)
            rows.append(found[kept])
            clips.append(clip_text(kept.sum(1).tolist()))
        whole = _filled(rendered(media, text), {IMAGE: stills, VIDEO: clips})
        width = self.model.config.text_config.hidden_size
        return list(self.tokenizer.encode(whole)), torch.cat(rows) if rows else torch.empty(0, width)

    @torch.no_grad()
    def answer_logits(self, ids: list[int], rows: torch.Tensor) -> torch.Tensor:
        """`[len(ids), V]` of one whole forward pass of the decoder, with `rows` in place of the embeddings of
        placeholders."""
        decoder, whole = self.model.language_model, torch.tensor([ids])
        places = torch.isin(whole, torch.tensor([self.tokenizer.token_id(token) for token in (IMAGE, VIDEO)]))
        embedded = decoder.get_input_embeddings()(whole)
        embedded[places] = rows
        return decoder(inputs_embeds=embedded, use_cache=False).logits[0].float()


def _filled(text: str, words: dict[str, list[str]]) -> str:
    for token, parts in words.items():
        pieces = text.split(token)
        assert len(pieces) == len(parts) + 1, (token, text)
        text = "".join(piece + part for piece, part in zip(pieces, [*parts, ""]))
    return text


def make_nano(
    path: Path, seed: int, *, files: int = 1, dtype: torch.dtype = torch.float32, text: dict[str, Any] | None = None,
    **processor: Any,
) -> TinyNano:  # fmt: skip
    """Writes a random tiny model. `files`: number of safetensors files; `text` and `processor`: settings of the decoder
    and of the image processor that are fixed instead of random."""
    rng = random.Random(seed)
    tokenizer = byte_tokenizer(SPECIALS)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIALS}
    pattern = rng.choice(["M-M*-", "M*-M", "-M*", "MM*-"])
    text = random_text_config(
        rng, pattern=pattern, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=4096,
        eos_token_id=ids["<SPECIAL_12>"], **(text or {}),
    )  # fmt: skip
    radio = random_vision_config(rng) | {"num_registers": rng.randint(1, 4)}
    torch.manual_seed(seed)
    config = NemotronH_Omni_Reasoning_V3_Config(
        text_config=text, vision_config={"model_type": "radio", **radio}, audio_config=None,
        projector_hidden_size=rng.choice([16, 40]), vision_hidden_size=radio["hidden_size"], image_token_id=ids[IMAGE],
    )  # fmt: skip
    model = NemotronH_Omni_Reasoning_V3(config).float().eval()
    randomise(model, seed)
    model.multi_modal_projector.layer_norm.variance_epsilon = eps = rng.choice([1e-5, 1e-2])
    model.vision_model.summary_idxs = model.vision_model.summary_idxs[:0]  # of class tokens that small towers lack
    model.save_pretrained(path, save_original_format=True)
    tensors = load_file(path / "model.safetensors")
    del tensors[VIDEO_WEIGHT]
    buffers = {"input_conditioner.norm_mean": torch.rand(3, 1, 1), "summary_idxs": torch.arange(2)}
    tensors |= {f"vision_model.radio_model.{name}": value for name, value in buffers.items()}
    _write(path, {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}, files)
    settings = {
        "image_processor_type": "NemotronNanoVLV2ImageProcessor", "image_size": radio["patch_size"] * 2
        * rng.choice([1, 2, 3]), "max_num_tiles": rng.choice([1, 2, 5, 12]), "use_thumbnail": rng.random() < 0.6,
        "norm_mean": [0.5, 0.45, 0.4], "norm_std": [0.5, 0.25, 0.3], "patch_size": radio["patch_size"],
        "downsample_ratio": 0.5, "do_rescale": True, "do_normalize": None, "resample": None, "image_mean": None,
        **processor,
    }  # fmt: skip
    released = _released_config(
        text | {"rms_norm_eps": eps}, radio, config.projector_hidden_size, settings, ids, pattern
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(released | {"torch_dtype": str(dtype).removeprefix("torch.")}))
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, ids["<SPECIAL_12>"]]}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(path / "tokenizer.json"))
    return TinyNano(path, model, True, settings)


def _write(path: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    """The tensors in so many files, with an index if there are several."""
    if files == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-{index % files + 1:05}-of-{files:05}.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(places.values())):
        chosen = {name: tensors[name] for name in names if places[name] == file}
        save_file(chosen, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _released_config(
    text: dict[str, Any], radio: dict[str, Any], projector: int, settings: dict[str, Any], ids: dict[str, int],
    pattern: str,
) -> dict[str, Any]:  # fmt: skip
    """`config.json` with the released field names; `time_step_limit` becomes a bare `Infinity`."""
    dense = {name: value for name, value in text.items() if "expert" not in name and not name.startswith("moe")}
    del dense["layers_block_type"]
    classes, patch = radio["num_cls_tokens"], radio["patch_size"]
    sizes = {name: value for name, value in radio.items() if name.startswith(("hidden", "num_h", "num_a"))}
    return {
        "architectures": ["NemotronH_Nano_VL_V2"], "model_type": "NemotronH_Nano_VL_V2", "downsample_ratio": 0.5,
        "force_image_size": settings["image_size"], "image_tag_type": "internvl", "img_context_token": IMAGE,
        "img_context_token_id": ids[IMAGE], "img_start_token": START, "img_end_token": END, "max_sequence_length": 4096,
        "video_context_token": VIDEO, "video_context_token_id": ids[VIDEO], "norm_mean": settings["norm_mean"],
        "norm_std": settings["norm_std"], "patch_size": patch, "projector_hidden_size": projector, "ps_version": "v2",
        "use_thumbnail": settings["use_thumbnail"], "vit_hidden_size": radio["hidden_size"],
        "llm_config": dense | {
            "model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern),
            "time_step_limit": [0.0, float("inf")], "mlp_hidden_act": "relu2",
        },
        "vision_config": sizes | {
            "args": {
                "model": "vit_huge_patch16_224", "cls_token_per_teacher": True, "cpe_max_size": radio["max_img_size"],
                "register_multiple": classes + radio["num_registers"],
                "teachers": [{"name": f"teacher {index}"} for index in range(classes)],
            },
            "mlp_ratio": radio["mlp_ratio"], "patch_size": patch, "use_swiglu_ffn": radio["use_swiglu_ffn"],
            "version": "radio_v2.5-h", "vitdet_window_size": None,
        },
    }  # fmt: skip
