"""The client accepts exactly the sampling parameters that the server accepts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from decoder.sampling import MAX_BIAS, MAX_REPETITION, MAX_TEMPERATURE, MIN_REPETITION, SamplingParams
from saccade import errors
from saccade._core import requests
from saccade._core.requests import build_request
from service.answers import bounds
from service.answers.convert import MAX_REQUEST_ID, spec_from_proto
from service.common.errors import StatusError

WHOLE = (-1, 0, 1, 2, 2**31 - 1, 2**31)
EDGES: dict[str, tuple[float, ...]] = {
    "max_tokens": WHOLE, "min_tokens": WHOLE, "top_k": WHOLE, "n": (*WHOLE, bounds.MAX_SAMPLES),
    "logprobs": (*WHOLE, bounds.MAX_LOGPROBS), "prompt_logprobs": (*WHOLE, bounds.MAX_LOGPROBS),
    "seed": (-1, 0, 2**64 - 1, 2**64), "temperature": (0.0, MAX_TEMPERATURE), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0),
    "repetition_penalty": (MIN_REPETITION, MAX_REPETITION), "presence_penalty": (-MAX_BIAS, MAX_BIAS),
    "frequency_penalty": (-MAX_BIAS, MAX_BIAS),
}  # fmt: skip


def beside(edge: float) -> list[float]:
    if isinstance(edge, int):
        return [edge - 1, edge, edge + 1]
    return [math.nextafter(edge, -math.inf), edge, math.nextafter(edge, math.inf), math.nan, math.inf]


VALUES = [(name, value) for name, edges in EDGES.items() for edge in edges for value in beside(edge)]
LISTS: list[dict[str, Any]] = [
    *({"stop": ["x"] * count} for count in (0, 1, bounds.MAX_STOP_STRINGS, bounds.MAX_STOP_STRINGS + 1)),
    *({"stop": ["é" * size]} for size in (0, 1, bounds.MAX_STOP_LENGTH, bounds.MAX_STOP_LENGTH + 1)),
    *({"logit_bias": {0: bias}} for edge in (-MAX_BIAS, MAX_BIAS) for bias in beside(edge)),
    *({"logit_bias": {token: 1.0}} for token in (-1, 0)),
    *({"stop_token_ids": [token]} for token in (-1, 0)),
    *({"request_id": "r" * size} for size in (1, MAX_REQUEST_ID, MAX_REQUEST_ID + 1)),
    *({"max_tokens": most, "min_tokens": least} for most, least in ((3, 2), (3, 3), (3, 4))),
    *({"continued_token_ids": [5], "n": n} for n in (1, 2)),
]  # fmt: skip


def the_client_takes(options: dict[str, Any]) -> bool:
    try:
        build_request("?", **options)
    except errors.InvalidArgument as error:
        assert next(iter(options)) in str(error) or len(options) > 1
        return False
    return True


def the_server_takes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(requests, "check_request", lambda request: None)
        try:
            spec = spec_from_proto(build_request("?", **options))
            bounds.check_counts(spec, bounds.FrontendLimits())
            SamplingParams(**spec.sampling)
        except (errors.InvalidArgument, StatusError, ValueError):  # the first: no message can hold it
            return False
    return True


@pytest.mark.parametrize(
    "options", [*({name: value} for name, value in VALUES), *LISTS], ids=lambda given: f"{given!s:.60}"
)
def test_what_the_client_takes_is_what_the_server_takes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert the_client_takes(options) == the_server_takes(options, monkeypatch)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, r"temperature is -1; it must be from 0 to 1e\+06"),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1"),
        ({"n": 65}, "n is 65; it must be from 1 to 64"),
        ({"stop": ["x" * 257]}, r"stop\[0\] has 257 characters; it must have from 1 to 256"),
    ],
)
def test_what_is_refused_is_named_with_both_numbers(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        build_request("?", **options)
