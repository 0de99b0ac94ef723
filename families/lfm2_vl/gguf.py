"""The family's models in GGUF files: llama.cpp's architecture `lfm2` with a tower `lfm2`.

Source: `conversion/lfm2.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from families.gguf_model import GgufModel, Layout, Made, linear, renamed
from families.lfm2.gguf import decoder, text_config

_TOWER = {
    "v.patch_embd.bias": "vision_tower.vision_model.embeddings.patch_embedding.bias",
    "v.position_embd.weight": "vision_tower.vision_model.embeddings.position_embedding.weight",
    **linear("v.post_ln", "vision_tower.vision_model.post_layernorm"),
    **linear("mm.input_norm", "multi_modal_projector.layer_norm"),
    **linear("mm.1", "multi_modal_projector.linear_1"),
    **linear("mm.2", "multi_modal_projector.linear_2"),
}
_LAYER = {
    **linear("ln1", "layer_norm1"),
    **linear("ln2", "layer_norm2"),
    **linear("attn_q", "self_attn.q_proj"),
    **linear("attn_k", "self_attn.k_proj"),
    **linear("attn_v", "self_attn.v_proj"),
    **linear("attn_out", "self_attn.out_proj"),
    **linear("ffn_up", "mlp.fc1"),
    **linear("ffn_down", "mlp.fc2"),
}
_BLOCK = "v.blk."


def _patches(weight: Tensor) -> Tensor:
    """The projection of patches `[h, 3, p, p]` -> `[h, p p 3]`."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def _layers(model: GgufModel) -> int:
    assert model.tower is not None
    return model.tower.count("vision.block_count", most=4096)


def _weights(model: GgufModel) -> Iterator[Made]:
    yield from decoder(model, "model.language_model.")
    embedding = "model.vision_tower.vision_model.embeddings.patch_embedding.weight"
    yield Made(embedding, ("v.patch_embd.weight",), _patches)
    yield from renamed(model, "", "model.", _TOWER)
    for index in range(_layers(model)):
        ours = f"model.vision_tower.vision_model.encoder.layers.{index}."
        yield from renamed(model, f"{_BLOCK}{index}.", ours, _LAYER)


def _unused(model: GgufModel, name: str) -> bool:
    """Whether a tensor belongs to a layer after the one whose output the model uses, or to the pooling head."""
    layer = name.removeprefix(_BLOCK).partition(".")[0] if name.startswith(_BLOCK) else ""
    return layer.isdecimal() and int(layer) >= _layers(model)


def _files(model: GgufModel) -> dict[str, dict[str, Any]]:
    tower, text = model.tower, text_config(model, moe=False)
    assert tower is not None
    tower.only("vision.projection_dim", text["hidden_size"])
    model.defaults.append("images of 64 to 256 tokens, larger ones in 2 to 10 tiles of 512 pixels")
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": tower.count("vision.embedding_length"),
        "intermediate_size": tower.count("vision.feed_forward_length"),
        "num_hidden_layers": _layers(model),
        "num_attention_heads": tower.count("vision.attention.head_count"),
        "num_channels": 3,
        "patch_size": tower.count("vision.patch_size"),
        "num_patches": model.shape("v.position_embd.weight", 2)[0],
        "layer_norm_eps": tower.number("vision.attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": False,
    }
    config = {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "image_token_id": model.token("<image>"),
        "downsample_factor": tower.count("vision.projector.scale_factor", 2),
        "projector_hidden_size": model.shape("mm.1.weight", 2)[0],
        "projector_hidden_act": "gelu",
        "projector_bias": "mm.1.bias" in model.shapes,
        "projector_use_layernorm": "mm.input_norm.weight" in model.shapes,
        "vision_feature_layer": -1,
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "text_config": text,
        "vision_config": vision,
    }
    processor = {f"image_{name}": tower.listed(f"vision.image_{name}", float, 3) for name in ("mean", "std")}
    return {"config.json": config, "preprocessor_config.json": processor}


LAYOUTS = (Layout("lfm2", _files, _weights, "lfm2", _unused),)
