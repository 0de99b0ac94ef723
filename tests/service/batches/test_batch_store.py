"""Batches on disk: limits, tenants, restarts and expiry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clock import Clock

from service.batches import batch_store
from service.batches.batch_store import BatchRecord, BatchStore
from service.common import errors


def make(store: BatchStore, tenant: str, data: bytes, request_id: str = "", **values: Any) -> BatchRecord:
    with store.upload(tenant, len(data)) as upload:
        upload.write(data)
        return upload.commit(request_id, **values)


def test_what_fits_exactly_fits(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 100, 9.0, tenant_capacity=60)
    make(store, "a", bytes(50))
    with pytest.raises(errors.ResourceExhausted, match="your batches fill 50 of 60 bytes, and this one has 11"):
        make(store, "a", bytes(11))
    make(store, "a", bytes(10))
    with pytest.raises(errors.ResourceExhausted, match="batches fill 60 of 100 bytes, and this one has 41"):
        make(store, "b", bytes(41))
    with store.upload("b", 30):  # announced bytes count towards the limits of the tenant and of all
        assert store.used_bytes == 90
        with pytest.raises(errors.ResourceExhausted, match="batches fill 90 of 100"):
            make(store, "c", bytes(11))
        make(store, "c", bytes(10))
    make(store, "b", bytes(30))
    assert store.used_bytes == 100
    for size in (0, -1):
        with pytest.raises(errors.InvalidArgument), store.upload("a", size):
            pass
    store.check_integrity()


def test_what_is_promised_to_a_tenant_counts_for_it(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000, 9.0, tenant_capacity=60)
    with store.upload("a", 30):
        with pytest.raises(errors.ResourceExhausted, match="your batches fill 30 of 60 bytes, and this one has 31"):
            make(store, "a", bytes(31))
        make(store, "a", bytes(30))
        make(store, "b", bytes(60))


def test_outputs_count_as_inputs_do(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 100, 9.0, tenant_capacity=60)
    record = make(store, "a", bytes(20))
    other = make(store, "b", bytes(20))
    path = store.folder(record.batch_id) / "output.jsonl"
    assert store.output_size(record.batch_id) == store.check_output(record) == 0
    path.write_bytes(bytes(40))
    assert store.check_output(record) == 40 and store.used_bytes == 80
    path.write_bytes(bytes(41))
    with pytest.raises(errors.ResourceExhausted, match="your batches take 61 of 60 bytes"):
        store.check_output(record)
    path.write_bytes(bytes(40))
    (store.folder(other.batch_id) / "output.jsonl").write_bytes(bytes(21))
    store.check_output(record)
    with pytest.raises(errors.ResourceExhausted, match="of batches take 101 of 100 bytes"):
        store.check_output(other)


def test_batches_have_a_number_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 2)
    store = BatchStore(tmp_path, 100, 9.0)
    first = make(store, "a", b"x")
    make(store, "a", b"x")
    with pytest.raises(errors.ResourceExhausted, match="you have 2 batches"):
        make(store, "a", b"x")
    make(store, "b", b"x")
    store.delete(first)
    make(store, "a", b"x")


def test_pages_go_from_the_newest_and_miss_nothing(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000, 9.0)
    mine = [make(store, "a", b"x").batch_id for _ in range(5)]
    make(store, "b", b"x")
    assert mine == sorted(mine) == [r.batch_id for r in store.unfinished() if r.tenant == "a"]
    seen, token = [], ""
    for size in (2, 2, 2):
        records, token = store.page("a", size, token)
        seen += [r.batch_id for r in records]
    assert seen == mine[::-1] and token == ""
    assert store.page("a", 5, "")[1] == "" and store.page("a", 4, "")[1] == mine[1]


def test_what_ended_long_enough_ago_goes_and_nothing_else(tmp_path: Path) -> None:
    clock = Clock()
    store = BatchStore(tmp_path, 1000, 10.0, clock=clock)
    over, running = make(store, "a", b"x"), make(store, "a", b"x")
    assert over.created == 1000.0 and store.expires(over) == 0.0
    over = store.save(replace(over, state="completed", ended=1000.0))
    assert store.expires(over) == 1010.0
    clock.now = 1009.9
    store.sweep()
    assert store.get("a", over.batch_id).over
    clock.now = 1010.0
    store.sweep()
    with pytest.raises(errors.NotFound):
        store.get("a", over.batch_id)
    assert store.get("a", running.batch_id).state == "validating" and store.unfinished() == [running]
    store.check_integrity()


def test_a_restart_finds_what_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = BatchStore(tmp_path, 1000, 10.0)
    record = make(store, "a", b"first", "r", ordered=True, max_errors=0)
    kept = store.save(replace(record, state="failed", ended=2e9, problems=("line 1: x",), total=3))
    store.save(replace(make(store, "a", b"second"), state="running"), on_disk=False)
    damaged = make(store, "a", b"third")
    (store.folder(damaged.batch_id) / "batch.json").write_text("{")
    no_object = make(store, "a", b"fourth")
    (store.folder(no_object.batch_id) / "batch.json").write_text("[]")
    (tmp_path / "incoming" / "half").mkdir()
    path = store.folder(kept.batch_id) / "batch.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_a_later_version": 1}))
    again = BatchStore(tmp_path, 1000, 10.0)
    assert again.get("a", kept.batch_id) == kept and (kept.ordered, kept.max_errors) == (True, 0)
    assert [r.state for r in again.unfinished()] == ["validating"]
    assert not list((tmp_path / "incoming").iterdir()) and "cannot be read, and its batch is ignored" in caplog.text
    assert again.folder(damaged.batch_id).exists()
    with pytest.raises(errors.AlreadyExists):
        make(again, "a", b"other", "r")
    assert make(again, "a", b"first", "r", ordered=True, max_errors=0) == kept
    for values in ({"ordered": False, "max_errors": 0}, {"ordered": True}, {"ordered": True, "max_errors": 1}):
        with pytest.raises(errors.AlreadyExists):  # the same file, but not the same request
            make(again, "a", b"first", "r", **values)


def test_a_batch_that_is_deleted_is_not_saved_any_more(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000, 10.0)
    record = make(store, "a", b"x")
    store.delete(record)
    store.save(replace(record, state="running"))
    store.delete(record)
    assert store.unfinished() == [] and store.used_bytes == 0
    store.check_integrity()


def test_an_upload_that_is_left_or_wrong_leaves_nothing(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000, 10.0)
    for written in (b"", b"shor"):
        with pytest.raises(errors.InvalidArgument), store.upload("a", 5) as upload:
            upload.write(written)
            upload.commit("")
    with pytest.raises(errors.InvalidArgument), store.upload("a", 5) as upload:
        upload.write(b"longer")
    with store.upload("a", 5) as upload:
        upload.write(b"whole")
    assert store.used_bytes == 0
    store.check_integrity()


def test_one_request_id_of_two_tenants_makes_two_batches(tmp_path: Path) -> None:
    """The same id of one tenant returns the same batch, or an error if the file differs."""
    store = BatchStore(tmp_path, 10**6, 100.0)

    one, two = (make(store, *values, "same").batch_id for values in (("a", b"first"), ("b", b"other")))
    assert one != two and store.get("a", one).tenant == "a" and store.get("b", two).tenant == "b"
    assert make(store, "a", b"first", "same").batch_id == one
    assert make(store, "b", b"other", "same").batch_id == two
    for tenant, data in (("a", b"other"), ("b", b"first")):
        with pytest.raises(errors.AlreadyExists):
            make(store, tenant, data, "same")
    assert make(store, "a", b"first", "another").batch_id != one
    assert make(store, "a", b"first").batch_id != make(store, "a", b"first").batch_id, "no name is no name to share"
    for tenant, batch_id in (("a", two), ("b", one), ("", one), ("a", "batch_0")):
        with pytest.raises(errors.NotFound):
            store.get(tenant, batch_id)
    store.check_integrity()
    assert len(store.page("a", 10, "")[0]) == 4 and len(store.page("b", 10, "")[0]) == 1


def test_a_repeated_request_needs_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 1)
    store = BatchStore(tmp_path, 100, 9.0)
    first = make(store, "a", bytes(90), "r")
    with store.upload("a", 90, "r") as upload:
        upload.write(bytes(90))
        assert store.used_bytes == 90 and not list((tmp_path / "incoming").iterdir())
        assert upload.commit("r") == first
    with store.upload("a", 90, "r") as upload:
        upload.write(b"x" * 90)
        with pytest.raises(errors.AlreadyExists):
            upload.commit("r")
    with store.upload("a", 90, "r") as upload:
        with pytest.raises(errors.InvalidArgument, match="0 of the 90 bytes"):
            upload.commit("r")
        upload.write(bytes(90))
        store.delete(first)
        with pytest.raises(errors.Unavailable):
            upload.commit("r")
    store.check_integrity()
    assert store.used_bytes == 0
