"""Opens the folders in which a server keeps uploads and batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from encoder.media_limits import ImageHeader
from service.batches.batch_store import BatchStore
from service.common.config import ConfigError, ServerOptions
from service.common.folders import OwnedFolder, locked
from service.media.media import SharedSpool, Spool
from service.servers.preflight import check_batches


@contextlib.contextmanager
def open_spool(
    options: ServerOptions, max_bytes: int, describe: Callable[[bytes], ImageHeader], member: int | None
) -> Iterator[Spool]:
    """The uploads. `max_bytes`, `describe`: as for `Spool`. `member`: the number of this process if several frontend
    processes share the folder, which none of them locks. Raises ConfigError if the folder cannot be used."""
    kind: Callable[..., Spool] = Spool
    if member is not None:
        kind = functools.partial(SharedSpool, member=member, members=options.frontends)
    with _folder(options, "media_dir", lock=member is None) as folder:
        with _config_error("media_dir", folder):
            spool = kind(
                folder, options.media_bytes, options.media_ttl, max_bytes, describe,
                tenant_capacity=options.media_tenant_bytes,
            )  # fmt: skip
        yield spool


@contextlib.contextmanager
def open_batch_store(options: ServerOptions) -> Iterator[BatchStore]:
    """The batches. Raises ConfigError if the folder cannot be used, or for options that do not fit."""
    check_batches(options)
    with _folder(options, "batch_dir") as folder:
        with _config_error("batch_dir", folder):
            store = BatchStore(
                folder, options.batch_bytes, options.batch_ttl, tenant_capacity=options.batch_tenant_bytes
            )
        yield store


@contextlib.contextmanager
def _folder(options: ServerOptions, option: str, *, lock: bool = True) -> Iterator[Path]:
    """The folder that an option names, else a temporary one, which is deleted at the end. With `lock`, it is locked:
    another server would delete unfinished uploads and end running batches as failed."""
    with contextlib.ExitStack() as ends:
        named = getattr(options, option)
        if named is None:
            named = ends.enter_context(OwnedFolder(f"saccade-{option.partition('_')[0]}-"))
        folder = Path(named)
        if lock:
            ends.enter_context(locked(folder, option))
        yield folder


@contextlib.contextmanager
def _config_error(option: str, folder: Path) -> Iterator[None]:
    """Turns an OSError about the folder into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option}: {folder}: {error.strerror}") from None
