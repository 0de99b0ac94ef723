"""Turns the results of steps into tokens of requests and events, and ends requests."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from decoder.flight import Flight
from decoder.pace import StepTimer
from decoder.pooling import Pools
from decoder.prompt_scores import PromptScoring
from decoder.request import FinishReason, TokenEvent
from decoder.sampling import Choice
from decoder.sequence import Sequence
from decoder.speculation import Speculation
from decoder.states import States
from decoder.step import Row, Step


class Answers:
    """The live requests, by id. The only writer of their tokens."""

    def __init__(
        self,
        states: States,
        speculation: Speculation | None,
        pools: Pools,
        prompt_scores: PromptScoring,
        timer: StepTimer,
    ) -> None:
        self.states, self.speculation, self.timer = states, speculation, timer
        self.pools, self.prompt_scores = pools, prompt_scores
        self.sequences: dict[str, Sequence] = {}
        self.reading: dict[str, Sequence] = {}
        """Live requests that want log-probabilities or hidden states of their prompts."""
        self.counters = {"output_tokens": 0, "failed": 0}

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        if sequence.reads_prompt:
            self.reading[sequence.request_id] = sequence

    def awaits(self, sequence: Sequence) -> bool:
        """Whether the sequence is still live."""
        return self.sequences.get(sequence.request_id) is sequence

    # -- what a step has drawn -----------------------------------------------------------------------------------------

    def failed(self, step: Step) -> list[TokenEvent]:
        """Ends the requests that the step could not compute."""
        return [self._failure(*failed) for failed in step.failed if self.awaits(failed[0])]

    def read(self, flight: Flight) -> list[TokenEvent]:
        """Reads the results of a step. Waits for the device, unless no request needs its tokens any more."""
        step = flight.step
        if not (self.states.at_once or any(self.awaits(sequence) for sequence in step.sequences)):
            return []
        choices, accepted = flight.read()
        self.timer.read(step.tokens, flight.started)
        if self.speculation is not None:
            self.speculation.timed(step, flight.started)
        return self._take_all(step, choices, accepted)

    def finish(self, step: Step, tokens: list[TokenEvent]) -> list[TokenEvent]:
        """Releases image rows that have been read, and ends requests that have their last token. To be called with the
        result of `read`, after the step's memory has been committed."""
        for row in step.rows:
            if row.sequence.next_span < len(row.sequence.request.spans):
                _release_spans(row.sequence, min(row.end, row.sequence.computed))
        for fork in step.forks:
            _release_spans(fork.follower, min(fork.follower.prompt_len, fork.follower.computed))
        for event in tokens:
            if event.finish_reason is not None:
                sequence = self.sequences[event.request_id]
                _forget_unread(sequence)
                if event.error is None:
                    self.states.keep(sequence)
                self.end(sequence)
        return tokens

    def _take_all(self, step: Step, choices: list[Choice], accepted: list[int]) -> list[TokenEvent]:
        """Emits the results; those of ended requests are dropped."""
        drawn, judged = iter(choices), iter(accepted)
        tokens: list[TokenEvent] = []
        for row in step.rows:
            if not row.samples:
                continue
            choice, hits, here = next(drawn), None, self.awaits(row.sequence)
            if accepted and row.verified:
                hits = next(judged)
            if row.drafts:
                mine = [choice, *(next(drawn) for _ in range(row.drafts))]
                hits = _hits(row, mine) if hits is None else hits
                tokens += self._take(row, mine[: hits + 1]) if here else []
            elif here:
                tokens.append(self._append(row.sequence, row.end, choice))
        for fork in step.forks:
            choice = next(drawn)
            if self.awaits(fork.follower):
                tokens.append(self._append(fork.follower, fork.follower.prompt_len, choice))
        return tokens

    def _take(self, row: Row, choices: list[Choice]) -> list[TokenEvent]:
        """Adds to a row's sequence the tokens drawn at its accepted drafts and the one after them, up to the token that
        ends the sequence."""
        sequence, first = row.sequence, row.end - row.drafts
        events: list[TokenEvent] = []
        for place, choice in enumerate(choices):
            events.append(self._append(sequence, first + place, choice))
            if events[-1].finish_reason is not None:
                break
        if self.speculation is not None:
            self.speculation.verified(sequence, row.drafts, min(len(choices) - 1, len(events)))
        return events

    def _append(self, sequence: Sequence, at: int, choice: Choice) -> TokenEvent:
        """Adds the token at position `at` to a sequence. Returns its event, which says whether it ends the sequence."""
        if at < len(sequence.tokens):
            sequence.tokens[at] = choice.token
            sequence.unread -= 1
        else:
            sequence.tokens.append(choice.token)
        self.counters["output_tokens"] += 1
        of_prompt: dict[str, Any] = {}
        if sequence.reads_prompt:  # the results for its prompt are emitted with its first token
            name = sequence.request_id
            of_prompt = {"pooled": self.pools.take(name), "prompt_scores": self.prompt_scores.take(name)}
            self.reading.pop(name, None)
        reason, stop = _finish_reason(sequence, at + 1 - sequence.prompt_len, choice.token)
        error = _followed(sequence, choice.token, reason)
        if error is not None:
            self.counters["failed"] += 1
            return TokenEvent(sequence.request_id, None, finish_reason="error", error=error)
        scheduled, sequence.scheduled = sequence.scheduled, None
        return TokenEvent(
            sequence.request_id,
            choice.token,
            choice.logprob,
            choice.top,
            reason,
            cached_tokens=sequence.cached_tokens,
            stop_token=stop,
            scheduled=scheduled,
            **of_prompt,
        )

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _failure(self, sequence: Sequence, error: Exception) -> TokenEvent:
        self.counters["failed"] += 1
        self.end(sequence)
        return TokenEvent(sequence.request_id, None, finish_reason="error", error=error)

    def end(self, sequence: Sequence) -> None:
        """Frees everything that a request holds. No step in flight may still read its images."""
        self.states.finish(sequence)
        for span in sequence.request.spans[sequence.next_span :]:
            span.release()
        sequence.next_span = len(sequence.request.spans)
        self.pools.drop(sequence.request_id)
        self.prompt_scores.take(sequence.request_id)
        self.reading.pop(sequence.request_id, None)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        del self.sequences[sequence.request_id]


def _hits(row: Row, choices: SequenceOf[Choice]) -> int:
    """Number of a row's drafts that equal the tokens drawn at their positions, up to the first that differs."""
    drafts = row.sequence.draft.tokens
    acceptable = row.acceptable
    return next((place for place in range(acceptable) if choices[place].token != drafts[place]), acceptable)


def _forget_unread(sequence: Sequence) -> None:
    """Removes the token that the in-flight step draws for a sequence that has ended; its row there is padding."""
    if sequence.unread:
        del sequence.tokens[sequence.known :]
        sequence.unread, sequence.computed = 0, min(sequence.computed, len(sequence.tokens) - 1)


def _release_spans(sequence: Sequence, end: int) -> None:
    """Releases the rows of images that lie in the first `end` tokens."""
    spans = sequence.request.spans
    while sequence.next_span < len(spans) and spans[sequence.next_span].end <= end:
        spans[sequence.next_span].release()
        sequence.next_span += 1


def _followed(sequence: Sequence, token: int, reason: FinishReason | None) -> Exception | None:
    """Passes a drawn token to the sequence's constraint, unless the sequence ends with it. Returns the constraint's
    error, if it has failed."""
    guide = sequence.guide
    if guide is None:
        return None
    if reason is None:
        guide.accept(token)
    return guide.error


def _finish_reason(sequence: Sequence, output: int, token: int) -> tuple[FinishReason | None, int | None]:
    """Why the sequence ends with its output token number `output`, and that token if it is an end or stop token."""
    request, params = sequence.request, sequence.request.sampling
    guided = sequence.guide is not None  # if its constraint allows only end tokens, it ends even before `min_tokens`
    ends = token in params.stop_token_ids or (token in request.eos_token_ids and (guided or not params.ignore_eos))
    if ends and (guided or output > params.min_tokens):
        return "stop", token
    if output >= sequence.limit:
        return "length", None
    return None, None
