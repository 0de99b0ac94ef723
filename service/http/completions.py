"""`/v1/completions`: prompts as text or token ids, without the chat template."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from saccade._core.requests import build_request
from saccade._core.results import generation_from
from saccade._openai.answers import extension, token_text, usage_object
from saccade._openai.chat import sampling_options
from saccade._openai.completion_schema import Completion, prompt_list
from saccade._openai.fields import prompt_rules
from saccade._openai.problems import validated
from saccade.types import Delta, Generation, Sample, TokenLogprob
from saccade.v1 import inference_pb2, model_pb2
from service.http.call import HttpCall, beside
from service.http.chunks import DONE, ChunkEvents
from service.http.json_text import compact, quoted
from service.http.streams import Asked, stream_several
from service.http.upstream import Caller, all_of


async def completions(call: HttpCall) -> None:
    """Answers a completion request, as a whole or as a stream of events."""
    call.fields = prompt_rules("prompt")
    body = validated(Completion, await call.json())
    caller, prompts = call.caller(), prompt_list(body.prompt)
    if body.stream:
        await _stream(call, caller, body, prompts)
        return

    async def generate(index: int) -> tuple[Generation, Echo]:
        request_id = call.id_of_prompt(index, len(prompts))
        request = await beside(call.held, _request, call, body, prompts[index], request_id)
        response = await caller.call("inference", "Generate", request)
        echo = await _echo(caller, request, prompts[index]) if body.echo else Echo()
        return generation_from(response, request.sampling), echo

    async with call.connected(), caller.as_one(len(prompts) > 1 or bool(body.echo)):
        answered = await all_of(generate, range(len(prompts)))
    answers = [answer for answer, _ in answered]
    choices = [
        _choice(body, i * (body.n or 1) + sample.index, sample, answer, echo)
        for i, (answer, echo) in enumerate(answered)
        for sample in answer.samples
    ]
    usages = [_usage(body, answer) for answer in answers]
    await call.respond({
        "id": f"cmpl-{call.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": answers[0].model,
        "system_fingerprint": answers[0].model_version,
        "choices": choices,
        "usage": _summed(usages),
        "saccade": extension(answers[0]),
    })  # fmt: skip


async def _stream(call: HttpCall, caller: Caller, body: Completion, prompts: Sequence[str | list[int]]) -> None:
    """Sends all answers as one stream."""
    answers: dict[int, Generation] = {}

    async def ask(index: int) -> Asked:
        request_id = call.id_of_prompt(index, len(prompts))
        request = await beside(call.held, _request, call, body, prompts[index], request_id)
        echo = (await _echo(caller, request, prompts[index])).text if body.echo else ""
        return request, CompletionEvents(call, body, echo, index, len(prompts), answers)

    async with call.connected(), caller.as_one(len(prompts) > 1 or bool(body.echo)):
        await stream_several(call, caller, ask, len(prompts))


def _request(
    call: HttpCall, body: Completion, prompt: str | list[int], request_id: str
) -> inference_pb2.GenerateRequest:
    options = sampling_options(body)
    options["max_tokens"] = body.max_tokens or 1
    options["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        options["prompt_logprobs"] = body.logprobs
    if options["priority"] is None:
        options["priority"] = call.priority
    request = build_request(prompt, raw=isinstance(prompt, str), request_id=request_id, **options)
    if isinstance(prompt, str):
        request.prompt.add_special_tokens = body.add_special_tokens is not False
    return request


@dataclass(frozen=True)
class Echo:
    """A prompt whose text begins the answer."""

    text: str = ""
    ids: Sequence[int] = ()
    tokens: Sequence[bytes] = ()
    """The bytes of each token."""


async def _echo(caller: Caller, request: inference_pb2.GenerateRequest, prompt: str | list[int]) -> Echo:
    if isinstance(prompt, str):
        asked = inference_pb2.TokenizeRequest(model=request.model, prompt=request.prompt)
        ids = list((await caller.call("inference", "Tokenize", asked)).token_ids)
    else:
        ids = prompt
    told = await caller.call("model", "Detokenize", model_pb2.DetokenizeRequest(model=request.model, token_ids=ids))
    return Echo(prompt if isinstance(prompt, str) else told.text, ids, told.tokens)


def _choice(body: Completion, index: int, sample: Sample, answer: Generation, echo: Echo) -> dict[str, Any]:
    generated = "" if body.max_tokens == 0 else sample.reasoning + sample.text
    logprobs = None
    if body.logprobs is not None:
        scored: list[Scored] = []
        if body.echo:
            scores = answer.prompt_logprobs or [None] * len(echo.ids)
            texts = [piece.decode("utf-8", "replace") for piece in echo.tokens]
            scored += zip(echo.ids, texts, scores, strict=True)
        if body.max_tokens != 0:
            scored += _scored(sample.logprobs or ())
        logprobs = _logprobs(scored, body)
    return {
        "index": index,
        "text": echo.text + generated,
        "logprobs": logprobs,
        **_ending(body, sample),
        **(_token_ids(body, sample, answer) if body.return_token_ids else {}),
    }


def _token_ids(body: Completion, sample: Sample, answer: Generation) -> dict[str, Any]:
    """With `max_tokens` 0, the one token that was generated does not count."""
    return {
        "token_ids": [] if body.max_tokens == 0 else sample.token_ids,
        "prompt_token_ids": answer.prompt_token_ids,
    }


def _ending(body: Completion, sample: Sample) -> dict[str, Any]:
    """Why a choice ends. With `max_tokens` 0 it ends by length, before the one token that was generated."""
    if body.max_tokens == 0:
        return {"finish_reason": "length", "stop_reason": None}
    return {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_match}


def _usage(body: Completion, answer: Generation) -> dict[str, Any]:
    """Usage of all samples. With `max_tokens` 0, the one token that was generated does not count."""
    usages = [sample.usage for sample in answer.samples]
    if body.max_tokens == 0:
        usages = [replace(usage, completion_tokens=0, reasoning_tokens=0) for usage in usages]
    return usage_object(usages)


Scored: TypeAlias = tuple[int, str, TokenLogprob | None]
"""The id, text and log-probability of a token; the first token of a prompt has no log-probability."""


def _scored(tokens: Sequence[TokenLogprob]) -> list[Scored]:
    return [(item.token_id, token_text(item.token_id, item.token), item) for item in tokens]


def _logprobs(scored: Sequence[Scored], body: Completion) -> dict[str, Any]:
    """OpenAI's older form of log-probabilities, which consists of parallel lists."""
    offsets, at = [], 0
    for _, text, _ in scored:
        offsets.append(at)
        at += len(text)
    by_id = bool(body.return_tokens_as_token_ids)
    return {
        "tokens": [token_text(token_id, b"") if by_id else text for token_id, text, _ in scored],
        "token_logprobs": [None if score is None else score.logprob for *_, score in scored],
        "top_logprobs": [None if score is None else _top(score, by_id) for *_, score in scored]
        if body.logprobs
        else None,
        "text_offset": offsets,
    }


def _top(score: TokenLogprob, by_id: bool) -> dict[str, float]:
    """Log-probabilities of the likeliest tokens and of the token itself, by their text or id; of tokens with the same
    text, that of the likeliest."""
    found: dict[str, float] = {}
    for item in score.top:
        found.setdefault(token_text(item.token_id, b"" if by_id else item.token), item.logprob)
    found.setdefault(token_text(score.token_id, b"" if by_id else score.token), score.logprob)
    return found


def _summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The usage of a request with several prompts."""
    total: dict[str, Any] = {}
    for usage in usages:
        for key, value in usage.items():
            if isinstance(value, dict):
                total[key] = _summed([total[key], value]) if key in total else value
            else:
                total[key] = total.get(key, 0) + value
    return total


class CompletionEvents(ChunkEvents):
    """`text_completion` chunks."""

    def __init__(
        self, call: HttpCall, body: Completion, echo: str, place: int, prompts: int, answers: dict[int, Generation]
    ) -> None:  # fmt: skip
        """`place`: of the prompt among the `prompts`. `answers`: to those whose stream has ended, to which this one is
        added; the last one ends the request's stream."""
        super().__init__(f"cmpl-{call.request_id}", "text_completion", body, first=place * (body.n or 1))
        self._body, self._echo = body, echo
        self._place, self._prompts, self._answers = place, prompts, answers
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        """Choices that have had a chunk."""

    def begin(self, started: inference_pb2.Started) -> bytes:
        super().begin(started)
        if not self._echo:
            return b""
        return b"".join(self._chunk(i, quoted(self._echo), "null") for i in range(self._body.n or 1))

    def _chunk(
        self, index: int, text: str, logprobs: str, ending: str = '"finish_reason":null', ids: Sequence[int] = ()
    ) -> bytes:
        first = self.prompt_ids if index not in self._begun else ""
        self._begun.add(index)
        return self.choice(index, f'"text":{text},"logprobs":{logprobs},{ending}{first}', ids)

    def piece(self, delta: Delta) -> bytes:
        if self._body.max_tokens != 0:
            self.count(delta)
        text = delta.reasoning + delta.text
        if self._body.max_tokens == 0 or not (text or delta.logprobs or (self.ids_asked and delta.token_ids)):
            return b""
        logprobs = "null"
        if delta.logprobs:
            scored = _scored(delta.logprobs)
            made = _logprobs(scored, self._body)
            at = self._offsets.get(delta.index, 0)
            made["text_offset"] = [at + offset for offset in made["text_offset"]]
            self._offsets[delta.index] = at + sum(len(text) for _, text, _ in scored)
            logprobs = compact(made)
        return self._chunk(delta.index, quoted(text), logprobs, ids=delta.token_ids)

    def end(self, answer: Generation) -> bytes:
        chunks = [self._chunk(s.index, '""', "null", compact(_ending(self._body, s))[1:-1]) for s in answer.samples]
        self._answers[self._place] = answer
        if len(self._answers) < self._prompts:
            return b"".join(chunks)
        if self.usage_asked:
            answers = [self._answers[place] for place in range(self._prompts)]
            usage = _summed([_usage(self._body, each) for each in answers])
            chunks.append(self.without_choices(usage, extension(answers[0])))
        return b"".join([*chunks, DONE])
