"""Batches on disk, limited in bytes and time.

    DIRECTORY/<batch id>/batch.json              state, replaced atomically at each change
    DIRECTORY/<batch id>/input.jsonl             the input, as it was uploaded
    DIRECTORY/<batch id>/output.jsonl[.journal]  answers, and the rows that they belong to: `saccade._jobs.journal`
    DIRECTORY/incoming/<random>/                 an upload in progress
    DIRECTORY/lock                               locked by the server that uses the folder: see `service.servers.server`

A batch is created by renaming its folder, so it exists completely or not at all. The folders are the only persistent
state and are read at a restart. Methods block and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from service.common import errors
from service.media.arriving import ArrivingFile, disk_trouble

log = logging.getLogger(__name__)

MAX_BATCHES = 1000
"""Limit on the batches of one tenant, because each takes a little memory as long as it is stored."""
ENDED = frozenset({"completed", "failed", "cancelled"})


@dataclass(frozen=True)
class BatchRecord:
    """The state of a batch. Times are Unix times; 0: not reached yet."""

    batch_id: str
    """Ids in ascending order are batches from old to new."""
    tenant: str
    request_id: str
    digest: str
    """Digest of the input and of the request's other fields."""
    input_bytes: int
    ordered: bool = False
    max_errors: int | None = None
    state: str = "validating"
    created: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    output_bytes: int = 0
    reason: str = ""
    message: str = ""
    problems: tuple[str, ...] = ()
    model: str = ""
    version: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    """Set by the caller, and not used by the server."""
    input_name: str = ""
    """The caller's name of the input file, not used by the server."""

    @property
    def over(self) -> bool:
        return self.state in ENDED

    @property
    def bytes(self) -> int:
        return self.input_bytes + self.output_bytes


class BatchStore:
    """The batches of all tenants."""

    def __init__(
        self, directory: Path, capacity: int, ttl: float, *, tenant_capacity: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """Loads the batches that an earlier run has left in `directory`. `capacity` and `tenant_capacity`: bytes of all
        tenants together and of each. `ttl`: seconds that a batch is kept after its end."""
        self._directory, self._capacity, self._ttl, self._clock = directory, capacity, ttl, clock
        self._tenant_capacity = capacity if tenant_capacity is None else tenant_capacity
        # Protects the bookkeeping. Taken on the event loop too, so no file is written or synced while it is held.
        self._lock = threading.RLock()
        self._writing = threading.Lock()
        self._records: dict[str, BatchRecord] = {}
        self._reserved: dict[str, int] = {}
        self._incoming = directory / "incoming"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir(mode=0o700)
        for path in sorted(directory.glob("*/batch.json")):
            try:
                known = {f.name for f in fields(BatchRecord)}
                values = {k: v for k, v in json.loads(path.read_bytes()).items() if k in known}
                record = BatchRecord(**{**values, "problems": tuple(values["problems"])})
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                log.error("%s cannot be read, and its batch is ignored: %s", path, error)
                continue
            self._records[record.batch_id] = record
        self.sweep()

    @property
    def used_bytes(self) -> int:
        """Bytes of inputs and outputs, and of running uploads."""
        with self._lock:
            return sum(r.bytes for r in self._records.values()) + sum(self._reserved.values())

    def folder(self, batch_id: str) -> Path:
        return self._directory / batch_id

    def sweep(self) -> None:
        """Deletes batches that ended more than `ttl` seconds ago."""
        with self._lock:
            now = self._clock()
            gone = [self._hide(r) for r in list(self._records.values()) if r.over and self.expires(r) <= now]
        for folder in gone:
            shutil.rmtree(folder, ignore_errors=True)

    def expires(self, record: BatchRecord) -> float:
        return record.ended + self._ttl if record.over else 0.0

    # -- uploads -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def upload(self, tenant: str, size: int, request_id: str = "") -> Iterator[BatchUpload]:
        """Reserves `size` bytes for an input. An upload that is not committed is deleted. The input of a batch that the
        same request has created needs no space: it is compared and not stored again. Raises InvalidArgument or
        ResourceExhausted."""
        if size < 1:
            raise errors.InvalidArgument(f"size_bytes is {size}; it must be at least 1", field="header.size_bytes")
        self.sweep()
        with self._lock:
            known = _of_request(self._records, tenant, request_id)
            repeated = known is not None and known.input_bytes == size
            if not repeated:
                self._check_room(tenant, size)
                self._reserved[tenant] = self._reserved.get(tenant, 0) + size
        if repeated:
            with contextlib.closing(BatchUpload(self, None, tenant, size)) as upload:
                yield upload
            return
        folder = self._incoming / secrets.token_hex(16)
        try:
            with _disk():
                folder.mkdir(mode=0o700)
            with contextlib.closing(BatchUpload(self, folder, tenant, size)) as upload:
                yield upload
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            with self._lock:
                self._reserved[tenant] -= size

    def _check_room(self, tenant: str, size: int) -> None:
        mine = [r for r in self._records.values() if r.tenant == tenant]
        if len(mine) >= MAX_BATCHES:
            raise _full(f"you have {len(mine)} batches, which is the limit for one tenant; delete some")
        if (used := self.used_bytes) + size > self._capacity:
            raise _full(f"batches fill {used} of {self._capacity} bytes, and this one has {size}")
        used = sum(r.bytes for r in mine) + self._reserved.get(tenant, 0)
        if used + size > self._tenant_capacity:
            raise _full(f"your batches fill {used} of {self._tenant_capacity} bytes, and this one has {size}")

    def _keep(self, folder: Path | None, record: BatchRecord) -> BatchRecord:
        """Turns the upload's folder into the batch, unless the same request has created one before."""
        with _disk():
            if folder is not None:
                _write_whole(folder / "batch.json", record)
            with self._lock:
                if (other := _of_request(self._records, record.tenant, record.request_id)) is not None:
                    if other.digest != record.digest:
                        raise errors.AlreadyExists(
                            f"request id {record.request_id!r} was used before for a batch with another input",
                            field="header.request_id",
                        )
                    return other
                if folder is None:
                    raise errors.Unavailable(
                        f"the batch of request id {record.request_id!r} was deleted while its input was sent again"
                    )
                os.rename(folder, self.folder(record.batch_id))
                self._records[record.batch_id] = record
            _sync_folder(self._directory)
        return record

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """The batch of this tenant with this id. Raises NotFound."""
        with self._lock:
            record = self._records.get(batch_id)
        if record is None or record.tenant != tenant:
            raise errors.NotFound(f"no batch {batch_id!r}", field="batch_id", reason="BATCH_NOT_FOUND")
        return record

    def record(self, batch_id: str) -> BatchRecord:
        """The batch with this id, of any tenant. Raises KeyError if there is none."""
        with self._lock:
            return self._records[batch_id]

    def output_size(self, batch_id: str) -> int:
        """Bytes of the batch's output so far."""
        try:
            return (self.folder(batch_id) / "output.jsonl").stat().st_size
        except FileNotFoundError:
            return 0

    def page(self, tenant: str, size: int, token: str) -> tuple[list[BatchRecord], str]:
        """At most `size` batches of a tenant, newest first, after the one that `token` names (empty: from the newest),
        and the token of the next page, empty at the end."""
        with self._lock:
            mine = [i for i, r in sorted(self._records.items(), reverse=True) if r.tenant == tenant]
            chosen = [i for i in mine if not token or i < token][: size + 1]
            records = [self._records[i] for i in chosen[:size]]
        return records, chosen[size - 1] if len(chosen) > size else ""

    def unfinished(self) -> list[BatchRecord]:
        """Unfinished batches, oldest first."""
        with self._lock:
            return [record for _, record in sorted(self._records.items()) if not record.over]

    # -- changing ------------------------------------------------------------------------------------------------------

    def save(self, record: BatchRecord, *, on_disk: bool = True) -> BatchRecord:
        """Replaces a batch's state. Without `on_disk`, or if the disk is full, the change is lost at a restart, which
        continues the batch from the state on the disk."""
        with self._lock:
            if record.batch_id in self._records:
                self._records[record.batch_id] = record
        if on_disk:
            self._write(record.batch_id)
        return record

    def _write(self, batch_id: str) -> None:
        """Writes the current state. It is read under the lock, so that the later of two concurrent writers writes the
        newest state."""
        with self._writing:
            with self._lock:
                record = self._records.get(batch_id)
            if record is None:
                return
            try:
                _write_whole(self.folder(batch_id) / "batch.json", record)
            except OSError as error:
                with self._lock:
                    if batch_id in self._records:  # else it has been deleted meanwhile
                        log.error("batch %s: its state cannot be written: %s", batch_id, error.strerror)

    def check_output(self, record: BatchRecord) -> int:
        """Updates the size of a batch's output and returns it. Raises ResourceExhausted if the batches of the tenant,
        or of all tenants together, exceed their limit."""
        size = self.output_size(record.batch_id)
        with self._lock:
            self._records[record.batch_id] = replace(self._records[record.batch_id], output_bytes=size)
            mine = sum(r.bytes for r in self._records.values() if r.tenant == record.tenant)
            if mine > self._tenant_capacity:
                raise _full(f"inputs and answers of your batches take {mine} of {self._tenant_capacity} bytes")
            if (used := self.used_bytes) > self._capacity:
                raise _full(f"inputs and answers of batches take {used} of {self._capacity} bytes")
        return size

    def delete(self, record: BatchRecord) -> None:
        with self._lock:
            if record.batch_id not in self._records:
                return
            gone = self._hide(record)
        shutil.rmtree(gone, ignore_errors=True)

    def _hide(self, record: BatchRecord) -> Path:
        """Removes a batch from the listings at once. Returns the folder for the caller to delete; after a crash, the
        next start deletes it."""
        gone = self._incoming / secrets.token_hex(16)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.folder(record.batch_id), gone)
        del self._records[record.batch_id]
        return gone

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the bookkeeping agrees with the disk."""
        with self._lock:
            folders = {path.name for path in self._directory.iterdir() if path.is_dir()} - {"incoming"}
            assert folders == set(self._records), "folders without a batch, or batches without a folder"
            for record in self._records.values():
                assert (self.folder(record.batch_id) / "input.jsonl").stat().st_size == record.input_bytes
            if not any(self._reserved.values()):
                assert not list(self._incoming.iterdir()), "files of uploads that have ended"


class BatchUpload:
    """One input that is being uploaded to a folder; None: it is that of a batch that exists."""

    def __init__(self, store: BatchStore, folder: Path | None, tenant: str, size: int) -> None:
        self._store, self._folder, self._tenant = store, folder, tenant
        self._file = ArrivingFile(None if folder is None else folder / "input.jsonl", size, _disk)
        self.write, self.close = self._file.write, self._file.close

    def commit(
        self, request_id: str, *, ordered: bool = False, max_errors: int | None = None,
        metadata: Mapping[str, str] | None = None, input_name: str = "",
    ) -> BatchRecord:  # fmt: skip
        """Creates the batch, or returns the one that the same request created before. Raises InvalidArgument if the
        file is shorter than announced, AlreadyExists if the request id was used before for another input."""
        self._file.end(sync=True)
        self._file.hash.update(f"\0{ordered}\0{max_errors}".encode())
        told = dict(sorted((metadata or {}).items()))
        if told or input_name:
            self._file.hash.update(f"\0{json.dumps([told, input_name])}".encode())
        record = BatchRecord(
            f"batch_{time.time_ns():016x}{secrets.token_hex(8)}", self._tenant, request_id or secrets.token_hex(16),
            self._file.hash.hexdigest(), self._file.size, ordered, max_errors, created=self._store._clock(),
            metadata=told, input_name=input_name,
        )  # fmt: skip
        return self._store._keep(self._folder, record)


def _of_request(records: Mapping[str, BatchRecord], tenant: str, request_id: str) -> BatchRecord | None:
    """The batch that a request has created."""
    return next((r for r in records.values() if (r.tenant, r.request_id) == (tenant, request_id)), None)


def _write_whole(path: Path, record: BatchRecord) -> None:
    scratch = path.with_suffix(".new")
    with scratch.open("wb") as file:
        file.write(json.dumps(asdict(record), indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _full(message: str) -> errors.ResourceExhausted:
    return errors.ResourceExhausted(message, reason="BATCH_SPOOL_FULL", quota="batch_bytes")


_disk = functools.partial(disk_trouble, "batches", _full)
