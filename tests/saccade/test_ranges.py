"""The client accepts exactly the sampling parameters that the server accepts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import saccade
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
        except (errors.InvalidArgument, StatusError, ValueError):  # the first: no message can contain it
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
        ({"top_p": 1.0000001}, r"top_p is 1\.0000001; it must be above 0 and at most 1"),
        ({"temperature": 1000000.5}, r"temperature is 1000000\.5; it must be from 0 to 1e\+06"),
        ({"n": 65}, "n is 65; it must be from 1 to 64"),
        ({"priority": 2**31}, "priority is 2147483648; it must be from -2147483648 to 2147483647"),
        ({"priority": -(2**31) - 1}, "priority is -2147483649; it must be from -2147483648 to 2147483647"),
        ({"priority": 1.5}, "priority: expected an integer, got 1.5"),
        ({"request_id": "\ud800"}, "request_id: half of a surrogate pair, at character 0"),
        ({"model": 3}, "model: expected a string, got int"),
        ({"stop": ["x" * 257]}, r"stop\[0\] has 257 characters; it must have from 1 to 256"),
    ],
)
def test_what_is_refused_is_named_with_both_numbers(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        build_request("?", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_errors": 2**70}, f"max_errors is {2**70}; it must be from 0 to {2**63 - 1}"),
        ({"max_errors": -1}, "max_errors is -1; it must be from 0"),
        ({"max_errors": "1"}, "max_errors: expected an int"),
        ({"metadata": {"a": 1}}, r"metadata\['a'\]: expected a string, got int"),
        ({"metadata": {1: "a"}}, "metadata: a key: expected a string, got int"),
        ({"metadata": {"a": "\ud800"}}, r"metadata\['a'\]: half of a surrogate pair"),
        ({"metadata": "ab"}, "metadata: expected a mapping from strings to strings, got str"),
        ({"request_id": "\ud800"}, "request_id: half of a surrogate pair"),
        ({"input_name": 3}, "input_name: expected a str"),
        ({"source": 3}, "source: expected a path or bytes, got int"),
    ],
)  # fmt: skip
def test_what_no_batch_takes_is_named(client: saccade.Client, options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        client.batches.create(**{"source": b"{}", **options})


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, name: client.batches.get(name), lambda client, name: client.batches.cancel(name),
        lambda client, name: client.batches.delete(name), lambda client, name: client.batches.wait(name),
        lambda client, name: client.batches.download(name, "unwritten"), lambda client, name: client.media.get(name),
        lambda client, name: client.media.delete(name), lambda client, name: client.get_model(name),
        lambda client, name: client.tokenize("a", model=name),
        lambda client, name: client.embed_image(b"a", model=name),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("name", "words"), [(3, "expected a string, got int"), ("\ud800", "half of a surrogate pair")])
def test_names_are_strings_that_a_message_can_hold(
    client: saccade.Client, ask: Callable[[saccade.Client, Any], Any], name: Any, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.InvalidArgument, match=f"(batch_id|media_id|name|model): {words}"):
        ask(client, name)
    assert not list(tmp_path.iterdir())
