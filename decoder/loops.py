"""The loops that run steps, each `schedule -> run -> take`.

A step leaves its tokens on the device, and reading them waits for the device. A plain loop reads each step before it
schedules the next one. So does a speculative loop, because the memory after a step with drafts depends on the drawn
tokens. An overlapped loop launches the next step while the device still runs the current one (see `decoder.flight`); if
the next step depends on the drawn tokens, the current one is read first, and this is counted.
"""

from __future__ import annotations

from decoder.answers import Answers
from decoder.execution import Execution
from decoder.flight import Flight, expect
from decoder.pace import StepTimer
from decoder.request import TokenEvent
from decoder.scheduler import Scheduler
from decoder.speculation import Speculation
from decoder.states import States

WAITS = ("drafts", "pooled", "prompt_logprobs", "checkpoint", "swap")
"""Reasons to read a step before the next one is launched, although steps overlap: drafts; requests whose hidden states
(`pooled`) or prompt log-probabilities are read; a request that passes a checkpoint, whose key hashes the ids; memory
that is copied to or from the host (`swap`)."""


class PlainLoop:
    """Reads each step before the next one is scheduled."""

    def __init__(
        self, scheduler: Scheduler, execution: Execution, states: States, answers: Answers, timer: StepTimer
    ) -> None:
        self.scheduler, self.execution, self.states = scheduler, execution, states
        self.answers, self.timer = answers, timer
        self.flight: Flight | None = None
        """A step that has been launched and not been read, between two calls of `step`."""
        self.waits = dict.fromkeys(WAITS, 0)

    def step(self) -> list[TokenEvent]:
        """Runs one step; returns its results, and the requests that have failed."""
        started = self.timer.clock()
        flight = self.execution.run(self.scheduler.schedule(), started)
        self.states.commit(flight.step)
        return self.answers.failed(flight.step) + self.take(flight)

    def take(self, flight: Flight) -> list[TokenEvent]:
        """The results of a step, after its memory has been committed."""
        return self.answers.finish(flight.step, self.answers.read(flight))

    def drain(self) -> list[TokenEvent]:
        """Reads the in-flight step, if there is one."""
        flight, self.flight = self.flight, None
        return [] if flight is None else self.take(flight)


class SpeculativeLoop(PlainLoop):
    """For steps that verify drafts: their results determine which states are kept."""

    def __init__(
        self, scheduler: Scheduler, execution: Execution, states: States, answers: Answers, timer: StepTimer,
        speculation: Speculation, *, counted: bool,
    ) -> None:  # fmt: skip
        """`counted`: whether steps would overlap if they had no drafts; then each step is counted as a wait."""
        super().__init__(scheduler, execution, states, answers, timer)
        self.speculation, self._counted = speculation, counted

    def step(self) -> list[TokenEvent]:
        """Runs one step; returns its results, and the requests that have failed."""
        self.waits["drafts"] += self._counted
        started = self.timer.clock()
        self.speculation.ask(self.scheduler.running)
        self.states.empty_rings(self.scheduler.running)
        flight = self.execution.run(self.scheduler.schedule(), started)
        return self.answers.failed(flight.step) + self.take(flight)

    def take(self, flight: Flight) -> list[TokenEvent]:
        """The results of a step; its memory is then committed."""
        tokens = self.answers.read(flight)
        self.states.commit(flight.step)
        return self.answers.finish(flight.step, tokens)


class OverlappedLoop(PlainLoop):
    """Launches the next step before the current one is read, or, if the next step has rows with a constraint, all of it
    but its draws."""

    _tokens: list[TokenEvent] | None = None
    """The results of the in-flight step, if they have been read."""

    def step(self) -> list[TokenEvent]:
        """Launches a step; returns results, usually of the previous step, and the requests that have failed."""
        events: list[TokenEvent] = []
        if (reason := self._why_wait()) is not None:
            self.waits[reason] += 1
            events += self.drain()
        flight = self.launch()
        events += self.drain()
        events += self.answers.failed(flight.step)
        self.flight = flight
        if not (flight.step.rows and self.answers.sequences):
            events += self.drain()
        return events

    def launch(self) -> Flight:
        """Schedules a step and launches it after the in-flight one."""
        started = self.timer.clock()
        step = self.scheduler.schedule()
        if self.flight is not None and (step.saves or step.loads):
            self.waits["swap"] += 1
        flight = self.execution.run(step, started, self.flight, self._read)
        self.states.commit(step)
        expect([row.sequence for row in step.rows if row.samples] + [fork.follower for fork in step.forks])
        return flight

    def _read(self) -> None:
        assert self.flight is not None and self._tokens is None
        self._tokens = self.answers.read(self.flight)

    def take(self, flight: Flight) -> list[TokenEvent]:
        """The results of a step, after its memory and that of a step launched since have been committed."""
        tokens, self._tokens = self._tokens, None
        return self.answers.finish(flight.step, self.answers.read(flight) if tokens is None else tokens)

    def _why_wait(self) -> str | None:
        """The reason why the in-flight step must be read before the next one is scheduled; `None` if there is none."""
        if self.flight is None:
            return None
        for sequence in self.answers.reading.values():
            whole = sequence.computed >= sequence.prompt_len
            if whole and sequence.request.pooled:
                return "pooled"
            if not whole and sequence.request.sampling.prompt_logprobs is not None:
                return "prompt_logprobs"
        return "checkpoint" if self.scheduler.needs_ids else None
