"""The engine's loop over a tiny model: requests that the decoder rejects, and several samples."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from counting import lines_run
from served import make_served

from decoder.sampling import SamplingParams
from service.answers.relay import engine_error
from service.common import errors
from service.common.config import EngineOptions
from service.common.errors import EngineDied
from service.common.types import ConstraintSpec
from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.types import EngineEvent, EngineRequest


class Running:
    """An engine in a thread, and its events."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.events = engine, list[EngineEvent]()
        self._told = threading.Condition()
        self._thread = threading.Thread(target=engine.run, args=(self._hear,))
        self._thread.start()

    def _hear(self, events: list[EngineEvent]) -> None:
        with self._told:
            self.events += events
            self._told.notify_all()

    def wait(self, names: set[str]) -> dict[str, list[EngineEvent]]:
        """Events by request, after all of these have ended."""
        with self._told:
            ended = self._told.wait_for(
                lambda: names <= {e.request_id for e in self.events if e.finish_reason is not None}, timeout=60
            )
        assert ended, f"{names} have not ended"
        return {name: [e for e in self.events if e.request_id == name] for name in names}

    def close(self) -> None:
        self.engine.query("integrity").result(60)
        self.engine.stop()
        self._thread.join()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    make_served(tmp_path / "model", vision=False)
    engine = build_engine(EngineOptions(str(tmp_path / "model"), dtype="float32", threads=1, max_seqs=4, max_len=200))
    running = Running(engine)
    yield running
    running.close()


def greedy(tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def test_a_deadline_out_of_reach_is_refused_and_leaves_nothing(running: Running) -> None:
    """A step has taken a thousand seconds: a request with five seconds left is not started."""
    running.engine._decoder.timer.pace.observe(1, 1000.0)
    running.engine.submit(EngineRequest("late", [1] * 50, greedy(), timeout=5.0))
    (event,) = running.wait({"late"})["late"]
    assert event.error == "deadline" and "50 prompt tokens" in event.message
    status = engine_error(event)
    assert isinstance(status, errors.DeadlineExceeded) and status.reason == "DEADLINE_UNREACHABLE"
    running.engine.submit(EngineRequest("patient", [1] * 50, greedy()))
    assert len(running.wait({"patient"})["patient"]) == 4


def test_samples_of_one_request_read_its_prompt_once(running: Running) -> None:
    """The same tokens as from separate requests, with one prompt computed."""
    prompt, sampling = [1 + i % 90 for i in range(70)], SamplingParams(max_tokens=5, seed=3, ignore_eos=True)
    for index in range(3):
        running.engine.submit(EngineRequest(f"alone {index}", prompt, sampling, sample_index=index))
        running.wait({f"alone {index}"})
    running.engine.query("flush").result(60)
    before = running.engine.query("stats").result(60)["decoder"]
    running.engine.submit(EngineRequest("group 0", prompt, sampling, siblings=("group 1", "group 2")))
    running.wait({f"group {index}" for index in range(3)})
    after = running.engine.query("stats").result(60)["decoder"]
    assert after["batched_tokens"] - before["batched_tokens"] == 70 + 3 * 4
    for index in range(3):
        alone, forked = (running.wait({f"{kind} {index}"})[f"{kind} {index}"] for kind in ("alone", "group"))
        assert [e.token_id for e in forked] == [e.token_id for e in alone]


def test_the_prompt_is_scored_once_for_all_samples(running: Running) -> None:
    """Six samples, and batch slots for four: the others do not compute the prompt again for its log-probabilities."""
    names = [f"sample {index}" for index in range(6)]
    sampling = SamplingParams(max_tokens=5, seed=3, ignore_eos=True, prompt_logprobs=0)
    running.engine.submit(EngineRequest(names[0], [1 + i % 90 for i in range(70)], sampling, siblings=(*names[1:],)))
    events = running.wait({*names})
    assert running.engine.query("stats").result(60)["decoder"]["batched_tokens"] < 2 * 70
    assert [len(events[name][0].prompt_scores) for name in names] == [69, 0, 0, 0, 0, 0]


def test_samples_share_the_memory_of_a_long_prompt(tmp_path: Path) -> None:
    """A copy of the ids for each of 64 samples would be hundreds of times what the client has sent."""
    make_served(tmp_path / "model", vision=False)
    engine = build_engine(EngineOptions(str(tmp_path / "model"), dtype="float32", threads=1, max_len=1024))

    def size(tokens: int) -> int:
        names = [f"{tokens}/{index}" for index in range(64)]
        tracemalloc.start()
        try:
            engine._requests.add(EngineRequest(names[0], [5] * tokens, greedy(), siblings=(*names[1:],)))
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            for name in names:
                engine._requests.abort(name)

    try:
        short, long = size(3), size(1000)
    finally:
        engine.close()
    assert long - short < 4 * 8 * 1000, f"{short} bytes with 3 tokens, {long} with 1000"


def test_every_sample_of_a_refused_request_is_told(running: Running) -> None:
    running.engine.submit(EngineRequest("group 0", [1] * 300, greedy(), siblings=("group 1",)))
    events = running.wait({"group 0", "group 1"})
    assert all("300" in of[0].message and of[0].error == "invalid" for of in events.values())


def test_a_sample_that_is_aborted_leaves_the_others(running: Running) -> None:
    running.engine.submit(EngineRequest("group 0", [2] * 60, greedy(9), siblings=("group 1", "group 2")))
    running.engine.abort("group 0")
    events = running.wait({"group 1", "group 2"})
    assert all(len(of) == 9 for of in events.values())


def test_an_abort_costs_the_same_however_many_requests_wait_for_their_constraints(tmp_path: Path) -> None:
    make_served(tmp_path / "model", vision=False)
    engine = build_engine(EngineOptions(str(tmp_path / "model"), dtype="float32", threads=1, max_seqs=4, max_len=200))
    requests, go_on = engine._requests, threading.Event()
    engine._constraining._started_pool().submit(go_on.wait)  # constraints are built one after another

    def cost(count: int) -> int:
        for number in range(count):
            names, allowed = (f"{number}/0", f"{number}/1"), ConstraintSpec(None, (1, 2))
            requests.add(EngineRequest(names[0], [1, 2], greedy(), siblings=names[1:], constraint=allowed))
        lines = lines_run(requests.abort, "0/1") + lines_run(requests.abort, "0/0")
        assert len(requests.live) == 2 * count - 2
        for name in list(requests.live):
            requests.abort(name)
        requests.check_integrity()
        return lines

    try:
        few, many = cost(2), cost(100)
    finally:
        go_on.set()
        engine.close()
    assert many == few, f"{few} lines with 2 requests, {many} with 100"


def test_a_sign_of_life_is_one_of_the_loop_itself(tmp_path: Path) -> None:
    """A separate thread would report that the engine is alive even if its loop hangs."""
    make_served(tmp_path / "model", vision=False)
    engine = build_engine(EngineOptions(str(tmp_path / "model"), dtype="float32", threads=1, max_seqs=4, max_len=200))
    reached, go_on = threading.Event(), threading.Event()

    def hang(events: list[EngineEvent]) -> None:
        reached.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=engine.run, args=(hang,))
    thread.start()
    try:
        assert engine.query("beat").result(60) == {}
        engine.submit(EngineRequest("a", [1, 2, 3], greedy()))
        assert reached.wait(60)
        beat = engine.query("beat")
        assert not beat.done()
        go_on.set()
        assert beat.result(60) == {}
    finally:
        go_on.set()
        engine.stop()
        thread.join()


def test_a_query_that_its_caller_drops_does_not_stop_the_engine(tmp_path: Path) -> None:
    make_served(tmp_path / "model", vision=False)
    engine = build_engine(EngineOptions(str(tmp_path / "model"), dtype="float32", threads=1, max_seqs=4, max_len=200))
    for what in ("stats", "flush", "beat"):
        engine.query(what).cancel()
    running = Running(engine)
    assert engine.query("stats").result(60)["live"] == 0 and engine.alive
    running.close()
    with pytest.raises(EngineDied, match="closed"):
        engine.query("stats").result(60)


def test_a_query_that_comes_while_the_engine_stops_is_told(tmp_path: Path) -> None:
    make_served(tmp_path / "model", vision=False)
    engine = build_engine(EngineOptions(str(tmp_path / "model"), dtype="float32", threads=1, max_seqs=4, max_len=200))
    engine.submit(EngineRequest("a", [1, 2, 3], greedy()))
    asked = []

    def stop(events: list[EngineEvent]) -> None:
        engine.stop()
        asked.append(engine.query("stats"))

    engine.run(stop)
    for query in (*asked, engine.query("beat")):
        with pytest.raises(EngineDied, match="closed"):
            query.result(60)


def test_what_was_queued_when_the_engine_stopped_is_refused(tmp_path: Path) -> None:
    make_served(tmp_path / "model", vision=False)
    engine = build_engine(EngineOptions(str(tmp_path / "model"), dtype="float32", threads=1, max_seqs=4, max_len=200))
    engine._fail_from_outside(RuntimeError("fault"))
    engine.submit(EngineRequest("a", [1, 2, 3], greedy()))
    running = Running(engine)
    [refused] = running.wait({"a"})["a"]
    assert refused.error == "died" and not engine.alive
    running.close()


def test_a_stopped_engine_outlives_a_second_fault(tmp_path: Path) -> None:
    """A fault of a GPU reaches the decoder's and the encoder's thread."""
    make_served(tmp_path / "model", vision=False)
    engine = build_engine(EngineOptions(str(tmp_path / "model"), dtype="float32", threads=1, max_seqs=4, max_len=200))
    running = Running(engine)
    for text in ("first", "second"):
        engine._fail_from_outside(RuntimeError(text))
    running.engine.submit(EngineRequest("a", [1, 2, 3], greedy()))
    [refused] = running.wait({"a"})["a"]
    assert refused.error == "died" and not engine.alive
    assert engine.query("stats").result(60)["live"] == 0
    running.close()
    with pytest.raises(EngineDied, match="closed"):
        engine.query("stats").result(60)
