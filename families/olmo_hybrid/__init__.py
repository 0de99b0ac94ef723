"""OLMo Hybrid (Ai2): gated delta layers and attention layers, which have their norms in different places, each followed
by a SwiGLU MLP. Text only."""

from families.family import Family
from families.olmo_hybrid.config import read_config
from families.olmo_hybrid.names import weights
from families.tool_calls import PYTHON_LINES

FAMILY = Family(name="olmo_hybrid", read_config=read_config, weights=weights, tool_markups=(PYTHON_LINES,))
