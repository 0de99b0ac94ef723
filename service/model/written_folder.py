"""Writes model directories: completely or not at all, with the weights in files of limited size."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kernels.linear import Quantised
from service.common.config import ConfigError

SHARD_BYTES = 2 * 2**30


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` at the end; after an error there is nothing. Raises ConfigError unless
    `out` is absent or an empty folder, and if it cannot be written."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT: {out} is a file; name a folder that does not exist or is empty")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"OUT: {out} is not empty; name a folder that does not exist or is empty")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise ConfigError(f"OUT: {out} cannot be written: {error.strerror}") from error
    try:
        yield unfinished
        unfinished.chmod(0o755)
        unfinished.rename(out)  # target is absent or an empty folder
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):  # a full disk, for example
            raise ConfigError(f"OUT: {out} cannot be written: {error}") from error
        raise


def own_format(name: str, weight: Quantised) -> dict[str, Tensor]:
    """The tensors of a weight in this server's own format, by their names in the files."""
    scale = weight.scale if weight.kind != "int8" or weight.in_groups else weight.scale[..., 0]
    parts = {f"{name}.values": weight.values, f"{name}.scale": scale}
    return parts if weight.outer is None else {**parts, f"{name}.outer": weight.outer}


class Shards:
    """Weight files of at most about `SHARD_BYTES` each, and their index."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._shard: dict[str, Tensor] = {}
        self._places: dict[str, str] = {}
        self._shards = self._bytes = 0

    def add(self, parts: dict[str, Tensor]) -> None:
        self._shard |= {key: part.contiguous() for key, part in parts.items()}
        self._bytes += sum(part.nbytes for part in parts.values())
        if sum(part.nbytes for part in self._shard.values()) >= SHARD_BYTES:
            self._flush()

    def close(self) -> int:
        """Writes the index. Returns the bytes of all tensors."""
        self._flush()
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._places}
        (self._out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")
        return self._bytes

    def _flush(self) -> None:
        if self._shard:
            self._shards += 1
            name = f"model-{self._shards:05d}.safetensors"
            save_file(self._shard, self._out / name, metadata={"format": "pt"})
            self._places.update(dict.fromkeys(self._shard, name))
            self._shard = {}
