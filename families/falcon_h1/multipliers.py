"""The constant multipliers of a model, and where they are applied here. README.md has the maths.

None of them changes a weight matrix: they are in numbers that are float32 anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from families import fields
from families.files import CheckpointError, first

LEAST, MOST = 1e-6, 1e6
"""Far beyond all that is published; products and quotients of a few such numbers are float32 numbers."""


@dataclass(frozen=True)
class Multipliers:
    """As in `config.json`, whose fields have the same names with `_multiplier` or `_multipliers`."""

    embedding: float
    logits: float
    ssm_in: float
    ssm_out: float
    gate: float
    """This and the next four: `ssm_multipliers`, in order."""
    x: float
    b: float
    c: float
    dt: float
    attention_in: float
    attention_out: float
    key: float
    mlp_gate: float
    mlp_down: float

    @classmethod
    def read(cls, text: Mapping[str, Any]) -> Multipliers:
        """Raises CheckpointError naming the field."""
        gate, x, b, c, dt = _several(text, "ssm_multipliers", 5)
        mlp_gate, mlp_down = _several(text, "mlp_multipliers", 2)
        return cls(
            embedding=_one(text, "embedding_multiplier"),
            logits=_one(text, "lm_head_multiplier"),
            ssm_in=_one(text, "ssm_in_multiplier"),
            ssm_out=_one(text, "ssm_out_multiplier"),
            gate=gate,
            x=x,
            b=b,
            c=c,
            dt=dt,
            attention_in=_one(text, "attention_in_multiplier"),
            attention_out=_one(text, "attention_out_multiplier"),
            key=_one(text, "key_multiplier"),
            mlp_gate=mlp_gate,
            mlp_down=mlp_down,
        )

    # Factors of the norms' weights, and of the biases of the projections behind them.

    @property
    def mixer_norm(self) -> float:
        """Of the norm before Mamba-2 and attention: makes dt right."""
        return self.ssm_in * self.dt

    @property
    def attention_bias(self) -> float:
        """Of the biases of attention. Its inputs, and so queries, keys and values, are larger by this factor here."""
        return self.mixer_norm / self.attention_in

    @property
    def in_proj_bias(self) -> float:
        return self.dt

    @property
    def mlp_norm(self) -> float:
        """Of the norm before the MLP, and of the MLP's biases: makes the gate right, and the outputs larger."""
        return self.mlp_gate

    # Scales of the descriptions.

    @property
    def mamba_scales(self) -> tuple[float, float, float, float]:
        """`Mamba2.scales`."""
        return self.gate / self.dt, self.x / self.dt, self.b / self.dt, self.c / self.dt

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        return self.key / self.attention_bias**2

    @property
    def output_scales(self) -> tuple[float, float]:
        """Of Mamba-2 and attention."""
        return self.ssm_out, self.attention_out / self.attention_bias

    @property
    def mlp_scale(self) -> float:
        return self.mlp_down / self.mlp_norm


def _one(text: Mapping[str, Any], name: str) -> float:
    value = fields.number(text, name, 1.0)
    if not LEAST <= value <= MOST:
        raise CheckpointError(f"config.json: {name} is {value}; from {LEAST} to {MOST} is served")
    return value


def _several(text: Mapping[str, Any], name: str, count: int) -> list[float]:
    values = first(text, name, default=[1.0] * count)
    if not isinstance(values, list | tuple) or len(values) != count or None in values:
        raise CheckpointError(f"config.json: {name} must be a list of {count} numbers, not {values!r}")
    return [_one({name: value}, name) for value in values]
