"""`saccade quantize MODEL OUT --weights FORM`: a checkpoint with the decoder's linear layers quantised.

OUT has the same files as MODEL. In this server's own format a quantised `X.weight` is replaced by `X.weight.values` and
`X.weight.scale`, which `kernels.linear.Quantised` describes, and config.json gets

    "saccade_weights": {"format": 1, "kind": "int8"}

Serving OUT then gives exactly the answers of serving MODEL with `--weights`. In the compressed-tensors format, which
other servers read too, the vocabulary projection is not quantised. `quantization_report.json` has the error of each
weight.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from decoder.config import DecoderConfig
from kernels.linear import quantise
from kernels.weight_forms import kind_and_group
from service.common.config import ConfigError
from service.model.checkpoint import Checkpoint
from service.model.formats import compressed
from service.model.modelconfig import ONE_FORM, WEIGHTS_KEY
from service.model.weight_sources import EMBEDDINGS, HEAD
from service.model.written_folder import Shards, new_folder, own_format

REPORT = "quantization_report.json"
FORMATS = ("saccade", "compressed-tensors")


@dataclass
class Written:
    """Result of quantising a checkpoint."""

    before: int = 0
    after: int = 0
    """Bytes of all weights."""
    errors: dict[str, float] = field(default_factory=dict)
    """Root mean square of each weight's error, relative to the root mean square of its values."""
    plain: list[str] = field(default_factory=list)
    """Modules with a matrix that is not quantised."""

    @property
    def mean_error(self) -> float:
        return sum(self.errors.values()) / max(1, len(self.errors))


def quantise_checkpoint(source: Checkpoint, out: Path, kind: str, form: str = "saccade") -> Written:
    """Writes OUT, which must be absent or empty, completely or not at all. `form`: one of `FORMATS`. Raises
    ConfigError."""
    if source.formats:
        raise ConfigError(f"{source.path} already has {', '.join(source.formats)} weights; quantise the original")
    if form == "compressed-tensors" and kind not in compressed.PUBLISHED:
        known = f"{', '.join(compressed.PUBLISHED[:-1])} and {compressed.PUBLISHED[-1]}"
        raise ConfigError(f"compressed-tensors can store {known}, not {kind}; --format saccade can store all kinds")
    with new_folder(out) as unfinished:
        return _write(source, unfinished, kind, form)


Store = Callable[[str, Tensor, str, Written], Iterator[tuple[str, Tensor]]]
"""Yields the tensors that replace a weight, given its name, the weight and the form."""


def _write(source: Checkpoint, out: Path, kind: str, form: str) -> Written:
    for file in source.path.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy2(file, out / file.name)
    written, shards = Written(), Shards(out)
    store = _own if form == "saccade" else _published
    chosen, tied = _chosen(source.config.decoder, form), source.config.decoder.tie_word_embeddings
    for name, entry in source.files.table.items():
        tensor = source.files.read(name)
        written.before += entry.nbytes
        targets = source.targets(name)
        ours = targets[0].name if targets else ""
        if tied and ours == HEAD:
            if name not in source.stored_names(EMBEDDINGS):
                continue  # a copy of the embeddings, from which it would differ once they are quantised
            ours = EMBEDDINGS
        if ours in chosen:
            parts = _stored(store, name, tensor, kind, written)
        else:
            parts = {name: tensor.clone()}
            if tensor.dim() == 2:
                written.plain.append(name.removesuffix(".weight"))
        shards.add(parts)
    written.after = shards.close()
    config: dict[str, Any] = json.loads((source.path / "config.json").read_text("utf-8"))
    if form == "saccade":
        config[WEIGHTS_KEY] = {"format": ONE_FORM, "kind": kind}
    else:
        config["quantization_config"] = compressed.configuration(kind, written.plain)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    report = {"kind": kind, "format": form, "relative_error": written.errors, "plain": written.plain}
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return written


def _chosen(decoder: DecoderConfig, form: str) -> set[str]:
    """Native names of the weights that are quantised: in this server's own format those that `--weights` quantises.
    Other servers expect the vocabulary projection and prediction heads to be plain."""
    return {name for name in decoder.linear_weights() if form == "saccade" or name.startswith("model.layers.")}


def _stored(store: Store, name: str, tensor: Tensor, kind: str, written: Written) -> dict[str, Tensor]:
    """The tensors that replace a weight. Raises ConfigError with its name."""
    try:
        return dict(store(name, tensor, kind, written))
    except ConfigError:
        raise
    except ValueError as error:  # numbers that are not finite
        raise ConfigError(f"{name}: {error}") from error


def _own(name: str, tensor: Tensor, kind: str, written: Written) -> Iterator[tuple[str, Tensor]]:
    if kind_and_group(kind)[0] in ("int4", "nvfp4") and tensor.shape[-1] % 2:
        raise ConfigError(f"{name} has {tensor.shape[-1]} inputs; {kind} needs an even number, int8 would work")
    packed = quantise(tensor, kind)
    written.errors[name] = _error(tensor, packed.dequantise())
    yield from own_format(name, packed).items()


def _published(name: str, tensor: Tensor, kind: str, written: Written) -> Iterator[tuple[str, Tensor]]:
    for module, matrix in compressed.modules_of(name, tensor):
        if not compressed.writable(matrix, kind):
            written.plain.append(module)
            yield f"{module}.weight", matrix.clone()
            continue
        packed = quantise(matrix, kind)
        written.errors[module] = _error(matrix, packed.dequantise())
        yield from compressed.tensors_of(module, packed, kind).items()


def _error(weight: Tensor, stored: Tensor) -> float:
    exact = weight.float()
    return float((stored - exact).norm() / exact.norm().clamp(min=1e-30))
