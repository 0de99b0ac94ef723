"""Heads that predict further tokens ("multi-token prediction"): weights `mtp.*`, and drafts from them.

    e = cat(enorm(embed(token t)), hnorm(hidden of token t - 1))          hidden: after the trunk's final norm
    x = eh_proj(e);  for each layer: x += mixer(norm(x));  m = final_layernorm(x)
    logits of token t + 1 = head(m); for the next token m stands for the hidden state of token t

One step of layers, pattern `*` and then `E`s, is used again for each further token, as released checkpoints are served
(DeepSeek-V3's layout, arXiv 2412.19437, section 2.2, with NemotronH's layers). Embedding and vocabulary projection are
the trunk's. The attention's keys and values lie in the sequence's own pages: the entry of token t at place t, so that
what a shared page holds depends on the tokens up to it and on nothing behind it; place 0 has no entry. The hidden
state of the last token, which the next entry needs, lies in the state slot (`Arena.carry`) and goes where that goes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decoder.arena import Arena
from decoder.batch import Batch, BatchBuilder
from decoder.compiled_head import CompiledHead
from decoder.config import DecoderConfig, DecoderOptions
from decoder.mixers import AttentionMixer, ExpertsMixer, stored_linear
from decoder.model import HybridModel
from decoder.sampler import Sampler
from decoder.scheduler import Row
from kernels.linear import Linear
from kernels.native import NativeUnavailable
from kernels.paged_attention import decode_attention_after, write_kv
from kernels.rms_norm import rms_norm

log = logging.getLogger(__name__)

PENDING_STEPS, PENDING_TOKENS = 64, 512
"""Steps without drafts, and tokens in them, that are worked on together: one by one their entries cost too much."""


class MtpHead:
    """The weights of one step, and its entries in the pages."""

    def __init__(
        self, config: DecoderConfig, options: DecoderOptions, weights: Mapping[str, Tensor], kv_B2SKP: Tensor,
        vocabulary: Linear,
    ) -> None:  # fmt: skip
        """`weights` by the names of `DecoderConfig.mtp_weights`; `vocabulary` is the trunk's projection. `ValueError`
        lists those that are missing or do not fit, and says so where the model has no such heads.
        """
        check_mtp(config, weights)
        self.eps, self.dtype = config.layer_norm_epsilon, options.dtype

        def norm(name: str) -> Tensor:
            return weights[name].to(device=options.device, dtype=torch.float32, copy=True)

        def layer(index: int) -> dict[str, Tensor]:
            prefix = f"mtp.layers.{index}.mixer."
            return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}

        last = len(config.mtp_pattern) - 1
        self.enorm, self.hnorm = norm("mtp.layers.0.enorm.weight"), norm("mtp.layers.0.hnorm.weight")
        self.fuse = stored_linear(weights["mtp.layers.0.eh_proj.weight"], None, options)
        self.norms = [norm(f"mtp.layers.{index}.norm.weight") for index in range(last + 1)]
        self.final = norm(f"mtp.layers.{last}.final_layernorm.weight")
        self.attention = AttentionMixer(config, options, layer(0), kv_B2SKP)
        self.experts = [ExpertsMixer(config, options, layer(index)) for index in range(1, last + 1)]
        self.vocabulary = vocabulary
        self.compiled = _compiled(config, options, self)

    def enter(self, embedded_TD: Tensor, hidden_TD: Tensor, places_T: Tensor) -> None:
        """Writes the entries of tokens, given the hidden states before them: place -1 for none."""
        if self.compiled is not None and 0 < places_T.shape[0] <= self.compiled.max_tokens:
            self.compiled.enter(embedded_TD, hidden_TD, places_T)
        else:
            self._enter(embedded_TD, hidden_TD, places_T)

    def _enter(self, embedded_TD: Tensor, hidden_TD: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual rows `[T, d]` and the queries `[T, Q, P]`."""
        of, eps = self.attention, self.eps
        token, before = (
            rms_norm(embedded_TD, self.enorm, eps, self.dtype),
            rms_norm(hidden_TD, self.hnorm, eps, self.dtype),
        )
        x = self.fuse(torch.cat((token, before), -1))
        qkv = of.qkv(rms_norm(x, self.norms[0], eps, self.dtype)).view(x.shape[0], -1, of.width)
        q, k, v = qkv.split([of.heads, of.kv_heads, of.kv_heads], dim=1)
        write_kv(of.kv, k, v, places_T)
        return x, q

    def predict(
        self,
        embedded_RD: Tensor,
        hidden_RD: Tensor,
        places_R: Tensor,
        tables_RW: Tensor,
        lengths_R: Tensor,
        longest: int,
    ) -> tuple[Tensor, Tensor]:
        """`[R, d]`, final norm included: what stands for the hidden states of one token of each row, whose entry it
        writes; and the next tokens' logits `[R, vocab]`. `lengths`: places up to the token's own.
        """
        if self.compiled is not None and embedded_RD.shape[0] <= self.compiled.max_tokens:
            return self.compiled.predict(embedded_RD, hidden_RD, places_R, tables_RW, lengths_R)
        of = self.attention
        x, q = self._enter(embedded_RD, hidden_RD, places_R)
        out = decode_attention_after(q, of.kv, tables_RW, lengths_R, 1, of.scale, longest)
        x = x + of.o_proj(out.reshape(x.shape[0], -1))
        for norm, mixer in zip(self.norms[1:], self.experts, strict=True):
            x = x + mixer(rms_norm(x, norm, self.eps, self.dtype))
        hidden = rms_norm(x, self.final, self.eps, self.dtype)
        return hidden, self.vocabulary(hidden)


def _compiled(config: DecoderConfig, options: DecoderOptions, head: MtpHead) -> CompiledHead | None:
    """A head's compiled form, where there is one; whether there has to be is the trunk's to say."""
    if options.native == "off":
        return None
    try:
        return CompiledHead(config, options, head, head.vocabulary)
    except NativeUnavailable as reason:
        log.info("drafts are made operation by operation: %s", reason)
        return None


def check_mtp(config: DecoderConfig, weights: Mapping[str, Any]) -> None:
    """`ValueError` unless `weights`, tensors or shapes by name, are all that a head of this model needs."""
    if config.num_nextn_predict_layers < 1:
        raise ValueError(
            f"speculative 'mtp' needs a model with heads for it, and num_nextn_predict_layers is "
            f"{config.num_nextn_predict_layers}; 'ngram' works with any model"
        )
    if not config.mtp_pattern.startswith("*") or set(config.mtp_pattern[1:]) - {"E"}:
        raise ValueError(f"speculative 'mtp' needs an mtp pattern of one * and then Es, not {config.mtp_pattern!r}")
    wanted = config.mtp_weights()
    found = {name: tuple(getattr(weight, "shape", weight)) for name, weight in weights.items()}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(
            f"speculative 'mtp' needs weights that the checkpoint has not: missing {', '.join(missing)}; "
            "'ngram' works with any model"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{name} has shape {found[name]}, not {shape}")


class MtpDrafter:
    """Keeps the head's entries up to date with the trunk, and drafts."""

    def __init__(
        self, config: DecoderConfig, options: DecoderOptions, arena: Arena, model: HybridModel, builder: BatchBuilder,
        sampler: Sampler,
    ) -> None:  # fmt: skip
        self.model, self.builder, self.sampler = model, builder, sampler
        self.head = MtpHead(config, options, model.mtp_weights, arena.kv[config.attention_layers], model.head)
        assert arena.carry is not None
        self.carry, self.page = arena.carry, options.page_size
        self._hidden: Tensor | None = None
        """Of the last step, after the trunk's final norm; None while that step is deferred."""
        self._deferred: list[tuple[list[int], Batch, Tensor]] = []
        """Steps of rows of one token: each row's slot, and the trunk's hidden rows before its final norm."""

    def draft(self, rows: SequenceOf[Row]) -> None:
        """Fills in the drafts that the rows are to have: each token is drawn as plain sampling would draw it, were the
        head's logits the model's.
        """
        rows = [row for row in rows if row.drafts]
        if not rows:
            return
        self.flush()
        for row in rows:
            row.sequence.drafts = []
        hidden = self.carry[self._ids([row.sequence.slot for row in rows])]
        tokens = [row.sequence.tokens[-1] for row in rows]
        tables = self.builder.page_tables([row.sequence for row in rows])
        for ahead in range(max(row.drafts for row in rows)):
            kept = [index for index, row in enumerate(rows) if row.drafts > ahead]
            if len(kept) < len(rows):
                rows, tokens = [rows[i] for i in kept], [tokens[i] for i in kept]
                hidden, tables = (of.index_select(0, self._ids(kept)) for of in (hidden, tables))
            at = [row.start + ahead for row in rows]
            pages = [row.sequence.pages[place // self.page] for row, place in zip(rows, at, strict=True)]
            places = [page * self.page + place % self.page for page, place in zip(pages, at, strict=True)]
            table = torch.tensor([tokens, places, [place + 1 for place in at]], device=self.carry.device)
            ids, writes, lengths = table.unbind()
            embedded = F.embedding(ids, self.model.embeddings)
            hidden, logits = self.head.predict(embedded, hidden, writes, tables, lengths, max(at) + 1)
            sequences = [row.sequence for row in rows]
            choices = self.sampler.sample(logits, sequences, [s.drafts for s in sequences])
            tokens = [choice.token for choice in choices]
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.drafts.append(token)

    def observe(self, rows: SequenceOf[Row], batch: Batch, hidden_TD: Tensor) -> None:
        """The trunk has computed a batch, `hidden_TD` before its final norm: the entries of all its tokens are due.
        Steps of single tokens are deferred: `flush` comes before anything is drafted, or pages or slots change hands.
        """
        slots = [row.sequence.slot for row in rows]
        if batch.updates == len(rows) and not batch.splices:
            self._deferred.append((slots, batch, hidden_TD.clone()))  # a graph writes its next step over this one
            self._hidden = None
            if len(self._deferred) >= PENDING_STEPS or len(self._deferred) * len(rows) >= PENDING_TOKENS:
                self.flush()
            return
        self.flush()
        normed = self.model.final_norm(hidden_TD)
        firsts, first = [], 0
        for row in rows:
            firsts.append(first)
            first += row.count
        before, places = normed.roll(1, 0), batch.places_T
        before[self._ids(firsts)] = self.carry[self._ids(slots)].to(before.dtype)
        fresh = self._ids([index for index, row in zip(firsts, rows, strict=True) if row.start == 0])
        if fresh.shape[0]:
            places = places.index_fill(0, fresh, -1)
            before.index_fill_(0, fresh, 0)
        self.head.enter(self.model.embed(batch), before, places)
        self._hidden = normed

    def flush(self) -> None:
        """Works on the deferred steps: writes their entries, and the slots' hidden rows."""
        if not self._deferred:
            return
        steps, self._deferred = self._deferred, []
        # A token's entry needs the hidden row before it: of the slot, or of the step that last used the slot.
        held = sorted({slot for slots, _, _ in steps for slot in slots})
        newest = {slot: index for index, slot in enumerate(held)}
        sources: list[int] = []
        for slots, _, _ in steps:
            first = len(held) + len(sources)
            sources += [newest[slot] for slot in slots]
            newest |= {slot: first + index for index, slot in enumerate(slots)}
        normed = self.model.final_norm(torch.cat([hidden for _, _, hidden in steps]))
        places, ids = (torch.cat(of) for of in zip(*((b.places_T, b.ids_T) for _, b, _ in steps), strict=True))
        at = self._ids(held)
        known = torch.cat((self.carry[at].to(normed.dtype), normed))
        self.head.enter(F.embedding(ids, self.model.embeddings), known[self._ids(sources)], places)
        self.carry[at] = known[self._ids([newest[slot] for slot in held])].to(self.carry.dtype)
        self._hidden = normed[-len(steps[-1][0]) :]

    def settle(self, kept: Iterable[tuple[int, int]]) -> None:
        """(slot, token of the batch): whose hidden state the slot carries on from."""
        pairs = [pair for pair in kept if pair[0] >= 0]
        if self._deferred and self._hidden is None:
            if pairs == [(slot, token) for token, slot in enumerate(self._deferred[-1][0])]:
                return
            self.flush()
        if pairs:
            assert self._hidden is not None
            slots, tokens = self._ids([slot for slot, _ in pairs]), self._ids([token for _, token in pairs])
            self.carry[slots] = self._hidden.index_select(0, tokens).to(self.carry.dtype)

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.carry.device)
