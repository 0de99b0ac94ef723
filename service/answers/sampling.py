"""The sampling parameters of a request: the model's defaults, the request's own values, and the limits of the
context."""

from __future__ import annotations

import secrets
from typing import Any

from decoder.sampling import SamplingParams
from service.answers.bounds import too_long
from service.common import errors
from service.common.types import GenerateSpec
from service.engine.types import EngineInfo
from service.model.assets import ModelAssets


def size_of_sampling(spec: GenerateSpec) -> int:
    """Number of ids and biases that `make_sampling` processes."""
    size = sum(len(spec.sampling.get(name, ())) for name in ("logit_bias", "stop_token_ids"))
    return size + len((spec.constraint and spec.constraint.allowed_token_ids) or ())


def make_sampling(spec: GenerateSpec, prompt_tokens: int, assets: ModelAssets, info: EngineInfo) -> SamplingParams:
    """The parameters for a prompt of `prompt_tokens` tokens; the seed is random if the request has none. Raises
    StatusError."""
    seed = spec.sampling.get("seed")
    seed = secrets.randbits(63) if seed is None else int(seed)
    values = {**assets.sampling_defaults, **spec.sampling, "seed": seed}
    _check_ids(spec, values, assets.config.decoder.vocab_size)
    room = info.max_len - prompt_tokens
    for name in ("min_tokens",) if spec.clamp_max_tokens else ("max_tokens", "min_tokens"):
        if (asked := spec.sampling.get(name)) is not None and asked > room:
            raise too_long(
                f"{name} {asked} and a prompt of {prompt_tokens} tokens exceed the context of "
                f"{info.max_len}; at most {room} would fit", f"sampling.{name}", info.max_len, asked + prompt_tokens,
            )  # fmt: skip
    if (wanted := values.get("max_tokens")) is not None:
        values["max_tokens"] = min(wanted, room)
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise errors.InvalidArgument(f"sampling: {error}", field=f"sampling.{str(error).split(' ')[0]}") from None


def _check_ids(spec: GenerateSpec, values: dict[str, Any], vocabulary: int) -> None:
    """Raises StatusError for a token id that is not in the vocabulary."""
    allowed = spec.constraint and spec.constraint.allowed_token_ids
    for name, ids in (
        *((name, values.get(name, ())) for name in ("logit_bias", "stop_token_ids")),
        ("allowed_token_ids", allowed or ()),
    ):
        if bad := [i for i in ids if not 0 <= i < vocabulary]:
            raise errors.InvalidArgument(
                f"{name}: token id {bad[0]} is not below the vocabulary size of {vocabulary}",
                field=f"sampling.{name}",
            )
