"""The state of an answer while it is generated: text of each sample, times of the request, errors of the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from service.answers.reasoning import ReasoningSplit
from service.answers.stops import StopMatcher
from service.common import errors
from service.common.types import Logprob, PromptLogprob
from service.engine.types import EngineEvent
from service.model.tokenizer import Detokenizer, Tokenizer

log = logging.getLogger(__name__)


class SampleState:
    """One sample that is being generated."""

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str], min_tokens: int, split: ReasoningSplit, *,
        exact: bool = False,
    ) -> None:  # fmt: skip
        """`exact`: newlines after the closing marker of reasoning belong to the text, not to the marker."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._split, self._exact = split, exact
        self._after_marker = split.reasoning
        """Whether nothing but newlines has followed the last marker."""
        self.tokens = self.reasoning_tokens = 0
        self.sequence = 0
        self.cached_tokens = 0
        self.done = False

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def push(self, token: int, *, shown: bool = True) -> tuple[str, str]:
        """Counts a token and returns the reasoning and the text that became certain. `shown` is False for an end
        token."""
        self.tokens += 1
        reasoning, kind = self._split.reasoning, self._split.take(token)
        if kind == "marker":
            text = self._trimmed(self._detokenizer.flush())
            self._detokenizer = Detokenizer(self._tokenizer)
            self._after_marker = self._split.reasoning or not self._exact
            return (text, "") if reasoning else ("", text)
        text = self._trimmed(self._detokenizer.push([token])) if shown else ""
        if kind == "reasoning":
            self.reasoning_tokens += shown
            return text, ""
        # Before min_tokens are reached, stop strings are ordinary text.
        return "", self._stops.push(text) if self.tokens >= self._min_tokens else text

    def _trimmed(self, text: str) -> str:
        """The text without the newlines that templates write after a marker."""
        if self._after_marker:
            text = text.lstrip("\n")
            self._after_marker = not text
        return text

    def replay(self, tokens: Sequence[int]) -> None:
        """Replays tokens that the client has already received: only the detokenizer's state is needed."""
        for token in tokens:
            self.push(token)

    def flush(self) -> tuple[str, str]:
        """The reasoning and the text that were held back."""
        text = self._trimmed(self._detokenizer.flush())
        if self._split.reasoning:
            return text, ""
        return "", self._stops.push(text) + self._stops.flush()


class Clock:
    """Times of one request, in seconds since its arrival."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._scheduled: float | None = None
        self.first_token = 0.0

    @property
    def queue(self) -> float:
        """Seconds until its first step was scheduled; without one, until now."""
        return max(0.0, (time.monotonic() if self._scheduled is None else self._scheduled) - self._arrived)

    def tick(self, events: list[EngineEvent]) -> None:
        for event in events:
            if self._scheduled is None:
                self._scheduled = event.scheduled
            if not self.first_token and event.token_id is not None:
                self.first_token = time.monotonic() - self._arrived


def read_prompt_scores(event: EngineEvent, tokenizer: Tokenizer | None) -> list[PromptLogprob]:
    return [
        PromptLogprob(score.position, read_logprob(score.token, score.logprob, score.top, tokenizer))
        for score in event.prompt_scores
    ]


def read_logprob(
    token: int, logprob: float, top: tuple[tuple[int, float], ...], tokenizer: Tokenizer | None
) -> Logprob:
    """A token's log-probability and those of the likeliest ones in its place, with their texts."""
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
            "the engine stopped while it worked on this request", reason="ENGINE_DIED", retry_after=1.0
        )
    log.error("request %s failed in the engine: %s", event.request_id, event.message)
    return errors.Internal("the engine failed on this request; the server's log has the details")
