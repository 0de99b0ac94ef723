"""Each format, damaged in every way in which a file can be: an error with the module's name, and nothing is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_checkpoint import quantise_files
from quantised_files import FORMATS
from safetensors.torch import load_file, save_file
from tiny_checkpoint import make_checkpoint
from torch import Tensor

from families import CheckpointError
from service.model.checkpoint import Checkpoint
from service.model.formats import expressions

MODULE = "backbone.layers.1.mixer.up_proj"
NAMED = "layers.1.mixer.up_proj"
"""In whatever way the module's names begin."""
OPTIONAL = (".input_scale", ".input_global_scale")
VALUES = (".weight", ".weight_packed", ".qweight")
SCALES = (".weight_scale", ".weight_scale_inv", ".scales")
Tensors = dict[str, Tensor]


def octets(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A change of shape, of dtypes that torch moves no elements of."""
    if tensor.dtype != torch.float8_e4m3fn:
        return change(tensor).contiguous()
    return change(tensor.view(torch.uint8)).contiguous().view(tensor.dtype)


def swizzled(scale: Tensor) -> Tensor:
    """As GPUs read scales: tiles of 128 rows and 4 groups."""
    rows, groups = scale.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-groups // 4) * 4, dtype=torch.uint8)
    padded[:rows, :groups] = scale.view(torch.uint8)
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded.shape).contiguous().view(scale.dtype)


def variants(own: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Names of what is wrong, and the module's tensors with it. `own`: by suffix."""
    for suffix in own:
        if suffix not in (*OPTIONAL, ".g_idx"):
            yield f"without {suffix}", {name: tensor for name, tensor in own.items() if name != suffix}
    values = next(suffix for suffix in VALUES if suffix in own)
    yield "values transposed", own | {values: octets(own[values], torch.Tensor.t)}
    yield "values cut", own | {values: octets(own[values], lambda t: t[:-8])}
    yield "values of another dtype", own | {values: own[values].to(torch.float16)}
    scale = next(suffix for suffix in SCALES if suffix in own)
    numbers = own[scale]
    if numbers.dim() > 1 and numbers.shape[0] != numbers.shape[1]:
        if min(numbers.shape[:2]) > 1 or scale != ".weight_scale":  # a column of scales may be stored as a row
            yield "scales transposed", own | {scale: octets(numbers, lambda t: t.transpose(0, 1))}
    yield "too many scales", own | {scale: octets(numbers, lambda t: torch.cat((t.reshape(-1),) * 3))}
    if numbers.dim() > 1:
        yield "a scale too few", own | {scale: octets(numbers, lambda t: t[:-1])}
        yield "blocks of another size", own | {scale: octets(numbers, lambda t: t.repeat_interleave(2, 0))}
    yield "scales of integers", own | {scale: torch.ones(numbers.shape, dtype=torch.int32)}
    broken = octets(numbers, lambda t: t.clone())
    (broken.view(torch.uint8) if broken.dtype == torch.float8_e4m3fn else broken).view(-1)[0] = (
        127 if broken.dtype == torch.float8_e4m3fn else float("nan")
    )
    yield "a scale that is not a number", own | {scale: broken}
    if numbers.dtype == torch.float8_e4m3fn:
        yield "scales swizzled", own | {scale: swizzled(numbers)}
    foreign = next(suffix for suffix in (".weight_scale_2", ".weight_scale_inv") if suffix not in own)
    yield "a tensor of another format", own | {foreign: torch.ones(1)}
    yield "a tensor of nothing", own | {".shadow.weight_scale": torch.ones(1)}


def other(form: str) -> dict[str, Any]:
    """The configuration of a format that stores weights otherwise."""
    return FORMATS["gptq" if form == "awq" else "awq"][1]


@pytest.fixture(scope="module", params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    form, folder = str(request.param), tmp_path_factory.mktemp("formats")
    text = {
        "pattern": "M-", "hidden_size": 64, "intermediate_size": 288, "mamba_num_heads": 8, "mamba_head_dim": 8,
        "n_groups": 2, "ssm_state_size": 12,
    }  # fmt: skip
    plain = make_checkpoint(folder / "plain", 5, vision=False, text=text)
    return form, quantise_files(plain, folder / "out", form).path


def read(path: Path) -> int:
    return sum(1 for _ in Checkpoint(path).decoder_weights())


def test_what_is_spoiled_is_refused_by_name(written: tuple[str, Path]) -> None:
    form, path = written
    file = path / "model.safetensors"
    whole = load_file(file)
    own = {name.removeprefix(MODULE): tensor for name, tensor in whole.items() if name.startswith(MODULE)}
    others = {name: tensor for name, tensor in whole.items() if not name.startswith(MODULE)}
    count, loaded, unnamed = 0, [], []
    assert read(path) > 5
    try:
        for what, tensors in variants(own):
            count += 1
            save_file(others | {MODULE + suffix: tensor for suffix, tensor in tensors.items()}, file)
            try:
                read(path)
                loaded.append(what)
            except CheckpointError as error:
                if NAMED not in str(error):
                    unnamed.append(f"{what}: {error}")
    finally:
        save_file(whole, file)
    assert count >= 8
    assert (loaded, unnamed) == ([], []), form


def test_a_configuration_that_says_otherwise_is_refused_by_name(written: tuple[str, Path]) -> None:
    form, path = written
    file = path / "config.json"
    config = json.loads(file.read_text())
    name = "quantization_config"
    found = config[name]
    excluded = {**found, "modules_to_not_convert": [NAMED], "exclude_modules": [NAMED], "ignore": [NAMED]}
    if found["quant_method"] == "gptq":
        excluded = {**found, "dynamic": {f"-:.*{NAMED}": {}}}
    try:
        for changed in (None, other(form), excluded):
            file.write_text(json.dumps({**config, name: changed}))
            with pytest.raises(CheckpointError, match=r"layers\.\d\.mixer"):
                Checkpoint(path)
    finally:
        file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("form", "suffix", "changes", "message"),
    [
        ("gptq-act-order", ".g_idx", {}, "no g_idx"),
        ("gptq", ".g_idx", {"desc_act": True}, "no g_idx"),
        ("gptq", ".g_idx", {"dynamic": {"+:.*": {"desc_act": True}}}, "no g_idx"),
        ("packed-int4", "", {"actorder": "group"}, "no g_idx"),
        ("packed-int4", "", {"symmetric": False}, "no zero points"),
    ],
)
def test_what_a_configuration_asks_for_has_to_be_there(
    tmp_path: Path, form: str, suffix: str, changes: dict[str, Any], message: str
) -> None:
    """Inputs in another order, or zero points, whose absence the other tensors do not show."""
    plain = make_checkpoint(
        tmp_path / "plain", 5, vision=False, text={"pattern": "-", "hidden_size": 64, "intermediate_size": 96}
    )
    path = quantise_files(plain, tmp_path / "out", form).path
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not suffix or not name.endswith(suffix)}
    save_file(kept, path / "model.safetensors")
    file = path / "config.json"
    config = json.loads(file.read_text())
    stored = config["quantization_config"]
    if form == "packed-int4":
        stored["config_groups"]["group_0"]["weights"] |= changes
    else:
        stored |= changes
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as refused:
        Checkpoint(path)
    assert "mixer.up_proj" in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_that_are_not_finite_are_not_served(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M"})
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    for name, read in (
        ("language_model.backbone.layers.0.mixer.in_proj.weight", Checkpoint.decoder_weights),
        ("language_model.backbone.layers.0.mixer.A_log", Checkpoint.decoder_weights),
        ("vision_model.radio_model.model.patch_generator.embedder.weight", Checkpoint.vision_weights),
    ):
        spoiled = tensors[name].clone()
        spoiled.view(-1)[-1] = value
        save_file(tensors | {name: spoiled}, file)
        message = f"{name.removesuffix('.weight')}.*: 1 of {spoiled.numel()} numbers are NaN or infinite"
        with pytest.raises(CheckpointError, match=message):
            list(read(Checkpoint(tmp_path)))


def test_an_fp8_number_that_is_not_one_is_not_served(tmp_path: Path) -> None:
    text = {"pattern": "M-", "hidden_size": 64, "intermediate_size": 96, "mamba_num_heads": 8, "mamba_head_dim": 8}
    plain = make_checkpoint(tmp_path / "plain", 3, vision=False, text=text)
    path = quantise_files(plain, tmp_path / "fp8", "channel-fp8").path
    tensors = load_file(path / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
    tensors[name].view(torch.uint8).view(-1)[5] = 255
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name.removesuffix('.weight')}: a number is NaN"):
        list(Checkpoint(path).decoder_weights())


def test_quantised_weights_without_rows_are_refused_by_name(tmp_path: Path) -> None:
    text = {"pattern": "-", "hidden_size": 64, "intermediate_size": 96}
    path = quantise_files(
        make_checkpoint(tmp_path / "plain", 5, vision=False, text=text), tmp_path / "out", "gptq"
    ).path
    file = path / "model.safetensors"
    whole, scale = load_file(file), torch.ones(1)
    norm = "backbone.layers.0.norm"
    for spoiled, message in (
        ({f"{norm}.weight": torch.ones(64, dtype=torch.int8), f"{norm}.weight_scale": scale}, "norm is stored as int8"),
        ({"own.weight": torch.tensor(1, dtype=torch.uint8), "own.weight_scale": scale}, "own: a single number of U8"),
    ):
        save_file(whole | spoiled, file)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(path)


SLOW = "(?:..?)+!.*"
"""Matching it takes a time that grows exponentially with a name's length: seconds for the names of `M` layers."""


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", f"re:{SLOW}"]},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {f"-:{SLOW}": {}}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": [f"re:{SLOW}"]}}},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {f"re:{SLOW}": {"quant_algo": "FP8"}}},
    ],
    ids=["fp8", "gptq", "compressed-tensors", "modelopt"],
)
def test_expressions_that_take_too_long_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: dict[str, Any]
) -> None:
    monkeypatch.setattr(expressions, "SECONDS", 0.2)
    make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M"})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": declared}))
    with pytest.raises(CheckpointError, match=rf"quantization_config: .*{re.escape(SLOW)}.* takes too long"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("expression", ["[", "a{4294967296}", "(" * 2000], ids=["open", "large", "deep"])
@pytest.mark.parametrize("mixed", [False, True])
def test_what_is_no_expression_is_named(tmp_path: Path, expression: str, mixed: bool) -> None:
    declared: dict[str, Any] = {"quant_method": "fp8", "ignored_layers": [f"re:{expression}"]}
    if mixed:
        layers = {f"re:{expression}*": {"quant_algo": "FP8"}}
        declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M"})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": declared}))
    with pytest.raises(CheckpointError, match="is not a regular expression"):
        Checkpoint(tmp_path)
