"""The parts of a model that the frontend needs: tokenizer, chat template, image rule, sampling defaults."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from decoder.sampling import SamplingParams
from families import CheckpointError, VisionSpec
from families.fields import count, flag
from families.tool_calls import ToolMarkup
from service.model.chat import ChatTemplate, load_template
from service.model.modelconfig import ModelConfig
from service.model.tokenizer import Tokenizer
from service.model.tokenizer_file import eos_token

MOST_TOKENS = 2**31 - 1
"""Largest `max_tokens` that a message of the protocol can hold."""

_WITHOUT_EFFECT: dict[str, float | None] = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": 0, "dola_layers": None, "guidance_scale": 1,
    "watermarking_config": None, "token_healing": None, "min_length": 0, "min_new_tokens": 0,
    "exponential_decay_length_penalty": None, "stop_strings": None, "typical_p": 1, "top_h": None, "epsilon_cutoff": 0,
    "eta_cutoff": 0, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None, "force_words_ids": None, "constraints": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "sequence_bias": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
}  # fmt: skip
"""Fields of `generation_config.json` with which transformers chooses other tokens and which are not served, each with a
value that has no effect."""


class ReasoningMarkers(NamedTuple):
    """Ids of the tokens that open and close reasoning."""

    open: int
    close: int


class ModelAssets:
    """The assets of one model directory."""

    def __init__(self, config: ModelConfig, vision: VisionSpec | None) -> None:
        self.config, self.vision = config, vision
        file = config.path / "tokenizer.json"
        self.tokenizer = Tokenizer(file) if file.exists() else None
        self.image_token_id = config.image_token_id if vision is not None else None
        self.video_token_id = config.model.video_token_id if vision is not None else None
        """None for models whose clips use the image placeholder."""
        self.image_token, self.video_token = map(self._token, (self.image_token_id, self.video_token_id))
        self.template: ChatTemplate = load_template(
            config.path, image_token=self.image_token, video_token=self.video_token
        )
        self.sampling_defaults = sampling_defaults(config)
        self.eos_token_ids = config.eos_token_ids | self._ending()
        """Ids that end an answer: those of the configuration, and the tokenizer's own, as in other servers. Fine-tuned
        models often have a new one in the tokenizer's files alone."""

    def _ending(self) -> set[int]:
        text = eos_token(self.config.path)
        ending = None if self.tokenizer is None or text is None else self.tokenizer.token_id(text)
        return set() if ending is None or ending >= self.config.decoder.vocab_size else {ending}

    def _token(self, token_id: int | None) -> str | None:
        return None if self.tokenizer is None or token_id is None else self.tokenizer.token(token_id)

    @cached_property
    def reasoning(self) -> ReasoningMarkers | None:
        """The family's markers of reasoning. None if it has none, or if the vocabulary has no tokens for them, so that
        tokens do not show where reasoning ends."""
        if self.config.family.reasoning is None or self.tokenizer is None:
            return None
        opening, closing = map(self.tokenizer.token_id, self.config.family.reasoning)
        return None if opening is None or closing is None else ReasoningMarkers(opening, closing)

    @property
    def tool_markup(self) -> ToolMarkup | None:
        """How the model writes tool calls; None if that is not known."""
        return self.config.family.tool_markup(self.template.source)

    @property
    def image_wrappers(self) -> tuple[str, str]:
        """The tokens around image tokens, if the vocabulary has them; otherwise empty strings."""
        wrappers = self.config.family.image_wrappers
        if wrappers is None or self.tokenizer is None or None in map(self.tokenizer.token_id, wrappers):
            return "", ""
        return wrappers

    def wrap_images(self, ids: list[int]) -> list[int]:
        """Adds the family's image wrappers around image tokens that have none, if the vocabulary has them: the
        published processor adds them after the template."""
        if self.tokenizer is None or self.image_token_id not in ids or not all(self.image_wrappers):
            return ids
        start, end = map(self.tokenizer.token_id, self.image_wrappers)
        assert start is not None and end is not None
        wrapped: list[int] = []
        inside = False
        for token in ids:
            inside = token == start or (inside and token != end)
            bare = token == self.image_token_id and not inside
            wrapped += (start, token, end) if bare else (token,)
        return wrapped


def sampling_defaults(config: ModelConfig) -> dict[str, Any]:
    """Sampling fields that `generation_config.json` sets. `do_sample: false` means greedy. Raises CheckpointError for
    values that no request could use, and for fields that would change answers and are not served."""
    source, file = config.generation, str(config.path / "generation_config.json")
    for name, neutral in _WITHOUT_EFFECT.items():
        if (value := source.get(name)) not in (None, neutral) and (value or neutral == 1):
            shown = "null" if neutral is None else neutral
            raise CheckpointError(f"{file}: {name} is {value!r}, which is not served; {shown} or no {name} would work")
    defaults: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        if (value := source.get(name)) is not None:
            if type(value) is not int and (type(value) is not float or name == "top_k"):
                kind = "whole number" if name == "top_k" else "number"
                raise CheckpointError(f"{file}: {name} must be a {kind}, not {value!r}")
            defaults[name] = value
    if source.get("max_new_tokens") is not None:
        defaults["max_tokens"] = count(source, "max_new_tokens", most=MOST_TOKENS, file=file)
    if not flag(source, "do_sample", True, file=file):
        defaults["temperature"] = 0.0
    try:
        checked = SamplingParams(**defaults)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    return {name: getattr(checked, name) for name in defaults}
