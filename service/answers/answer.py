"""One answer while it is generated: the request to the engine, and the conversion of the engine's events for the
client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from decoder.sampling import SamplingParams
from service.answers.prompts import Prompt
from service.answers.reasoning import ReasoningSplit, phase_of, with_reasoning
from service.answers.relay import Clock, SampleState, Shown, engine_error, merged, read_logprob
from service.answers.tool_calls import CallSplit, silent_markers, tool_use
from service.common.types import (
    ChatInput,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateSpec,
    Logprob,
    PromptLogprob,
    Started,
    Usage,
)
from service.engine.types import EngineEvent, EngineInfo, EngineRequest
from service.model.assets import ModelAssets


def needed_at_end(spec: GenerateSpec) -> bool:
    """Whether an answer's tokens are needed only at its end. They are needed earlier if the caller streams them, or if
    the frontend looks in the text for a stop string or the end of a tool call, where it has to stop the engine."""
    return spec.whole and not spec.stop and tool_use(spec) is None


def without_prompt(spec: GenerateSpec, info: EngineInfo) -> list[Event]:
    """The answer to a request that was cancelled before it had a prompt."""
    nothing = Usage(0, 0, 0, 0, 0.0, 0.0)
    started = Started(spec.request_id, 0, 0, info.model, info.revision, 0)
    return [started, *(Finished(index, "aborted", nothing) for index in range(spec.n))]


class Answer:
    """All samples of one request."""

    def __init__(
        self, spec: GenerateSpec, prompt: Prompt, params: SamplingParams, assets: ModelAssets, info: EngineInfo,
        arrived: float,
    ) -> None:  # fmt: skip
        """`arrived`: when the request arrived, by `time.monotonic`."""
        self.prompt_scores: Sequence[PromptLogprob] = ()
        self._spec, self._prompt, self._params, self._assets, self._info = spec, prompt, params, assets, info
        self._clock = Clock(arrived)
        continued = spec.input.continued_text if isinstance(spec.input, ChatInput) else ""
        self._phase = phase_of(prompt.ids, assets, continued=bool(continued.strip()))
        use = tool_use(spec)
        self._tools = None if use is None or use.choice == "none" else use
        """None if there can be no tool calls."""
        self._samples = [self._new_sample(index) for index in range(spec.n)]

    @property
    def done(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.done for sample in self._samples)

    def is_done(self, index: int) -> bool:
        """Whether one sample has ended."""
        return self._samples[index].done

    def started(self) -> Started:
        prompt, info = self._prompt, self._info
        return Started(
            self._spec.request_id, len(prompt.ids), prompt.image_tokens, info.model, info.revision, self._params.seed,
            prompt.video_tokens, prompt.media, prompt.narrow_ids if self._spec.return_prompt_ids else (),
        )  # fmt: skip

    def request(self, names: list[str], salt: bytes, timeout: float | None) -> EngineRequest:
        """The request to the engine, for samples with these names. It owns the patches of the prompt's images."""
        prompt = self._prompt
        return EngineRequest(
            names[0],
            prompt.ids,
            self._params,
            prompt.take_images(),
            self._spec.continued,
            self._eos,
            priority=self._spec.priority,
            salt=salt,
            timeout=self._left(timeout),
            checkpoint_at=(prompt.system_end,) if prompt.system_end else (),
            siblings=tuple(names[1:]),
            constraint=with_reasoning(self._spec, self._phase, self._assets),
            whole=needed_at_end(self._spec),
        )

    def prompt_request(self, name: str, salt: bytes, timeout: float | None) -> EngineRequest:
        """A request to the engine for the log-probabilities of the prompt alone; its only event has them."""
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=self._params.prompt_logprobs)
        return EngineRequest(
            name, self._prompt.ids, sampling, self._prompt.take_images(), priority=self._spec.priority, salt=salt,
            timeout=self._left(timeout),
        )  # fmt: skip

    def _left(self, timeout: float | None) -> float | None:
        """The seconds that are left of a timeout that began when the request arrived."""
        return None if timeout is None else timeout - (time.monotonic() - self._clock.arrived)

    def replay(self) -> None:
        """Brings the sample to the state after the tokens that the client has already received."""
        continued, end = self._spec.continued, self._end_token
        self._samples[0].replay(continued if end is None else continued[:-1])
        if end is not None:
            self._samples[0].push(end, shown=False)

    def already_ended(self) -> Finished | None:
        """The last event of an answer that is to be continued but has already ended; None if it can continue."""
        continued, params, sample = self._spec.continued, self._params, self._samples[0]
        if not continued:
            return None
        full = params.max_tokens is not None and len(continued) >= params.max_tokens
        if not sample.over and self._end_token is None and not full:
            return None
        given: FinishReason = "length" if self._end_token is None else "stop"
        sample.flush(given)  # the client received the text that was held back with the last token
        return self._finish(0, *sample.end(given, self._end_token))

    @property
    def _end_token(self) -> int | None:
        """The last of the continued tokens, if it ends the answer."""
        continued, params = self._spec.continued, self._params
        if len(continued) > params.min_tokens and continued[-1] in (self._eos | params.stop_token_ids):
            return continued[-1]
        return None

    def tick(self, events: list[EngineEvent]) -> None:
        """Records the times of events that have arrived."""
        self._clock.tick(events)

    def relay(self, index: int, events: list[EngineEvent]) -> tuple[list[Delta], Finished | None, bool]:
        """Converts events of one sample to (deltas, end, whether the engine may still be generating and has to be told
        to abort). Raises StatusError for an error event."""
        sample = self._samples[index]
        deltas: list[Delta] = []
        pieces: list[Shown] = []
        ids: list[int] = []
        logprobs: list[Logprob] = []
        reason: FinishReason | None = None
        stop_token: int | None = None
        for event in events:
            if event.error is not None:
                raise engine_error(event)
            sample.cached_tokens = max(sample.cached_tokens, event.cached_tokens)
            if event.token_id is not None:
                piece = sample.push(event.token_id, shown=event.stop_token is None)
                if pieces and self._apart(pieces, piece):
                    deltas += self._delta(index, merged(pieces), ids, logprobs)
                    pieces, ids, logprobs = [], [], []
                ids.append(event.token_id)
                pieces.append(piece)
                if event.logprob is not None:
                    logprobs.append(read_logprob(event.token_id, event.logprob, event.top, self._assets.tokenizer))
            if sample.over:
                reason = sample.reason("stop")
                break
            if event.finish_reason is not None:
                given = cast(FinishReason, event.finish_reason)
                pieces.append(sample.flush(given))
                reason, stop_token = sample.end(given, event.stop_token)
        deltas += self._delta(index, merged(pieces), ids, logprobs)
        if reason is None:
            return deltas, None, False
        return deltas, self._finish(index, reason, stop_token), sample.over or reason == "aborted"

    def _apart(self, before: list[Shown], piece: Shown) -> bool:
        """Whether a piece needs another delta than those before it. A delta has text before the calls that begin in it.
        With log-probabilities, each token of an answer that may have calls has a delta, which shows whether it is
        text."""
        if self._tools is None:
            return False
        written = bool(piece.text or piece.reasoning)
        return self._params.logprobs is not None or (written and any(shown.calls for shown in before))

    def _delta(self, index: int, shown: Shown, ids: list[int], logprobs: list[Logprob]) -> list[Delta]:
        if not any(shown) and not ids:
            return []
        sample = self._samples[index]
        cached = 0 if sample.sequence else sample.cached_tokens
        delta = Delta(
            index, shown.text, tuple(ids), tuple(logprobs), sample.sequence, shown.reasoning, shown.calls, cached
        )
        sample.sequence += 1
        return [delta]

    def _finish(self, index: int, reason: FinishReason, stop_token: int | None = None) -> Finished:
        sample, prompt, clock = self._samples[index], self._prompt, self._clock
        sample.done = True
        usage = Usage(
            len(prompt.ids), prompt.image_tokens, sample.cached_tokens, sample.tokens, clock.queue, clock.first_token,
            prompt.video_tokens, prompt.frames, sample.reasoning_tokens, clock.last_token,
        )  # fmt: skip
        scores = self.prompt_scores if index == 0 else ()
        asked = stop_token if stop_token in self._params.stop_token_ids else None  # not the model's own end
        return Finished(index, reason, usage, sample.stop_string, asked, scores)

    def _new_sample(self, index: int) -> SampleState:
        spec, assets = self._spec, self._assets
        markup, calls = assets.tool_markup, None
        text_format = None if spec.constraint is None else spec.constraint.format
        or_format = text_format is not None and text_format.calls_or_answer
        if self._tools is not None and markup is not None:
            silent, name = silent_markers(markup, assets), f"{spec.request_id}/{index}"
            calls = CallSplit(markup, self._tools, silent, name, or_format=or_format)
        exact = or_format or (text_format is not None and text_format.kind != "tool_calls")
        split = ReasoningSplit(assets.reasoning, self._phase)
        return SampleState(
            assets.tokenizer, spec.stop, self._params.min_tokens, split, exact=exact, calls=calls,
            special=spec.show_special,
        )  # fmt: skip

    @property
    def _eos(self) -> frozenset[int]:
        return frozenset() if self._params.ignore_eos else self._assets.eos_token_ids
