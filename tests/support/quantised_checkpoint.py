"""A checkpoint with linear layers in a published quantised format, and an oracle with the same values in float32."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from quantised_files import FORMATS
from safetensors.torch import load_file, save_file
from tiny_checkpoint import TinyCheckpoint
from torch import Tensor

from kernels.linear import Quantised
from service.model.formats.declared import disagreements, read_declared
from service.model.formats.tensors import PACKED, Entry, find_weights
from service.model.formats.unpack import load

PLAIN = (
    "embed",
    "conv1d",
    "norm",
    "visual",
    "vision",
    "mlp1",
    "multi_modal_projector",
    "in_proj_a",
    "in_proj_b",
    "shared_expert_gate",
    "mtp.fc",
    "lm_head",
)
"""Parts of the names of matrices that published files keep in 16 bits."""
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float32: "F32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8",
}  # fmt: skip
NAME = "model.layers.3.mixer.up_proj"


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Whether published files quantise this matrix."""
    router = name.endswith((".gate.weight", ".router.layer.weight"))
    return tensor.dim() == 2 and name.endswith(".weight") and not router and not any(part in name for part in PLAIN)


def quantise_files(tiny: TinyCheckpoint, out: Path, form: str) -> TinyCheckpoint:
    """Writes `out` with its matrices in one of `FORMATS`; sets the oracle's weights to the dequantised values, in
    place."""
    write, config = FORMATS[form]
    out.mkdir()
    for file in tiny.path.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy2(file, out / file.name)
    written: dict[str, Tensor] = {}
    matrices: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
    for matrix in _matrices(tiny.model):
        matrices[matrix.shape].append(matrix)
    for name, tensor in load_file(tiny.path / "model.safetensors").items():
        if not is_quantised(name, tensor):
            written[name] = tensor
            continue
        tensors, meant = write(name.removesuffix(".weight"), tensor.numpy())
        written |= tensors
        if not name.startswith("mtp."):  # the oracle has no prediction heads
            _replace(matrices[tensor.shape], tensor, torch.from_numpy(meant))
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, out / "model.safetensors")
    file = out / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return TinyCheckpoint(out, tiny.model, tiny.vision)


def edit_config(path: Path, **changes: Any) -> None:
    """Changes `quantization_config`."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))


def _matrices(model: torch.nn.Module) -> Iterator[Tensor]:
    """Views of all matrices: those of stacks one by one, whole and by halves of their rows."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            yield parameter
        elif parameter.dim() == 3:
            for matrix in parameter:
                yield from (matrix, *matrix.chunk(2))


@torch.no_grad()
def _replace(matrices: list[Tensor], old: Tensor, new: Tensor) -> None:
    """`matrices`: those of the same shape."""
    found = [matrix for matrix in matrices if torch.equal(matrix, old)]
    assert len(found) == 1, (len(found), old.shape)
    found[0].copy_(new)


def entries(tensors: dict[str, torch.Tensor]) -> dict[str, Entry]:
    return {name: Entry(DTYPES[t.dtype], tuple(t.shape), t.nbytes) for name, t in tensors.items()}


def read_back(tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Quantised:
    """The module `NAME`: through detection, comparison with the configuration and unpacking."""
    declared = read_declared({"quantization_config": config}, {})
    assert declared is not None
    found, _ = find_weights(
        entries(tensors), block=declared.block, group_of=declared.group_of, packed_of=declared.packed_of
    )
    problems = disagreements(declared, found)
    assert not problems, problems
    stored = found[f"{NAME}.weight"]
    if stored.scheme in PACKED:  # as the configuration's shape is
        stored = stored.with_inputs(int(tensors.get(f"{NAME}.weight_shape", torch.tensor(0)).flatten()[-1]))
    weight = load(stored, tensors.__getitem__, gptq_offset=declared.gptq_offset)
    assert isinstance(weight, Quantised)
    return weight
