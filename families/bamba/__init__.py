"""Bamba (IBM, Princeton, UIUC): Mamba-2 layers and attention layers with partial rotary positions, each followed by a
SwiGLU MLP. Text only."""

from families.bamba.config import read_config
from families.bamba.names import weights
from families.family import Family

FAMILY = Family(name="bamba", read_config=read_config, weights=weights)
