"""Separates a model's reasoning from its answer, by token ids: both markers are single tokens of the vocabulary.

Reasoning is at the beginning of the output. Either the prompt ends with the opening marker, as chat templates of
reasoning models write it, or the opening marker is the first token of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from service.common import errors
from service.common.types import ConstraintSpec, GenerateSpec, ReasoningSpec
from service.model.assets import ModelAssets, ReasoningMarkers

Phase = Literal["opened", "possible", "none"]
"""`opened`: the prompt ends inside reasoning. `possible`: the output may begin with the opening marker. `none`: the
prompt ends with the closing marker, or the model has no markers."""
_LONGEST_GAP = 16
"""Tokens of white space after a marker at the end of a prompt."""


def phase_of(ids: Sequence[int], assets: ModelAssets) -> Phase:
    """Where the output of a prompt begins."""
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
    return "possible"


def with_reasoning(spec: GenerateSpec, phase: Phase, assets: ModelAssets) -> ConstraintSpec | None:
    """The request's constraint, which begins after the reasoning if there is any. If the prompt does not open
    reasoning, a constrained answer has some only if the request asks for it. Raises FailedPrecondition for a request
    that the model or its template cannot follow."""
    limit, constraint = spec.max_reasoning_tokens, spec.constraint
    if assets.reasoning is None and limit is not None:
        raise errors.FailedPrecondition(
            f"max_reasoning_tokens: {assets.config.name} does not mark its reasoning",
            field="sampling.max_reasoning_tokens",
        )
    if phase == "opened" and spec.thinking is False:
        raise errors.FailedPrecondition(
            "enable_thinking is false, and the model's chat template begins reasoning all the same",
            field="chat.enable_thinking",
        )
    asked = limit is not None or spec.thinking is True
    if assets.reasoning is None or phase == "none" or (phase == "possible" and not asked):
        return constraint
    if limit is None and constraint is None:
        return None
    markers = assets.reasoning
    reasoning = ReasoningSpec(markers.close, None if phase == "opened" else markers.open, limit)
    return replace(constraint or ConstraintSpec(), reasoning=reasoning)


class ReasoningSplit:
    """Classifies the tokens of one sample."""

    def __init__(self, markers: ReasoningMarkers | None, phase: Phase) -> None:
        self._markers = markers
        self.reasoning = phase == "opened"
        """Whether the last token left the output inside reasoning."""
        self._may_open = phase != "none"
        """Whether the next token is the first, and an opening marker there begins reasoning."""

    def take(self, token: int) -> Literal["reasoning", "marker", "text"]:
        markers, first = self._markers, self._may_open
        self._may_open = False
        if markers is None:
            return "text"
        if first and token == markers.open:  # also where the prompt has opened it: some models repeat the marker
            self.reasoning = True
            return "marker"
        if self.reasoning and token == markers.close:
            self.reasoning = False
            return "marker"
        return "reasoning" if self.reasoning else "text"
