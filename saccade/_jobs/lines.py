"""The lines of a job's output, in OpenAI's batch format."""

from __future__ import annotations

import json
import time
from typing import Any

from saccade import errors
from saccade.errors import SaccadeError
from saccade.types import Generation, Sample, TokenLogprob

_STATUS: dict[type[SaccadeError], int] = {
    errors.InvalidArgument: 400,
    errors.FailedPrecondition: 400,
    errors.OutOfRange: 400,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.NotFound: 404,
    errors.AlreadyExists: 409,
    errors.MessageTooLarge: 413,
    errors.RateLimited: 429,
    errors.Cancelled: 499,
    errors.Unimplemented: 501,
    errors.Unavailable: 503,
    errors.Overloaded: 503,
    errors.DeadlineExceeded: 504,
}


def status_code(error: SaccadeError) -> int:
    """The HTTP status for OpenAI's format."""
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)


def is_transient(status: int) -> bool:
    """Whether a row that failed with this status should be tried again in a later run."""
    return status in (401, 403, 429, 499) or (status >= 500 and status != 501)


def output_line(row_id: str, custom_id: str, result: Generation | SaccadeError) -> bytes:
    """The line for one answer or error, with its newline."""
    if isinstance(result, SaccadeError):
        error = {"code": result.reason or type(result).__name__, "message": result.message}
        response: dict[str, Any] = {
            "status_code": status_code(result),
            "request_id": result.request_id,
            "body": {"error": {**error, "type": type(result).__name__}},
        }
    else:
        error = None
        response = {"status_code": 200, "request_id": result.request_id, "body": _completion(result)}
    row = {"id": row_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def _completion(answer: Generation) -> dict[str, Any]:
    completion_tokens = sum(sample.usage.completion_tokens for sample in answer.samples)
    return {
        "id": f"chatcmpl-{answer.request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": answer.model,
        "system_fingerprint": answer.model_version,
        "seed": answer.seed,
        "choices": [_choice(sample) for sample in answer.samples],
        "usage": {
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": answer.usage.prompt_tokens + completion_tokens,
            "completion_tokens_details": {
                "reasoning_tokens": sum(sample.usage.reasoning_tokens for sample in answer.samples)
            },
            "prompt_tokens_details": {
                "cached_tokens": answer.usage.cached_tokens,
                "image_tokens": answer.usage.image_tokens,
                "video_tokens": answer.usage.video_tokens,
            },
        },
    }


def _choice(sample: Sample) -> dict[str, Any]:
    logprobs = None if sample.logprobs is None else {"content": [_logprob(item) for item in sample.logprobs]}
    message = {"role": "assistant", "content": sample.text}
    if sample.reasoning:
        message["reasoning"] = sample.reasoning
    return {
        "index": sample.index,
        "message": message,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_match,
        "logprobs": logprobs,
    }


def _logprob(item: TokenLogprob) -> dict[str, Any]:
    top = [{**_token(t.token_id, t.token), "logprob": t.logprob} for t in item.top]
    return {**_token(item.token_id, item.token), "logprob": item.logprob, "top_logprobs": top}


def _token(token_id: int, text: bytes) -> dict[str, Any]:
    """A token may end within a character, so its text counts in bytes; one without any is named by its id."""
    if not text:
        return {"token": f"token_id:{token_id}", "bytes": None}
    return {"token": text.decode("utf-8", "replace"), "bytes": list(text)}
