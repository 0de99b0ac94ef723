"""Downloads models and adapters that are named by hub id into the Hugging Face cache, before the server's processes are
started.

Only JSON, chat templates and safetensors are downloaded, never code or pickles. Small files come first, so that an
unsupported model is rejected before its weights are downloaded. `HF_ENDPOINT`, `HF_TOKEN` (or the token's file),
`HF_HUB_CACHE` and `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) mean the same as for the Hugging Face tools, and the
cache is shared with them.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from families import CheckpointError
from service.common.config import EngineOptions
from service.model.adapter_config import AdapterConfig
from service.model.cache import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIGS,
    GGUF,
    Kind,
    cached_snapshot,
    check_revision,
    how_to_convert,
    hub_cache,
    indexed_files,
    local_folder,
    missing_files,
    repository_of,
    resolve_model,
)
from service.model.chat import TEMPLATES
from service.model.download_progress import NoBar, Progress, Stopped, size
from service.model.modelconfig import load_config

if TYPE_CHECKING:
    from huggingface_hub.file_download import HfFileMetadata

log = logging.getLogger(__name__)

OptionsT = TypeVar("OptionsT", bound=EngineOptions)

SMALL = (".json", ".jinja")
"""Suffixes of the small files that a server reads: configurations, tokenizer, templates."""
WORKERS = 4
"""Weight files that are downloaded at a time."""
RETRIES, RETRY_SECONDS = 4, 0.5
"""How many connections in a row may be lost without receiving a byte, and the seconds to wait after a lost connection
that received some; the wait doubles with each that did not."""


def fetched(options: OptionsT, *, weights: bool = True) -> OptionsT:
    """The options with their model and adapter downloaded to this host's cache and pinned to one commit, so that every
    process started from them reads the same files, even if the branch has moved. Unchanged for `demo` and folders.
    `weights`: False for the small files only. Raises CheckpointError with one sentence that says what to do."""
    pinned = None
    if options.adapter is not None:  # first: it is smaller
        pinned = _fetched(options.adapter, options.adapter_revision, weights, "adapter")
    revision = _fetched(options.model, options.revision, weights, "model")
    return replace(options, revision=revision, adapter_revision=pinned)


def _fetched(name: str, revision: str | None, weights: bool, kind: Kind) -> str | None:
    """The commit that has been downloaded; None for a folder."""
    if local_folder(name, kind) is not None:
        resolve_model(name, revision, kind)  # raises for a revision, since a folder has none
        return None
    return fetch(name, revision, weights=weights, kind=kind).name


def fetch(model: str, revision: str | None = None, *, weights: bool = True, kind: Kind = "model") -> Path:
    """The snapshot folder of a hub id, complete except for `weights` that are not requested; its name is the commit.

    Asks the hub for the commit of `revision` (None: `main`), and downloads what the cache lacks. If the hub does not
    answer, a complete copy in the cache is used, with a warning. Raises CheckpointError.
    """
    if revision is not None:
        check_revision(revision, kind)
    cached = cached_snapshot(model, revision, kind)
    complete = cached is not None and not missing_files(cached, weights=weights, kind=kind)
    if cached is not None and complete and cached.name == revision:
        return cached  # a commit never changes
    if variable := _offline():
        if cached is not None and complete:
            return cached
        raise CheckpointError(_not_cached(model, kind, cached, f"{variable} is set", "unset it, or"))
    try:
        return _Download(model, revision or "main", kind).run(weights=weights)
    except _Unavailable as error:
        if cached is None or not complete:
            if isinstance(error, _Unreachable):
                raise CheckpointError(
                    _not_cached(model, kind, cached_snapshot(model, revision, kind), str(error))
                ) from None
            raise
        log.warning("%s: serving commit %s from the cache", error, cached.name)
        return cached
    except OSError as error:
        raise CheckpointError(f"{model!r} cannot be kept in {hub_cache()}: {error}") from None


class _Unavailable(CheckpointError):
    """The hub does not answer, or denies this caller access: a cached copy may be used."""


class _Unreachable(_Unavailable):
    """The hub cannot be reached."""


def _offline() -> str:
    """The environment variable that forbids access to the hub; empty if none does. As for the Hugging Face tools, the
    first of them that is set counts."""
    variable = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), "")
    return variable if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE") else ""


def _not_cached(model: str, kind: Kind, cached: Path | None, reason: str, first: str = "") -> str:
    there = f"{hub_cache()} does not hold it"
    if cached is not None and (lacking := missing_files(cached, kind=kind)):
        there = f"{hub_cache()} holds only a part of it ({len(lacking)} files are missing, such as {lacking[0]})"
    return (
        f"{model!r} is not a folder here, {there}, and {reason}: {first}{' ' if first else ''}run "
        f"`hf download {model}` where the hub can be reached and copy the folder, then name that folder"
    )


@dataclass(frozen=True)
class _File:
    """A weight file that the cache lacks."""

    name: str
    metadata: HfFileMetadata
    blob: Path
    """Its final path. The received part is next to it, with the suffix `.incomplete`."""

    @property
    def size(self) -> int:
        assert self.metadata.size is not None
        return self.metadata.size

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    @property
    def there(self) -> int:
        """Bytes that an earlier download has left."""
        if self.blob.exists():
            return self.size
        found = self.partial.stat().st_size if self.partial.exists() else 0
        return found if found <= self.size else 0


class _Download:
    """One model or adapter at one revision."""

    def __init__(self, model: str, revision: str, kind: Kind) -> None:
        from huggingface_hub import HfApi, constants, get_token

        # Its INFO lines contain the signed URLs to which weights are redirected, which are as sensitive as a token.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        self.model, self.revision, self.kind = model, revision, kind
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self.repository = repository_of(model)
        self.commit = ""
        self._api = HfApi(endpoint=self.endpoint)
        self._has_token = get_token() is not None

    def run(self, *, weights: bool) -> Path:
        """Downloads what is missing. Returns the snapshot's folder. Raises CheckpointError."""
        info = self._ask(lambda: self._api.model_info(self.model, revision=self.revision))
        self.commit = info.sha or ""
        check_revision(self.commit)
        names = [file.rfilename for file in info.siblings or ()]
        if info.siblings is None:  # as some mirrors answer
            names = self._ask(lambda: self._api.list_repo_files(self.model, revision=self.commit))
        snapshot = self.repository / "snapshots" / self.commit
        for name in self._small_files(names):
            self._fetch_small(name)
        self._check_served(snapshot)
        if not weights:
            return snapshot
        self._fetch_weights([name for name in self._weights(snapshot, names) if not (snapshot / name).exists()])
        self._write_reference()
        return snapshot

    def _small_files(self, names: Sequence[str]) -> list[str]:
        """Those of the repository's files that are downloaded before its weights. CheckpointError if it has no model or
        adapter."""
        small = [name for name in names if name.endswith(SMALL) and name.rpartition("/")[0] in ("", TEMPLATES)]
        if self.kind == "adapter":
            small = [name for name in names if name == ADAPTER_CONFIG]  # the others are of a tokenizer, or of training
        if (needed := CONFIGS[self.kind]) in small:
            return small
        what, hint = "a model" if self.kind == "model" else "an adapter", ""
        if ADAPTER_CONFIG in names:
            hint = "; name its base model, and it with --adapter"
        elif any(name.endswith(GGUF) for name in names):
            hint = f"; its GGUF files have to be downloaded: {how_to_convert('FILE.gguf')}"
        raise CheckpointError(f"{self.model!r} on {self.endpoint} is not {what}: it has no {needed}{hint}")

    def _check_served(self, snapshot: Path) -> None:
        """Raises CheckpointError for a model or adapter that is not served."""
        if self.kind == "adapter":
            AdapterConfig.read(snapshot)
        else:
            load_config(snapshot, name=self.model)

    def _weights(self, snapshot: Path, names: list[str]) -> list[str]:
        """The files that the checkpoint reader will read; other formats and copies are not downloaded."""
        if self.kind == "adapter":
            if ADAPTER_WEIGHTS not in names:
                raise CheckpointError(
                    f"{self.model!r} on {self.endpoint} has no {ADAPTER_WEIGHTS}; other formats are not fetched, since "
                    "loading them can run code"
                )
            return [ADAPTER_WEIGHTS]
        files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
        if not files:
            raise CheckpointError(
                f"{self.model!r} on {self.endpoint} has no safetensors weights; other formats are not fetched, since "
                "loading them can run code"
            )
        if "model.safetensors" in files:  # goes before an index
            return ["model.safetensors"]
        if (index := snapshot / "model.safetensors.index.json").is_file():
            wanted = indexed_files(index)
            if absent := [file for file in wanted if file not in files]:
                raise CheckpointError(f"{self.model!r} on {self.endpoint} lacks {absent[0]}, which its index names")
            return wanted
        return files

    def _fetch_small(self, name: str) -> None:
        from huggingface_hub import hf_hub_download

        self._ask(
            lambda: hf_hub_download(
                self.model, name, revision=self.commit, cache_dir=hub_cache(), endpoint=self.endpoint, tqdm_class=NoBar
            )
        )

    def _fetch_weights(self, names: list[str]) -> None:
        """Downloads several files at a time, each from where an earlier download of it ended."""
        if not names:
            return
        with ThreadPoolExecutor(WORKERS) as pool:
            files = list(pool.map(self._file, names))
        need = sum(file.size - file.there for file in files)
        self._check_disk(need)
        log.info("fetching %s at %s: %d files, %s", self.model, self.commit[:12], len(files), size(need))
        with Progress(self.model, sum(file.size for file in files)) as progress, ThreadPoolExecutor(WORKERS) as pool:
            runs = [pool.submit(self._fetch_file, file, progress) for file in files]
            try:
                wait(runs, return_when=FIRST_EXCEPTION)
            finally:  # also after an interruption
                progress.stopping = True
                for run in runs:
                    run.cancel()
        failures = [error for run in runs if not run.cancelled() and (error := run.exception())]
        for failure in sorted(failures, key=lambda error: isinstance(error, Stopped)):
            raise failure

    def _file(self, name: str) -> _File:
        from huggingface_hub import get_hf_file_metadata

        metadata = self._ask(lambda: get_hf_file_metadata(self._url(name), endpoint=self.endpoint))
        if metadata.etag is None or metadata.size is None:
            raise CheckpointError(
                f"{self.endpoint} gives no ETag or no size for {name}: it is not a hub, or a broken mirror"
            )
        check_revision(metadata.etag)  # it becomes a file's name
        return _File(name, metadata, self.repository / "blobs" / metadata.etag)

    def _url(self, name: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.model, name, revision=self.commit, endpoint=self.endpoint)

    def _fetch_file(self, file: _File, progress: Progress) -> None:
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        lock = hub_cache() / ".locks" / self.repository.name / f"{file.blob.name}.lock"
        for folder in (lock.parent, file.blob.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):  # the Hugging Face tools take the same one
            if file.blob.exists():
                progress.add(file.size)
            else:
                self._fetch_blob(file, progress)
        pointer = self.repository / "snapshots" / self.commit / file.name
        temporary = pointer.with_name(f".{pointer.name}.{os.getpid()}")
        temporary.symlink_to(os.path.relpath(file.blob, pointer.parent))
        temporary.replace(pointer)

    def _fetch_blob(self, file: _File, progress: Progress) -> None:
        """Downloads the remaining bytes. Then checks the whole file against its ETag, if that is a SHA-256.

        `hf_hub_download` starts a file again after an interruption, so the transfer itself is implemented here.
        """
        there = file.there
        if there == 0:
            file.partial.unlink(missing_ok=True)
        progress.add(there)
        # Unbuffered: closing the file would otherwise try again to write what a full disk rejected, and that second
        # error would hide the first.
        with file.partial.open("ab", buffering=0) as stream:
            self._ask(lambda: self._receive(file, stream, progress), file)
        if len(file.blob.name) == 64 and _sha256(file.partial) != file.blob.name:
            file.partial.unlink()
            raise CheckpointError(
                f"{file.name} of {self.model!r} arrived damaged (its SHA-256 is not {file.blob.name}) and was deleted: "
                "start again"
            )
        file.partial.replace(file.blob)

    def _receive(self, file: _File, stream: io.FileIO, progress: Progress) -> None:
        """Appends the rest of a file, over as many connections as needed as long as they receive bytes."""
        import httpx2

        failures = 0
        while (there := stream.tell()) < file.size:
            progress.add(0)  # raises Stopped if the download is to end
            try:
                self._receive_from(there, file, stream, progress)
            except httpx2.TransportError:
                failures = 0 if stream.tell() > there else failures + 1
                if failures > RETRIES:
                    raise
                time.sleep(RETRY_SECONDS * 2**failures)

    def _receive_from(self, there: int, file: _File, stream: io.FileIO, progress: Progress) -> None:
        from huggingface_hub import constants, get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if there:
            headers["Range"] = f"bytes={there}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        # Redirects are followed; httpx2 removes the token from a redirected request to another host.
        with get_session().stream("GET", self._url(file.name), headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            if there and not response.headers.get("Content-Range", "").startswith(f"bytes {there}-"):
                stream.truncate(0)  # a server without range support sends the whole file again
                progress.add(-there)
            for chunk in response.iter_raw():
                progress.add(len(chunk))
                rest = memoryview(chunk)
                while rest:
                    rest = rest[stream.write(rest) :]
        if (got := stream.tell()) != file.size:
            file.partial.unlink()
            raise CheckpointError(
                f"{file.name} of {self.model!r} has {got} bytes, but {self.endpoint} announced {file.size}: it was "
                "deleted, start again"
            )

    def _check_disk(self, need: int) -> None:
        folder = hub_cache()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if need > free:
            raise CheckpointError(
                f"{self.model!r} needs {size(need)} more ({need} bytes) in {hub_cache()}, and {size(free)} ({free} "
                "bytes) are free there: free some space, or set HF_HUB_CACHE to a folder on another disk"
            )

    def _write_reference(self) -> None:
        """Stores the commit of the branch or tag, for offline use. Called last, when the snapshot is complete."""
        if self.revision == self.commit:
            return
        reference = self.repository / "refs" / self.revision
        if reference.is_file() and reference.read_text() == self.commit:
            return
        reference.parent.mkdir(parents=True, exist_ok=True)
        temporary = reference.with_name(f".{reference.name}.{os.getpid()}")
        temporary.write_text(self.commit)
        temporary.replace(reference)

    def _ask(self, call: Callable[[], Any], file: _File | None = None) -> Any:
        """The result of a call to the hub. Its errors become CheckpointError; none of them contains the token."""
        import httpx2
        from huggingface_hub import errors

        try:
            return call()
        except errors.RevisionNotFoundError:
            raise CheckpointError(f"{self.model!r} on {self.endpoint} has no revision {self.revision!r}") from None
        except errors.HfHubHTTPError as error:
            raise self._refused(error.response.status_code, error) from None
        except (httpx2.HTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            cause = error if error.__cause__ is None else error.__cause__
            if isinstance(cause, errors.HfHubHTTPError):
                raise self._refused(cause.response.status_code, cause) from None
            if file is not None and file.there:
                raise CheckpointError(
                    f"{file.name} of {self.model!r} was interrupted after {file.there} of {file.size} bytes "
                    f"({_reason(cause)}): start again, the download continues from there"
                ) from None
            raise _Unreachable(f"{self.endpoint} cannot be reached ({_reason(cause)})") from None
        except errors.HFValidationError as error:
            raise CheckpointError(f"{self.model!r} is not a hub id: {error}") from None
        except OSError as error:
            if file is None:
                raise
            free = shutil.disk_usage(file.blob.parent).free
            raise CheckpointError(
                f"{file.name} of {self.model!r} could not be written to {file.blob.parent} after {file.there} of "
                f"{file.size} bytes, with {free} bytes free there: {error}"
            ) from None

    def _refused(self, status: int, error: Exception) -> CheckpointError:
        from huggingface_hub import errors

        page = f"{self.endpoint}/{self.model}"
        if isinstance(error, errors.GatedRepoError) or status == 403:
            sent = "this token has no access" if self._has_token else "no token was sent"
            return _Unavailable(
                f"{page} is gated ({status}) and {sent}: accept its terms there and set HF_TOKEN to a token that may "
                "read it"
            )
        if status == 401 and self._has_token:
            return _Unavailable(
                f"{self.endpoint} does not accept the token for {self.model!r} (401): check HF_TOKEN, or the file that "
                "`hf auth login` wrote"
            )
        if status in (401, 404):
            who = "this token" if self._has_token else "callers without a token; set HF_TOKEN if it is private"
            return _Unavailable(
                f"{self.model!r} is not a folder here, and {self.endpoint} has no such model ({status}) for {who}"
            )
        return _Unavailable(f"{self.endpoint} answers {status} for {self.model!r}: try again later")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text and text[0] else type(error).__name__
