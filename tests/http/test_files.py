"""Files and batches over HTTP outlive the HTTP server and the gRPC server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from full_disk import file_size_limit
from running import RunningServer
from running_http import RunningHttp
from waiting import until

from saccade.errors import NotFound, RateLimited
from saccade.v1 import batch_pb2
from service.common.config import ConfigError
from service.http import app, file_store
from service.http.batches import CHUNK, parts
from service.http.file_store import FileStore, StoredFile, owner_of, stored_file

BODY = {"messages": [{"role": "user", "content": "what is it?"}], "max_tokens": 3, "temperature": 0}
ROW = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}).encode()


def client_of(http: RunningHttp, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http.url}/v1", api_key=key, max_retries=0, timeout=60)


def test_what_was_uploaded_and_said_outlives_both_servers(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_dir": str(tmp_path / "batches"), "max_seqs": 2, "max_len": 300}
    kept = {"http_file_dir": str(tmp_path / "files")}
    with RunningServer(str(model), **options) as server:
        with RunningHttp([server.address], **kept) as http, client_of(http) as client:
            first = client.files.create(file=("first.jsonl", ROW), purpose="batch")
            second = client.files.create(file=("zweite é.jsonl", ROW + b"\n" + ROW), purpose="batch")
            made = client.batches.create(
                input_file_id=first.id, endpoint="/v1/chat/completions", completion_window="24h",
                metadata={"run": "7", "owner": "é"},
            )  # fmt: skip
        with RunningHttp([server.address], **kept) as http, client_of(http) as client:
            assert [file.id for file in client.files.list()] == [second.id, first.id]
            assert client.files.retrieve(second.id) == second
            assert client.files.content(second.id).content == ROW + b"\n" + ROW
            with client_of(http, "another") as other, pytest.raises(openai.NotFoundError):
                other.files.retrieve(first.id)
            again = client.batches.retrieve(made.id)
            assert (again.metadata, again.input_file_id) == ({"run": "7", "owner": "é"}, first.id)
            while client.batches.retrieve(made.id).status != "completed":
                pass
    with (
        RunningServer(str(model), **options) as server, RunningHttp([server.address], **kept) as http,
        client_of(http) as client,
    ):  # fmt: skip
        done = client.batches.retrieve(made.id)
        assert done.status == "completed" and done.output_file_id
        assert (done.metadata, done.input_file_id) == (made.metadata, first.id)
        assert client.batches.create(
            input_file_id=second.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).input_file_id == second.id  # fmt: skip
        assert client.files.delete(first.id).deleted
    with RunningHttp(["127.0.0.1:1"], **kept) as http:
        assert list(http.front.files._files) == [second.id]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def large_output(server: RunningServer, client: openai.OpenAI, lines: int) -> tuple[str, int]:
    """A batch whose output has `lines` lines of a mebibyte: its id, and the size of the output."""
    file = client.files.create(file=("in.jsonl", ROW), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )  # fmt: skip
    while client.batches.retrieve(made.id).status != "completed":
        pass
    client.files.delete(file.id)
    line = json.dumps({"custom_id": "a", "response": "x" * 2**20, "error": None}).encode() + b"\n"
    store = server.server._batch_store
    with open(store.folder(made.id) / "output.jsonl", "wb") as output:
        for _ in range(lines):
            output.write(line)
    store.save(replace(store.record(made.id), output_bytes=lines * len(line)), on_disk=False)
    return made.id, lines * len(line)


def test_an_output_is_sent_as_it_is_read(server: RunningServer, http: RunningHttp) -> None:
    """The time of a download is its reader's, not limited like that of an answer, and the server holds little of it."""
    with client_of(http) as client:
        batch_id, size = large_output(server, client, 96)
    get = f"GET /v1/files/file-output-{batch_id}/content HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    with RunningHttp([server.address], default_timeout=1.0) as brief:
        with socket.create_connection(("127.0.0.1", brief.port), timeout=60) as slow:
            slow.sendall(f"{get}authorization: Bearer none\r\n\r\n".encode())
            before, most, received = resident_bytes(), 0, b""
            while b"\r\n\r\n" not in received:
                assert (byte := slow.recv(1)), received
                received += byte
            end = time.monotonic() + 1.4
            while time.monotonic() < end:
                received += slow.recv(1)
                most = max(most, resident_bytes())
            head, body = received.split(b"\r\n\r\n", 1)
            count = len(body)
            while piece := slow.recv(2**20):
                count += len(piece)
        with socket.create_connection(("127.0.0.1", brief.port), timeout=60) as gone:
            gone.sendall(f"{get}authorization: Bearer none\r\n\r\n".encode())
            assert gone.recv(20)
        brief.idle()
    assert f"content-length: {size}".encode() in head.lower().split(b"\r\n")
    assert count == size
    assert most - before < 48 * 2**20
    server.drained()
    with client_of(http) as client:
        client.files.delete(f"file-output-{batch_id}")


def test_a_part_of_a_file(server: RunningServer, http: RunningHttp) -> None:
    def get(file_id: str, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{http.url}/v1/files/{file_id}/content"
        return httpx.get(url, headers={"authorization": "Bearer none", **named}, timeout=60)

    with client_of(http) as client:
        failing = json.dumps({**json.loads(ROW), "custom_id": "b", "body": {**BODY, "max_tokens": 10**6}}).encode()
        file = client.files.create(file=("in.jsonl", b"\n".join([ROW, failing])), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        while (batch := client.batches.retrieve(made.id)).status != "completed":
            pass
        whole_batch, _ = large_output(server, client, 2)
        assert batch.output_file_id and batch.error_file_id
        for file_id in (file.id, batch.output_file_id, batch.error_file_id, f"file-output-{whole_batch}"):
            whole = get(file_id)
            size, etag = len(whole.content), whole.headers["etag"]
            assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")
            for given, first, last in (
                ("bytes=0-0", 0, 0), ("bytes=5-20", 5, 20), (f"bytes={size - 9}-", size - 9, size - 1),
                ("BYTES = 7-999999999999", 7, size - 1), ("bytes=-9", size - 9, size - 1),
                ("bytes=-999999999999", 0, size - 1), (f"bytes=0-{2**64 - 1}", 0, size - 1),
                (f"bytes=-{'9' * 5000}", 0, size - 1), (f"bytes={'0' * 30}3-{'9' * 5000}", 3, size - 1),
            ):  # fmt: skip
                part = get(file_id, range=given, if_range=etag)
                assert (part.status_code, part.content) == (206, whole.content[first : last + 1]), given
                assert part.headers["content-range"] == f"bytes {first}-{last}/{size}"
                assert part.headers["content-length"] == str(last + 1 - first) and part.headers["etag"] == etag
            for given in (f"bytes={size}-", "bytes=-0", f"bytes={2**64}-"):
                none = get(file_id, range=given)
                assert (none.status_code, none.headers["content-range"]) == (416, f"bytes */{size}")
                assert str(size) in none.json()["error"]["message"] and given in none.json()["error"]["message"]
        for ignored in (
            {"range": "bytes=0-1,3-4"}, {"range": "lines=0-1"}, {"range": "bytes=0-1", "if_range": '"other"'},
            {"range": "bytes=0-1", "if_range": "Mon, 30 Nov 2026 00:00:00 GMT"},
        ):  # fmt: skip
            assert (answer := get(file.id, **ignored)).status_code == 200 and answer.content == ROW + b"\n" + failing
        for malformed in ("bytes=", "bytes=-", "bytes=4-3", "bytes=a-", "bytes=+1-2", "bytes=1"):
            wrong = get(file.id, range=malformed)
            assert wrong.status_code == 400 and "range: expected bytes=FIRST-LAST" in wrong.json()["error"]["message"]
        empty = get(f"file-errors-{whole_batch}", range="bytes=0-")
        assert (empty.status_code, empty.headers["content-range"]) == (416, "bytes */0")
        head = httpx.head(
            f"{http.url}/v1/files/{file.id}/content", headers={"authorization": "Bearer none", "range": "bytes=0-1"}
        )
        assert head.status_code == 200
        for name in (file.id, batch.output_file_id, f"file-output-{whole_batch}"):
            client.files.delete(name)


def test_a_batch_of_a_file_that_is_deleted_meanwhile(http: RunningHttp) -> None:
    with client_of(http) as client:
        ask: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        gone = client.files.create(file=("in.jsonl", ROW), purpose="batch")
        http.front.files.get(gone.id, owner_of({"authorization": "Bearer none"})).path.unlink()
        with pytest.raises(openai.NotFoundError) as caught:
            client.batches.create(input_file_id=gone.id, **ask)
        assert caught.value.code == "FILE_NOT_FOUND"
        client.files.delete(gone.id)


def test_attempts_to_send_a_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """A thread may still read the file for an attempt that has failed while the next server gets it."""
    (tmp_path / "in.jsonl").write_bytes(data := random.Random(1).randbytes(3 * CHUNK + 5))
    header = batch_pb2.BatchHeader(size_bytes=len(data))
    with open(tmp_path / "in.jsonl", "rb") as file:
        failed, following = parts(header, file), parts(header, file)
        next(failed), next(following)
        pairs = [(first.chunk, second.chunk) for first, second in zip(failed, following, strict=True)]
    assert [b"".join(chunks) for chunks in zip(*pairs, strict=True)] == [data, data]


def test_an_error_file_is_not_deleted_with_the_answers(http: RunningHttp) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    wrong = json.dumps({**json.loads(ROW), "custom_id": "b", "body": {**BODY, "messages": long}}).encode()
    with client_of(http) as client:
        file = client.files.create(file=("in.jsonl", ROW + b"\n" + wrong), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )  # fmt: skip
        while (batch := client.batches.retrieve(made.id)).status != "completed":
            pass
        assert batch.error_file_id and batch.output_file_id
        with pytest.raises(openai.BadRequestError, match=f"to delete both, delete {batch.output_file_id}"):
            client.files.delete(batch.error_file_id)
        assert b'"b"' in client.files.content(batch.error_file_id).content
        assert b'"a"' in client.files.content(batch.output_file_id).content
        assert client.files.delete(batch.output_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.error_file_id)
        client.files.delete(file.id)


def test_files_are_listed_in_pages(http: RunningHttp) -> None:
    with client_of(http, "pages") as client:
        ids = [client.files.create(file=(f"{i}.jsonl", ROW), purpose="batch").id for i in range(3)]
        assert [file.id for file in client.files.list(limit=2)] == ids[::-1]  # the client asks for the second page
        assert [file.id for file in client.files.list(limit=2).data] == ids[:0:-1]
        assert [file.id for file in client.files.list(order="asc", after=ids[0])] == ids[1:]
        assert not client.files.list(purpose="fine-tune").data
        for name, value in (("limit", "0"), ("limit", "10001"), ("limit", "x"), ("order", "up")):
            with pytest.raises(openai.BadRequestError) as caught:
                client.files.list(extra_query={name: value})
            assert caught.value.param == name
        with pytest.raises(openai.NotFoundError, match="after: there is no file"):
            client.files.list(after="file-x")
        for file in client.files.list():
            assert file.expires_at == file.created_at + 24 * 3600
            client.files.delete(file.id)


def form(*fields: str) -> bytes:
    parts = [f'--B\r\nContent-Disposition: form-data; name="{field}"\r\n\r\nbatch\r\n' for field in fields]
    file = '--B\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n{}\r\n--B--\r\n'
    return ("".join(parts) + file).encode()


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("Multipart/Form-Data; boundary=B", form("purpose"), None),
        ("multipart/form-data; boundary=B; charset=undefined", form("purpose"), "the form cannot be read: "),
        ("multipart/form-data; boundary=B", form("purpose", "expires_after[anchor]"), "expires_after[anchor]: unknown"),
    ],
    ids=["case", "charset", "field"],
)
def test_an_upload_is_a_form_of_known_fields(http: RunningHttp, kind: str, body: bytes, words: str | None) -> None:
    answer = httpx.post(f"{http.url}/v1/files", content=body, headers={"content-type": kind}, timeout=60)
    if words is None:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert http.front.files.used == sum(file.size for file in http.front.files.owned(owner_of({})))


def test_a_key_owns_its_files_in_either_header(http: RunningHttp) -> None:
    url, key = f"{http.url}/v1/files", {"x-api-key": "mine"}
    made = httpx.post(
        url, content=form("purpose"), headers={**key, "content-type": "multipart/form-data; boundary=B"}, timeout=60
    ).json()["id"]
    for headers in (key, {"authorization": "Bearer mine"}, {"authorization": "bearer  mine"}):
        assert httpx.get(f"{url}/{made}", headers=headers).status_code == 200
    assert httpx.get(f"{url}/{made}", headers={"x-api-key": "other"}).status_code == 404
    assert httpx.delete(f"{url}/{made}", headers=key).json()["deleted"]


def test_metadata_is_limited_as_openai_s(http: RunningHttp) -> None:
    with client_of(http) as client:
        file = client.files.create(file=("in.jsonl", ROW), purpose="batch")
        for metadata, words in [
            ({str(i): "" for i in range(17)}, "metadata has 17 pairs; at most 16"),
            ({"k" * 65: ""}, "a key has 65 characters; at most 64"),
            ({"k": "v" * 513}, "a value has 513 characters; at most 512"),
        ]:
            with pytest.raises(openai.BadRequestError, match=words):
                client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata=metadata
                )
        client.files.delete(file.id)


def written(store: FileStore, data: bytes = b"abc") -> StoredFile:
    store.reserve(b"owner", len(data))
    stored = stored_file(store.new_path(), b"owner", "a.jsonl", len(data))
    stored.path.write_bytes(data)
    stored.describe()
    store.add(stored)
    return stored


def test_files_count_and_expire_after_a_restart(tmp_path: Path) -> None:
    store = FileStore(10, str(tmp_path))
    one, old = written(store), written(store, b"old")
    store.close()
    about = old.path.with_suffix(".json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"created": old.created - 25 * 3600}))
    store = FileStore(10, str(tmp_path))
    assert store.owned(b"owner") == [one] and store.used == 3 and not old.path.exists()
    store.reserve(b"owner", 7)
    with pytest.raises(RateLimited, match="10 of 10 bytes"):
        store.reserve(b"another", 1)
    store.close()


def test_one_key_leaves_others_their_files(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, Any] = {"http_file_bytes": 10_000, "http_file_key_bytes": 6_000, "http_file_dir": str(tmp_path)}
    large, small = ("in.jsonl", b"x" * 4_500), ("in.jsonl", ROW)
    with RunningHttp([server.address], **limits) as http, client_of(http, "a") as one, client_of(http, "b") as two:
        kept = one.files.create(file=large, purpose="batch")
        with pytest.raises(openai.RateLimitError, match=r"1 uploaded files of this key .* of 6000 bytes"):
            one.files.create(file=large, purpose="batch")
        with pytest.raises(openai.APIStatusError, match="more than 6000 bytes"):
            one.files.create(file=("in.jsonl", b"x" * 6_000), purpose="batch")
        two.files.create(file=large, purpose="batch")
        with client_of(http, "c") as three, pytest.raises(openai.RateLimitError, match=r"of all keys .* of 10000"):
            three.files.create(file=large, purpose="batch")
    with RunningHttp([server.address], **limits) as http, client_of(http, "a") as one, client_of(http, "b") as two:
        with pytest.raises(openai.RateLimitError, match=r"of this key .* of 6000 bytes"):
            one.files.create(file=large, purpose="batch")  # what was there before counts
        one.files.delete(kept.id)
        one.files.delete(one.files.create(file=large, purpose="batch").id)
        monkeypatch.setattr(file_store, "MAX_KEY_FILES", 2)
        made = [one.files.create(file=small, purpose="batch").id for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match=r"2 uploaded files of this key \(at most 2\)"):
            one.files.create(file=small, purpose="batch")
        two.files.create(file=small, purpose="batch")
        for file_id in made:
            one.files.delete(file_id)
        assert http.front.files._used.keys() == {owner_of({"authorization": "Bearer b"})}


def test_a_file_may_fill_the_store(server: RunningServer, tmp_path: Path) -> None:
    with RunningHttp([server.address], http_file_bytes=3_000_000, http_file_dir=str(tmp_path)) as http:
        with client_of(http) as client:
            file = client.files.create(file=("in.jsonl", b"x" * 2_999_000), purpose="batch")
            assert http.front.files.used == 2_999_000
            with pytest.raises(openai.RateLimitError, match="of 3000000 bytes"):
                client.files.create(file=("in.jsonl", b"x" * 2_000), purpose="batch")
            client.files.delete(file.id)
            with pytest.raises(openai.APIStatusError, match="more than 3000000 bytes"):
                client.files.create(file=("in.jsonl", b"x" * 3_000_000), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="purpose"):
                client.files.create(file=("in.jsonl", b"x" * 2_000_000), purpose="assistants")
        assert http.front.files.used == 0


def expire(store: FileStore, file_id: str) -> Path:
    """Ages a file by 25 hours; returns its path."""
    stored = store._files[file_id]
    store._files[file_id] = replace(stored, created=stored.created - 25 * 3600)
    return stored.path


@pytest.mark.parametrize("limit", [2**20, 2**21], ids=["of the store", "of the form's parser"])
def test_a_full_disk_is_no_failure_of_the_server(http: RunningHttp, limit: int) -> None:
    data, before = b"x" * (limit + 2**20 if limit > 2**20 else limit + 5), http.front.files.used
    with client_of(http) as client:
        with file_size_limit(limit), pytest.raises(openai.RateLimitError, match="disk of uploaded files is full"):
            client.files.create(file=("in.jsonl", data), purpose="batch")
        assert http.front.files.used == before
        assert client.files.delete(client.files.create(file=("in.jsonl", data), purpose="batch").id).deleted


def test_an_expired_file_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FileStore(10, str(tmp_path))
    for ask in (lambda: store.owned(b"owner") == [], lambda: store.get("file-x", b"owner")):
        path = expire(store, written(store).file_id)
        with contextlib.suppress(NotFound):
            assert ask()
        assert not path.exists() and store.used == 0
    path = expire(store, written(store).file_id)
    path.unlink()
    path.mkdir()  # it cannot be unlinked
    assert store.owned(b"owner") == [] and "cannot be deleted" in caplog.text
    store.close()


def test_expired_files_are_deleted_though_nobody_asks(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SWEEP_SECONDS", 0.01)
    with RunningHttp([server.address], http_file_dir=str(tmp_path)) as http, client_of(http) as client:
        file = client.files.create(file=("in.jsonl", ROW), purpose="batch")
        path = expire(http.front.files, file.id)
        until(lambda: not path.exists())


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.path.with_suffix(".json").unlink(),
        lambda file: file.path.with_suffix(".json").write_text("{"),
        lambda file: file.path.with_suffix(".json").write_text("[]"),
        lambda file: file.path.with_suffix(".json").write_text('{"owner": "zz"}'),
        lambda file: file.path.write_bytes(b"ab"),
        lambda file: file.path.unlink(),
    ],
)
def test_what_is_there_in_part_is_deleted(tmp_path: Path, damage: Callable[[StoredFile], object]) -> None:
    (tmp_path / "notes.json").write_text("not of this program")
    store = FileStore(10, str(tmp_path))
    whole, broken = written(store), written(store)
    store.close()
    damage(broken)
    store = FileStore(10, str(tmp_path))
    assert store.owned(b"owner") == [whole] and store.used == 3
    left = {"lock", "notes.json", whole.path.name, f"{whole.path.name}.json"}
    assert {path.name for path in tmp_path.iterdir()} == left
    store.close()


def test_a_folder_has_one_user(tmp_path: Path) -> None:
    store = FileStore(10, str(tmp_path))
    with pytest.raises(ConfigError, match="http_file_dir: another process uses"):
        FileStore(10, str(tmp_path))
    store.close()
    FileStore(10, str(tmp_path)).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="http_file_dir: .* cannot be used"):
        FileStore(10, str(tmp_path / "file"))
