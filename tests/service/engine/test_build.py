"""The operator's options reach the decoder."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import make_checkpoint

from decoder.config import DecoderOptions
from service.commands.plan import plan
from service.common.config import ConfigError, EngineOptions, ServerOptions
from service.engine.build import build_encoder, build_engine
from service.engine.runner_options import decoder_options, resolve_device, resolve_step_tokens
from service.model.checkpoint import open_checkpoint

FIXED = {"page_size"}
"""Options that are set by tests of the decoder only."""
OTHERS: dict[str, Any] = {
    "dtype": "bfloat16", "device": "cpu", "max_seqs": 3, "max_len": 99, "max_batched_tokens": 77, "max_chunk": 5,
    "memory_bytes": 10**9, "memory_share": 0.25, "host_bytes": 12345, "weights": "int8", "native": "off",
    "activations": "fp8", "state_dtype": "bfloat16",
    "state_cache": "align", "state_block": 64, "ageing": 7, "graphs": "off", "overlap": "off", "max_capture": 9,
    "speculative": "ngram", "draft_tokens": 2, "draft_vocab": 40, "spec_state": "slots", "draft_policy": "fixed",
    "forced_tokens": "off", "checkpoint_bytes": 10**7,
}  # fmt: skip


def test_each_option_of_the_decoder_is_set_by_that_of_the_service(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M*-M"})
    plain = EngineOptions(model=str(tmp_path), dtype="float32", device="cpu")
    checkpoint = open_checkpoint(str(tmp_path))
    assert OTHERS.keys() | FIXED == {field.name for field in fields(DecoderOptions)}
    for name, value in OTHERS.items():
        base = replace(plain, speculative="mtp") if name == "draft_vocab" else plain
        default, changed = (decoder_options(of, checkpoint) for of in (base, replace(base, **{name: value})))
        assert name == "device" or getattr(changed, name) != getattr(default, name), name
        assert getattr(changed, name) == (getattr(torch, value) if "dtype" in name else value)
        assert replace(changed, **{name: getattr(default, name)}) == default, f"{name} changes something else"


@pytest.mark.parametrize(("max_seqs", "tokens"), [(32, 512), (512, 512), (600, 600)])
def test_a_step_on_a_cpu_has_512_tokens_or_one_for_each_request(max_seqs: int, tokens: int) -> None:
    assert resolve_step_tokens(EngineOptions(device="cpu", max_seqs=max_seqs)) == tokens


@pytest.mark.parametrize("device", ["cuda:2", "cuda:300"])
def test_a_gpu_that_the_machine_lacks_is_an_error(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device(EngineOptions(device="cuda:1")) == "cuda:1"
    with pytest.raises(ConfigError, match=f"device: '{device}' .* finds 2 CUDA devices; 'cuda:1' would work"):
        resolve_device(EngineOptions(device=device))


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_of_the_memory_is_a_share(tmp_path: Path, share: float) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M*-M"})
    options = EngineOptions(model=str(tmp_path), memory_share=share)
    with pytest.raises(ValueError, match=f"memory_share must be above 0 and at most 1, not {share}"):
        decoder_options(options, open_checkpoint(str(tmp_path)))


@pytest.mark.parametrize(
    ("heads", "draft_vocab", "words"),
    [
        (True, 10**6, "draft_vocab is 1000000, and the vocabulary has [0-9]+ ids"),
        (False, None, "needs a model with heads for it, and this one's configuration has none"),
    ],
)
def test_heads_that_cannot_draft_are_an_error_of_server_and_plan(
    tmp_path: Path, heads: bool, draft_vocab: int | None, words: str
) -> None:
    make_checkpoint(tmp_path, 3, mtp=heads, text={"pattern": "M*-M"})
    options = ServerOptions(model=str(tmp_path), speculative="mtp", draft_vocab=draft_vocab, max_len=64)
    for check in (build_engine, plan):
        with pytest.raises(ValueError, match=words):
            check(options)


@pytest.mark.parametrize("declared", ["float16", "torch.float16", "float64"])
def test_a_dtype_that_is_not_computed_is_reported_unless_another_is_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, declared: str
) -> None:
    make_checkpoint(tmp_path, 3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": declared}))
    loss = f"{declared.removeprefix('torch.')} is rounded to bfloat16"
    for dtype, told in ((None, True), ("bfloat16", False), ("float32", False)):
        options = ServerOptions(model=str(tmp_path), dtype=dtype, max_seqs=2, max_len=64)
        caplog.clear()
        assert build_engine(options).info.dtype == (dtype or "bfloat16")
        assert (loss in caplog.text) is told
        assert (loss in str(plan(options)[0])) is told
        caplog.clear()
        build_encoder(replace(options, role="encoder"))
        assert (loss in caplog.text) is told


@pytest.mark.parametrize("declared", ["float32", "bfloat16"])
def test_the_dtype_of_a_checkpoint_is_that_of_computation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, declared: str
) -> None:
    make_checkpoint(tmp_path, 3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": f"torch.{declared}"}))
    assert build_engine(EngineOptions(model=str(tmp_path), max_seqs=2, max_len=64)).info.dtype == declared
    assert "rounded" not in caplog.text
