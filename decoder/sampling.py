"""How the next token is chosen: the parameters of one request.

The draw itself is `kernels.sample`; `decoder.sampler` holds the state that penalties need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

MAX_LOGPROBS = 1024
MAX_TOP_K = (1 << 31) - 1
SEED_LIMIT = 1 << 64
MIN_TEMPERATURE = 1e-5
"""A smaller one is greedy."""
MAX_TEMPERATURE = 1e6
MAX_BIAS = 1e10
"""Magnitude of a bias or an additive penalty."""
MIN_REPETITION, MAX_REPETITION = 1e-3, 1e3
"""With these bounds no logit that a model gives (to 1e20) leaves float32's range on its way to a probability, so that
every back end, all of which calculate in float32, draws the same token.
"""


class Choice(NamedTuple):
    """One drawn token; `logprob` and `top` are of the raw distribution, where asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. Raises `ValueError` with the field, its value and its range.

    Order of application to the logits: `logit_bias`, repetition, frequency and presence penalties, the `min_tokens`
    mask; then `temperature`, `top_k`, `top_p`, `min_p`; then one uniform number decides. `temperature` 0 takes the
    largest logit after the penalties (the lowest id wins a tie); one below `MIN_TEMPERATURE` becomes 0.
    """

    max_tokens: int | None = None
    """Output tokens at most; `None`: as many as the decoder's `max_len` leaves."""
    min_tokens: int = 0
    """Before so many output tokens, neither an end token nor a stop token can be drawn."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Keeps the smallest set of likeliest tokens whose probability reaches this; 1 = off."""
    top_k: int = 0
    """Keeps so many of the likeliest tokens; 0 = off."""
    min_p: float = 0.0
    """Drops tokens less likely than this share of the likeliest one's probability; 0 = off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 = off."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Taken from the logit of each token once for each time that it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit."""
    seed: int = 0
    """64-bit key of the counter-based generator: the same seed gives the same draws at the same positions."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    """`None`: no log-probabilities; k: that of the drawn token, and the k likeliest tokens with theirs."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt but the first. It is then read whole, whatever is cached of it."""

    def __post_init__(self) -> None:
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        self._check("min_tokens", self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        self._check_range("temperature", 0.0, MAX_TEMPERATURE)
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        self._check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._check_range("top_k", 0, MAX_TOP_K)
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
        """Pickles by its arguments: the frozen view of `logit_bias` cannot be."""
        return type(self), tuple(
            dict(value) if isinstance(value, MappingProxyType) else value
            for value in (getattr(self, f.name) for f in fields(self))
        )

    def _check(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{name} must be {allowed}, not {getattr(self, name)}")

    def _check_range(self, name: str, low: float, high: float) -> None:
        """Both ends belong to it; NaN does not."""
        if not low <= getattr(self, name) <= high:
            self._check(name, False, f"from {low:g} to {high if isinstance(high, int) else f'{high:g}'}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True when the choice depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def plain(self) -> bool:
        """True when the largest raw logit decides at every position and nothing else is asked for."""
        return (
            self.greedy
            and not self.penalised
            and not self.logit_bias
            and self.min_tokens == 0
            and self.logprobs is None
        )
