"""Finds the directory of a model or adapter by name: `demo`, a local folder, or a hub id in the Hugging Face cache."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Literal

from families import CheckpointError
from families.files import read_json

DEMO = Path(__file__).resolve().parent.parent.parent / "demo" / "model"

Kind = Literal["model", "adapter"]
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIGS: dict[Kind, str] = {"model": "config.json", "adapter": ADAPTER_CONFIG}
"""The file by which a folder of each kind is known."""
REVISIONS: dict[Kind, str] = {"model": "revision", "adapter": "adapter_revision"}
"""The options that name revisions."""

GGUF = ".gguf"
"""Suffix of the files in which llama.cpp stores models."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[\w][\w.+-]*(/[\w][\w.+-]*)*")


def how_to_convert(file: str) -> str:
    """What to do with a GGUF file."""
    return f"`saccade convert {file} FOLDER` writes a folder that can be served (--mmproj FILE: with its vision tower)"


def hub_cache() -> Path:
    """The folder in which the Hugging Face tools keep downloaded snapshots. Raises CheckpointError if no variable names
    it and the user has no home directory."""
    try:
        if path := os.environ.get("HF_HUB_CACHE"):
            return Path(path).expanduser()
        home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
        return Path(home).expanduser() / "hub"
    except RuntimeError:
        raise CheckpointError(
            "the hub's cache has no folder, because this user has no home directory: set HF_HUB_CACHE to a folder"
        ) from None


def repository_of(model: str) -> Path:
    """The folder of a hub id in the cache, which may not exist."""
    return hub_cache() / f"models--{model.replace('/', '--')}"


def local_folder(model: str, kind: Kind = "model") -> Path | None:
    """The folder for `demo` or a path; None for a hub id. A folder takes precedence over a hub id of the same name.
    Raises CheckpointError for names that are neither, and for ambiguous ones."""
    path = Path(model)
    with contextlib.suppress(RuntimeError):  # `~name` of no user here
        path = path.expanduser()
    if model == "demo" and kind == "model":
        if (path / "config.json").is_file():
            raise CheckpointError("'demo' is the embedded model and a model's folder here: use './demo' for the folder")
        return DEMO
    try:
        if path.is_dir():
            with contextlib.suppress(FileNotFoundError):
                (path / CONFIGS[kind]).stat()  # raises if files of the folder cannot be reached
            return path
        exists = path.exists()
    except PermissionError as error:
        raise CheckpointError(f"{model!r} cannot be read: {error.strerror}") from None
    if exists:
        if path.suffix.lower() == GGUF and kind == "model":
            raise CheckpointError(f"{model!r} is a GGUF file: {how_to_convert(model)}")
        what = "a model" if kind == "model" else "an adapter"
        raise CheckpointError(f"{model!r} is a file; {what} is a folder with {CONFIGS[kind]} and its weights")
    if _HUB_ID.fullmatch(model) and len(model) <= 96 and ".." not in model and "--" not in model:
        return None
    address = re.fullmatch(r"(?:hf://|https?://[^/]+/)(?:models/)?([^/@?#]+/[^/@?#]+).*", model)
    hint = f"; the hub id in this address is {address[1]!r}" if address else ""
    other = "'demo', nor " if kind == "model" else ""
    raise CheckpointError(
        f"no {kind} {model!r}: it is neither {other}a folder, nor a hub id such as 'OWNER/NAME'{hint}"
    )


def check_revision(revision: str, kind: Kind = "model") -> None:
    """Raises CheckpointError unless this can be a branch, tag or commit: it becomes part of a path."""
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise CheckpointError(f"{REVISIONS[kind]}: {revision!r} is not a branch, tag or commit")


def cached_snapshot(model: str, revision: str | None, kind: Kind = "model") -> Path | None:
    """The cached snapshot of a hub id at the branch, tag or commit `revision`; if that is None, at `main` or else any.
    It may be incomplete."""
    repository = repository_of(model)
    snapshots = repository / "snapshots"
    if revision is not None and (snapshots / revision).is_dir():
        return snapshots / revision
    reference = repository / "refs" / (revision or "main")
    if reference.is_file() and (found := snapshots / reference.read_text().strip()).is_dir():
        return found
    if revision is None and snapshots.is_dir() and (every := sorted(p for p in snapshots.iterdir() if p.is_dir())):
        return max(every, key=lambda p: not missing_files(p, kind=kind))
    return None


def missing_files(snapshot: Path, *, weights: bool = True, kind: Kind = "model") -> list[str]:
    """Files that a snapshot lacks: its configuration, weights that its index names, or any weights at all."""
    if not (snapshot / CONFIGS[kind]).is_file():
        return [CONFIGS[kind]]
    if not weights:
        return []
    if kind == "adapter":
        return [] if (snapshot / ADAPTER_WEIGHTS).is_file() else [ADAPTER_WEIGHTS]
    if (snapshot / "model.safetensors").is_file():  # goes before an index
        return []
    if (index := snapshot / "model.safetensors.index.json").is_file():
        return [file for file in indexed_files(index) if not (snapshot / file).is_file()]
    return [] if any(snapshot.glob("*.safetensors")) else ["model.safetensors"]


def indexed_files(index: Path) -> list[str]:
    """The weight files that a `model.safetensors.index.json` names. Raises CheckpointError."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise CheckpointError(f"{index}: weight_map must map each weight to its file")
    files = sorted(set(named.values()))
    if strange := [file for file in files if "/" in file or not file.endswith(".safetensors")]:
        raise CheckpointError(f"{index}: weight_map names {strange[0]!r}, which is not a safetensors file next to it")
    return files


def resolve_model(model: str, revision: str | None = None, kind: Kind = "model") -> Path:
    """The folder of `demo`, of a path, or of a hub id that is completely cached. Never downloads: `service.model.hub`
    does that before. Raises CheckpointError."""
    if (folder := local_folder(model, kind)) is not None:
        if revision is not None:
            raise CheckpointError(f"{REVISIONS[kind]}: {revision!r} would not be used: {model!r} is a folder here")
        return folder
    if revision is not None:
        check_revision(revision, kind)
    snapshot = cached_snapshot(model, revision, kind)
    if snapshot is None:
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(f"no {kind} {model!r}: there is no such folder, and {hub_cache()} does not have it{at}")
    return snapshot
