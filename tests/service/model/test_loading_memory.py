"""Loading a checkpoint needs little more memory than what stays of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import needs_compiled
from resident import file_bytes
from torch import randn

from benchmarks.large_checkpoint import write_checkpoint
from kernels.host_memory import drop_pages, map_file

LOADING = """
import json, sys
from service.common.helper_process import torch_imports
with torch_imports():
    import torch
from kernels import native
from kernels.host_memory import keep_freed_memory, release_freed_memory
from kernels.linear import Linear, quantise
from service.common.config import EngineOptions
from service.engine.build import build_engine

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10

assert keep_freed_memory()
options = EngineOptions(
    model=sys.argv[1], dtype="bfloat16", max_seqs=1, max_len=64, max_batched_tokens=16, state_cache="none", threads=1,
    graphs="off", handoff_bytes=16 << 20,
)
native.library()
Linear(quantise(torch.randn(64, 64), "nvfp4"))(torch.randn(1, 64))  # what is imported and set up when first used
release_freed_memory()
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
engine = build_engine(options)
print(json.dumps([resident("VmHWM") - before, resident("VmRSS") - before]))
"""
SIZES = {
    "model": {"projector_hidden_size": 2048},
    "text": {"vocab_size": 16384, "hidden_size": 1024, "moe_intermediate_size": 512, "head_dim": 64,
             "moe_shared_expert_intermediate_size": 1024, "num_attention_heads": 16, "ssm_state_size": 64,
             "mamba_num_heads": 32},
    "vision": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_img_size": 64},
}  # fmt: skip


@needs_compiled
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts peaks from a moment on")
def test_a_peak_is_at_most_1_15_of_what_stays(tmp_path: Path) -> None:
    """Of experts in nvfp4, other matrices in fp8 and bfloat16, and a tower."""
    write_checkpoint(tmp_path / "model", 0.0, 32, SIZES)
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path / "model")], capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    peak, stays = json.loads(done.stdout)
    stored = sum(file.stat().st_size for file in tmp_path.glob("model/*.safetensors"))
    assert stays > stored / 2, "what was loaded is not there"
    assert peak <= 1.15 * stays, (peak, stays, stored)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_what_reads_ahead_leaves_no_memory(tmp_path: Path) -> None:
    """Its threads' buffers; the C allocator keeps those of ended threads."""
    (tmp_path / "weights").write_bytes(bytes(64 << 20))
    program = """
import sys
from pathlib import Path
from kernels.host_memory import keep_freed_memory
from service.model.read_ahead import Range, ReadAhead

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) << 10

keep_freed_memory()
before = resident()
ahead = ReadAhead([Range(Path(sys.argv[1]), 0, 64 << 20)])
assert ahead.wait(60)
ahead.close()
print(resident() - before)
"""
    told = subprocess.run([sys.executable, "-c", program, str(tmp_path / "weights")], capture_output=True, text=True)
    assert not told.returncode, told.stderr
    assert int(told.stdout) < 2 << 20


def test_pages_of_a_file_are_dropped_and_read_again(tmp_path: Path) -> None:
    content = randn(1 << 18)
    (tmp_path / "numbers").write_bytes(b"xyz!" + content.numpy().tobytes())
    with (tmp_path / "numbers").open("rb") as file:
        mapped = map_file(file.fileno(), 4, content.nbytes)
    read = mapped.view(content.dtype)
    assert bool((read == content).all())
    before = file_bytes()
    drop_pages(read[: 1 << 17], read)
    assert before - file_bytes() > 0.9 * content.nbytes
    assert bool((read == content).all())
    own = content.clone()
    drop_pages(own, own[1:], own[::2])
    assert bool((own == content).all()), "memory that is no file's is left alone"
