"""`saccade quantize MODEL OUT --weights int8|int4|fp8|nvfp4`: a checkpoint with the decoder's linear layers quantised.

OUT holds what MODEL does, under the same names; a quantised `X.weight` is replaced by `X.weight.values` and
`X.weight.scale` as `kernels.linear.Quantised` describes them, and config.json gets

    "saccade_weights": {"format": 1, "kind": "int8"}

Serving OUT gives the very answers of serving MODEL with `--weights`.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import torch

from kernels.linear import quantise
from service.common.config import ConfigError
from service.model.checkpoint import Checkpoint
from service.model.modelconfig import WEIGHTS_FORMAT, WEIGHTS_KEY

SHARD_BYTES = 2 * 2**30
_LINEAR = re.compile(
    r"(in_proj(_qkv|_[zba])?|out_proj|[qkvo]_proj|gate_proj|up_proj|down_proj|fc[12]_latent_proj|^lm_head)(\.weight)?$"
)


def quantised_name(native: str) -> bool:
    """Whether a decoder weight of this native name belongs to a linear layer that is quantised."""
    return (native.startswith("model.layers.") or native == "lm_head.weight") and bool(_LINEAR.search(native))


def quantise_checkpoint(source: Checkpoint, out: Path, kind: str) -> dict[str, int]:
    """Writes OUT, absent or empty before, whole or not at all. Returns bytes before and after. Raises ConfigError."""
    if source.config.weights is not None:
        raise ConfigError(f"{source.path} holds {source.config.weights} weights already; quantise the original")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        sizes = _write(source, unfinished, kind)
        unfinished.chmod(0o755)
        unfinished.rename(out)  # onto nothing, or an empty folder
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return sizes


def _write(source: Checkpoint, out: Path, kind: str) -> dict[str, int]:
    from safetensors import safe_open
    from safetensors.torch import save_file

    for file in source.path.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy2(file, out / file.name)
    config = json.loads((source.path / "config.json").read_text("utf-8"))
    config[WEIGHTS_KEY] = {"format": WEIGHTS_FORMAT, "kind": kind}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    shard: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    sizes = {"before": 0, "after": 0}
    shards = 0

    def flush() -> None:
        nonlocal shards, shard
        if shard:
            shards += 1
            name = f"model-{shards:05d}.safetensors"
            save_file(shard, out / name, metadata={"format": "pt"})
            places.update(dict.fromkeys(shard, name))
            shard = {}

    decoder = set(source.config.decoder.expected_weights())
    for file in source.files.files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                tensor = handle.get_tensor(name)
                sizes["before"] += tensor.nbytes
                targets = source.targets(name)
                if targets and targets[0].name in decoder and quantised_name(targets[0].name):
                    if kind in ("int4", "nvfp4") and tensor.shape[-1] % 2:
                        raise ConfigError(
                            f"{name} has {tensor.shape[-1]} inputs; {kind} comes in pairs, int8 would work"
                        )
                    packed = quantise(tensor, kind)
                    parts = {f"{name}.values": packed.values, f"{name}.scale": packed.scale}
                    if packed.outer is not None:
                        parts[f"{name}.outer"] = packed.outer
                else:
                    parts = {name: tensor.clone()}
                shard |= {key: part.contiguous() for key, part in parts.items()}
                sizes["after"] += sum(part.nbytes for part in parts.values())
                if sum(part.nbytes for part in shard.values()) >= SHARD_BYTES:
                    flush()
    flush()
    index = {"metadata": {"total_size": sizes["after"]}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    return sizes
