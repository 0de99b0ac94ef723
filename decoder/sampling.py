"""The parameters of one request that determine how its tokens are drawn.

The draw itself is in `kernels.sample`; `decoder.sampler` holds the state that penalties need.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

MAX_LOGPROBS = 1024
MAX_TOP_K = (1 << 31) - 1
SEED_LIMIT = 1 << 64
MIN_TEMPERATURE = 1e-5
"""Smaller temperatures are greedy."""
MAX_TEMPERATURE = 1e6
MAX_BIAS = 1e10
"""Largest magnitude of a bias or an additive penalty."""
MIN_REPETITION, MAX_REPETITION = 1e-3, 1e3
"""With these bounds, logits of up to 1e20 stay in float32's range on the way to a probability, so that all back ends,
which compute in float32, draw the same token.
"""


class Choice(NamedTuple):
    """One drawn token; `logprob` and `top` are those of the raw distribution, if requested."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. Raises `ValueError` with the field, its value and its range.

    Order of application to the logits: `logit_bias`, repetition, frequency and presence penalties, the `min_tokens`
    mask; then `temperature`, `top_k`, `top_p`, `min_p`; then a uniform random number selects the token. `temperature` 0
    takes the largest logit after the penalties (the lowest id among equals); temperatures below `MIN_TEMPERATURE`
    become 0.
    """

    max_tokens: int | None = None
    """Largest number of output tokens; `None`: as many as the decoder's `max_len` allows."""
    min_tokens: int = 0
    """Before this many output tokens, neither end tokens nor stop tokens can be drawn."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Keeps the smallest set of likeliest tokens whose probability reaches this; 1 = off."""
    top_k: int = 0
    """Keeps this many of the likeliest tokens; 0 = off, and so is -1, which becomes 0."""
    min_p: float = 0.0
    """Drops tokens whose probability is below this share of the likeliest token's; 0 = off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of each token once for each time that it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number that is added to its logit."""
    seed: int = 0
    """64-bit key of the counter-based generator: the same seed gives the same draws at the same positions."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    """`None`: no log-probabilities; k: that of the drawn token, and the k likeliest tokens with theirs."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The whole prompt is then computed, whatever the cache holds.
    """

    def __post_init__(self) -> None:
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        self._check("min_tokens", self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        self._check_range("temperature", 0.0, MAX_TEMPERATURE)
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        self._check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._check_range("top_k", -1, MAX_TOP_K)
        if self.top_k == -1:  # as other servers and their files write it
            object.__setattr__(self, "top_k", 0)
        self._check_range("min_p", 0, 1)
        self._check_range("repetition_penalty", MIN_REPETITION, MAX_REPETITION)
        self._check_range("presence_penalty", -MAX_BIAS, MAX_BIAS)
        self._check_range("frequency_penalty", -MAX_BIAS, MAX_BIAS)
        self._check("seed", 0 <= self.seed < SEED_LIMIT, f"from 0 to {SEED_LIMIT - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_range(name, 0, MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            if not (token >= 0 and -MAX_BIAS <= bias <= MAX_BIAS):
                allowed = f"ids are at least 0, biases from {-MAX_BIAS:g} to {MAX_BIAS:g}"
                raise ValueError(f"logit_bias of token {token} is {bias}; {allowed}")
        for token in self.stop_token_ids:
            if token < 0:
                raise ValueError(f"stop_token_ids holds {token}; ids are at least 0")
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by its arguments, because the read-only view of `logit_bias` cannot be pickled."""
        return type(self), tuple(
            dict(value) if isinstance(value, MappingProxyType) else value
            for value in (getattr(self, f.name) for f in fields(self))
        )

    def _check(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{name} must be {allowed}, not {getattr(self, name)}")

    def _check_range(self, name: str, low: float, high: float) -> None:
        """Both ends are allowed; NaN is not."""
        if not low <= getattr(self, name) <= high:
            self._check(name, False, f"from {low:g} to {high if isinstance(high, int) else f'{high:g}'}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the draw depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def biases(self) -> tuple[array[int], array[float]]:
        """The ids (int64) and biases (float32) of `logit_bias`, made once for all samples of a prompt: there may be one
        for each id of the vocabulary."""
        return array("q", self.logit_bias), array("f", self.logit_bias.values())

    @cached_property
    def plain(self) -> bool:
        """Whether the largest raw logit is taken at every position, and nothing else is requested."""
        return (
            self.greedy
            and not self.penalised
            and not self.logit_bias
            and self.min_tokens == 0
            and self.logprobs is None
        )
