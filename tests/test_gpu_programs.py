"""The GPU programs run on a CPU: every part runs, writes its file and reports its status."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fetch_peers, gpu, gpu_check, gpu_kernels, gpu_models, gpu_peers, gpu_setting, gpu_sweep

CPU = ["--device", "cpu", "--scale", "tiny", "--out"]


def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["layers", "graphs", "batches", "options", *CPU, str(tmp_path)]) == 0
    said = last_line(capsys)
    assert said == json.loads((tmp_path / "gpu-check.json").read_text())
    assert all(said[part]["passed"] for part in ("layers", "graphs", "batches", "options"))
    assert said["options"]["cases"] == 4 and said["batches"]["steps"] == 3 * 24
    assert said["machine"]["torch"] == torch.__version__
    assert said["layers"].keys() >= {"nemotron-9b", "nano-3-30b", "qwen3.5-35b", "radio-h"}


def test_a_check_without_time_left_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["graphs", "--seconds", "0", *CPU, str(tmp_path)]) == 1
    assert "the time is up" in last_line(capsys)["graphs"]["error"]


def test_a_wrong_result_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = gpu_check.logprobs, []

    def off(*given: Any, **named: Any) -> torch.Tensor:
        """Makes the first of three calls, that of the kernels, wrong by 0.02."""
        calls.append(given)
        return honest(*given, **named) * (1.02 if len(calls) % 3 == 1 else 1.0)

    monkeypatch.setattr(gpu_check, "logprobs", off)
    assert gpu_check.main(["layers", *CPU, str(tmp_path)]) == 1
    assert "the reference's own" in last_line(capsys)["layers"]["error"]


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers, "SOURCES", tmp_path / "none")
    assert gpu.main(["ceilings", "kernels", "runners", *CPU, str(tmp_path)]) == 0
    ceilings, kernels, runners = last_line(capsys)
    assert len(list(tmp_path.glob("*-gpu-*.json"))) == 3
    assert ceilings["ceilings"].keys() == {"copy_gb_s", "bf16_tflop_s"}
    assert kernels["qwen3.5-35b-a3b"].keys() >= {"gated_delta_update b2", "gated_delta_scan 96", "norm_rotate"}
    shares = kernels["nano-v2-12b-vl"] | kernels["nano-3-omni"] | kernels["qwen3.5-35b-a3b"]
    assert len(shares) > 10 and all(row["seconds"] > 0 for row in shares.values())
    assert shares["varlen_attention"]["difference_torch"] < 0.05
    assert not any(part["errors"] or part["left_out"] for part in (ceilings, kernels, runners))
    assert all(runners["decode"][batch]["over_floor"] > 0 for batch in ("1", "2"))
    assert runners["decode"]["graphs"]["replays_decode_2"] > 0
    assert runners["images"]["2"]["eager_over_graph"] > 0


def test_a_part_that_fails_or_runs_out_of_time_leaves_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    record = gpu_setting.Record(path, {"benchmark": "x"}, 1000.0)
    record.take("a", "one", lambda: 1)
    record.take("a", "two", lambda: {}["missing"])
    assert json.loads(path.read_text())["a"] == {"one": 1}
    late = gpu_setting.Record(path, {}, 0.0)
    late.take("", "three", lambda: 3)
    assert "KeyError" in record.result["errors"]["a two"] and json.loads(path.read_text())["left_out"] == ["three"]


def test_a_failed_measurement_is_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu.PARTS, "kernels", broken)
    assert gpu.main(["ceilings", "kernels", *CPU, str(tmp_path)]) == 1
    (left,) = tmp_path.glob("*-gpu-kernels.json")
    assert "no such kernel" in json.loads(left.read_text())["errors"]["kernels"]


def test_a_peer_that_fails_or_differs_is_told_beside_ours() -> None:
    state = torch.ones(3)

    def ours() -> torch.Tensor:
        return state.add_(1).clone()

    measure = gpu_kernels.Measure(
        "x", ours, peers={"same": ours, "half": lambda: ours() / 2, "broken": lambda: 1 / 0}, changes=(state,)
    )
    ceilings = {"copy_gb_s": 1.0, "bf16_tflop_s": 1.0}
    row = gpu_kernels.result_of(gpu_setting.Setting("cpu", "tiny"), ceilings, measure)
    assert row["difference_same"] == 0.0 and row["difference_half"] == 0.5 and row["times_same"] > 0
    assert "ZeroDivisionError" in row["failed_broken"]


def test_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that gives other results, or fails, does not count; the table is as before."""
    sweep, calls = gpu_sweep.SWEEPS["patches"], []
    before, honest = dict(sweep.table), gpu_kernels.patch_embed

    def off(*given: Any) -> torch.Tensor:
        """The first call of each measure and those of the first candidate are right."""
        calls.append(sweep.table["sm_90"])
        if calls[-1] == sweep.candidates[1]:
            raise RuntimeError("too much shared memory")
        return honest(*given) * (2 if calls[-1] == sweep.candidates[2] else 1)

    monkeypatch.setattr(gpu_kernels, "patch_embed", off)
    assert gpu_sweep.main(["patches", *CPU, str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu-sweep.json").read_text())["patches"]["nano-3-omni patch_embed"]
    assert [row[0] is None for row in found] == [False, False, True, True] and dict(sweep.table) == before
    assert "too much shared memory" in str(found) and any(row[1] == 1.0 for row in found)


def test_sweeps_name_measures_and_candidates_that_differ() -> None:
    for name, sweep in gpu_sweep.SWEEPS.items():
        assert len({str(candidate) for candidate in sweep.candidates}) == len(sweep.candidates) > 1, name
        for candidate in sweep.candidates:
            with sweep.using("sm_90", candidate):
                row = sweep.table["sm_90"]
                assert (row if sweep.entry is None else row[sweep.entry]) == candidate


@pytest.mark.skipif(torch.cuda.is_available(), reason="what the programs say where there is no GPU")
def test_without_a_gpu_the_programs_say_what_would_work(capsys: pytest.CaptureFixture[str]) -> None:
    for program, part, what in (
        (gpu.main, "kernels", "--device cpu --scale tiny"),
        (gpu_check.main, "layers", "--device cpu --scale tiny"),
        (gpu_sweep.main, "patches", "--compile DIR"),
    ):
        with pytest.raises(SystemExit):
            program([part])
        assert what in capsys.readouterr().err


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


def test_vllm_finds_what_its_kernels_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers, "SOURCES", tmp_path)
    folder = tmp_path / "vllm" / "vllm" / "ops"
    folder.mkdir(parents=True)
    (folder / "work.py").write_text(
        "import vllm.envs as envs\nfrom vllm import _custom_ops as ops\nfrom vllm.logger import init_logger\n"
        "from vllm.platforms import current_platform\nfrom vllm.triton_utils import HAS_TRITON, tl, triton\n"
        "from vllm.utils.platform_utils import get_device_name_as_file_name\n"
        "from vllm.v1.attention.backends.utils import NULL_BLOCK_ID\n"
        "def answer():\n    init_logger('x').info_once('%s', 1, scope='global')\n"
        "    return current_platform.is_cpu(), current_platform.is_device_capability(90), NULL_BLOCK_ID\n"
    )
    found = gpu_peers.function("vllm", "ops.work", "answer")
    assert found is not None and found() == (False, False, -1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_wheels_are_unpacked_once(tmp_path: Path) -> None:
    peers, to = tmp_path / "peers", tmp_path / "site"
    assert fetch_peers.unpack(peers, to) == [] and not to.exists()
    (peers / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(peers / "wheels" / "thing-1.whl", "w") as wheel:
        wheel.writestr("thing/__init__.py", "one = 1")
    assert fetch_peers.main(["--to", str(peers), "--unpack", str(to)]) == 0
    (to / "mark").touch()
    assert fetch_peers.unpack(peers, to) == ["thing-1.whl"] and (to / "mark").exists()
    (peers / "wheels" / "thing-1.whl").rename(peers / "wheels" / "thing-2.whl")
    fetch_peers.unpack(peers, to)
    assert (to / "thing/__init__.py").exists() and not (to / "mark").exists()


def test_the_list_of_peers() -> None:
    peers = fetch_peers.read(fetch_peers.LIST.read_text())
    assert {peer.kind for peer in peers} == {"wheel", "source"} and all(peer.version for peer in peers)
    for line in ("wheel transformers", "source mamba-ssm==1", "egg a==1"):
        with pytest.raises(ValueError, match=line):
            fetch_peers.read(line)
