"""Faults that a served model must survive. Each is a real run with a count: small in the test suite, large in the soak.

Every function raises AssertionError if an answer was lost or differed or a resource leaked, and returns its counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from certificates import Authority
from full_disk import file_size_limit
from fuzz import fill
from images import data_url, png
from rpc import ask, connect, reason
from running import RunningServer, children
from waiting import ended

import saccade
import saccade.errors
from saccade.v1 import inference_pb2
from service.commands.server_process import ServerProcess
from service.common.config import ServerOptions
from service.engine.engine_client import SupervisedEngine

ROOT = Path(__file__).resolve().parents[2]
Numbers = dict[str, Any]
PLAIN = (
    "--dtype", "float32", "--threads", "1", "--log-level", "error", "--max-len", "600", "--no-warmup",
    "--image-workers", "1",
)  # fmt: skip


# -- streams over deaths -----------------------------------------------------------------------------------------------


def long_requests(count: int, image_token: int | None = None) -> list[dict[str, Any]]:
    """Requests of all kinds with answers of 200 tokens and more, which take longer than a fault takes to happen."""
    made: list[dict[str, Any]] = []
    for i in range(count):
        request: dict[str, Any] = {"prompt": f"go on {i}", "max_tokens": 300 + i % 50, "ignore_eos": True, "seed": i}
        if i % 3 == 1:
            request |= {"images": [png(i % 7)], "presence_penalty": 0.4, "temperature": 1.1}
        if i % 3 == 2 and image_token is not None:
            request |= {"prompt": [9, 10 + i, image_token], "images": [png(i % 7)], "temperature": 0, "logprobs": 1}
        if i % 8 == 3:
            request |= {"n": 2, "max_tokens": 200}
        if i % 8 == 5:
            request |= {"stop": ["no such string"], "min_tokens": 20}
        made.append(request)
    return made


def open_stream(client: Any, request: dict[str, Any]) -> Any:
    return client.stream(request["prompt"], **{k: v for k, v in request.items() if k != "prompt"})


def check_same(found: list[saccade.Generation], wanted: list[saccade.Generation]) -> None:
    """Equal except for the rounding of log-probabilities, which depends on the rest of the batch."""
    for one, other in zip(found, wanted, strict=True):
        for sample, expected in zip(one.samples, other.samples, strict=True):
            assert sample.token_ids == expected.token_ids
            assert (sample.text, sample.finish_reason) == (expected.text, expected.finish_reason)
            assert sample.usage == expected.usage
            for a, b in zip(sample.logprobs or (), expected.logprobs or (), strict=True):
                assert abs(a.logprob - b.logprob) < 1e-4


def streams_over(
    client: saccade.Client, requests: list[dict[str, Any]], strike: Callable[[], None]
) -> list[saccade.Generation]:
    """Reads all streams concurrently; calls `strike` when each has had its first delta."""
    begun = threading.Barrier(len(requests) + 1)

    def read(request: dict[str, Any]) -> saccade.Generation:
        with open_stream(client, request) as stream:
            next(stream)
            begun.wait(120)
            answer: saccade.Generation = stream.final()
            return answer

    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(read, request) for request in requests]
        begun.wait(120)
        strike()
        return [future.result(300) for future in futures]


def engine_killed(model: str, streams: int, *, image_token: int | None = None) -> Numbers:
    """kill -9 of the engine under `streams` streams, which the client resumes."""
    options: dict[str, Any] = {"max_seqs": streams, "max_len": 600, "dtype": "float32", "threads": 1}
    engine = SupervisedEngine(ServerOptions(model=model, **options))
    requests = long_requests(streams, image_token)
    with RunningServer(model, engine=engine, **options) as server:
        with saccade.Client(server.address, max_retries=60) as client:
            wanted = [open_stream(client, request).final() for request in requests]
            found = streams_over(client, requests, lambda: os.kill(engine.pid, signal.SIGKILL))
        check_same(found, wanted)
        assert engine.restarts == 1
        server.drained()
    return {"streams": streams, "tokens": sum(len(s.token_ids) for answer in found for s in answer.samples)}


def frontend_killed(model: str, streams: int) -> Numbers:
    """kill -9 of the whole server under streams, which the client resumes on the next server at the same address. The
    next one is in this process."""
    requests = long_requests(streams)
    with contextlib.ExitStack() as ends:
        first = ends.enter_context(ServerProcess([model, *PLAIN, "--max-seqs", str(streams)]))
        client = ends.enter_context(saccade.Client(first.address, max_retries=60))
        wanted = [open_stream(client, request).final() for request in requests]
        engines = children(first.pid, "service.servers.engine_process")

        def strike() -> None:
            os.kill(first.pid, signal.SIGKILL)
            first.stop()
            port = int(first.address.rpartition(":")[2])
            ends.enter_context(RunningServer(model, port=port, max_seqs=streams, max_len=600))

        check_same(streams_over(client, requests, strike), wanted)
        for engine in engines:
            ended(engine)  # by itself once its frontend has ended
    return {"streams": streams, "engines_left": 0}


def sigterm_under_load(model: str, clients: int) -> Numbers:
    """SIGTERM under load: answers in progress are finished."""
    with ServerProcess([model, *PLAIN, "--max-seqs", str(clients), "--grace", "120"]) as server:
        stop_under_load(server, clients)
    return {"clients": clients}


def stop_under_load(server: ServerProcess, clients: int) -> None:
    """SIGTERM for a server with `clients` streams. It must be able to decode them at the same time."""
    with saccade.Client(server.address, max_retries=0) as client:
        requests = [{"prompt": f"{i}", "max_tokens": 300, "ignore_eos": True, "seed": i} for i in range(clients)]
        found = streams_over(client, requests, lambda: os.kill(server.pid, signal.SIGTERM))
        assert all(answer.usage.completion_tokens == 300 for answer in found)
    assert server.stop() == 0


# -- clients that behave badly -----------------------------------------------------------------------------------------

# Opens ten streams with an image each, reads one message of each, and kills itself.
VANISHING = """
import os, sys
sys.path[:0] = [sys.argv[3], sys.argv[4]]
import saccade
from images import png
client = saccade.Client(sys.argv[1])
streams = [
    client.stream("tell me", images=[png(int(sys.argv[2]) * 10 + i)], max_tokens=400, ignore_eos=True, seed=i)
    for i in range(10)
]
for i, stream in enumerate(streams):
    if i % 3:
        next(stream)
os.kill(os.getpid(), 9)
"""


def vanishing_clients(server: RunningServer, processes: int) -> Numbers:
    """Client processes die with ten streams each. Another client's answers must stay the same throughout."""
    arguments = [sys.executable, "-c", VANISHING, server.address]
    with saccade.Client(server.address) as client:
        steady = client.generate("steady", max_tokens=20, temperature=0, ignore_eos=True)
        for wave in range(0, processes, 4):
            dying = [
                subprocess.Popen([*arguments, str(i), str(ROOT), str(ROOT / "tests" / "support")])
                for i in range(wave, min(wave + 4, processes))
            ]
            assert client.generate("steady", max_tokens=20, temperature=0, ignore_eos=True) == steady
            assert {process.wait(timeout=120) for process in dying} == {-signal.SIGKILL}
    stats = server.drained()
    assert stats["decoder"]["used_slots"] == 0 and stats["decoder"]["used_pages"] == 0
    assert stats["handoff"]["leases"] == 0
    assert stats["handoff"]["used_bytes"] == stats["handoff"]["cached_bytes"]
    return {"clients": processes * 10}


def slow_readers(model: str, readers: int) -> Numbers:
    """Streams that are not read hold no resources for long and do not delay others."""
    with RunningServer(model, engine_process=True, max_seqs=readers + 1, max_len=900, stall_timeout=0.2) as server:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.lookahead_bytes", 1024),
            ("grpc.http2.bdp_probe", 0),
        ]
        channels = [grpc.insecure_channel(server.address, options) for _ in range(readers)]
        method = "/saccade.v1.InferenceService/StreamGenerate"
        request = ask(max_tokens=800, sampling={"logprobs": 100})
        message = inference_pb2.StreamGenerateRequest(request=request).SerializeToString()
        with saccade.Client(server.address) as client:
            steady = client.generate("steady", max_tokens=20, temperature=0, ignore_eos=True)
            calls = [channel.unary_stream(method)(message) for channel in channels]
            for call in calls:
                next(call)  # in progress; not read from here on
            assert client.generate("steady", max_tokens=20, temperature=0, ignore_eos=True) == steady
            server.drained()  # each call has ended, or a message has waited for longer than allowed
            outcomes: Counter[str] = Counter()
            for call in calls:
                try:
                    for _ in call:
                        pass
                    outcomes["OK"] += 1
                except grpc.RpcError as error:
                    outcomes[reason(error)[1]] += 1
            assert outcomes == {"SLOW_READER": readers}, outcomes
        for channel in channels:
            channel.close()
    return {"readers": readers, "outcomes": dict(outcomes)}


FAIR = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "FAILED_PRECONDITION"}
"""The statuses with which a random request may end."""


def outcome(call: Any, *arguments: Any) -> str:
    """The status of a call, unary or streaming, read to its end."""
    try:
        result = call(*arguments, timeout=60)
        if isinstance(result, grpc.Call) and not hasattr(result, "SerializeToString"):
            list(result)
    except grpc.RpcError as error:
        return reason(error)[0]
    return "OK"


def check_outcomes(requests: list[tuple[Any, Any]]) -> Counter[str]:
    """Makes the calls; each must end with a status that describes the request. Returns the number of each status."""
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda pair: outcome(*pair), requests))
    strange = {
        code: str(request)[:500] for (_, request), code in zip(requests, outcomes, strict=True) if code not in FAIR
    }
    assert not strange, strange
    return Counter(outcomes)


def random_generate(rng: random.Random) -> inference_pb2.GenerateRequest:
    """Any request; about half of them are valid."""
    request: inference_pb2.GenerateRequest = fill(rng, inference_pb2.GenerateRequest())
    if rng.random() < 0.5:
        request.model = ""
        request.ClearField("sampling")
        request.sampling.max_tokens = rng.randint(1, 5)
        request.ClearField("continued_token_ids")
        if request.WhichOneof("input") is None or rng.random() < 0.3:
            request.prompt.text = "hello"
    return request


def damaged_message(rng: random.Random) -> bytes:
    """The bytes of a request, some of them changed or missing."""
    data = bytearray(ask(max_tokens=3, images=[{"data": png(2, (12, 12))}]).SerializeToString())
    for _ in range(rng.randint(0, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def random_requests(server: RunningServer, count: int, seed: int) -> Numbers:
    """Random requests and damaged messages. Afterwards the server must answer as before."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    with connect(server.address) as stubs:
        steady = ask(max_tokens=20, images=[{"data": png(3, (16, 16))}])
        before = stubs.inference.Generate(steady).samples[0].token_ids
        raw = stubs.channel.unary_unary("/saccade.v1.InferenceService/Generate")
        while (done := seen.total()) < count:
            requests: list[tuple[Any, Any]] = []
            for _ in range(min(500, count - done)):
                stream = fill(rng, inference_pb2.StreamGenerateRequest())
                request = random_generate(rng)
                stream.request.CopyFrom(request)
                requests.append(
                    rng.choice(
                        [(stubs.inference.Generate, request), (stubs.inference.StreamGenerate, stream),
                         (raw, damaged_message(rng))]
                    )
                )  # fmt: skip
            seen += check_outcomes(requests)
        assert stubs.inference.Generate(steady).samples[0].token_ids == before
    assert "OK" in seen and len(seen) > 1, "the generator has lost its aim"
    server.drained()
    server.server.spool.check_integrity()
    return {"requests": seen.total(), "outcomes": dict(seen)}


# -- disks, clocks, certificates ---------------------------------------------------------------------------------------


def disk_full(model: str, folder: Path, uploads: int) -> Numbers:
    """No file of the server can grow beyond 100 kB: uploads and batches get an explanatory error, and answers
    continue."""
    places = ["--media-dir", str(folder / "media"), "--batch-dir", str(folder / "batches")]
    with ServerProcess([model, *PLAIN, *places]) as server:
        fill_disk(server, folder, uploads)
        assert server.stop() == 0
    return {"refused": 2 * uploads}


def fill_disk(server: ServerProcess, folder: Path, uploads: int) -> None:
    """`disk_full` for a server that has its uploads and its batches in `folder`."""
    data = png(1, (300, 300))
    assert len(data) > 200_000
    with saccade.Client(server.address, max_retries=0) as client:
        before = client.generate("x", max_tokens=5, temperature=0)
        with file_size_limit(100_000, server.pid):
            for i in range(uploads):
                for refused, attempt in (
                    ("MEDIA_SPOOL_FULL", lambda: client.media.upload(data)),
                    ("BATCH_SPOOL_FULL", lambda: client.batches.create(b" " * 200_000)),
                ):
                    try:
                        attempt()
                        raise AssertionError(f"upload {i} was taken")
                    except saccade.errors.RateLimited as error:
                        assert error.reason == refused
                # an image too large for the spool travels with its request
                small = client.with_options(upload_above=1000)
                assert small.generate("x", images=[png(2, (120, 120))], max_tokens=1).usage.image_tokens
            assert client.generate("x", max_tokens=5, temperature=0) == before
            assert not any(list((folder / place / "incoming").iterdir()) for place in ("media", "batches"))
        assert client.media.upload(data).size_bytes == len(data)


# A server whose wall clock differs from the real one by the number in a file, which is read at each call.
JUMPING = """
import sys, time, pathlib
real, offset = time.time, pathlib.Path(sys.argv.pop(1))
time.time = lambda: real() + float(offset.read_text())
from service.commands.cli import main
sys.exit(main(sys.argv[1:]))
"""


def clock_jump(model: str, folder: Path, jumps: int) -> Numbers:
    """The wall clock jumps back by a day and then forward: answers and rate limits are unaffected, and uploads expire
    by the wall clock.

    Calls have no deadlines here, because gRPC computes deadlines by its own clock, which does not jump.
    """
    offset = folder / "offset"
    offset.write_text("0")
    arguments = [sys.executable, "-c", JUMPING, str(offset), "serve", model, *PLAIN, "--port", "0"]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().removeprefix("saccade ready on ").strip()
        with saccade.Client(address, max_retries=0, timeout=None) as client:
            wanted = client.generate("x", max_tokens=200, ignore_eos=True, seed=3)
            for i in range(jumps):
                media = client.media.upload(png(i))
                with client.stream("x", max_tokens=200, ignore_eos=True, seed=3) as stream:
                    next(stream)
                    _replace(offset, str((-1) ** i * 86400 * (i + 1)))
                    assert stream.final().token_ids == wanted.token_ids
                assert client.generate("x", max_tokens=5).usage.completion_tokens == 5
                if i % 2:  # back in time: nothing has expired
                    assert client.media.get(media.media_id).media_id == media.media_id
                _replace(offset, "0")
    finally:
        process.terminate()
        code = process.wait(60)
        process.stdout.close()
    assert code == 0
    return {"jumps": 2 * jumps}


def _replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def certificate_rotated(model: str, folder: Path, rotations: int) -> Numbers:
    """Certificates are replaced while four threads keep opening connections; none of them may fail."""
    authority = Authority.create(folder / "authority")
    certificate, key = folder / "server.pem", folder / "server.key"

    def install(name: str) -> None:
        for source, target in zip(authority.issue(name), (certificate, key), strict=True):
            scratch = target.with_suffix(".new")
            scratch.write_bytes(source.read_bytes())
            os.replace(scratch, target)

    install("first")
    over, calls, called = threading.Event(), Counter[str](), threading.Condition()
    tls = saccade.TLSConfig(ca=authority.certificate)
    with RunningServer(model, max_seqs=4, max_len=300, tls_cert=str(certificate), tls_key=str(key)) as server:

        def visit() -> None:
            while not over.is_set():
                try:
                    with saccade.Client(server.address, tls=tls, max_retries=0) as client:
                        client.generate("x", max_tokens=2)
                    calls["OK"] += 1
                except BaseException:
                    over.set()
                    raise
                finally:
                    with called:
                        called.notify_all()

        with saccade.Client(server.address, tls=tls, max_retries=0) as old, ThreadPoolExecutor(4) as pool:
            stream = old.stream("x", max_tokens=250, ignore_eos=True)
            next(stream)
            visitors = [pool.submit(visit) for _ in range(4)]
            try:
                for i in range(rotations):
                    seen = calls["OK"]
                    install(f"next{i}")
                    with called:
                        assert called.wait_for(lambda seen=seen: over.is_set() or calls["OK"] >= seen + 8, 120)
            finally:
                over.set()
            for visitor in visitors:
                visitor.result(60)
            assert stream.final().usage.completion_tokens == 250
    return {"rotations": rotations, "connections": calls["OK"]}


# -- batches -----------------------------------------------------------------------------------------------------------


def batch_rows(count: int) -> Iterator[bytes]:
    """Every tenth row has an image."""
    for i in range(count):
        content: Any = f"row {i}"
        if i % 10 == 0:
            url = data_url(png(i % 50, (16, 16)))
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": content}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3 + i % 3, "seed": i}
        yield json.dumps({"custom_id": str(i), "body": body}).encode() + b"\n"


def _peak(pid: int) -> int:
    """Peak memory of the process in bytes."""
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def batch_killed(
    model: str, folder: Path, rows: int, kills: int, *, tear: bool = True,
    then: Callable[[ServerProcess], object] = lambda server: None,
) -> Numbers:  # fmt: skip
    """A batch whose server is killed repeatedly and whose journal is damaged in between: each row is answered once.
    `then` is called with the last server, which has its files in `folder` and decodes 16 requests at the same time."""
    source = folder / "in.jsonl"
    with source.open("wb") as file:
        file.writelines(batch_rows(rows))
    places = ["--media-dir", str(folder / "media"), "--batch-dir", str(folder / "batches")]
    arguments = [model, *PLAIN, *places, "--batch-concurrency", "16", "--max-seqs", "16", "--grace", "120"]
    rng, batch_id, peaks = random.Random(rows), "", []
    for kill in range(kills + 1):
        with ServerProcess(arguments) as server, saccade.Client(server.address) as client:
            batch_id = batch_id or client.batches.create(source).batch_id
            for now in client.batches.watch(batch_id):
                if kill < kills and now.completed >= rows * (kill + 1) // (kills + 2):
                    peaks.append(_peak(server.pid))
                    os.kill(server.pid, signal.SIGKILL)
                    break
            else:
                assert kill == kills, "it was over before it could be killed"
                assert (now.state, now.completed, now.failed) == ("completed", rows, 0), now
                output = client.batches.download(batch_id, folder / "out.jsonl")
                peaks.append(_peak(server.pid))
                found = [json.loads(line) for line in output.open("rb")]
                _check_answers(found, rows, client)
                then(server)
                assert server.stop() == 0
                continue
        if tear:
            _tear(folder / "batches" / batch_id, rng)
    return {"rows": rows, "kills": kills, "torn": kills * tear, "peak_bytes_of_each_run": peaks}


def _check_answers(found: list[Any], rows: int, client: saccade.Client) -> None:
    assert sorted(int(row["custom_id"]) for row in found) == list(range(rows)), "rows are lost or there twice"
    answers = {int(row["custom_id"]): row["response"]["body"]["choices"][0]["message"]["content"] for row in found}
    for i in {0, 1, rows // 3, rows // 2 // 10 * 10, rows - 1}:
        images = [png(i % 50, (16, 16))] if i % 10 == 0 else []
        wanted = client.generate(f"row {i}", images=images, max_tokens=3 + i % 3, seed=i)
        assert answers[i] == wanted.text, i


def _tear(folder: Path, rng: random.Random) -> None:
    """What may remain after a power failure: half a line at the end of the output, random bytes in the journal."""
    output, journal = folder / "output.jsonl", folder / "output.jsonl.journal"
    with output.open("ab") as file:
        file.write(b'{"id": "batch_req_')
    match rng.randrange(3):
        case 0:
            journal.write_bytes(rng.randbytes(500))
        case 1:
            os.truncate(journal, journal.stat().st_size // 2)
        case 2:
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{journal}{suffix}")
