"""Runs in an environment with compressed-tensors: compresses weights with it, and reads what this project wrote.

    python compressed_library.py CASES WRITTEN OUT

CASES: JSON, name -> the layout and keyword arguments of `QuantizationArgs`. WRITTEN: a folder of checkpoints. Into OUT:
`NAME.safetensors` for each case, with the tensors of a module and its weight in float32 as `meant`; and for each
checkpoint `written-NAME.safetensors`, module -> its weight.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

ROWS, INPUTS = 44, 96


def compressed(layout: str, fields: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    """A module's tensors, and the weight that they mean."""
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, INPUTS, generator=generator) + 0.5
    weight[::3] = weight[::3].abs()  # the lowest zero point
    group = args.group_size or INPUTS
    order = torch.arange(INPUTS) // group
    state = {}
    if args.actorder == "group":
        order = order[torch.randperm(INPUTS, generator=generator)]
        state["weight_g_idx"] = order.int()
    parts = [weight[:, order == place] for place in range(INPUTS // group)]
    least, most = (torch.stack([getattr(part, of)(1) for part in parts], 1) for of in ("amin", "amax"))
    state["weight"] = weight
    state["weight_scale"], state["weight_zero_point"] = calculate_qparams(least, most, args)
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress(state, scheme)
    meant = compressor.decompress(tensors, scheme)["weight"]
    return {**tensors, "meant": meant}


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights in float32 of a checkpoint's quantised modules."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme(**group, format=config["format"])
    tensors = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    found = {}
    for module in {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}:
        own = {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}
        own["weight_scale"] = own["weight_scale"].float()
        found[module] = compressor.decompress(own, scheme)["weight"]
    return found


def main(cases: str, written: str, out: str) -> None:
    for seed, (name, (layout, fields)) in enumerate(json.loads(cases).items()):
        tensors = {key: tensor.contiguous() for key, tensor in compressed(layout, fields, seed).items()}
        save_file(tensors, Path(out) / f"{name}.safetensors")
    for folder in Path(written).iterdir():
        save_file(weights_of(folder), Path(out) / f"written-{folder.name}.safetensors")


main(*sys.argv[1:])
