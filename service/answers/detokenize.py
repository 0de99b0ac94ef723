"""Converts token ids to text, for clients without the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from service.common import errors
from service.model.assets import ModelAssets


def detokenize(
    assets: ModelAssets, served: str, model: str, ids: Sequence[int], *, special: bool = False
) -> tuple[str, list[bytes]]:
    """The text, and the bytes of each token. `served`: the model's name. `model`: the name that the caller gave; may be
    empty. `special`: special tokens have their names in the text too. Raises StatusError."""
    if model not in ("", served):
        raise errors.NotFound(f"no model {model!r}; this server has {served!r}", field="model")
    if assets.tokenizer is None:
        raise errors.FailedPrecondition(f"the model {served!r} has no tokenizer", field="token_ids")
    size = assets.config.decoder.vocab_size
    for position, token_id in enumerate(ids):
        if token_id >= size:
            raise errors.InvalidArgument(
                f"token_ids[{position}] is {token_id}; the vocabulary has {size} ids", field=f"token_ids[{position}]"
            )
    text = assets.tokenizer.decode(ids, special=special)
    return text, [assets.tokenizer.token_bytes(token_id) for token_id in ids]
