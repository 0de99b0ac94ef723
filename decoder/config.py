"""The model that a decoder runs (`DecoderConfig`) and how it runs it (`DecoderOptions`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from decoder.layers.descriptions import Attention, SharedBlock
from decoder.layers.spec import Layer, LinearShape, MixerSpec, PageSpec, SlotSpec, positive, require
from decoder.metadata import STATE_MODES
from kernels.rope import Rope
from kernels.weight_forms import FORMS

if TYPE_CHECKING:
    import torch

WEIGHT_KINDS = FORMS
ACTIVATION_KINDS = ("fp8", "int8")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "weights": (None, *WEIGHT_KINDS), "activations": (None, *ACTIVATION_KINDS), "native": ("auto", "on", "off"),
    "state_cache": STATE_MODES, "graphs": ("auto", "on", "off"), "overlap": ("auto", "on", "off"),
    "speculative": ("none", "ngram", "mtp"), "spec_state": ("replay", "slots"), "draft_policy": ("adaptive", "fixed"),
    "forced_tokens": ("auto", "on", "off"),
}  # fmt: skip
"""Values of the options that have a list of them."""
_LEAST = {
    "max_seqs": 1, "max_batched_tokens": 1, "page_size": 1, "ageing": 1, "max_chunk": 1, "memory_bytes": 1,
    "host_bytes": 0, "checkpoint_bytes": 0, "max_capture": 1, "draft_vocab": 1,
}  # fmt: skip
"""Least values of options, unless they are None."""
RING = 16
"""Tokens whose inputs `replay` keeps for each sequence: reading more would take longer than writing a state."""


@dataclass(frozen=True)
class DecoderConfig:
    """The model that the runner runs: layers, embedding and head. `ValueError` names the field at fault.

    x = embedding_scale * embed(ids); each layer adds to x; logits = logits_scale * head(rms_norm(x)).
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    residual_in_fp32: bool = False
    """Keeps the residual stream in float32 whatever the compute dtype is."""
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    max_position_embeddings: int = 4096
    """Context length, in tokens, that the model was trained for."""
    position_axes: int = 0
    """Number of axes of the positions that layers read; 0: no layer reads positions."""
    mtp: tuple[MixerSpec, ...] = ()
    """Mixers of the multi-token prediction (MTP) head; empty for models without one."""

    def __post_init__(self) -> None:
        require(len(self.layers) > 0, "layers is empty: at least one layer is needed")
        positive(self, "vocab_size", "hidden_size")
        require(self.norm_eps > 0, f"norm_eps must be above 0, not {self.norm_eps}")
        chunks = sorted({slot.chunk for slot in self.slots if slot.chunk is not None})
        require(len(chunks) < 2, f"layers scan in chunks of different lengths: {chunks}")
        axes = max((rope.num_axes for rope in self.ropes), default=0)
        require(self.position_axes >= axes, f"position_axes {self.position_axes} is below the {axes} that layers read")

    @property
    def ropes(self) -> set[Rope]:
        """The distinct rotary parameters of all layers and of the MTP head."""
        found = [mixer.rope for mixer in (*self.mixers, *self.mtp) if isinstance(mixer, Attention | SharedBlock)]
        return {rope for rope in found if rope is not None}

    def rotation_bytes(self, max_len: int) -> int:
        """Bytes of the rotation tables for `max_len` positions."""
        return sum(4 * rope.dims * max_len for rope in self.ropes)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """The mixers of all layers, branches included, in order."""
        return tuple(mixer for layer in self.layers for _, mixer in layer.parts)

    @property
    def has_branches(self) -> bool:
        """Whether layers read the embedded tokens beside the residual stream."""
        return any(layer.branch is not None for layer in self.layers)

    @cached_property
    def slots(self) -> tuple[SlotSpec, ...]:
        """Memory of fixed size that a sequence needs, for each mixer that has any."""
        return tuple(mixer.memory for mixer in self.mixers if isinstance(mixer.memory, SlotSpec))

    @cached_property
    def pages(self) -> tuple[PageSpec, ...]:
        """Memory that grows with a sequence, for each mixer that has any."""
        return tuple(mixer.memory for mixer in self.mixers if isinstance(mixer.memory, PageSpec))

    @property
    def mtp_pages(self) -> tuple[PageSpec, ...]:
        return tuple(mixer.memory for mixer in self.mtp if isinstance(mixer.memory, PageSpec))

    @property
    def scan_chunk(self) -> int | None:
        """Tokens of a chunk of the scan; None if no layer scans."""
        return next((slot.chunk for slot in self.slots if slot.chunk is not None), None)

    @property
    def has_recurrent_states(self) -> bool:
        """Whether any layer has a recurrent state, and not only a convolution window."""
        return any(slot.state_size for slot in self.slots)

    # -- weights -------------------------------------------------------------------------------------------------------

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor a checkpoint may hold for this model, `optional_weights` included."""
        table = LinearShape((self.vocab_size, self.hidden_size))
        weights: dict[str, tuple[int, ...]] = {
            "model.embeddings.weight": table if self.tie_word_embeddings else tuple(table)
        }
        for index, layer in enumerate(self.layers):
            found = layer.weights(self.hidden_size)
            weights |= {f"model.layers.{index}.{name}": shape for name, shape in found.items()}
        weights["model.norm_f.weight"] = (self.hidden_size,)
        weights |= self.mtp_weights()
        if not self.tie_word_embeddings:
            weights["lm_head.weight"] = table
        return weights

    def linear_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of those of `expected_weights` that `DecoderOptions.weights` quantises."""
        return {name: shape for name, shape in self.expected_weights().items() if isinstance(shape, LinearShape)}

    def optional_weights(self) -> frozenset[str]:
        """Names of `expected_weights` that a checkpoint may omit."""
        layers = enumerate(self.layers)
        found = {f"model.layers.{index}.{name}" for index, layer in layers for name in layer.optional_weights()}
        return frozenset(found | self.mtp_weights().keys())

    def mtp_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the weights of the MTP head; empty for a model without one. Its projections have no biases,
        like those of released models.
        """
        if not self.mtp:
            return {}
        d, last = self.hidden_size, len(self.mtp) - 1
        weights: dict[str, tuple[int, ...]] = {
            "mtp.layers.0.enorm.weight": (d,),
            "mtp.layers.0.hnorm.weight": (d,),
            "mtp.layers.0.eh_proj.weight": LinearShape((d, 2 * d)),
        }
        for index, spec in enumerate(self.mtp):
            weights[f"mtp.layers.{index}.norm.weight"] = (d,)
            mixer = {name: shape for name, shape in spec.weights().items() if not name.endswith("_proj.bias")}
            weights |= {f"mtp.layers.{index}.mixer.{name}": shape for name, shape in mixer.items()}
        weights[f"mtp.layers.{last}.final_layernorm.weight"] = (d,)
        return weights


def _float32() -> torch.dtype:
    import torch  # not at the top: configurations are also read by processes without torch

    return torch.float32


@dataclass(frozen=True)
class DecoderOptions:
    """How the decoder runs. The runner resolves `None` to a value, which it does not write back into this."""

    dtype: torch.dtype = field(default_factory=_float32)
    """Dtype of weights, activations, KV pages and conv windows."""
    device: str = "cpu"
    max_seqs: int = 16
    """Largest number of requests that run at the same time."""
    max_len: int = 4096
    """Largest number of tokens, prompt and output together, of one request."""
    max_batched_tokens: int = 2048
    """Largest number of tokens of one step, over all requests."""
    max_chunk: int | None = None
    """Prompt tokens that one request may compute in one step; `None`: no limit but `max_batched_tokens`."""
    memory_bytes: int | None = None
    """Bytes of the state arena; `None`: what `max_seqs` requests of `max_len` need, at most `memory_share` of the
    memory.
    """
    memory_share: float = 0.5
    """Share of the device's memory that a default arena may take."""
    host_bytes: int | None = None
    """Bytes of host memory for the exact states of preempted requests; `None`: a quarter of the arena."""
    state_dtype: torch.dtype = field(default_factory=_float32)
    """Dtype of recurrent states: `float32`, or `bfloat16` on a CPU, to which they are rounded at fixed positions of a
    sequence (kernels/native/README.md). The dtype changes answers; with either, answers do not depend on batches,
    chunks, drafts or saved states.
    """
    page_size: int = 16
    """Tokens of one KV page."""
    weights: str | None = None
    """Form of the weights of linear layers: one of `kernels.weight_forms.FORMS`, such as `int8` (a scale for each
    output) or `int8-32` (a scale for every 32 inputs), to which weights are quantised when they are read, unless the
    checkpoint's are of that kind already. `None`: as in the checkpoint, plain ones in `dtype`.
    """
    activations: str | None = None
    """Form of the rows that are multiplied with quantised weights: `None` for `dtype`; `fp8` with fp8 weights on GPUs
    that multiply fp8; `int8` with int8 and int4 weights on CPUs. It changes answers.
    """
    native: str = "auto"
    """Compiled code for whole steps on a CPU: `auto` uses it if it is available, `on` raises a `ValueError` with the
    reason if it is not, `off` uses torch operations.
    """
    state_cache: str = "auto"
    """Positions at which states are kept for later requests: `none`, `align` (the last boundary of `state_block`),
    `all` (every boundary) or `auto` (ends of images and of the system prompt, junctions, the last chunk, the end of an
    answer).
    """
    checkpoint_bytes: int | None = None
    """Bytes that states kept for later requests may take; those of least worth are evicted first. `None`: as many as
    the arena can hold beside running requests, which have precedence in any case.
    """
    state_block: int | None = None
    """Tokens between boundaries, a multiple of `page_size`; `None`: the least common multiple of page and chunk."""
    ageing: int = 256
    """Steps that one level of priority is worth: a request is served before another of the next higher level that
    arrives at least this many steps later.
    """
    graphs: str = "auto"
    """`on`: every step that fits a captured size is a replay; `off`: no step is; `auto`: `on` if the device is a GPU.
    On a CPU a replay is the same function on padded buffers, which is for tests only.
    """
    overlap: str = "auto"
    """`on`: a step is prepared and launched before the results of the previous one are read, unless the host needs them
    for it; `off`: never; `auto`: `on` if the device is a GPU. On a CPU this saves no time.
    """
    max_capture: int = 512
    """Largest captured size, in tokens and in requests; `max_batched_tokens` and `max_seqs` limit it too."""
    speculative: str = "none"
    """Source of drafts, which steps verify: `none`, `ngram` (what followed the same tokens before) or `mtp` (the
    checkpoint's own head).
    """
    draft_tokens: int = 3
    """Largest number of drafts of one request in a step."""
    draft_vocab: int | None = None
    """`mtp` drafts only ids below this, so that a draft does not read the whole vocabulary projection; `None`: all ids.
    """
    spec_state: str = "replay"
    """How a state is restored after a rejected draft: `replay` keeps one slot and the last inputs, `slots` one slot for
    each token of a step.
    """
    draft_policy: str = "adaptive"
    """`adaptive`: as many drafts as measurements show to be worth their time, and none if drafting makes decoding
    slower; `fixed`: always `draft_tokens`.
    """

    forced_tokens: str = "auto"
    """Whether tokens that a request's constraint forces are proposed as drafts and verified together: `on` (which
    reserves memory for drafts), `off`, or `auto` (on if `speculative` is not `none`).
    """

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            require(value is None or value >= least, f"{name} must be at least {least}, not {value}")
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            require(value in known, f"{name} {value!r} is not one of {', '.join(filter(None, known))}")
        require(self.max_len >= 2, f"max_len must be at least 2 (one prompt and one output token), not {self.max_len}")
        require(0 < self.memory_share <= 1, f"memory_share must be above 0 and at most 1, not {self.memory_share}")
        block = self.state_block
        require(
            block is None or (block >= 1 and block % self.page_size == 0),
            f"state_block {block} is not a multiple of page_size {self.page_size}; {self._next_block} would work",
        )
        most = RING - 1
        require(
            1 <= self.draft_tokens <= most,
            f"draft_tokens must be at least 1 and at most {most}, not {self.draft_tokens}",
        )
        require(
            self.draft_vocab is None or self.speculative == "mtp",
            f"draft_vocab {self.draft_vocab} needs speculative 'mtp', not {self.speculative!r}",
        )
        require(self.dtype.is_floating_point, f"dtype must be a floating type, not {self.dtype}")
        self._check_state_dtype()
        require(
            self.native != "on" or not self.not_compiled,
            f"native: 'on' is not possible: {self.not_compiled}; 'auto' would work",
        )

    @property
    def _next_block(self) -> int:
        """The smallest `state_block` that is not below the given one."""
        return max(1, -(-(self.state_block or 1) // self.page_size)) * self.page_size

    def _check_state_dtype(self) -> None:
        import torch  # see _float32

        known = (torch.float32, torch.bfloat16)
        require(self.state_dtype in known, f"state_dtype must be float32 or bfloat16, not {self.state_dtype}")
        require(
            self.state_dtype == torch.float32 or self.device.startswith("cpu"),
            f"state_dtype bfloat16 needs a CPU, and the device is {self.device}: prompts are computed there in chunks, "
            "which have no states to round after every token; float32 would work",
        )

    @property
    def not_compiled(self) -> str:
        """Why the decoder runs without compiled code with these options, whatever the model; empty if it may not."""
        if self.device != "cpu":
            return f"the decoder is on {self.device}"
        if self.graphs_on and self.state_dtype != _float32():
            return "with graphs, states in bfloat16 are computed by torch operations, which round them at other tokens"
        return ""

    @property
    def graphs_on(self) -> bool:
        """The value of `graphs` on this device, with `auto` resolved."""
        return self.graphs == "on" or (self.graphs == "auto" and not self.device.startswith("cpu"))

    @property
    def overlap_on(self) -> bool:
        """The value of `overlap` on this device, with `auto` resolved."""
        return self.overlap == "on" or (self.overlap == "auto" and not self.device.startswith("cpu"))

    @property
    def num_drafts(self) -> int:
        """Largest number of drafts of one request in a step; 0 if nothing drafts."""
        return self.draft_tokens if self.speculative != "none" or self.forced_on else 0

    @property
    def forced_on(self) -> bool:
        """The value of `forced_tokens`, with `auto` resolved."""
        return self.forced_tokens == "on" or (self.forced_tokens == "auto" and self.speculative != "none")

    @property
    def slots_per_seq(self) -> int:
        """State slots that a running request holds: with `spec_state` `slots`, one for each token of a step."""
        return 1 + self.num_drafts if self.spec_state == "slots" else 1
