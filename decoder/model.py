"""A hybrid decoder: embeddings, layers of mixers, final norm, vocabulary projection.

x = scale * embed(ids); for each layer: x += scale * sum(mixer(rms_norm(x))); logits = scale * head(rms_norm(x)).
Layers with a branch read more (`decoder.layers.spec.Layer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decoder.arena import Arena
from decoder.arriving_weights import ArrivingWeights
from decoder.batch import Batch
from decoder.config import DecoderConfig, DecoderOptions
from decoder.embedding_table import EmbeddingTable
from decoder.layers.build import Recurrent, build_layers
from decoder.layers.linear import float_vector, stored_linear, stored_weight
from decoder.native import native_step
from decoder.trunk import Trunk
from kernels.host_memory import kept_copy
from kernels.linear import Quantised, Stack, check_fp8_products, check_int8_products
from kernels.rms_norm import rms_norm
from kernels.transfer import upload


class HybridModel:
    """Weights and layers; the state of sequences is in the arena."""

    def __init__(
        self,
        config: DecoderConfig,
        options: DecoderOptions,
        arena: Arena,
        weights: Iterable[tuple[str, Tensor | Quantised | Stack]],
    ) -> None:
        """Copies, casts and lays out every tensor. Raises `ValueError` that lists names that are missing, unknown or of
        a wrong shape, or that gives the reason why `activations` or `native` are not available."""
        self.config, self.options = config, options
        if options.activations == "fp8":
            check_fp8_products(torch.device(options.device), options.dtype)
        if options.activations == "int8":
            check_int8_products(torch.device(options.device))
        arriving = ArrivingWeights(config, weights)
        table = arriving.take(["model.embeddings.weight"])["model.embeddings.weight"]
        # Logits decide which token is drawn: rows before the vocabulary projection stay in 16 bits.
        of_head = replace(options, activations=None) if options.activations == "int8" else options
        tied = None
        if config.tie_word_embeddings:
            table = stored_weight(table, of_head)
            table = kept_copy(table) if isinstance(table, Tensor) else table
            tied = stored_linear(table, None, of_head, owned=True)
        else:
            plain = table.dequantise() if isinstance(table, Quantised) else table
            table = plain.to(options.device, options.dtype)
            del plain
        embeddings = EmbeddingTable(table, options.dtype, tied)
        del table
        layers = build_layers(config, options, arena, arriving)
        norm_f = float_vector(arriving.take(["model.norm_f.weight"]), "model.norm_f.weight", options)
        mtp = arriving.take(config.mtp_weights())
        self.mtp_weights = mtp if options.speculative == "mtp" else {}
        """Weights of multi-token prediction heads as read, for the drafter."""
        head = tied or stored_linear(arriving.take(["lm_head.weight"])["lm_head.weight"], None, of_head)
        arriving.finish()
        self.trunk = Trunk(config, options, embeddings, layers, norm_f, head)
        self.native = native_step(self.trunk)
        mixers: list[Any] = [mixer for layer in layers for mixer in layer.mixers]
        self._advanced = [
            mixer
            for mixer in mixers
            if isinstance(mixer, Recurrent) and (self.native is None or self.native.calls(mixer))
        ]
        """Recurrent mixers whose states compiled code does not advance."""
        self.empties_rings = self.native is not None and not self._advanced
        """Whether a step outside of graphs applies the inputs in a ring to the state and begins the ring anew, as
        compiled code does. Torch operations append to a ring, so a model with both begins steps with empty rings."""

    def embed_ids(self, ids_T: Tensor) -> Tensor:
        """`[T, d]`: rows of the table, scaled."""
        x_TD = self.trunk.embeddings(ids_T)
        return x_TD if self.config.embedding_scale == 1.0 else x_TD * self.config.embedding_scale

    def embed(self, batch: Batch) -> Tensor:
        """`[T, d]`: rows of the table, scaled, with those of images in their places."""
        return _with_images(self.embed_ids(batch.ids_T), batch)

    def hidden(self, batch: Batch, *, all_rows: bool = True) -> Tensor:
        """Runs all layers and updates the arena. Returns the rows before the final norm: `[T, d]`, or, without
        `all_rows`, `[L, d]` of the batch's `samples`."""
        native, wanted_L = self.native, None if all_rows else batch.samples
        if native is None or not native.takes(batch.ids_T.shape[0], batch):
            x_TD = self.run_layers(self.embed(batch), batch)
            return x_TD if wanted_L is None else x_TD.index_select(0, wanted_L)
        given = batch.splices or self.config.has_branches
        embedded = _with_images(native.embed(batch.ids_T), batch) if given else None
        return native.layers(embedded, batch, wanted_L)

    def run_layers(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """`hidden` for embedded rows. Overwrites them, unless the residual stream has another dtype."""
        if self.native is not None:
            if self.native.takes(x_TD.shape[0], batch):
                return self.native.layers(x_TD, batch)
            self.native.leave(batch)
        if self.config.residual_in_fp32:
            x_TD = x_TD.float()
        delta, embedded_TD = None, x_TD.clone() if self.config.has_branches else None
        for layer in self.trunk.layers:
            delta = layer(layer.rows(x_TD, delta, self.options.dtype, batch, embedded_TD), batch)
        if delta is not None:
            x_TD += delta
        return x_TD

    def advance(self, rows: Sequence[Sequence[int]]) -> None:
        """For each of `rows`, (batch slot, slot, target, count): in all recurrent layers, advances the state in the
        slot by the first `count` inputs of the batch slot's ring, and writes it to the target slot."""
        table = upload(rows, torch.int64, self.options.device)
        if self.native is not None:
            self.native.advance(table)
        batch_slots, slots, targets, counts = table.t().contiguous()  # kernels read them without a stride
        span = max(row[3] for row in rows)
        for mixer in self._advanced:
            mixer.advance(batch_slots, slots, targets, counts, span)

    def logits(self, hidden_TD: Tensor, samples: Tensor | None = None) -> Tensor:
        """`[L, vocab]` in the compute dtype or float32: the logits of the tokens with the indices `samples` (default:
        all)."""
        rows = hidden_TD if samples is None else hidden_TD.index_select(0, samples)
        if self.native is not None and 0 < rows.shape[0] <= self.native.max_tokens:
            return self.native.logits(rows)
        logits = self.trunk.head(self.final_norm(rows))
        return logits if self.config.logits_scale == 1.0 else logits * self.config.logits_scale

    def largest(self, logits: Tensor) -> list[int] | None:
        """The id of the largest logit of each row, if the step that computed these logits has found the ids too."""
        return None if self.native is None else self.native.largest(logits)

    def final_norm(self, hidden_TD: Tensor) -> Tensor:
        """`[T, d]` in the compute dtype: the input of the vocabulary projection."""
        if self.native is not None and 0 < hidden_TD.shape[0] <= self.native.max_tokens:
            return self.native.final_norm(hidden_TD)
        return rms_norm(hidden_TD, self.trunk.norm_f, self.config.norm_eps, self.options.dtype)


def _with_images(x_TD: Tensor, batch: Batch) -> Tensor:
    """Overwrites the rows of images in embedded rows; returns the same tensor."""
    for first, rows in batch.splices:
        x_TD[first : first + rows.shape[0]] = rows
    return x_TD
