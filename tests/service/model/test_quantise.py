"""A saved quantised checkpoint gives the same model as quantisation at load; a checkpoint that cannot be saved or read
is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from full_disk import file_size_limit
from safetensors.torch import load_file, save_file
from tiny_checkpoint import make_checkpoint

from decoder.config import DecoderOptions
from decoder.model import HybridModel
from decoder.runner import DecoderRunner
from families import CheckpointError
from kernels.linear import Linear, Quantised, quantise
from kernels.weight_forms import FORMS
from service.commands.cli import main
from service.common.config import ConfigError
from service.model.checkpoint import Checkpoint
from service.model.formats import compressed
from service.model.quantise import REPORT, quantise_checkpoint


def linears(model: HybridModel) -> list[Linear]:
    found = [model.trunk.head]
    for mixer in [mixer for layer in model.trunk.layers for mixer in layer.mixers]:
        found += [value for value in vars(mixer).values() if isinstance(value, Linear)]
    return found


def load(path: Path, weights: str | None) -> HybridModel:
    checkpoint = Checkpoint(path)
    options = DecoderOptions(max_seqs=2, max_len=64, weights=weights)
    return DecoderRunner(checkpoint.config.decoder, options, checkpoint.decoder_weights()).model


@pytest.mark.parametrize("kind", FORMS)
def test_saved_equals_quantised_at_load(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And so do embeddings, which are quantised if they are tied."""
    text = {"pattern": "M*-ME", "tie_word_embeddings": kind != "int8"}
    original = make_checkpoint(tmp_path / "model", 3, text=text).path
    assert main(["quantize", str(original), str(tmp_path / "small"), "--weights", kind]) == 0
    assert "MB of weights instead of" in capsys.readouterr().out
    small = Checkpoint(tmp_path / "small")
    assert small.config.stored_forms == (kind,)
    assert any("lm_head" in name for name in small.files.table) == (kind == "int8"), "a tied copy is not written"
    x = torch.randn(3, 4096)
    models = load(tmp_path / "small", None), load(original, kind)
    tables = [model.embed_ids(torch.arange(model.config.vocab_size)) for model in models]
    assert torch.equal(*tables)
    assert all((model.trunk.embeddings.nbytes == 0) == (kind != "int8") for model in models)
    pairs = list(zip(*map(linears, models), strict=True))
    assert len(pairs) > 3
    for saved, at_load in pairs:
        rows = x[:, : saved.in_features].contiguous()
        assert torch.equal(saved(rows), at_load(rows))
    assert all(isinstance(p.weight, Quantised) or p.packed is not None for p, _ in pairs)


@pytest.mark.parametrize("form", ["saccade", "compressed-tensors"])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, form: str) -> None:
    make_checkpoint(tmp_path / "model", 3, vision=False, text={"pattern": "M", "hidden_size": 32})
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["backbone.layers.0.mixer.in_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"layers\.0\.mixer\.in_proj.*not finite"):
        quantise_checkpoint(Checkpoint(tmp_path / "model"), tmp_path / "out", "fp8", form)
    assert not (tmp_path / "out").exists()


def test_wrong_formats_are_named(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "model", 3, text={"pattern": "M*-ME"}).path
    quantise_checkpoint(Checkpoint(original), tmp_path / "small", "int8")
    with pytest.raises(ConfigError, match="already has int8 weights"):
        quantise_checkpoint(Checkpoint(tmp_path / "small"), tmp_path / "again", "int4")
    with pytest.raises(ConfigError, match="is not empty"):
        quantise_checkpoint(Checkpoint(original), tmp_path / "small", "int8")
    file = tmp_path / "small" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"saccade_weights": {"format": 3, "kind": "int8"}}))
    with pytest.raises(CheckpointError, match="format 3, but this server reads 1 and 2"):
        Checkpoint(tmp_path / "small")
    file.write_text(json.dumps(config | {"saccade_weights": 1}))
    with pytest.raises(CheckpointError, match="saccade_weights must be an object, not 1"):
        Checkpoint(tmp_path / "small")
    file.write_text(json.dumps(config | {"saccade_weights": {"format": 1, "kind": "int2"}}))
    with pytest.raises(CheckpointError, match="kind 'int2' is not one of int8, int8-32, int4"):
        Checkpoint(tmp_path / "small")
    for kinds, problem in (
        (None, "kinds must be a list, not None"),
        (["int8", "int2"], "kind 'int2' is not one of int8"),
        (["int8-32"], r"1 quantised|values of I8 \[.*\] with scales of shape \[.*\] have none of .* names: int8-32"),
    ):
        file.write_text(json.dumps(config | {"saccade_weights": {"format": 2, "kinds": kinds}}))
        with pytest.raises(CheckpointError, match=problem):
            Checkpoint(tmp_path / "small")


def test_experts_of_one_layer_in_several_forms_are_named(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "model", 3, vision=False, text={"pattern": "ME"}).path
    for kind in ("int8", "int4"):
        quantise_checkpoint(Checkpoint(original), tmp_path / kind, kind)
    files = [tmp_path / kind / "model-00001.safetensors" for kind in ("int8", "int4")]
    tensors, others = map(load_file, files)
    name = next(name for name in tensors if name.endswith("experts.1.up_proj.weight.values")).removesuffix(".values")
    save_file(tensors | {f"{name}.{part}": others[f"{name}.{part}"] for part in ("values", "scale")}, files[0])
    file = tmp_path / "int8" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"saccade_weights": {"format": 2, "kinds": ["int8", "int4"]}}))
    with pytest.raises(CheckpointError, match=r"int8 \(.*\) and int4 \(.*experts\.1\.up_proj.*stored in the same way"):
        Checkpoint(tmp_path / "int8")


@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_full_disk_is_named_and_leaves_nothing(
    limit: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over a configuration file, and over the weights."""
    source, out = make_checkpoint(tmp_path / "source", 3, vision=False).path, tmp_path / "out"
    with file_size_limit(limit):
        status = main(["quantize", str(source), str(out), "--weights", "int8"])
    said = capsys.readouterr().err
    assert status == 2 and f"OUT: {out} cannot be written: " in said, said
    assert "File too large" in said and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    source = Checkpoint(make_checkpoint(tmp_path / "source", 3, vision=False).path)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", Path("/proc/out")):
        with pytest.raises(ConfigError, match=f"OUT: {out} cannot be written: "):
            quantise_checkpoint(source, out, "int8")


def test_a_refusal_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "model", 3, vision=False, text={"pattern": "M*-M", "hidden_size": 33}).path
    (tmp_path / "small").mkdir()
    with pytest.raises(ConfigError, match="33 inputs; int4 needs an even number, int8 would work"):
        quantise_checkpoint(Checkpoint(original), tmp_path / "small", "int4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "small"]
    assert not list((tmp_path / "small").iterdir())
    quantise_checkpoint(Checkpoint(original), tmp_path / "small", "int8")
    assert Checkpoint(tmp_path / "small").config.stored_forms == ("int8",)


@pytest.mark.parametrize("kind", compressed.PUBLISHED)
def test_published_format_holds_the_numbers_of_quantising_at_load(tmp_path: Path, kind: str) -> None:
    text = {
        "pattern": "M*-E", "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "moe_latent_size": None, "moe_shared_expert_intermediate_size": 40,
    }  # fmt: skip
    original = make_checkpoint(tmp_path / "model", 3, vision=False, text=text).path
    arguments = ["quantize", str(original), str(tmp_path / "small"), "--weights", kind]
    assert main([*arguments, "--format", "compressed-tensors"]) == 0
    small, plain = Checkpoint(tmp_path / "small"), dict(Checkpoint(original).decoder_weights())
    report = json.loads((tmp_path / "small" / REPORT).read_text())
    counted = 0
    for name, weight in small.decoder_weights():
        if isinstance(weight, Quantised):
            counted += 1
            assert torch.equal(weight.dequantise(), quantise(plain[name], kind).dequantise()), name
        else:
            assert torch.equal(weight, plain[name]), name
    # A group is 128 or 32 inputs: the shared expert's 40 are not full groups.
    rows = kind in ("fp8", "int8")
    assert counted == (12 if rows else 11)
    assert any("shared_experts.down_proj" in name for name in report["plain"]) != rows
    assert 0.0 < max(report["relative_error"].values()) < 0.15
    runner_options = DecoderOptions(max_seqs=2, max_len=64)
    DecoderRunner(small.config.decoder, runner_options, small.decoder_weights())
    with pytest.raises(ConfigError, match="quantise the original"):
        quantise_checkpoint(small, tmp_path / "again", kind)


def test_kinds_without_a_published_format_are_refused(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "model", 3, vision=False, text={"pattern": "M"}).path
    with pytest.raises(
        ConfigError, match="compressed-tensors can store fp8, int8, int8-32, int4 and int4-32, not nvfp4"
    ):
        quantise_checkpoint(Checkpoint(original), tmp_path / "small", "nvfp4", "compressed-tensors")
