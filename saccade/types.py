"""What the clients return: plain frozen dataclasses, so that they can be compared, copied and pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Usage:
    """Token counts of one sample.

    `prompt_tokens` counts the whole prompt, its `image_tokens` among them; `cached_tokens` of these came from a cache.
    `completion_tokens` counts what was generated, `continued_token_ids` included. Times are seconds after admission, or
    None where the server does not measure them.
    """

    prompt_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_time: float | None = field(default=None, compare=False)
    time_to_first_token: float | None = field(default=None, compare=False)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class TopLogprob(NamedTuple):
    """One of the likeliest tokens in a place."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """The natural log-probability of one generated token, before temperature, filters, penalties and biases.

    `top` holds the k likeliest tokens in its place, best first; the generated one need not be among them.
    """

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer. Text is whole characters only, so a delta can hold ids and no text yet."""

    text: str
    token_ids: list[int]
    index: int = 0
    """Which of the n samples this belongs to."""
    logprobs: list[TokenLogprob] | None = None
    sequence: int = 0
    """Counts this sample's deltas from 0."""


@dataclass(frozen=True)
class Sample:
    """One of the n answers of a request."""

    text: str
    token_ids: list[int]
    finish_reason: str
    """"stop", "length" or "aborted"."""
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    index: int = 0
    stop_match: str | int | None = None
    """The stop string or token id of the request that ended this sample, if one did."""


@dataclass(frozen=True)
class Generation:
    """A whole answer. `samples` holds all n; the fields before it are those of the first."""

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    logprobs: list[TokenLogprob] | None
    samples: list[Sample]
    request_id: str = field(default="", compare=False)
    model: str = ""
    model_version: str = ""
    seed: int = field(default=0, compare=False)
    """The seed used, whether given or drawn by the server: with it the same request gives the same answer."""
