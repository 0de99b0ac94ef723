"""Multi-token prediction (MTP) heads: weights `mtp.*` and their maths.

    e = cat(enorm(embed(token t)), hnorm(hidden of token t - 1))          hidden: after the trunk's final norm
    x = eh_proj(e);  for each layer: x += mixer(norm(x));  m = final_layernorm(x)
    logits of token t + 1 = head(m); for the next token m replaces the hidden state of token t

The same layers (attention, then MLPs or experts) are applied for each further token, as in DeepSeek-V3 (arXiv
2412.19437, section 2.2), here with layers of a hybrid decoder. The trunk provides the embedding and the vocabulary
projection. The head's keys and values are in the sequence's own pages: the entry of token t is at place t, so a shared
page depends only on the tokens up to its end; place 0 has no entry. If the attention reads positions, the entry of
token t has the position of token t - 1, whose hidden state it is made from (as in vLLM; next to images this differs
from the position of token t). The hidden state of the last token, which the next entry needs, is stored with the state
slot (`Arena.carry`) and moves with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from decoder.compiled_head import CompiledHead
from decoder.config import DecoderConfig
from decoder.head_weights import HeadWeights
from decoder.layers.attention import Projected
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.trunk import Trunk
from kernels.linear import Linear
from kernels.native import NativeUnavailable
from kernels.paged_attention import decode_attention_after, write_kv
from kernels.rms_norm import rms_norm

log = logging.getLogger(__name__)


class MtpHead:
    """Applies the head's layers once, in compiled code if possible, and writes its entries to the pages."""

    def __init__(self, weights: HeadWeights, trunk: Trunk) -> None:
        self.weights, draft_vocab = weights, trunk.options.draft_vocab
        self.vocabulary = trunk.head if draft_vocab is None else trunk.head.first(draft_vocab)
        """Computes the logits of the ids that can be drafted, which are those below its number of outputs."""
        self.eps, self.dtype = trunk.config.norm_eps, trunk.options.dtype
        self.axes = 0 if weights.attention.spec.rope is None else trunk.config.position_axes
        """Number of position axes of the entries; 0: the head reads no positions."""
        self.compiled = _compiled(weights, trunk, self.vocabulary)

    def enter(
        self, embedded_TD: Tensor, hidden_TD: Tensor, places_T: Tensor, positions_TA: Tensor | None = None
    ) -> None:
        """Writes the entries of tokens, given the hidden states of the tokens before them. Place -1: no entry.
        `positions_TA`: of the entries, for a head that reads positions."""
        if self.compiled is not None and 0 < places_T.shape[0] <= self.compiled.max_tokens:
            self.compiled.enter(embedded_TD, hidden_TD, places_T, positions_TA)
        else:
            self._enter(embedded_TD, hidden_TD, places_T, positions_TA)

    def _enter(
        self, embedded_TD: Tensor, hidden_TD: Tensor, places_T: Tensor, positions_TA: Tensor | None
    ) -> tuple[Tensor, Projected]:
        """Returns the residual rows `[T, d]` and the attention's projections of them."""
        weights, of, eps = self.weights, self.weights.attention, self.eps
        token, before = (
            rms_norm(embedded_TD, weights.enorm, eps, self.dtype),
            rms_norm(hidden_TD, weights.hnorm, eps, self.dtype),
        )
        x = weights.fuse(torch.cat((token, before), -1))
        given = of.project(rms_norm(x, weights.norms[0], eps, self.dtype), positions_TA)
        write_kv(of.kv, given.k_TKP, given.v_TKP, places_T)
        return x, given

    def predict(
        self,
        embedded_RD: Tensor,
        hidden_RD: Tensor,
        places_R: Tensor,
        tables_RW: Tensor,
        lengths_R: Tensor,
        longest: int,
        positions_RA: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """For one token per row: writes its entry and returns the rows after the head's final norm `[R, d]`, which take
        the place of the token's hidden state for the next token, and the next token's logits `[R, V]` for the V ids
        that can be drafted. `lengths`: number of places up to and including the token's own; `longest`: the largest of
        these."""
        if self.compiled is not None and embedded_RD.shape[0] <= self.compiled.max_tokens:
            return self.compiled.predict(embedded_RD, hidden_RD, places_R, tables_RW, lengths_R, positions_RA)
        weights, of = self.weights, self.weights.attention
        x, given = self._enter(embedded_RD, hidden_RD, places_R, positions_RA)
        out = decode_attention_after(given.q_THP, of.kv, tables_RW, lengths_R, 1, of.scale, longest, of.spec.window)
        x = x + of.output(out, given.gate_TG)
        for norm, mixer in zip(weights.norms[1:], weights.rest, strict=True):
            x = x + mixer(rms_norm(x, norm, self.eps, self.dtype))
        hidden = rms_norm(x, weights.final, self.eps, self.dtype)
        return hidden, self.vocabulary(hidden)


def _compiled(weights: HeadWeights, trunk: Trunk, vocabulary: Linear) -> CompiledHead | None:
    """The head's compiled form; None, with the reason logged, if it has none. With native "on" the trunk has raised an
    error for that before."""
    if trunk.options.native == "off":
        return None
    try:
        return CompiledHead(weights, trunk, vocabulary)
    except NativeUnavailable as reason:
        log.info("drafts are made operation by operation: %s", reason)
        return None


def check_mtp(config: DecoderConfig, weights: Mapping[str, Any], draft_vocab: int | None = None) -> None:
    """Raises `ValueError` unless `weights` (tensors or shapes by name) are all that this model's head needs, and if
    `draft_vocab` is more than the vocabulary."""
    if draft_vocab is not None and draft_vocab > config.vocab_size:
        raise ValueError(f"draft_vocab is {draft_vocab}, and the vocabulary has {config.vocab_size} ids")
    if not config.mtp:
        raise ValueError(
            "speculative 'mtp' needs a model with heads for it, and this one's configuration has none; 'ngram' works "
            "with any model"
        )
    if not isinstance(config.mtp[0], Attention) or not all(isinstance(spec, Experts | Mlp) for spec in config.mtp[1:]):
        kinds = ", ".join(type(spec).__name__ for spec in config.mtp)
        raise ValueError(f"speculative 'mtp' needs heads of attention and then MLPs or experts, not {kinds}")
    wanted = config.mtp_weights()
    found = {name: tuple(getattr(weight, "shape", weight)) for name, weight in weights.items()}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(
            f"speculative 'mtp' needs weights that the checkpoint does not have: {', '.join(missing)}; "
            "'ngram' works with any model"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{name} has shape {found[name]}, not {shape}")
