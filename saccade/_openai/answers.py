"""Answers in OpenAI's format: the bodies of chat completions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from saccade.types import Generation, MediaLayout, Sample, TokenLogprob, Usage


def completion(answer: Generation) -> dict[str, Any]:
    """The body of a chat completion that is not streamed. It has token ids if the answer has those of the prompt."""
    ids = answer.prompt_token_ids
    return {
        "id": f"chatcmpl-{answer.request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": answer.model,
        "system_fingerprint": answer.model_version,
        "seed": answer.seed,
        "choices": [
            _choice(sample) | ({} if ids is None else {"token_ids": sample.token_ids}) for sample in answer.samples
        ],
        **({} if ids is None else {"prompt_token_ids": ids}),
        "usage": usage_object([sample.usage for sample in answer.samples]),
    }


def usage_object(samples: list[Usage]) -> dict[str, Any]:
    """OpenAI's usage of a request, for the usages of its samples."""
    first = samples[0]
    generated = sum(usage.completion_tokens for usage in samples)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": first.prompt_tokens + generated,
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in samples)},
        "prompt_tokens_details": {
            "cached_tokens": first.cached_tokens,
            "image_tokens": first.image_tokens,
            "video_tokens": first.video_tokens,
        },
    }


def extension(answer: Generation) -> dict[str, Any]:
    """The object `saccade`: values for which OpenAI's format has no field. Times are in seconds since admission."""
    usage = answer.usage
    return {
        "request_id": answer.request_id,
        "model_version": answer.model_version,
        "seed": answer.seed,
        "cached_tokens": usage.cached_tokens,
        "image_tokens": usage.image_tokens,
        "video_tokens": usage.video_tokens,
        "video_frames": usage.video_frames,
        "reasoning_tokens": usage.reasoning_tokens,
        "queue_seconds": usage.queue_time,
        "first_token_seconds": usage.time_to_first_token,
        "last_token_seconds": usage.time_to_last_token,
        "media": media_objects(answer.media),
    }


def media_objects(layouts: Iterable[MediaLayout]) -> list[dict[str, int]]:
    """How each image and clip was divided, in the order of the prompt; the keys are those of `MediaLayout` in gRPC."""
    return [
        {
            "grid_rows": item.grid[0],
            "grid_columns": item.grid[1],
            "merge_size": item.merge_size,
            "tokens": item.tokens,
            "slice_rows": item.slices[0],
            "slice_columns": item.slices[1],
            "slice_grid_rows": item.slice_grid[0],
            "slice_grid_columns": item.slice_grid[1],
            "frames": item.frames,
            "slices_first": item.slices_first,
        }
        for item in layouts
    ]


def _choice(sample: Sample) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": sample.text}
    if sample.reasoning:
        message |= {"reasoning": sample.reasoning, "reasoning_content": sample.reasoning}
    if calls := sample.tool_calls:
        message["content"] = sample.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return {
        "index": sample.index,
        "message": message,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_match,
        "logprobs": None if sample.logprobs is None else logprobs_object(sample.logprobs),
    }


def logprobs_object(tokens: list[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a choice of a chat completion."""
    return {"content": [_logprob(item) for item in tokens], "refusal": None}


def _logprob(item: TokenLogprob) -> dict[str, Any]:
    top = [{**_token(t.token_id, t.token), "logprob": t.logprob} for t in item.top]
    return {**_token(item.token_id, item.token), "logprob": item.logprob, "top_logprobs": top}


def token_text(token_id: int, text: bytes) -> str:
    """A token as a string; a token without text is named by its id."""
    return text.decode("utf-8", "replace") if text else f"token_id:{token_id}"


def _token(token_id: int, text: bytes) -> dict[str, Any]:
    """A token may begin or end within a character, so its bytes are given in addition to its text."""
    return {"token": token_text(token_id, text), "bytes": list(text) if text else None}
