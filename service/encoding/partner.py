"""Properties that an encoder and a decoder in different processes must share."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from families import VisionSpec
from service.common.config import ConfigError
from service.model.checkpoint import Checkpoint

PROTOCOL = 2
"""Version of the messages between them; increased when an older version would misunderstand the messages."""


class PartnerRefused(ConfigError):
    """The other side serves another model, or the same one differently."""


@dataclass(frozen=True)
class Partner:
    """The identity of one side, in human-readable values."""

    protocol: int
    model: str
    revision: str
    weights_digest: str
    """Digest of the vision weights."""
    preprocessing: str
    dtype: str
    """Dtype of pixels and rows."""
    hidden_size: int
    """Width of a row."""

    def check(self, other: Partner, name: str) -> None:
        """Raises PartnerRefused listing each difference with both values. `name`: what messages call the other side."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name != "model")
        differences = [
            f"{field} is {theirs!r} there and {ours!r} here" for field, ours, theirs in pairs if ours != theirs
        ]
        if differences:
            raise PartnerRefused(f"{name} ({other.model}) does not match {self.model}: {'; '.join(differences)}")


def partner_of(checkpoint: Checkpoint, vision: VisionSpec, dtype: torch.dtype) -> Partner:
    """The identity of a side that serves `checkpoint`. The name may differ: each host names its own folder."""
    return Partner(
        protocol=PROTOCOL,
        model=checkpoint.config.name,
        revision=checkpoint.revision,
        weights_digest=checkpoint.vision_digest(),
        preprocessing=vision.describe_preprocessing(),
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=vision.row_width,
    )
