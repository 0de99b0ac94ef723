"""The state of an answer while it is generated: text of each sample, times of the request, errors of the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, overload

from decoder.request import PromptScore
from service.answers.reasoning import ReasoningSplit
from service.answers.stops import StopMatcher
from service.answers.tool_calls import CallSplit
from service.common import errors
from service.common.types import CallDelta, FinishReason, Logprob, PromptLogprob
from service.engine.types import EngineEvent
from service.model.tokenizer import Detokenizer, Tokenizer

log = logging.getLogger(__name__)


class Shown(NamedTuple):
    """A part of a sample's output that can be sent, because later tokens cannot change it."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()


def merged(shown: Iterable[Shown]) -> Shown:
    reasoning, text, calls = zip(*shown, Shown())
    return Shown("".join(reasoning), "".join(text), tuple(call for part in calls for call in part))


class SampleState:
    """One sample that is being generated."""

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str], min_tokens: int, split: ReasoningSplit, *,
        exact: bool = False, calls: CallSplit | None = None, special: bool = False,
    ) -> None:  # fmt: skip
        """`exact`: newlines after the closing marker of reasoning belong to the text, not to the marker. `calls`: None
        if the request has no tools that can be called. `special`: the text has the names of special tokens."""
        self._new_detokenizer = partial(Detokenizer, tokenizer, special=special)
        self._detokenizer = self._new_detokenizer()
        self._stops = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._split, self._exact, self._calls = split, exact, calls
        self._after_marker = split.after_marker
        """Whether nothing but newlines has followed the last marker."""
        self.tokens = self.reasoning_tokens = 0
        self.sequence = 0
        self.cached_tokens = 0
        self.done = False

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    @property
    def over(self) -> bool:
        """Whether the text ends the answer: with a stop string, or with the end of the only call that is allowed."""
        called = self._calls is not None and self._calls.done and self.tokens >= self._min_tokens
        return called or self.stop_string is not None

    def reason(self, given: FinishReason) -> FinishReason:
        """Why the sample ended: "tool_calls" if it stopped after tool calls, else `given`."""
        return "tool_calls" if given == "stop" and self._calls is not None and self._calls.called else given

    def end(self, given: FinishReason, stop_token: int | None) -> tuple[FinishReason, int | None]:
        """Why the sample ended, and the token that ended it. To be called after `flush`, because text that was held
        back may contain a stop string, which then ends the answer."""
        return (self.reason("stop"), None) if self.over else (self.reason(given), stop_token)

    def push(self, token: int, *, shown: bool = True) -> Shown:
        """Counts a token and returns the output that can be sent now. `shown` is False for an end token."""
        self.tokens += 1
        reasoning, kind = self._split.reasoning, self._split.take(token)
        if kind == "marker":
            found = merged((self._take(self._detokenizer.flush(), reasoning), self._end(reasoning)))
            self._detokenizer = self._new_detokenizer()
            self._after_marker = self._split.reasoning or not self._exact
            return found
        self.reasoning_tokens += shown and kind == "reasoning"
        return self._take(self._decoded(token) if shown else "", kind == "reasoning")

    def _decoded(self, token: int) -> str:
        """The text that a token completes. Special tokens of the markup of calls have text here, too."""
        marker = None if self._calls is None else self._calls.silent.get(token)
        if marker is None:
            return self._detokenizer.push([token])
        text = self._detokenizer.flush() + marker
        self._detokenizer = self._new_detokenizer()
        return text

    def _take(self, text: str, reasoning: bool) -> Shown:
        text = self._trimmed(text)
        if self._calls is None or (reasoning and not self._calls.in_reasoning):
            return Shown(text) if reasoning else Shown("", self._stopped(text))
        return self._sorted(self._calls.feed(text), reasoning)

    def _end(self, reasoning: bool, *, cut: bool = False) -> Shown:
        """The text and calls held back at the end of the reasoning or of the answer; no call continues after it."""
        return Shown() if self._calls is None else self._sorted(self._calls.finish(cut=cut), reasoning)

    def _sorted(self, pieces: Iterable[str | CallDelta], reasoning: bool) -> Shown:
        texts, calls = list[str](), list[CallDelta]()
        for piece in pieces:
            if self.stop_string is not None:
                break
            if isinstance(piece, str):
                texts.append(piece if reasoning else self._stopped(piece))
            else:
                texts.append("" if reasoning else self._stops.flush())  # a stop string does not span a call
                calls.append(piece)
        text = "".join(texts)
        return Shown(text, "", tuple(calls)) if reasoning else Shown("", text, tuple(calls))

    def _stopped(self, text: str) -> str:
        # Before min_tokens are reached, stop strings are ordinary text.
        return self._stops.push(text) if self.tokens >= self._min_tokens else text

    def _trimmed(self, text: str) -> str:
        """The text without the newlines that templates write after a marker."""
        if self._after_marker:
            text = text.lstrip("\n")
            self._after_marker = not text
        return text

    def replay(self, tokens: Sequence[int]) -> None:
        """Processes tokens that the client has already received, for the resulting state; their text is dropped."""
        for token in tokens:
            self.push(token)

    def flush(self, given: FinishReason) -> Shown:
        """The output that was held back, at the end of the sample. `given`: why it ended."""
        reasoning = self._split.reasoning
        parts = [self._take(self._detokenizer.flush(), reasoning), self._end(reasoning, cut=given != "stop")]
        return merged(parts if reasoning else [*parts, Shown("", self._stops.flush())])


class Clock:
    """Times of one request, in seconds since its arrival."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        """By `time.monotonic`."""
        self._scheduled: float | None = None
        self.first_token = self.last_token = 0.0

    @property
    def queue(self) -> float:
        """Seconds until the request's first step was scheduled, or until now if there is none yet."""
        return max(0.0, (time.monotonic() if self._scheduled is None else self._scheduled) - self.arrived)

    def tick(self, events: list[EngineEvent]) -> None:
        for event in events:
            if self._scheduled is None:
                self._scheduled = event.scheduled
            if event.token_id is not None:
                self.last_token = time.monotonic() - self.arrived
                self.first_token = self.first_token or self.last_token


class PromptLogprobs(Sequence[PromptLogprob]):
    """The scores of a prompt with the texts of their tokens, each made when it is read: those of a long prompt take a
    hundred megabytes together."""

    def __init__(self, scores: Sequence[PromptScore], tokenizer: Tokenizer | None) -> None:
        self._scores, self._tokenizer = scores, tokenizer

    def __len__(self) -> int:
        return len(self._scores)

    @overload
    def __getitem__(self, index: int) -> PromptLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> PromptLogprobs: ...
    def __getitem__(self, index: int | slice) -> PromptLogprob | PromptLogprobs:
        if isinstance(index, slice):
            return PromptLogprobs(self._scores[index], self._tokenizer)
        score = self._scores[index]
        return PromptLogprob(score.position, read_logprob(score.token, score.logprob, score.top, self._tokenizer))


def read_logprob(
    token: int, logprob: float, top: tuple[tuple[int, float], ...], tokenizer: Tokenizer | None
) -> Logprob:
    """The log-probabilities of a token and of the likeliest tokens at its position, with their texts."""
    texts = () if tokenizer is None else tuple(map(tokenizer.token_bytes, (token, *(other for other, _ in top))))
    return Logprob(token, logprob, top, texts)


def engine_error(event: EngineEvent) -> errors.StatusError:
    if event.error == "invalid":
        return errors.InvalidArgument(event.message, field=event.field or None)
    if event.error == "deadline":
        return errors.DeadlineExceeded(event.message, reason="DEADLINE_UNREACHABLE", metadata={"phase": "admission"})
    if event.error == "unavailable":
        return errors.Unavailable(event.message, reason="ENCODER_UNAVAILABLE", retry_after=1.0)
    if event.error == "full":
        return errors.Unavailable(event.message, reason="SHARED_MEMORY_FULL", retry_after=1.0)
    if event.error == "died":
        return errors.Unavailable(
            "the engine stopped while it processed this request", reason="ENGINE_DIED", retry_after=1.0
        )
    log.error("request %r failed in the engine: %s", event.request_id, event.message)
    return errors.Internal("the engine failed on this request; the server's log has the details")
