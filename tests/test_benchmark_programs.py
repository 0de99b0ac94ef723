"""Each program of benchmarks/ starts: it can be imported, its command line is read, and those that need no other
server or peer run with the smallest workload. Nothing is said about their times."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import models, record, scripted_models

BENCHMARKS = Path(models.__file__).parent
PROGRAMS = sorted(file.stem for file in BENCHMARKS.glob("*.py") if re.search(r"^def main\(", file.read_text(), re.M))
OWN = ("saccade", "service", "families", "encoder", "decoder", "kernels", "demo", "benchmarks")
SMALL = {
    **models.TEXT, "hidden_size": 64, "layers_block_type": [models.KINDS[kind] for kind in "M-*-"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "ssm_state_size": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "chunk_size": 16,
}  # fmt: skip
TOWER = {**models.VISION, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_img_size": 512}

RUNS = {
    "bookkeeping": "--requests 1 --steps 1 --folder FOLDER",
    "encoder": "--only mixes,operations,packing --rough --rounds 1 --images 2 --threads 1 --folder FOLDER",
    "memory": "--kinds= --peers= --folder FOLDER",
    "mutants": "--list",
    "prefix_cache": "--folder FOLDER",
    "preprocess": "--sizes 64x64 --seconds 0",
    "profile": "--rough --concurrent 1 --steps 1 --prompts 1x16 --threads 1 --folder FOLDER",
    "schedule": "--requests 1 --pages 1 --steps 1",
    "speculation_rates": "--rough --model nemotron_h --only mtp --policy fixed --concurrent 1 --tokens 2 --rounds 1 "
    "--threads 1 --folder FOLDER",
}
"""The smallest workload of each program that runs here."""
TESTED_ELSEWHERE = {"fetch_peers", "gpu", "gpu_check", "gpu_sweep", "soak"}
NOT_RUN = {
    "compare": "transformers as a peer, and seconds of ceilings around each round",
    "contexts": "two servers",
    "gateway": "smg and two servers",
    "handoff": "processes for engine and encoder",
    "http_load": "vLLM's load generator",
    "http_overhead": "a server and two clients",
    "image_walk": "a server",
    "large_checkpoint": "gigabytes",
    "lm_eval_scores": "an environment with lm-eval",
    "ray_jobs": "Ray",
    "ray_serve": "Ray",
    "replicas": "three servers",
    "serve": "servers and readers",
    "speculation": "rounds of three kinds of text on the embedded model",
    "structured": "servers, or seconds for a large vocabulary",
    "vllm_reads": "vLLM",
    "weights": "a server and llama.cpp",
}
"""What a run needs. Only the command line of these programs is read here."""
WITHOUT_OPTIONS = {"gguf_model", "peer_llamacpp", "peer_transformers", "peer_vllm"}
"""Programs that other benchmarks start."""


def written_imports(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name in it) of each import in the file's strings, which are programs for other processes. mypy checks
    the imports of the file itself, but not these."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names in re.findall(r"^\s*from ([\w.]+) import ([\w, ]+)$", node.value, re.M):
                yield from ((module, name.split()[0]) for name in names.split(","))


def exists(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None


def test_imports_of_programs_for_other_processes() -> None:
    found = {each for file in sorted(BENCHMARKS.rglob("*.py")) for each in written_imports(file)}
    own = sorted(each for each in found if each[0].split(".")[0] in OWN)
    assert ("saccade.v1", "inference_pb2_grpc") in own
    assert [each for each in own if not exists(*each)] == []


def test_what_runs_in_vllms_environment_needs_nothing_of_this_project() -> None:
    code, file = "import runpy, sys; runpy.run_path(sys.argv[1])", BENCHMARKS / "vllm_reads.py"
    subprocess.run([sys.executable, "-IS", "-c", code, str(file)], cwd="/", check=True)


def test_each_program_is_run_or_has_a_reason() -> None:
    assert PROGRAMS == sorted([*RUNS, *TESTED_ELSEWHERE, *NOT_RUN, *WITHOUT_OPTIONS])


@pytest.mark.parametrize("name", sorted({*PROGRAMS} - WITHOUT_OPTIONS))
def test_command_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name.startswith("ray_"):
        pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` installs it")
    program = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit) as ended:
        program.main(["--help"])
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models under the names of the benchmarks' own, which are kept where they exist."""
    path = tmp_path_factory.mktemp("models")
    models.write(path / models.TEXT_NAME, vision=False, text=SMALL)
    models.write(path / models.OMNI_NAME, vision=True, text=SMALL, tower=TOWER)
    scripted_models.nemotron_model(path, SMALL)
    return path


@pytest.mark.parametrize("name", RUNS)
def test_smallest_run(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, program = sorted(record.RESULTS.iterdir()), importlib.import_module(f"benchmarks.{name}")
    code = program.main([argument.replace("FOLDER", str(folder)) for argument in RUNS[name].split()])
    assert code in (0, 1), "1: a target of its times is missed"
    out = capsys.readouterr().out
    assert name == "mutants" or json.loads(out.splitlines()[-1]) is not None
    assert sorted(record.RESULTS.iterdir()) == written
