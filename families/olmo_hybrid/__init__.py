"""OLMo Hybrid (Ai2): gated delta layers and attention layers, which have their norms in different places, each followed
by a SwiGLU MLP. Text only."""

from families.family import Family
from families.olmo_hybrid.config import read_config
from families.olmo_hybrid.names import weights

FAMILY = Family(name="olmo_hybrid", read_config=read_config, weights=weights)
