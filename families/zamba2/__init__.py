"""Zamba2 (Zyphra): Mamba-2 layers, some of which also read the output of a block of attention and an MLP that several
layers share, each with low-rank adapters of its own. Text only."""

from families.family import Family
from families.zamba2.config import read_config
from families.zamba2.names import weights

FAMILY = Family(name="zamba2", read_config=read_config, weights=weights)
