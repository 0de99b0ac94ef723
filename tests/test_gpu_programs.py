"""The programs for a GPU machine prove themselves on a CPU: every part runs, leaves its file and says how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fetch_peers, gpu, gpu_check, gpu_models, gpu_peers

CPU = ["--device", "cpu", "--scale", "tiny", "--out"]


def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["layers", "graphs", *CPU, str(tmp_path)]) == 0
    said = last_line(capsys)
    assert said == json.loads((tmp_path / "gpu-check.json").read_text())
    assert said["layers"]["passed"] and said["graphs"]["passed"] and said["machine"]["torch"] == torch.__version__
    assert said["layers"].keys() >= {"nemotron-9b", "nano-3-30b", "radio-h"}


def test_a_wrong_result_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = gpu_check.logprobs, []

    def off(*given: Any) -> torch.Tensor:
        """The first of three calls, which is that of the kernels, is two hundredths off."""
        calls.append(given)
        return honest(*given) * (1.02 if len(calls) % 3 == 1 else 1.0)

    monkeypatch.setattr(gpu_check, "logprobs", off)
    assert gpu_check.main(["layers", *CPU, str(tmp_path)]) == 1
    assert "the reference's own" in last_line(capsys)["layers"]["error"]


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["ceilings", "kernels", "runners", *CPU, str(tmp_path)]) == 0
    ceilings, kernels, runners = last_line(capsys)
    assert len(list(tmp_path.glob("*-gpu-*.json"))) == 3
    assert ceilings["ceilings"].keys() == {"copy_gb_s", "bf16_tflop_s"}
    shares = {name: row for name, row in kernels.items() if name.startswith(("nano-v2", "nano-3"))}
    assert len(shares) > 15 and all(row["seconds"] > 0 for row in shares.values())
    assert all(runners["decode"][batch]["over_floor"] > 0 for batch in ("1", "2"))
    assert runners["decode"]["graphs"]["replays_decode_2"] > 0
    assert runners["pictures"]["2"]["eager_over_graph"] > 0


def test_without_a_gpu_the_programs_say_what_would_work(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        return
    for program, part in ((gpu.main, "kernels"), (gpu_check.main, "layers")):
        with pytest.raises(SystemExit):
            program([part])
        assert "--device cpu --scale tiny" in capsys.readouterr().err


def test_random_weights_are_those_that_the_models_expect() -> None:
    config = gpu_models.decoder("tiny", experts=True)
    first, second = (dict(gpu_models.weights(config.expected_weights(), "cpu", torch.float32)) for _ in range(2))
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == config.expected_weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_peer_is_imported_without_the_package_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers, "SOURCES", tmp_path)
    assert gpu_peers.function("a-peer", "ops.work", "half") is None
    (tmp_path / "a-peer" / "a_peer" / "ops").mkdir(parents=True)
    (tmp_path / "a-peer" / "a_peer" / "__init__.py").write_text("import what_nobody_has")
    (tmp_path / "a-peer" / "a_peer" / "ops" / "work.py").write_text("def half(x):\n    return x / 2\n")
    found = gpu_peers.function("a-peer", "ops.work", "half")
    assert found is not None and found(6) == 3


def test_the_list_of_peers() -> None:
    peers = fetch_peers.read(fetch_peers.LIST.read_text())
    assert {peer.kind for peer in peers} == {"wheel", "source"} and all(peer.version for peer in peers)
    for line in ("wheel transformers", "source mamba-ssm==1", "egg a==1"):
        with pytest.raises(ValueError, match=line):
            fetch_peers.read(line)
