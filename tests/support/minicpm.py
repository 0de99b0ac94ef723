"""Random tiny MiniCPM-V checkpoints with a tokenizer; transformers' own model and processor are the oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import encoded
from PIL import Image
from qwen_checkpoint import random_text
from safetensors.torch import save_file
from tiny_checkpoint import randomise
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import MiniCPMV4_6Config
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6ForConditionalGeneration
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.models.minicpmv4_7.configuration_minicpmv4_7 import MiniCPMV4_7Config
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7ForConditionalGeneration
from transformers.models.minicpmv4_7.processing_minicpmv4_7 import MiniCPMV4_7Processor

import saccade
from encoder.item import EncoderItem

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SPECIALS = {
    "image": IMAGE, "video": VIDEO, "image_start": "<image>", "image_end": "</image>",
    "slice_start": "<slice>", "slice_end": "</slice>", "image_id_start": "<image_id>", "image_id_end": "</image_id>",
}  # fmt: skip
MARKERS = {name: SPECIALS[name] for name in ("image_start", "image_end", "slice_start", "slice_end")} | {"newline": "Ċ"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}" + IMAGE + "\n"
    "{% elif part.type == 'video' %}" + VIDEO + "\n"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\\n' }}"
)


def byte_tokenizer(
    specials: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *SPECIALS.values()),
) -> Tokenizer:
    """Bytes, some merged pairs of them, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges = [("i", "n"), ("t", "h"), ("th", "e"), ("0", "<"), ("Ċ", "<")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, merges))
    split = pre_tokenizers.Split(Regex(r"\d|\s+|[^\s\d]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return made


@dataclass(frozen=True)
class TinyMiniCPM:
    """A model directory, and the transformers model that wrote it, in float32 and eval mode."""

    path: Path
    model: Any
    processor: Any

    @property
    def mode(self) -> str:
        """The downsampling mode: `16x`, or `4x` without the window merger."""
        return str(self.model.config.downsample_mode)

    def inputs(self, text: str, images: list[Image.Image], videos: Sequence[Frames] = ()) -> dict[str, Any]:
        """The output of the released processor for a prompt with one image token per image, and one video token per
        video. Videos need `replace_torchvision`."""
        found: dict[str, Any] = {}
        words: dict[str, list[str]] = {IMAGE: [], VIDEO: []}
        if images:
            found, words[IMAGE] = self.processor._process_images(images, return_tensors="pt", downsample_mode=self.mode)
        if videos:
            made = self.video_inputs(videos)
            found |= made
            divisor = 4 if self.mode == "4x" else 16
            words[VIDEO] = [
                self.processor.replace_video_token(made, index, video_token_divisor=divisor)
                for index in range(len(videos))
            ]
        if self.processor.default_use_image_id:
            words = {
                token: self.processor._prepend_local_ids([text], parts, token) if parts else []
                for token, parts in words.items()
            }
        (text,), _ = self.processor.get_text_with_replacements([text], words[IMAGE], words[VIDEO])
        return {**found, **self.processor.tokenizer([text], return_tensors="pt")}

    def video_inputs(self, videos: Sequence[Frames]) -> dict[str, Any]:
        """Pixels and sizes from the released video processor, whose frames are sampled already."""
        settings = self.processor.video_processor.settings
        stacked = [torch.stack(frames).permute(0, 3, 1, 2) for frames in videos]
        found = self.processor.video_processor._preprocess(
            stacked, do_resize=True, resample=3, do_rescale=True, rescale_factor=1 / 255, do_normalize=True,
            video_metadata=[None] * len(videos), return_tensors=None, **settings,
        )  # fmt: skip
        return dict(found) | {"grids_videos": found["grids_videos"].numpy()}

    @torch.no_grad()
    def rows(self, item: EncoderItem) -> torch.Tensor:
        """`[N, row_width]` of one image."""
        patch = self.model.config.vision_config.patch_size
        planes = item.patches.view(-1, 3, patch, patch).permute(1, 2, 0, 3).reshape(1, 3, patch, -1)
        return torch.cat(self.model.get_image_features(planes, torch.tensor(item.grids)).pooler_output)

    @torch.no_grad()
    def logits(self, ids: list[int], inputs: dict[str, Any]) -> torch.Tensor:
        """`[len(ids), V]` of one whole forward pass."""
        names = [f"{name}{kind}" for name in ("pixel_values", "target_sizes") for kind in ("", "_videos")]
        given = {name: inputs[name] for name in names if name in inputs}
        whole, config = torch.tensor([ids]), self.model.config
        if config.model_type == "minicpmv4_7" and given:
            kinds = (whole == config.image_token_id).long() + 2 * (whole == config.video_token_id).long()
            given["mm_token_type_ids"] = kinds
        return self.model(input_ids=whole, **given, use_cache=False).logits[0].float()


Frames = list[torch.Tensor]
"""The frames of a video, `[H, W, 3]` uint8 each."""
Media = Image.Image | Frames


def released_processor(
    tokenizer: Tokenizer, numbers: dict[str, Any], video: dict[str, Any], kind: type[Any] = MiniCPMV4_6Processor
) -> Any:
    """transformers' own processor, built without its constructor, which needs a video processor and thereby
    torchvision."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made: Any = object.__new__(kind)
    made.tokenizer, made.image_processor = fast, MiniCPMV4_6ImageProcessorPil(**numbers)
    made.slice_mode, made.default_use_image_id = made.image_processor.slice_mode, made.image_processor.use_image_id
    made.video_processor = object.__new__(MiniCPMV4_6VideoProcessor)
    made.video_processor.settings = video | {name: tuple(video[name]) for name in ("image_mean", "image_std")}
    made.video_slice_mode = video["slice_mode"]
    for name, token in SPECIALS.items():
        setattr(made, f"{name}_token", token)
        setattr(made, f"{name}_token_id", tokenizer.token_to_id(token))
    return made


def make_minicpm(path: Path, seed: int, *, canvas: bool = False, moe: bool = False, **processor: Any) -> TinyMiniCPM:
    """Writes a random tiny model. `canvas`: MiniCPM-V 4.7 instead of 4.6; `moe`: experts in the decoder; `processor`:
    fields of `preprocessor_config.json` that are fixed instead of random."""
    rng = random.Random(seed)
    tokenizer = byte_tokenizer()
    heads, layers, mode = rng.choice([1, 2, 4]), rng.randint(1, 3), rng.choice(["16x", "16x", "16x", "4x"])
    patch = rng.choice([2, 4])
    text = random_text(
        rng, moe=moe, vocab_size=tokenizer.get_vocab_size(), eos_token_id=tokenizer.token_to_id("<|im_end|>")
    )
    text["max_position_embeddings"] = 4096
    vision = {
        "hidden_size": heads * rng.choice([8, 18]), "intermediate_size": rng.choice([20, 36]),
        "num_hidden_layers": layers, "num_attention_heads": heads, "patch_size": patch,
        "image_size": patch * rng.choice([5, 8]),
    }  # fmt: skip
    torch.manual_seed(seed)
    make_config, make_model, make_processor = (
        (MiniCPMV4_7Config, MiniCPMV4_7ForConditionalGeneration, MiniCPMV4_7Processor) if canvas
        else (MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration, MiniCPMV4_6Processor)
    )  # fmt: skip
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in MARKERS.items()} if canvas else {}
    config = make_config(
        text_config={"model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text", **text},
        vision_config=vision, downsample_mode=mode,
        insert_layer_id=rng.randrange(layers), tie_word_embeddings=rng.random() < 0.5,
        image_token_id=tokenizer.token_to_id(IMAGE), video_token_id=tokenizer.token_to_id(VIDEO), **ids,
    )  # fmt: skip
    model = make_model(config).float().eval()
    randomise(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "language_model" in name and "linear_attn" not in name:
                parameter -= 1  # zero-centred
    if config.tie_word_embeddings:
        model.tie_weights()
    numbers = {
        "patch_size": patch, "scale_resolution": patch * 4 * rng.choice([2, 3]), "downsample_mode": mode,
        "max_slice_nums": rng.choice([2, 4, 9]), "slice_mode": rng.random() < 0.85,
        "use_image_id": rng.random() < 0.8, "image_mean": [0.5, 0.45, 0.4], "image_std": [0.5, 0.25, 0.3], **processor,
    }  # fmt: skip
    video = {
        "patch_size": patch, "scale_resolution": patch * 4 * rng.choice([1, 2]), "downsample_mode": mode,
        "max_slice_nums": rng.choice([1, 2, 4]), "slice_mode": rng.random() < 0.7, "max_num_frames": 128,
        "stack_frames": 1, "image_mean": [0.45, 0.5, 0.4], "image_std": [0.3, 0.5, 0.25],
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"dtype": "float32"}, default=str))
    (path / "preprocessor_config.json").write_text(json.dumps(numbers))
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(path / "tokenizer.json"))
    return TinyMiniCPM(path, model, released_processor(tokenizer, numbers, video, make_processor))


def random_image(rng: random.Random, most: int = 90) -> Image.Image:
    """An image of any shape, smooth enough for a resize to matter."""
    height, width = rng.randint(3, most), rng.randint(3, most)
    noise = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


def random_video(rng: random.Random) -> Frames:
    """One to four frames of one size."""
    first = random_image(rng)
    images = [first] + [random_image(rng).resize(first.size) for _ in range(rng.randrange(4))]
    return [torch.from_numpy(np.array(image)) for image in images]


def random_media(rng: random.Random) -> list[Media]:
    """A video at least, and up to two other videos and images, in any order."""
    media: list[Media] = [random_video(rng)]
    media += [rng.choice([random_image, random_video])(rng) for _ in range(rng.randrange(3))]
    rng.shuffle(media)
    return media


def rendered(media: list[Media], text: str = "0<1 ") -> str:
    """One user message with `text` after each item, as the checkpoint's template writes it."""
    inner = "".join((VIDEO if isinstance(item, list) else IMAGE) + "\n" + text for item in media)
    return f"<|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n"


def part(item: Media) -> dict[str, Any]:
    """The item as part of a message, with files."""
    if isinstance(item, list):
        return {"type": "video", "video": [encoded(Image.fromarray(frame.numpy())) for frame in item]}
    return {"type": "image", "image": encoded(item)}


def inputs_of(tiny: TinyMiniCPM, media: list[Media], text: str = "0<1 ") -> dict[str, Any]:
    """The released processor's output for `rendered(media, text)`."""
    images = [item for item in media if not isinstance(item, list)]
    return tiny.inputs(rendered(media, text), images, [item for item in media if isinstance(item, list)])


def check_media_answers(tiny: TinyMiniCPM, media: list[Media], text: str, **options: Any) -> None:
    """The greedy answer about media, each followed by `text`, is transformers'. `options`: the engine's."""
    content = [each for item in media for each in (part(item), {"type": "text", "text": text})]
    never = {tiny.model.config.image_token_id: -1e9, tiny.model.config.video_token_id: -1e9}
    inputs = inputs_of(tiny, media, text)
    ids = inputs["input_ids"][0].tolist()
    with saccade.LocalClient(tiny.path, dtype="float32", max_seqs=2, max_len=4096, threads=1, **options) as client:
        for _ in range(2):  # the second time from the caches
            answer = client.generate(
                [{"role": "user", "content": content}], max_tokens=16, temperature=0, ignore_eos=True, logprobs=5,
                logit_bias=never,
            )  # fmt: skip
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.usage.video_tokens == ids.count(tiny.model.config.video_token_id)
            assert answer.usage.video_frames == sum(len(item) for item in media if isinstance(item, list))
            assert_greedy(answer, tiny.logits(ids + answer.token_ids[:-1], inputs)[len(ids) - 1 :], list(never))


def assert_greedy(answer: saccade.Generation, logits: torch.Tensor, never: Sequence[int]) -> None:
    """`logits`: transformers', `[tokens of the answer, V]`; `never`: tokens that could not be drawn."""
    expected, scale = torch.log_softmax(logits, -1), max(float(logits.abs().max()), 1.0)
    logits[:, list(never)] = -torch.inf
    assert answer.token_ids == logits.argmax(-1).tolist()
    for place, entry in enumerate(answer.logprobs or ()):
        for token, logprob in entry.top:
            assert abs(logprob - float(expected[place, token])) <= 1e-4 * scale
