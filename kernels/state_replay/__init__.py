"""Steps of several Mamba-2 tokens that can be rolled back: their inputs are kept, and states are not written."""

from kernels.dispatch import dispatched
from kernels.state_replay import reference
from kernels.state_replay.reference import MambaTerms

replay_tokens = dispatched(reference.replay_tokens)
replay_advance = dispatched(reference.replay_advance)

__all__ = ["MambaTerms", "replay_advance", "replay_tokens"]
