"""Published quantised formats: correct numbers, answers of the dequantised model, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import png
from quantised_checkpoint import NAME, edit_config, entries, quantise_files, read_back
from quantised_files import FORMATS, block_fp8, packed
from qwen_checkpoint import make_qwen
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from safetensors.torch import save as save_bytes
from text_families import FAMILIES, make_text_checkpoint
from tiny_checkpoint import IMAGE_TOKEN, TinyCheckpoint, make_checkpoint, oracle_images
from tiny_decoder import greedy_params, request, run, tokens

import saccade
from decoder.config import DecoderOptions
from decoder.runner import DecoderRunner
from families import CheckpointError
from kernels.linear import Linear, Packed, Quantised
from kernels.native import NativeUnavailable
from service.model.checkpoint import Checkpoint
from service.model.formats.declared import disagreements, read_declared
from service.model.formats.tensors import FormatError, find_weights
from service.model.formats.unpack import load

STEPS = 12


def matrix(rows: int, inner: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, inner)).astype(np.float32) * 0.05


@pytest.mark.parametrize("shape", [(256, 384), (264, 160), (8, 32)])
@pytest.mark.parametrize("form", FORMATS)
def test_a_weight_is_what_its_format_means_bit_for_bit(form: str, shape: tuple[int, int]) -> None:
    write, config = FORMATS[form]
    tensors, meant = write(NAME, matrix(*shape, seed=shape[0]))
    weight = read_back(tensors, config)
    assert weight.shape == shape
    assert np.array_equal(weight.dequantise().numpy(), meant)


SHORT = [
    ("packed-int4", 168), ("packed-int4", 100), ("packed-int4", 20), ("packed-int4-zeros", 168), ("gptq", 168),
    ("gptq-act-order", 168), ("gptq-v2", 72), ("gptq", 8), ("block-fp8", 200), ("modelopt-fp8-blocks", 130),
    ("grouped-int8-zeros", 165), ("packed-int8", 99), ("packed-int8-zeros", 30), ("packed-int8-zeros", 165),
    ("gptq-int8", 100), ("gptq-int8-act-order", 100),
]  # fmt: skip


@pytest.mark.parametrize(("form", "inner"), SHORT)
def test_a_last_group_may_be_short(form: str, inner: int) -> None:
    """Groups of 32: 168 inputs are six groups, which must not be read as six groups of 28."""
    write, config = FORMATS[form]
    tensors, meant = write(NAME, matrix(24, inner))
    weight = read_back(load_bytes(save_bytes(tensors)), config)
    assert np.array_equal(weight.dequantise().numpy(), meant)
    x = torch.randn(3, inner).bfloat16()
    exact = x.double() @ torch.from_numpy(meant).double().t()
    found = Linear(weight, dtype=torch.bfloat16)(x)
    assert float((found.double() - exact).abs().max()) <= 2**-8 * float(exact.abs().max())


ROW = ["modelopt-fp8", "channel-fp8", "block-fp8", "modelopt-nvfp4", "packed-int4", "packed-int8", "grouped-int8"]


@pytest.mark.parametrize("form", ROW)
def test_a_weight_may_have_a_single_row(form: str) -> None:
    write, config = FORMATS[form]
    tensors, meant = write(NAME, matrix(1, 64))
    assert np.array_equal(read_back(tensors, config).dequantise().numpy(), meant)


def test_blocks_of_fp8_have_transformers_default_size() -> None:
    write, config = FORMATS["block-fp8"]
    tensors, meant = write(NAME, matrix(264, 160))
    absent = {key: value for key, value in config.items() if key != "weight_block_size"}
    assert np.array_equal(read_back(tensors, absent).dequantise().numpy(), meant)
    declared = read_declared({"quantization_config": {**absent, "weight_block_size": None}}, {})
    assert declared is not None and disagreements(declared, find_weights(entries(tensors))[0])


@pytest.mark.parametrize("section", ["text_config", "llm_config"])
def test_the_text_section_may_hold_the_configuration(section: str) -> None:
    declared = read_declared({section: {"quantization_config": FORMATS["awq"][1]}}, {})
    assert declared is not None and declared.method == "awq"


@pytest.mark.parametrize("form", ["gptq", "gptq-v2", "awq"])
def test_the_layout_may_be_named_format(form: str) -> None:
    """The newer name in transformers. The versions of GPTQ differ only in what zero points mean."""
    write, config = FORMATS[form]
    tensors, meant = write(NAME, matrix(72, 160))
    old = "version" if form == "awq" else "checkpoint_format"
    layout = config.get(old, "gptq")
    for names in ({"format": layout}, {"format": str(layout).upper()}, {"format": "other", old: layout}):
        named = {key: value for key, value in config.items() if key != old} | names
        assert np.array_equal(read_back(tensors, named).dequantise().numpy(), meant)


def test_other_groups_than_the_configuration_says_are_refused() -> None:
    tensors, _ = packed(NAME, matrix(24, 168))
    config = json.loads(json.dumps(FORMATS["packed-int4"][1]))
    config["config_groups"]["group_0"]["weights"]["group_size"] = 64
    declared = read_declared({"quantization_config": config}, {})
    assert declared is not None
    found, _ = find_weights(entries(tensors), group_of=declared.group_of)
    assert disagreements(declared, found) == [f"{NAME} has groups of 28, but {declared.where} says 64"]
    with pytest.raises(FormatError, match=f"{NAME}: 6 groups do not divide 160 inputs"):
        find_weights(entries(packed(NAME, matrix(24, 160), 29)[0]))


def test_blocks_of_another_size_in_compressed_tensors() -> None:
    """192 rows are two blocks of 96 as well as two of 128."""
    tensors, meant = block_fp8(NAME, matrix(192, 200), (96, 128))
    tensors[f"{NAME}.weight_scale"] = tensors.pop(f"{NAME}.weight_scale_inv")
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [96, 128]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    assert np.array_equal(read_back(tensors, config).dequantise().numpy(), meant)
    other = {"targets": ["re:.*up.*"], "weights": {**weights, "block_structure": [128, 128]}}
    with pytest.raises(CheckpointError, match="128x128"):
        read_declared({"quantization_config": {**config, "config_groups": {**groups, "group_1": other}}}, {})
    for wrong in ([0, 128], [128], "128x128", [True, 1]):
        changed = {"group_0": {"targets": ["Linear"], "weights": {**weights, "block_structure": wrong}}}
        with pytest.raises(CheckpointError, match="block_structure"):
            read_declared({"quantization_config": {**config, "config_groups": changed}}, {})


@pytest.mark.parametrize("rows", [1, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
def test_products_are_those_of_the_numbers_and_of_each_row_alone(form: str, dtype: torch.dtype, rows: int) -> None:
    write, config = FORMATS[form]
    tensors, meant = write(NAME, matrix(72, 160))
    weight, x = read_back(tensors, config), torch.randn(rows, 160).to(dtype)
    linear = Linear(weight, dtype=dtype)
    together = linear(x)
    exact = x.double() @ torch.from_numpy(meant).double().t()
    half = 2**-8 if linear.packed is not None else 2**-7  # where weights are expanded, each is rounded to bfloat16 too
    bound = (1e-4 if weight.kind == "int8" else 2e-6) if dtype == torch.float32 else half
    assert float((together.double() - exact).abs().max()) <= bound * float(exact.abs().max()) + 1e-7
    if linear.packed is not None:
        assert torch.equal(together, torch.cat([linear(row[None]) for row in x]))


def test_fixed_scales_of_rows_are_not_used() -> None:
    write, config = FORMATS["channel-int8"]
    tensors, meant = write(NAME, matrix(72, 160))
    tensors |= {f"{NAME}.input_scale": torch.ones(1), f"{NAME}.input_zero_point": torch.zeros(1, dtype=torch.int8)}
    _, unused = find_weights(entries(tensors))
    assert sorted(unused) == [f"{NAME}.input_scale", f"{NAME}.input_zero_point"]
    assert np.array_equal(read_back(tensors, config).dequantise().numpy(), meant)


def test_stacked_experts_may_have_fixed_scales_of_rows() -> None:
    """transformers' names of experts in fp8 with `activation_scheme: static`."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    scales = {f"{name}_scale_inv": torch.rand(3, 1, 1), f"{name}_activation_scale": torch.ones(3)}
    stacked = {name: torch.rand(3, 8, 16).to(torch.float8_e4m3fn)}
    found, unused = find_weights(entries(stacked | scales))
    assert unused == [f"{name}_activation_scale"] and found[name].scheme == "fp8-tensor"


def test_compiled_products_keep_weights_packed() -> None:
    """Bytes in memory, compared with two per number in bfloat16."""
    shares = {"block-fp8": 0.53, "modelopt-nvfp4": 0.29, "awq": 0.5, "packed-int4": 0.4}
    for form, share in shares.items():
        write, config = FORMATS[form]
        weight = read_back(write(NAME, matrix(256, 512))[0], config)
        try:
            packed = Packed(weight, None, torch.bfloat16)
        except NativeUnavailable:
            pytest.skip("this machine has no compiled products")
        assert packed.nbytes <= share * 2 * 256 * 512


TEXT: dict[str, Any] = {
    "pattern": "M*-ME", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64, "moe_latent_size": None, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "n_groups": 2, "ssm_state_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def tiny_nemotron(path: Path) -> TinyCheckpoint:
    return make_checkpoint(path, 5, vision=False, text=TEXT)


def tiny_qwen(path: Path, *, moe: bool) -> TinyCheckpoint:
    fields = {
        "hidden_size": 64, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                            "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }  # fmt: skip
    fields |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32} if moe else {"intermediate_size": 96}
    return make_qwen(path, 3, moe=moe, tied=False, naming="model.language_model.", one_by_one=True, text=fields)


MODELS: dict[str, Callable[[Path], TinyCheckpoint]] = {
    "nemotron_h": tiny_nemotron,
    "qwen3_5": lambda path: tiny_qwen(path, moe=False),
    "qwen3_5_moe": lambda path: tiny_qwen(path, moe=True),
}


TEXT_FAMILIES = [
    *((family, form) for family in FAMILIES for form in ("block-fp8", "channel-fp8", "modelopt-fp8")),
    ("bamba", "modelopt-fp8-blocks"),
]
"""Random sizes, which fp8 alone takes all of."""


@pytest.mark.parametrize(("family", "form"), TEXT_FAMILIES)
def test_answers_of_text_families(tmp_path: Path, family: str, form: str) -> None:
    plain = make_text_checkpoint(tmp_path / "plain", family, len(form))
    check_answers(quantise_files(plain, tmp_path / "out", form), "auto")


DENSE = ("block-fp8", "modelopt-nvfp4", "packed-int4-zeros", "gptq-act-order")
"""One format of each kind: all matrices of `qwen3_5` but those of its MLP are in `qwen3_5_moe` too."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyCheckpoint]:
    """A model of `MODELS` whose oracle may be changed; its files may not."""
    made: dict[str, TinyCheckpoint] = {}

    def get(model: str) -> TinyCheckpoint:
        if model not in made:
            made[model] = MODELS[model](tmp_path_factory.mktemp("plain") / model)
        return replace(made[model], model=deepcopy(made[model].model))

    return get


@pytest.mark.parametrize(
    ("form", "model"), [(form, model) for form in FORMATS for model in MODELS if model != "qwen3_5" or form in DENSE]
)
def test_answers_are_those_of_the_dequantised_model(
    plain: Callable[[str], TinyCheckpoint], tmp_path: Path, form: str, model: str
) -> None:
    tiny = quantise_files(plain(model), tmp_path / form, form)
    check_answers(tiny, ("auto", "off")[(len(form) + len(model)) % 2])


@pytest.mark.parametrize(
    ("form", "native"),
    [("packed-int4", "auto"), ("packed-int4-zeros", "off"), ("packed-int8", "off"), ("packed-int8-zeros", "auto")],
)
def test_packed_rows_may_end_within_a_word(tmp_path: Path, form: str, native: str) -> None:
    """No layer has a multiple of eight inputs, and experts are stacked from several files' weights."""
    sizes = {
        "hidden_size": 36, "intermediate_size": 41, "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 66, "mamba_num_heads": 3, "mamba_head_dim": 7, "n_groups": 1,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6,
    }  # fmt: skip
    plain = make_checkpoint(tmp_path / "plain", 5, vision=False, text=TEXT | sizes)
    check_answers(quantise_files(plain, tmp_path / form, form), native)


@pytest.mark.parametrize("form", ["modelopt-nvfp4", "packed-int4", "gptq-act-order"])
def test_answers_about_images(tmp_path: Path, form: str) -> None:
    """The whole path, from files to log-probabilities."""
    plain = make_checkpoint(tmp_path / "plain", 5, naming="released", text=TEXT)
    tiny, files = quantise_files(plain, tmp_path / form, form), [png(3), png(4)]
    ids = [7, 11, IMAGE_TOKEN, 5, 3, IMAGE_TOKEN, 31]
    with saccade.LocalClient(tiny.path, dtype="float32", max_seqs=2, max_len=512, threads=1) as client:
        answer = client.generate(
            ids, images=files, max_tokens=STEPS, temperature=0, ignore_eos=True, logprobs=2,
            logit_bias={IMAGE_TOKEN: -1e9},
        )  # fmt: skip
    images = oracle_images(tiny.path, files)
    sizes = iter(images)
    widened = [i for token in ids for i in ([token] * next(sizes).tokens if token == IMAGE_TOKEN else [token])]
    rows = tiny.logits(widened + answer.token_ids[:-1], [(i.grid, i.patches) for i in images])[len(widened) - 1 :]
    assert answer.logprobs is not None
    for row, token, entry in zip(torch.log_softmax(rows, -1), answer.token_ids, answer.logprobs, strict=True):
        assert abs(float(row[token]) - entry.logprob) < 1e-3
        row[IMAGE_TOKEN] = -torch.inf
        assert float(row.max() - row[token]) < 1e-4


def check_answers(tiny: TinyCheckpoint, native: str) -> None:
    """Greedy answers to a prompt, against the oracle's."""
    checkpoint = Checkpoint(tiny.path)
    assert any(scheme != "plain" for scheme in checkpoint.stored_as)
    options = DecoderOptions(max_seqs=2, max_len=64, max_batched_tokens=32, native=native)
    runner = DecoderRunner(checkpoint.config.decoder, options, checkpoint.decoder_weights())
    ids = [7, 11, 5, 3, 29, 31, 8]
    events = run(runner, request("one", ids, greedy_params(STEPS, logprobs=2)))["one"]
    drawn = tokens(events)
    expected = torch.log_softmax(tiny.logits(ids + drawn[:-1])[len(ids) - 1 :], -1)
    for row, event in zip(expected, events, strict=True):
        assert float(row.max() - row[event.token_id]) < 1e-4
        assert abs(float(row[event.token_id]) - event.logprob) < 1e-3


# -- what is refused ---------------------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]


def without(suffix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(suffix)}


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: change(t).contiguous() if n.endswith(suffix) else t for n, t in tensors.items()}


def added(suffix: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {f"{NAME}{suffix}": tensor}


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8).t().contiguous().view(t.dtype)


MALFORMED: list[tuple[str, Callable[[Tensors], Tensors], str]] = [
    ("block-fp8", without("_scale_inv"), "F8_E4M3 without its scale"),
    ("block-fp8", without(".weight"), "without the weight"),
    ("block-fp8", changed("_scale_inv", lambda t: t.t()), "neither one, nor one per row"),
    ("block-fp8", changed("_scale_inv", lambda t: t[:-1]), "neither one, nor one per row"),
    ("block-fp8", changed("_scale_inv", lambda t: t.to(torch.int32)), "its scale is I32"),
    ("block-fp8", changed("_scale_inv", lambda t: t * float("nan")), "a scale is not finite"),
    ("block-fp8", added(".weight_scale", torch.ones(1)), "two tensors for its scale"),
    ("block-fp8", changed(".weight", lambda t: t.float()), "belongs to a weight of F32, which has no such part"),
    ("modelopt-fp8", without(".weight_scale"), "F8_E4M3 without its scale"),
    ("modelopt-fp8", added(".weight_scale_2", torch.ones(())), "its outer, which this format does not have"),
    ("channel-fp8", changed(".weight_scale", lambda t: t[:-1]), "neither one, nor one per row"),
    ("modelopt-nvfp4", without(".weight_scale"), "U8 without its scale"),
    ("modelopt-nvfp4", without(".weight_scale_2"), "its weight_scale_2 is missing"),
    ("modelopt-nvfp4", changed(".weight_scale", lambda t: t.view(torch.uint8)), "not F8_E4M3"),
    ("modelopt-nvfp4", changed(".weight_scale", lambda t: t.flatten()), "one for each 16 inputs"),
    (
        "modelopt-nvfp4",
        changed(".weight_scale", lambda t: t.view(torch.uint8).t().contiguous().view(t.dtype)),
        "16 inputs",
    ),
    ("modelopt-nvfp4", changed(".weight_scale_2", lambda t: t.repeat(3)), "its weight_scale_2 has shape [3]"),
    ("packed-nvfp4", without("weight_global_scale"), "its weight_scale_2 is missing"),
    ("packed-nvfp4", changed("weight_global_scale", lambda t: t * 0), "its weight_global_scale is 0"),
    ("packed-int4", without(".weight_shape"), "its weight_shape is missing"),
    ("packed-int4", without(".weight_scale"), "packed int4 without its scale"),
    ("packed-int4", changed(".weight_shape", lambda t: t + 8), "weight_shape is [272, 264], not [264, 256]"),
    ("packed-int4-zeros", changed("_zero_point", lambda t: t[:-1]), "zero points of I32"),
    ("packed-int8", without(".weight_scale"), "packed int8 without its scale"),
    ("packed-int8", changed(".weight_shape", lambda t: t + 4), "weight_shape is [268, 260], not [264, 256]"),
    ("packed-int8-zeros", changed("_zero_point", lambda t: t[:-1]), "zero points of I32 [65, 8], not I32 [66, 8]"),
    ("channel-int8", changed("_scale", lambda t: t[:-1]), "scales of shape [263, 1] for int8 rows [264, 256]"),
    ("grouped-int8", changed("_scale", lambda t: t[:, :-1]), "7 groups do not divide 256 inputs"),
    ("grouped-int8", changed("_scale", lambda t: t[None]), "scales of shape [1, 264, 8] for int8 rows [264, 256]"),
    ("grouped-int8-zeros", changed("_point", lambda t: t[:, :1]), "zero points of I8 [264, 1], not I8 [264, 8]"),
    ("grouped-int8-zeros", changed("_point", lambda t: t.int()), "zero points of I32 [264, 8], not I8 [264, 8]"),
    ("grouped-int8", added(".weight_g_idx", torch.arange(8).int()), "g_idx of shape [8], not I32 [256]"),
    ("grouped-int8", added(".weight_g_idx", torch.arange(256).int()), "does not put 32 inputs into each of 8 groups"),
    ("gptq-int8", changed(".qzeros", lambda t: t[:, :22]), "not 8 rows of 33 words with 4 bits or 66 with 8 bits"),
    ("gptq-int8", changed(".qzeros", lambda t: t[:, :33]), "g_idx of shape [256], not I32 [512]"),
    ("gptq", without(".qzeros"), "without its qzeros"),
    ("gptq", without(".scales"), "without its scales"),
    ("gptq", changed(".qweight", lambda t: t.t()), "fits neither GPTQ nor AWQ"),
    ("gptq", changed(".g_idx", lambda t: t[:-1]), "g_idx of shape"),
    ("gptq", changed(".g_idx", lambda t: t * 0), "does not put 32 inputs into each"),
    ("gptq", changed(".g_idx", lambda t: t + 1000), "does not put 32 inputs into each"),
    ("awq", changed(".qzeros", lambda t: t[:, :-1]), "qzeros of shape"),
]


@pytest.mark.parametrize("form, spoil, message", MALFORMED)
def test_malformed_tensors_are_refused_with_the_modules_name(
    form: str, spoil: Callable[[Tensors], Tensors], message: str
) -> None:
    write, config = FORMATS[form]
    tensors = spoil(write(NAME, matrix(264, 256))[0])
    with pytest.raises(FormatError) as refused:
        read_back(tensors, config)
    assert message in str(refused.value) and NAME in str(refused.value)


def test_tensors_that_belong_to_nothing_are_named(tmp_path: Path) -> None:
    tiny = quantise_files(tiny_nemotron(tmp_path / "plain"), tmp_path / "out", "modelopt-fp8")
    weights = load_file(tiny.path / "model.safetensors")
    weights["backbone.layers.9.mixer.up_proj.weight_scale"] = torch.ones(())
    save_file(weights, tiny.path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"backbone\.layers\.9\.mixer\.up_proj: .*without the weight"):
        Checkpoint(tiny.path)


DISAGREEING: list[tuple[str, dict[str, object], str]] = [
    ("block-fp8", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "stored as fp8-block, but .* says nvfp4"),
    ("block-fp8", {"weight_block_size": [64, 64]}, "neither one, nor one per row"),
    ("block-fp8", {"weight_block_size": None}, "stored as fp8-block, but .* says fp8-tensor or fp8-channel"),
    ("block-fp8", {"modules_to_not_convert": ["up_proj"]}, "stored as fp8-block, but .* says not quantised"),
    ("gptq", {"group_size": 128}, "has groups of 32, but .* says 128"),
    ("packed-int4", {"config_groups": {"g": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "channel"}}}}, "has groups of 32, but .* says -1"),
    ("gptq", {"dynamic": {"-:.*up_proj": {}}}, "stored as gptq, but .* says not quantised"),
    ("gptq", {"bits": 3}, "GPTQ with 3 bits is not supported, only with 4 or 8"),
    ("gptq", {"bits": 8}, "stored as gptq, but .* says gptq-int8"),
    ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "stored as gptq, but .* says gptq-int8"),
    ("gptq-int8", {"bits": 4}, "stored as gptq-int8, but .* says gptq"),
    ("awq", {"version": "gemv"}, "AWQ version 'gemv' is not supported"),
    ("modelopt-nvfp4", {"quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' of all modules is not supported"),
    ("modelopt-fp8", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "backbone.layers.2.mixer": {"quant_algo": "NVFP4", "group_size": 16}}}, "stored as fp8-tensor, but .* says"),
    ("channel-fp8", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; expected one of fp8, modelopt"),
]  # fmt: skip


@pytest.mark.parametrize("form, changes, message", DISAGREEING)
def test_a_configuration_that_says_something_else_is_refused(
    form: str, changes: dict[str, object], message: str
) -> None:
    write, config = FORMATS[form]
    tensors, _ = write(NAME, matrix(264, 384))
    with pytest.raises((CheckpointError, FormatError), match=message):
        declared = read_declared({"quantization_config": {**config, **changes}}, {})
        assert declared is not None
        found, _ = find_weights(entries(tensors), block=declared.block)
        if problems := disagreements(declared, found):
            raise CheckpointError(problems[0])


def compressed(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}, **more}


def transformed(*locations: str) -> dict[str, Any]:
    applied = [{"targets": ["Linear"], "location": location} for location in locations]
    return {"transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": applied}}}}


BROKEN: list[tuple[dict[str, Any], str]] = [
    (compressed({"group_size": 32}, ignore="lm_head"), "ignore is 'lm_head', not a list"),
    (compressed({"group_size": 32}, ignore=[3]), r"ignore is \[3\], not a list"),
    (compressed({"group_size": 32}, ignore=["re:(lm_head"]), r"'re:\(lm_head' is not a regular expression"),
    (compressed({"group_size": "32"}), "group_size '32' of config group g"),
    (compressed({"group_size": True}), "group_size True of config group g"),
    (compressed({}), "config group g of strategy 'group' has group_size None"),
    (
        compressed({"group_size": 32}, **transformed("weight_input", "input")),
        "transform_config u is applied at 'input'",
    ),
    (compressed({"group_size": 32}, **transformed("k_cache")), "transform_config u is applied at 'k_cache'"),
    (compressed({"group_size": 32}, transform_config=[1]), r"transform_config is \[1\], not an object"),
    (compressed({"group_size": 32}, config_groups=["g"]), r"config_groups is \['g'\], not an object"),
    (compressed({"group_size": 32}, config_groups={"g": 4}), "config_groups: g is 4, not an object"),
    (compressed({"group_size": 32}, config_groups={"g": {"weights": 4}}), "group g: weights is 4, not an object"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"a": 1}}, "dynamic: a is 1, not an object"),
    ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 1}}, "quantized_layers: a is 1, not an object"),
    (compressed({"group_size": -32}), "group_size -32 of config group g"),
    ({"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": {"a": 1}}, "modules_to_not_conv"),
    ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version 'gemv'"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:[": {}}}, "dynamic rule '-:\\['"),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {".*": {"group_size": "64"}}},
        r"dynamic rule '\.\*': group_size is '64'",
    ),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": "*"}, "exclude_modules is"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [None]}, "not a list of names"),
]


@pytest.mark.parametrize(("config", "message"), BROKEN)
def test_a_broken_configuration_is_refused_before_any_weight_is_read(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_declared({"quantization_config": config}, {})


def test_transforms_that_the_weights_contain_are_read() -> None:
    for transforms in (transformed("weight_input", "weight_output"), {"transform_config": {}}):
        assert read_declared({"quantization_config": compressed({"group_size": 32}, **transforms)}, {}) is not None


def test_a_module_of_the_table_without_quantised_tensors_is_named() -> None:
    tensors, _ = FORMATS["modelopt-fp8"][0](NAME, matrix(64, 64))
    tensors["model.layers.4.mixer.o_proj.weight"] = torch.zeros(64, 64)
    found, _ = find_weights(entries(tensors))
    table = {name: {"quant_algo": "FP8"} for name in (NAME, "model.layers.4.mixer.o_proj", "model.layers.5.mixer")}
    declared = read_declared(
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": table,
            }
        },
        {},
    )
    problems = disagreements(declared, found)
    assert len(problems) == 2
    assert "model.layers.4.mixer.o_proj is stored unquantised" in problems[0]
    assert "model.layers.5.mixer, which has no tensors" in problems[1]


def test_the_longest_entry_of_a_table_counts() -> None:
    entry = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "backbone.layers.1.mixer.experts": {"quant_algo": "NVFP4", "group_size": 16},
            "backbone.layers.1.mixer": {"quant_algo": "FP8"}, "*.lm_head": {"quant_algo": "FP8"},
        },
    }  # fmt: skip
    declared = read_declared({"quantization_config": entry}, {})
    assert declared is not None
    assert declared.say("backbone.layers.1.mixer.experts.7.up_proj").schemes == ("nvfp4",)
    assert declared.say("backbone.layers.1.mixer.shared_experts.up_proj").schemes == ("fp8-tensor",)
    assert declared.say("backbone.layers.11.mixer.up_proj").schemes == ()
    assert declared.say("model.lm_head").schemes == ("fp8-tensor",)


def test_quantised_tensors_need_a_configuration(tmp_path: Path) -> None:
    tiny = quantise_files(tiny_nemotron(tmp_path / "plain"), tmp_path / "out", "modelopt-fp8")
    file = tiny.path / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="none of config.json, hf_quant_config.json, quantize_config.json says"):
        Checkpoint(tiny.path)
    old = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tiny.path / "hf_quant_config.json").write_text(json.dumps(old))
    assert Checkpoint(tiny.path).stored_as["fp8-tensor"] > 0


def test_old_gptq_files_have_a_file_of_their_own(tmp_path: Path) -> None:
    """As AutoGPTQ wrote it. What config.json says goes first."""
    tiny = quantise_files(tiny_nemotron(tmp_path / "plain"), tmp_path / "out", "gptq-act-order")
    file = tiny.path / "config.json"
    config = json.loads(file.read_text())
    declared = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    own = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": True, "sym": False, "true_sequential": True}
    (tiny.path / "quantize_config.json").write_text(json.dumps(own))
    check_answers(tiny, "auto")
    (tiny.path / "quantize_config.json").write_text(json.dumps(own | {"group_size": 64}))
    with pytest.raises(CheckpointError, match=r"has groups of 32, but quantize_config.json says 64"):
        Checkpoint(tiny.path)
    file.write_text(json.dumps(config | {"quantization_config": declared}))
    assert Checkpoint(tiny.path).stored_as["gptq"] > 0


def test_cache_scales_and_activation_scales_change_nothing(tmp_path: Path) -> None:
    tiny = quantise_files(tiny_qwen(tmp_path / "plain", moe=False), tmp_path / "out", "modelopt-fp8")
    weights = load_file(tiny.path / "model.safetensors")
    weights["model.language_model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    weights["model.language_model.layers.1.self_attn.v_proj.v_scale"] = torch.tensor(0.5)
    weights["model.language_model.layers.1.self_attn.k_proj.output_scale"] = torch.tensor(0.5)
    static = weights.pop("model.language_model.layers.1.self_attn.q_proj.input_scale")
    weights["model.language_model.layers.1.self_attn.q_proj.activation_scale"] = static  # transformers' name
    save_file(weights, tiny.path / "model.safetensors")
    edit_config(tiny.path, kv_cache_quant_algo="FP8")
    found = Checkpoint(tiny.path)
    assert not any(name.endswith("k_scale") for name in found.weights)


def test_blocks_may_be_short_and_of_any_size() -> None:
    for block in ((24, 40), (128, 32), (7, 300)):
        tensors, meant = block_fp8(NAME, matrix(100, 200), block)
        found, _ = find_weights(entries(tensors), block=block)
        weight = load(found[f"{NAME}.weight"], tensors.__getitem__)
        assert isinstance(weight, Quantised) and np.array_equal(weight.dequantise().numpy(), meant)
