"""Text-only families against transformers in float32, on random tiny checkpoints, with every option of the decoder."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import NATIVE
from safetensors.torch import load_file, save_file
from speculation import pairwise
from text_families import FAMILIES, make_text_checkpoint
from tiny_checkpoint import VOCAB
from tiny_decoder import greedy_params, request, run, tokens
from transformers import AutoConfig

from decoder.config import DecoderOptions
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.mamba2 import Mamba2Mixer
from decoder.layers.recurrent_descriptions import GatedDelta, Mamba2
from decoder.recurrence_operations import MAX_TAPS
from decoder.runner import DecoderRunner
from families import CheckpointError
from kernels.linear import Quantised, quantise
from service.model.checkpoint import Checkpoint
from service.model.modelconfig import load_config
from service.model.quantise import quantise_checkpoint

SEEDS = 20
FALCON_NORMED = 18
"""A seed that gives Falcon-H1 a norm before the gate."""
STEPS = 10


OPTIONS = pairwise(
    {
        "state_cache": ["none", "align", "all", "auto"],
        "speculative": ["none", "ngram"],
        "spec_state": ["replay", "slots"],
        "max_chunk": [None, 5],
        "graphs": ["off", "on"],
        "native": NATIVE,
        "preempt_every": [0, 3],
    }
)


def whole(runner: DecoderRunner) -> bool:
    """Whether compiled code, if available, covers every layer but Mamba-2 with too many taps."""
    native, layers = runner.model.native, [layer.mixers for layer in runner.model.trunk.layers]
    called = [] if native is None else [mixers for mixers in layers if any(map(native.calls, mixers))]
    return all(isinstance(each[0], Mamba2Mixer) and each[0].spec.conv_kernel > MAX_TAPS for each in called)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_with_any_options(tmp_path: Path, family: str, seed: int) -> None:
    """Two prompts with a common beginning, one after the other: the second uses the cached prefix of the first."""
    tiny = make_text_checkpoint(tmp_path, family, seed)
    checkpoint = Checkpoint(tmp_path)
    chosen: dict[str, Any] = dict(OPTIONS[seed % len(OPTIONS)])
    preempt_every = chosen.pop("preempt_every")
    if checkpoint.config.decoder.mtp and chosen["speculative"] != "none":
        chosen["speculative"] = "mtp"
    block = {"state_block": 8} if chosen["state_cache"] in ("align", "all") else {}
    options = DecoderOptions(
        max_seqs=3,
        max_len=128,
        max_batched_tokens=64,
        page_size=4,
        host_bytes=2**24,
        draft_policy="fixed",
        **block,
        **chosen,
    )
    runner = DecoderRunner(checkpoint.config.decoder, options, checkpoint.decoder_weights())
    assert whole(runner)
    rng = random.Random(seed)
    common = [rng.randint(3, 9) for _ in range(rng.choice([9, 24, 33]))]
    for name in ("first", "second"):
        ids = [*common, *(rng.randint(3, VOCAB - 2) for _ in range(rng.randint(1, 12)))]
        asked = request(name, ids, greedy_params(STEPS, logprobs=3))
        events = run(runner, asked, preempt_every=preempt_every)[name]
        drawn = tokens(events)
        oracle = tiny.logits(ids + drawn[:-1])[len(ids) - 1 :]
        expected = torch.log_softmax(oracle, -1)
        scale = max(1.0, float(oracle.abs().max()))
        for row, event in zip(expected, events, strict=True):
            assert event.logprob == pytest.approx(float(row[event.token_id]), abs=1e-4 * scale)
            assert float(row.max() - row[event.token_id]) <= 1e-4 * scale
    runner.check_integrity()


@pytest.mark.parametrize("seed", [2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_files_are_read_back(tmp_path: Path, family: str, seed: int) -> None:
    """The same bits as of a model whose layers are quantised when they are read: files and memory hold the same layers
    in int8, prediction heads included. Fused tensors are quantised as stored and split when they are read."""
    make_text_checkpoint(tmp_path / "model", family, seed)
    checkpoint = Checkpoint(tmp_path / "model")
    quantise_checkpoint(checkpoint, tmp_path / "small", "int8")

    def answer(of: Checkpoint, weights: str | None) -> list[tuple[int | None, float | None]]:
        drafting = "mtp" if of.config.decoder.mtp else "none"
        options = DecoderOptions(max_seqs=1, max_len=64, weights=weights, native="off", speculative=drafting)
        runner = DecoderRunner(of.config.decoder, options, of.decoder_weights())
        events = run(runner, request("a", [5, 7, 9], greedy_params(12, logprobs=0)))["a"]
        return [(event.token_id, event.logprob) for event in events]

    assert answer(Checkpoint(tmp_path / "small"), None) == answer(checkpoint, "int8")


@pytest.mark.parametrize("seed", [2, 3], ids=["thirds", "released"])
def test_joined_weights_are_read_back_from_compressed_tensors(tmp_path: Path, seed: int) -> None:
    """The convolution of OLMo Hybrid, wherever its channels are divided."""
    tiny = make_text_checkpoint(tmp_path / "model", "olmo_hybrid", seed)
    original = Checkpoint(tiny.path)
    plain = dict(original.decoder_weights())
    names = [name for name in plain if name.endswith("conv1d.weight")]
    assert names
    for name in names:
        layer = int(name.split(".")[2]) // 2
        assert torch.equal(plain[name], tiny.model.state_dict()[f"model.layers.{layer}.linear_attn.conv1d.weight"])
    quantise_checkpoint(original, tmp_path / "small", "fp8", "compressed-tensors")
    small = dict(Checkpoint(tmp_path / "small").decoder_weights())
    assert all(torch.equal(small[name], plain[name]) for name in names)


def test_a_joined_weight_needs_all_parts(tmp_path: Path) -> None:
    make_text_checkpoint(tmp_path, "olmo_hybrid", 3)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "k_conv1d" not in n}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"conv1d\.weight has entries \[0, 2\], which do not count up from 0"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("naming", ["released", "native"])
def test_experts_of_granite_are_read_back_from_compressed_tensors(tmp_path: Path, naming: str) -> None:
    """Stacks become one module for each matrix of an expert, whatever their names in the file."""
    tiny = make_text_checkpoint(tmp_path / "model", "granitemoehybrid", 1)
    tiny.model.save_pretrained(tiny.path, save_original_format=naming == "released")
    original = Checkpoint(tiny.path)
    quantise_checkpoint(original, tmp_path / "small", "fp8", "compressed-tensors")
    plain, experts = dict(original.decoder_weights()), 0
    for name, weight in Checkpoint(tmp_path / "small").decoder_weights():
        if isinstance(weight, Quantised):
            assert torch.equal(weight.dequantise(), quantise(plain[name], "fp8").dequantise()), name
            experts += "experts" in name
        else:
            assert torch.equal(weight, plain[name]), name
    assert experts > 0


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bamba", "intermediate_size": 8, "attn_layer_indices": [0]},
        {"model_type": "granitemoehybrid", "intermediate_size": 8, "shared_intermediate_size": 8,
         "layer_types": ["full_attention"]},
        {"model_type": "nemotron_h", "layers_block_type": ["full_attention"]},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_key_and_value_heads_of_files_without_the_field(tmp_path: Path, config: dict[str, Any]) -> None:
    """transformers' number if the field is absent, and as many as query heads if it is null."""
    file, whole = tmp_path / "config.json", {**config, "hidden_size": 256, "vocab_size": 8, "num_hidden_layers": 1}

    def heads() -> int:
        mixer = load_config(tmp_path).decoder.mixers[0]
        assert isinstance(mixer, Attention)
        return mixer.kv_heads

    file.write_text(json.dumps(whole))
    assert heads() == AutoConfig.from_pretrained(tmp_path).num_key_value_heads
    file.write_text(json.dumps(whole | {"num_key_value_heads": None}))
    assert heads() == 32


@pytest.mark.parametrize(
    ("family", "seed", "change"),
    [
        ("granitemoehybrid", 1, {"attention_multiplier": None}),
        ("granitemoehybrid", 7, {"mamba_conv_bias": None}),
        ("bamba", 4, {"mamba_conv_bias": None}),
        ("qwen3_next", 1, {"partial_rotary_factor": None, "rope_parameters": {"rope_type": "default"}}),
        ("falcon_h1", FALCON_NORMED, {"mamba_norm_before_gate": None, "mlp_multipliers": None}),
        ("falcon_h1", FALCON_NORMED, {"rope_theta": 1e11, "rope_parameters": None, "rope_scaling": None}),
        ("granitemoehybrid", 1, {"layer_types": ["attention", "mamba"], "layers_block_type": ["mamba", "attention"]}),
    ],
    ids=str,
)
def test_fields_that_are_null_or_named_twice(tmp_path: Path, family: str, seed: int, change: dict[str, Any]) -> None:
    """They mean what they mean in transformers."""
    tiny = make_text_checkpoint(tmp_path, family, seed)
    file = tmp_path / "config.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps(before | change))
    checkpoint, ids = Checkpoint(tmp_path), [5, 7, 11, 13, 17, 19]
    runner = DecoderRunner(
        checkpoint.config.decoder, DecoderOptions(max_seqs=1, max_len=64), checkpoint.decoder_weights()
    )
    [event] = run(runner, request("a", ids, greedy_params(1, logprobs=VOCAB)))["a"]
    with torch.no_grad():
        oracle = type(tiny.model).from_pretrained(tmp_path).eval()(torch.tensor([ids]), use_cache=False).logits[0, -1]
    expected = torch.log_softmax(oracle, -1)
    assert len(event.top) == VOCAB
    for token, logprob in event.top:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-4 * max(1.0, float(oracle.abs().max())))


def test_names_of_nemotron_that_contradict_their_aliases(tmp_path: Path) -> None:
    """The aliases win, as in transformers."""
    mamba = {"n_groups": 2, "conv_kernel": 3, "use_conv_bias": True, "chunk_size": 8, "n_routed_experts": 4}
    aliases = {"mamba_n_groups": 1, "mamba_d_conv": 2, "mamba_conv_bias": False, "mamba_chunk_size": 16,
               "num_local_experts": 6}  # fmt: skip
    kinds = {"layers_block_type": ["moe", "mamba"], "layer_types": ["mamba", "moe"]}
    sizes = {"vocab_size": 8, "hidden_size": 16, "mamba_num_heads": 2, "mamba_head_dim": 4, "ssm_state_size": 4}
    whole = {"model_type": "nemotron_h", **sizes, **mamba, **aliases, **kinds}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    oracle = AutoConfig.from_pretrained(tmp_path)
    first, second = load_config(tmp_path).decoder.mixers
    assert oracle.layers_block_type == ["linear_attention", "moe"]
    assert isinstance(first, Mamba2) and isinstance(second, Experts)
    found = {name: getattr(first, name) for name in list(mamba)[:-1]} | {"n_routed_experts": second.n_routed_experts}
    assert found == {name: getattr(oracle, name) for name in mamba} == dict(zip(mamba, aliases.values(), strict=True))


def test_which_layers_of_qwen_next_have_experts(tmp_path: Path) -> None:
    """Every second layer, the others and those of a list have MLPs; so does no multi-token prediction head."""
    fields = {
        "model_type": "qwen3_next", "vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 2, "intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
        "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_nextn_predict_layers": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    decoder = load_config(tmp_path).decoder
    kinds = [type(layer.mixers[0][1]) for layer in decoder.layers[1::2]]
    assert kinds == [Mlp, Experts, Mlp, Mlp, Mlp, Experts]
    assert [type(spec) for spec in decoder.mtp] == [Attention, Experts]
    small = json.dumps(fields | {"num_experts": 0})
    (tmp_path / "config.json").write_text(small)
    assert {type(layer.mixers[0][1]) for layer in load_config(tmp_path).decoder.layers[1::2]} == {Mlp}


def test_defaults_and_positions_of_olmo(tmp_path: Path) -> None:
    """Those of transformers, but that null or absent `rope_parameters` are no positions."""
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_attention_heads": 2, "pad_token_id": 0}
    whole = {"model_type": "olmo_hybrid", "num_hidden_layers": 6, **sizes}
    theta: list[tuple[dict[str, Any], float | None]] = [
        ({}, None), ({"rope_parameters": None}, None), ({"rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, None), ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
    ]  # fmt: skip
    for rope, expected in theta:
        (tmp_path / "config.json").write_text(json.dumps(whole | rope))
        decoder, oracle = load_config(tmp_path).decoder, AutoConfig.from_pretrained(tmp_path)
        kinds = [
            "full_attention" if isinstance(layer, Attention) else "linear_attention" for layer in decoder.mixers[::2]
        ]
        delta, attention = decoder.mixers[0], decoder.mixers[6]
        assert isinstance(delta, GatedDelta) and isinstance(attention, Attention) and kinds == oracle.layer_types
        assert (delta.num_key_heads, delta.key_head_dim, delta.num_value_heads, delta.value_head_dim) == (
            oracle.linear_num_key_heads, oracle.linear_key_head_dim, oracle.linear_num_value_heads,
            oracle.linear_value_head_dim,
        )  # fmt: skip
        assert (attention.rope and attention.rope.theta) == expected and decoder.position_axes == (expected is not None)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with a family's model, which tests copy before they change it."""
    return cache(lambda family: make_text_checkpoint(tmp_path_factory.mktemp(family), family, 1).path)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("bamba", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not served"),
        ("bamba", {"attn_layer_indices": [7]}, "attn_layer_indices names layer 7 of"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("bamba", {"is_causal": False}, "is_causal is False; this family is served with True"),
        ("bamba", {"vocab_size": None}, "lacks vocab_size"),
        ("bamba", {"mamba_d_head": 3}, "mamba_d_head is 3"),
        ("bamba", {"mamba_n_heads": 0}, "mamba_n_heads must be a whole number of at least 1, not 0"),
        ("bamba", {"mamba_d_conv": 4.5}, "mamba_d_conv must be a whole number of at least 1, not 4.5"),
        ("bamba", {"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number of at least 1, not '2'"),
        ("bamba", {"mamba_chunk_size": float("inf")}, "mamba_chunk_size must be a whole number of at least 1, not inf"),
        ("granitemoehybrid", {"num_local_experts": float("inf")}, "num_local_experts must be a whole number"),
        ("granitemoehybrid", {"layer_types": ["mamba", "sliding"]}, "sliding"),
        ("granitemoehybrid", {"layer_types": ["mamba", ["mamba"]]}, r"layer_types holds \[\"\['mamba'\]\"\]"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 9}, "names 9 layers and num_hidden_layers is"),
        ("granitemoehybrid", {"is_causal": False}, "is_causal is False; this family is served with True"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "'alibi'"),
        ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling must be a number above 0, not 0"),
        ("granitemoehybrid", {"num_local_experts": 2, "num_experts_per_tok": 3}, "3 is above the 2 experts"),
        ("qwen3_next", {"mlp_only_layers": [0.5]}, r"mlp_only_layers must be a list of whole numbers, not \[0.5\]"),
        ("qwen3_next", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number of at least 1, not 0"),
        ("qwen3_next", {"num_experts": 8, "norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_next", {"num_experts": "8"}, "num_experts must be a whole number of at least 1, not '8'"),
        ("qwen3_next", {"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ("qwen3_next", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; 0 and 1 are served"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("olmo_hybrid", {"layer_types": ["linear_attention", "sliding"]}, "sliding"),
        ("olmo_hybrid", {"linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval must be true or false, not 2"),
        (
            "olmo_hybrid",
            {"linear_num_key_heads": 2, "linear_num_value_heads": 3},
            "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2",
        ),
        (
            "olmo_hybrid",
            {"linear_value_head_dim": 0},
            "linear_value_head_dim must be a whole number of at least 1, not 0",
        ),
        (
            "olmo_hybrid",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
            "rope_type 'yarn' is not served",
        ),
        ("olmo_hybrid", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta must be a number above 0, not '1e4'"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("falcon_h1", {"attention_in_multiplier": 0}, "attention_in_multiplier must be a number above 0, not 0"),
        ("falcon_h1", {"key_multiplier": 1e9}, "key_multiplier is 1000000000.0; from 1e-06 to 1000000.0 is served"),
        ("falcon_h1", {"lm_head_multiplier": "2"}, "lm_head_multiplier must be a number above 0, not '2'"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be a list of 5 numbers"),
        ("falcon_h1", {"ssm_multipliers": [1, 1, 1, -1, 1]}, "ssm_multipliers must be a number above 0, not -1"),
        ("falcon_h1", {"mlp_multipliers": [1.0, None]}, "mlp_multipliers must be a list of 2 numbers"),
        ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp is False; this family is served with True"),
        ("falcon_h1", {"attn_layer_indices": [0]}, r"attn_layer_indices is \[0\]; this family is served with None"),
        ("falcon_h1", {"mamba_d_ssm": 33, "mamba_n_heads": 2}, "mamba_n_heads 2 does not divide mamba_d_ssm 33"),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 8}, "mamba_d_ssm 32 make it 16"),
        ("falcon_h1", {"mamba_d_ssm": 0}, "mamba_d_ssm must be a whole number of at least 1, not 0"),
        ("falcon_h1", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not served"),
        ("falcon_h1", {"rms_norm_eps": 10**400}, "rms_norm_eps must be a number above 0, not 1000"),
        (
            "falcon_h1",
            {"head_dim": None, "num_attention_heads": 10**6, "num_key_value_heads": 1},
            r"hidden_size \d+ is below num_attention_heads 1000000",
        ),
        ("falcon_h1", {"mamba_rms_norm": "no"}, "mamba_rms_norm must be true or false, not 'no'"),
        ("zamba2", {"hidden_act": "tanh"}, "hidden_act 'tanh' is not one of relu2, relu, silu, gelu"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings is False; this family is served with True"),
        ("zamba2", {"use_long_context": True}, "use_long_context is True; this family is served with False"),
        ("zamba2", {"use_conv_bias": False}, "use_conv_bias is False; this family is served with True"),
        ("zamba2", {"layers_block_type": None}, "lacks layers_block_type"),
        ("zamba2", {"layers_block_type": ["hybrid"]}, "layers_block_type names 1 layers and num_hidden_layers is 2"),
        ("zamba2", {"layers_block_type": ["hybrid", "attention"]}, r"layers_block_type holds \['attention'\]"),
        ("zamba2", {"num_mem_blocks": 0}, "num_mem_blocks must be a whole number of at least 1, not 0"),
        ("zamba2", {"adapter_rank": 0}, "adapter_rank must be a whole number of at least 1, not 0"),
        ("zamba2", {"num_attention_heads": 7}, "num_attention_heads 7 does not divide twice the hidden_size 24"),
        ("zamba2", {"n_mamba_heads": 7}, "n_mamba_heads 7 does not divide mamba_expand 2 x hidden_size 24"),
        ("zamba2", {"mamba_ngroups": 5}, "n_mamba_heads 1 is not a multiple of mamba_ngroups 5"),
        (
            "zamba2",
            {"use_shared_attention_adapter": True, "num_key_value_heads": 1},
            "num_key_value_heads is 1 and num_attention_heads 2; they must be equal with use_shared_attention_adapter",
        ),
        ("zamba2", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not served"),
    ],
)
def test_configurations_that_are_refused(
    written: Callable[[str], Path], tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(written(family), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)
