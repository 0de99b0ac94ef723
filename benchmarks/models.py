"""The random checkpoints that benchmarks use, written once by transformers into a cache folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.byte_tokenizer import add_tokenizer

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
PATTERN = "M-M-M*-M-M-M*-M-"
VOCAB = 32000
IMAGE_TOKEN = 31999
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "layers_block_type": [KINDS[k] for k in PATTERN],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 3072,
    "ssm_state_size": 128,
    "mamba_num_heads": 24,
    "mamba_head_dim": 64,
    "n_groups": 4,
    "chunk_size": 128,
    "max_position_embeddings": 8192,
    "time_step_min": 1e-9,
}
"""116 M parameters, 66 M of them outside the embeddings."""
VISION: dict[str, Any] = {
    "model_type": "radio",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "patch_size": 16,
    "max_img_size": 2048,
    "video_temporal_patch_size": 2,
}
"""A ViT-S of the RADIO architecture."""
IMAGE_RULE = {"patch_size": 16, "min_num_patches": 64, "max_num_patches": 1024}

THIN_PATCH = 64
TEXT_NAME, OMNI_NAME = "nemotron-h-116m", "omni-116m-radio-s"
"""Folders of the text model and of the one with images."""


def text_model(folder: Path) -> Path:
    """The 116 M decoder alone, in bf16."""
    return write(folder / TEXT_NAME, vision=False)


def written_model(folder: Path) -> Path:
    """The same weights with a byte-level tokenizer of their vocabulary, for answers that are text."""
    model, path = text_model(folder), folder / "nemotron-h-116m-written"
    path.mkdir(exist_ok=True)
    for file in model.iterdir():
        if not (path / file.name).exists():
            (path / file.name).symlink_to(file)
    add_tokenizer(path, VOCAB)
    return path


def omni_model(folder: Path) -> Path:
    """The same decoder with the ViT, in bf16."""
    return write(folder / OMNI_NAME, vision=True)


RELEASED_CONFIG = """from transformers import NemotronHConfig, PretrainedConfig


class Config(PretrainedConfig):
    model_type = "NemotronH_Nano_Omni_Reasoning_V3"
    is_composition = True

    def __init__(self, llm_config=None, vision_config=None, **fields):
        self.text_config = NemotronHConfig(**(llm_config or {}))
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        super().__init__(**fields)
"""
"""transformers' own configuration of this model renames the released fields; the peer reads them by their released
names."""


def released_names(model: Path, folder: Path) -> Path:
    """The same Omni checkpoint with the configuration of NVIDIA's released files, which vLLM reads."""
    path = folder / f"{model.name}-released"
    path.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.name != "config.json" and not (path / file.name).exists():
            (path / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    text, vision = config.pop("text_config"), config.pop("vision_config")
    letters = {kind: letter for letter, kind in KINDS.items()}
    text |= {"dtype": "bfloat16", "hybrid_override_pattern": "".join(letters[k] for k in text["layers_block_type"])}
    teachers = [{"name": name, "use_summary": index < 2} for index, name in enumerate("abc")]
    arguments = {
        "model": "vit_small_patch16_224", "register_multiple": 10, "teachers": teachers,
        "cls_token_per_teacher": True, "cpe_max_size": 2048,
        **{key: IMAGE_RULE[key] for key in ("min_num_patches", "max_num_patches")},
    }  # fmt: skip
    vision |= {"dtype": "bfloat16", "args": arguments}
    config |= {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"], "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "auto_map": {"AutoConfig": "configuration.Config"}, "llm_config": text, "vision_config": vision,
        "sound_config": None, "image_tag_type": "internvl", "vit_hidden_size": config["vision_hidden_size"],
        "img_context_token_id": IMAGE_TOKEN, "img_context_token": "<image>", "img_start_token": "<img>",
        "img_end_token": "</img>", "patch_size": 16, "force_image_size": 512, "norm_mean": vision["norm_mean"],
        "norm_std": vision["norm_std"], "use_thumbnail": False, "template": "none", "ps_version": "v2",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "configuration.py").write_text(RELEASED_CONFIG)
    _write_tokenizer(path)
    return path


def _write_tokenizer(path: Path) -> None:
    """One word per id, and at the end the words that the peer's image processor needs."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    special = ["<unk>", "<so_embedding>", "<video>", "</img>", "<img>", "<image>"]
    words = [f"w{i}" for i in range(VOCAB - len(special))] + special
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %} <image> {% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def chat_omni_model(folder: Path) -> Path:
    """The model with images, with released names, a tokenizer and a chat template, which other servers can load
    unchanged."""
    path = released_names(omni_model(folder), folder)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def thin_omni_model(folder: Path) -> Path:
    """A model whose tower does almost no work per pixel, with patches of 64 per side: the time that remains is
    transport."""
    text = {**TEXT, "layers_block_type": [KINDS["M"]], "mamba_num_heads": 4}
    tower = {**VISION, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": THIN_PATCH}
    rule = {"patch_size": THIN_PATCH, "min_num_patches": 16, "max_num_patches": 1024}
    return write(folder / "omni-thin", vision=True, text=text, tower=tower, rule=rule)


def write(
    path: Path, *, vision: bool, text: dict[str, Any] = TEXT, tower: dict[str, Any] = VISION,
    rule: dict[str, Any] = IMAGE_RULE,
) -> Path:  # fmt: skip
    """Writes a random `nemotron_h` checkpoint in bf16, or one of the Omni architecture; an existing one is kept."""
    if (path / "complete").exists():
        return path
    from transformers import NemotronHConfig, NemotronHForCausalLM
    from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config
    from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3

    torch.manual_seed(0)
    if vision:
        config = NemotronH_Omni_Reasoning_V3_Config(
            text_config=text, vision_config=tower, audio_config=None, projector_hidden_size=4 * tower["hidden_size"],
            vision_hidden_size=tower["hidden_size"], image_token_id=IMAGE_TOKEN,
        )  # fmt: skip
        model: Any = NemotronH_Omni_Reasoning_V3(config)
    else:
        model = NemotronHForCausalLM(NemotronHConfig(**text))
    model.to(torch.bfloat16).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(rule))
    (path / "complete").touch()
    return path
