"""Separates a model's reasoning from its answer, by token ids: both markers are single tokens of the vocabulary.

Reasoning is at the beginning of the output. Either the prompt ends with the opening marker, which the chat templates of
reasoning models write there, or the opening marker is the first token of the output. An answer that continues a message
continues its reasoning if that is still open, and has no reasoning otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from service.common import errors
from service.common.types import ConstraintSpec, GenerateSpec, ReasoningSpec
from service.model.assets import ModelAssets, ReasoningMarkers
from service.model.tokenizer import Tokenizer

Phase = Literal["opened", "inside", "possible", "none"]
"""`opened`: the prompt ends with the opening marker. `inside`: it ends later within reasoning. `possible`: the output
may begin with the opening marker. `none`: the prompt is past its reasoning, or the model has no markers."""
_LONGEST_GAP = 16
"""Largest number of tokens of white space between a marker and the end of a prompt."""


def phase_of(ids: Sequence[int], assets: ModelAssets, *, continued: bool = False) -> Phase:
    """The phase in which the output after a prompt begins. `continued`: the prompt ends within the text of the
    assistant's message."""
    markers = assets.reasoning
    if markers is None or assets.tokenizer is None:
        return "none"
    for token in reversed(ids[-_LONGEST_GAP:]):
        if token == markers.open:
            return "opened"
        if token == markers.close:
            return "none"
        if assets.tokenizer.silent(token) or assets.tokenizer.token_bytes(token).strip():
            break
    return _phase_in_message(ids, markers, assets.tokenizer) if continued else "possible"


def _phase_in_message(ids: Sequence[int], markers: ReasoningMarkers, tokenizer: Tokenizer) -> Phase:
    """Like `phase_of`, for a prompt that ends within a message's text: the last marker of the message decides. Other
    special tokens are taken as the message's beginning."""
    for token in reversed(ids):
        if token == markers.open:
            return "inside"
        if token == markers.close or tokenizer.silent(token):
            break
    return "none"


def with_reasoning(spec: GenerateSpec, phase: Phase, assets: ModelAssets) -> ConstraintSpec | None:
    """The request's constraint. It applies after the reasoning, if there is any, unless the request constrains the
    reasoning too. If the prompt does not open reasoning, a constrained answer has some only if the request asks for it.
    Raises FailedPrecondition for a request that the model or its template cannot follow."""
    limit, constraint = spec.max_reasoning_tokens, spec.constraint
    if assets.reasoning is None and limit is not None:
        raise errors.FailedPrecondition(
            f"max_reasoning_tokens: {assets.config.name} does not mark its reasoning, so it cannot be limited",
            field="sampling.max_reasoning_tokens",
        )
    if phase in ("opened", "inside") and spec.thinking is False:
        raise errors.FailedPrecondition(
            "enable_thinking is false, but the model's chat template begins reasoning anyway",
            field="chat.enable_thinking",
        )
    asked = limit is not None or spec.thinking is True
    if assets.reasoning is None or phase == "none" or (phase == "possible" and not asked) or spec.constrain_reasoning:
        return constraint
    if limit is None and constraint is None:
        return None
    markers = assets.reasoning
    reasoning = ReasoningSpec(markers.close, markers.open if phase == "possible" else None, limit)
    return replace(constraint or ConstraintSpec(), reasoning=reasoning)


class ReasoningSplit:
    """Classifies the output tokens of one sample as reasoning, markers and text."""

    def __init__(self, markers: ReasoningMarkers | None, phase: Phase) -> None:
        self._markers = markers
        self.reasoning = phase in ("opened", "inside")
        """Whether the last token left the output inside reasoning."""
        self.after_marker = phase == "opened"
        """Whether the prompt ends with the opening marker."""
        self._may_open = phase in ("opened", "possible")
        """Whether the next token is the first, and an opening marker there begins reasoning."""

    def take(self, token: int) -> Literal["reasoning", "marker", "text"]:
        markers, first = self._markers, self._may_open
        self._may_open = False
        if markers is None:
            return "text"
        if first and token == markers.open:  # even if the prompt has opened it: some models repeat the marker
            self.reasoning = True
            return "marker"
        if self.reasoning and token == markers.close:
            self.reasoning = False
            return "marker"
        return "reasoning" if self.reasoning else "text"
