"""What a batch that waits for its turn does with the media of its rows."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from clock import Clock
from images import png

from encoder.images import read_header
from service.batches.batch_runs import Uploaded
from service.common import errors
from service.common.auth import Tenant
from service.media.media import Spool, tenant_folder

TENANT = Tenant("t", b"salt")


def put(spool: Spool, data: bytes) -> str:
    with spool.upload(tenant_folder(TENANT.salt), len(data)) as upload:
        upload.write(data)
        return upload.commit().media_id


def test_media_are_renewed_however_a_row_names_them(tmp_path: Path) -> None:
    clock = Clock()
    spool = Spool(tmp_path / "spool", 10**6, 100.0, 10**6, read_header, clock)
    by_url, by_field, in_capitals, across, unused = (put(spool, png(i)) for i in range(5))
    source, block = tmp_path / "in.jsonl", 2**20
    text = f'{{"url": "media:{by_url}"}}\n{{"media_id": "{by_field}"}}\n{{"url": "Media:{in_capitals}"}}\n'
    text += " " * (block - len(text) - 40) + f'{{"url": "media:{across}"}}\n'
    source.write_text(text)
    clock.now += 60
    Uploaded(spool, TENANT).keep(source)
    clock.now += 60
    kept = {spool.get(tenant_folder(TENANT.salt), name).media_id for name in (by_url, by_field, in_capitals, across)}
    assert len(kept) == 4
    with pytest.raises(errors.NotFound):
        spool.get(tenant_folder(TENANT.salt), unused)


def test_a_line_as_long_as_the_file_is_not_held(tmp_path: Path) -> None:
    """An input is searched before it is checked."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"x" * 2**26)
    uploaded = Uploaded(Spool(tmp_path / "spool", 10**6, 100.0, 10**6, read_header), TENANT)
    tracemalloc.start()
    try:
        uploaded.keep(source)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
