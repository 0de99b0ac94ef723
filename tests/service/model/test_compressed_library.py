"""compressed-tensors' own files mean here what they mean there, and files written here what they mean here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_checkpoint import NAME, read_back
from safetensors.torch import load_file
from tiny_checkpoint import make_checkpoint

from benchmarks.vllm_reads import PYTHON
from kernels.linear import Quantised
from service.model.checkpoint import Checkpoint
from service.model.formats.compressed import PUBLISHED
from service.model.quantise import quantise_checkpoint

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="compressed-tensors is not here: benchmarks/setup_vllm.sh")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{layout}-{bits}-{group}-{symmetric}-{order}": (
        layout,
        {
            "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
            "group_size": group, "actorder": order,
        },
    )
    for layout in ("pack-quantized", "int-quantized")
    for bits in (4, 8)
    for group in (None, 32)
    for symmetric in (True, False)
    for order in (None, "group")
    if (bits == 8 or layout == "pack-quantized") and (group or not order)
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoints written here, by form, and the folder with the library's results."""
    written, out = (tmp_path_factory.mktemp(name) for name in ("written", "out"))
    text = {"pattern": "M-", "hidden_size": 128, "intermediate_size": 256, "mamba_num_heads": 8, "mamba_head_dim": 16}
    source = make_checkpoint(tmp_path_factory.mktemp("source"), 3, vision=False, text=text).path
    for form in PUBLISHED:
        quantise_checkpoint(Checkpoint(source), written / form, form, "compressed-tensors")
    script = Path(__file__).parents[2] / "support" / "compressed_library.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(PYTHON), str(script), json.dumps(CASES), str(written), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return written, out


@pytest.mark.parametrize("case", CASES)
def test_what_the_library_writes_is_read_bit_for_bit(library: tuple[Path, Path], case: str) -> None:
    layout, weights = CASES[case]
    tensors = load_file(library[1] / f"{case}.safetensors")
    meant = tensors.pop("meant")
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    weight = read_back({f"{NAME}.{name}": tensor for name, tensor in tensors.items()}, config)
    assert weight.kind == f"int{weights['num_bits']}" and (weight.order is None) == (weights["actorder"] is None)
    assert (weight.zeros is None) == weights["symmetric"]
    assert torch.equal(weight.dequantise(), meant)


@pytest.mark.parametrize("form", PUBLISHED)
def test_the_library_reads_what_is_written_here(library: tuple[Path, Path], form: str) -> None:
    checkpoint, theirs = Checkpoint(library[0] / form), load_file(library[1] / f"written-{form}.safetensors")
    ours = {
        checkpoint.stored_names(name)[0].removesuffix(".weight"): weight.dequantise()
        for name, weight in checkpoint.decoder_weights()
        if isinstance(weight, Quantised)
    }
    assert len(ours) == 4 and ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], weight) for name, weight in ours.items())
