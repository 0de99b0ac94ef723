"""The structs of structs.h, sample.h, draft.h, pack.h and compact.h, field by field, and enums of the compiled code.

When the library is loaded, `layout.py` compares them with the compiler's layout.
"""

from __future__ import annotations

from ctypes import Structure, c_char_p, c_double, c_float, c_int64, c_uint64, c_void_p
from enum import IntEnum

PANEL = 64
"""Outputs per panel of a packed weight."""
GROUP = 128
"""Inputs per scale in int4, unless a weight has another number."""
BLOCK_TOKENS = 16
"""Tokens per block, by which a recurrent state is advanced."""
SUMMED = 32
"""Inputs of a row of `SUMMED_BYTES` per stored sum."""


class Kind(IntEnum):
    """How a weight is stored and multiplied."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3
    FP8 = 4
    NVFP4 = 5
    UINT4 = 6
    BYTES = 7
    """A form of rows, not of weights: signed bytes, for weights in INT8."""
    SUMMED_BYTES = 8
    """Rows of signed bytes with the sums of every `SUMMED` of them, for weights in INT4 and UINT8."""
    COMPACT_BF16 = 9
    """bfloat16 in 12 bits, without loss; see compact.h."""
    COMPACT_ROWS = 10
    """bfloat16 in 12 bits for tables, whose rows are read and not multiplied: each row is a panel."""
    UINT8 = 11


class Activation(IntEnum):
    """Function applied to the outputs of a product; see activations.h."""

    NONE = 0
    RELU_SQUARED = 1
    RELU = 2
    GELU = 3
    GELU_TANH = 4
    GELU_QUICK = 5
    SILU = 6


class Code(IntEnum):
    """Operation codes."""

    NORM = 0
    LINEAR = 1
    MAMBA = 2
    ATTENTION = 3
    CONVERT = 4
    ACTIVATE = 5
    ROUTE = 6
    GROUP_PICKS = 7
    GATHER = 8
    EXPERTS = 9
    PICKED_ACTIVATE = 10
    COMBINE = 11
    NORM_PAIR = 12
    EMBED = 13
    LARGEST = 14
    HEADS = 15
    GATE = 16
    DELTA = 17
    KEEP = 18
    SHORT_CONV = 19
    ADD_NORM = 20


class Form(IntEnum):
    """Form of a recurrent state in a slot."""

    BLOCKS = 0
    """Used by compiled code: the state after the last multiple of `BLOCK_TOKENS` tokens, and the inputs of the
    tokens since."""
    PLAIN = 1
    """Used by torch operations: `[heads, head, state]` after the last token."""
    WRITTEN = 2
    """Like PLAIN, for a state that is about to be overwritten: its content need not be kept."""


class Target(IntEnum):
    """Destination of the product of a `LINEAR`; structs.h says how other operations use it."""

    WIDE = 0
    RESIDUAL = 1
    LOGITS = 2
    MID = 3
    OPERAND = 4
    STREAM = 5
    INNER = 6


class Weight(Structure):
    _fields_ = [
        ("kind", c_int64), ("n", c_int64), ("k", c_int64), ("kpad", c_int64),
        ("data", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("gated", c_int64), ("operand", c_int64),
        ("group", c_int64), ("zeros", c_void_p), ("outer", c_void_p), ("bf16_scale", c_void_p),
        ("compact", c_void_p), ("exceptions", c_void_p),
    ]  # fmt: skip


class Experts(Structure):
    _fields_ = [
        ("count", c_int64), ("chosen", c_int64), ("groups", c_int64), ("kept", c_int64), ("normalise", c_int64),
        ("scaling", c_float), ("epsilon", c_float), ("correction", c_void_p), ("up", c_void_p), ("down", c_void_p),
        ("shared", c_void_p),
    ]  # fmt: skip


class AttentionShape(Structure):
    _fields_ = [
        ("q_heads", c_int64), ("kv_heads", c_int64), ("width", c_int64), ("scale", c_float), ("norm_eps", c_float),
        ("q_norm", c_void_p), ("k_norm", c_void_p), ("pairs", c_int64), ("rotations", c_void_p), ("axes", c_void_p),
        ("column", c_int64), ("norm_whole", c_int64), ("window", c_int64), ("head_gate", c_int64),
    ]  # fmt: skip


class DeltaShape(Structure):
    _fields_ = [
        ("key_heads", c_int64), ("heads", c_int64), ("key", c_int64), ("value", c_int64), ("taps", c_int64),
        ("eps", c_float), ("beta_scale", c_float),
    ]  # fmt: skip


class Op(Structure):
    _fields_ = [
        ("code", c_int64), ("kind", c_int64), ("width", c_int64), ("weight", Weight), ("target", c_int64),
        ("norm", c_void_p), ("windows", c_void_p), ("window_stride", c_int64), ("states", c_void_p),
        ("state_stride", c_int64), ("conv", c_void_p), ("conv_bias", c_void_p), ("a", c_void_p), ("d", c_void_p),
        ("dt_bias", c_void_p), ("kv", c_void_p), ("kv_stride", c_int64), ("ring", c_void_p), ("ring_stride", c_int64),
        ("experts", c_void_p), ("delta", c_void_p), ("first_key", c_int64), ("attention", c_void_p),
        ("activation", c_int64), ("gated", c_int64), ("scale", c_float), ("row_scale", c_void_p),
        ("column", c_int64), ("bf16_rows", c_int64), ("taps", c_int64), ("norm_first", c_int64),
    ]  # fmt: skip


class Model(Structure):
    _fields_ = [
        ("count", c_int64), ("ops", c_void_p), ("threads", c_int64), ("hidden", c_int64), ("vocab", c_int64),
        ("heads", c_int64), ("head", c_int64), ("groups", c_int64), ("state", c_int64), ("taps", c_int64),
        ("conv_dim", c_int64), ("inner", c_int64), ("page", c_int64), ("positions", c_int64),
        ("stored_bf16", c_int64), ("states_bf16", c_int64), ("eps", c_float), ("dt_low", c_float), ("dt_high", c_float),
        ("x", c_void_p), ("wide", c_void_p), ("mid", c_void_p), ("ld", c_int64), ("mid_ld", c_int64),
        ("operand", c_void_p), ("operand_ld", c_int64), ("operand_scale", c_void_p),
        ("picks", c_void_p), ("places", c_void_p), ("shares", c_void_p), ("runs", c_void_p), ("picked", c_void_p),
        ("picked_scale", c_void_p), ("picked_wide", c_void_p),
    ]  # fmt: skip


class Step(Structure):
    _fields_ = [
        ("tokens", c_int64), ("rows", c_int64), ("starts", c_void_p), ("slots", c_void_p), ("initial", c_void_p),
        ("save_count", c_int64), ("saves", c_void_p), ("lengths", c_void_p), ("tables", c_void_p), ("places", c_void_p),
        ("table_stride", c_int64), ("logits", c_void_p), ("origins", c_void_p), ("batch_slots", c_void_p),
        ("counts", c_void_p), ("scans", c_int64), ("scan_computed", c_void_p), ("scan_tables", c_void_p),
        ("scan_table_stride", c_int64),
        ("ids", c_void_p), ("largest", c_void_p), ("positions", c_void_p), ("axes", c_int64), ("keeps", c_int64),
        ("kept", c_void_p), ("kept_count", c_int64),
    ]  # fmt: skip


class VarlenAttention(Structure):
    _fields_ = [
        ("q", c_void_p), ("k", c_void_p), ("v", c_void_p), ("out", c_void_p), ("stride", c_int64),
        ("head_stride", c_int64), ("out_stride", c_int64), ("stored_bf16", c_int64), ("out_bf16", c_int64),
        ("kind", c_int64), ("heads", c_int64), ("group", c_int64), ("width", c_int64), ("sequences", c_int64),
        ("bounds", c_void_p), ("scale", c_float),
    ]  # fmt: skip


class SampleParams(Structure):
    """Sampling parameters of a sequence."""

    _fields_ = [
        ("temperature", c_double), ("top_p", c_double), ("min_p", c_double), ("repetition", c_double),
        ("presence", c_double), ("frequency", c_double), ("top_k", c_int64), ("sample", c_int64), ("seed", c_uint64),
        ("logprobs", c_int64), ("bias_count", c_int64), ("end_count", c_int64), ("bias_ids", c_void_p),
        ("ends", c_void_p), ("bias", c_void_p),
    ]  # fmt: skip


class Draw(Structure):
    """One row of logits to draw from."""

    _fields_ = [
        ("params", c_void_p), ("position", c_int64), ("masked", c_int64), ("prompt", c_int64), ("known", c_int64),
        ("tokens", c_void_p), ("mask", c_void_p),
    ]  # fmt: skip


class Drafting(Structure):
    _fields_ = [
        ("due", c_int64), ("rows", c_int64), ("passes", c_int64), ("enter", c_int64), ("draft_vocab", c_int64),
        ("is_bf16", c_int64), ("embeddings", c_void_p), ("given", c_void_p), ("norm", c_void_p), ("ids", c_void_p),
        ("places", c_void_p), ("lengths", c_void_p), ("counts", c_void_p), ("draws", c_char_p), ("out", c_void_p),
        ("positions", c_void_p), ("axes", c_int64), ("table", c_void_p),
    ]  # fmt: skip


class Packing(Structure):
    """A weight's panels, made of rows as files store them."""

    _fields_ = [
        ("kind", c_int64), ("n", c_int64), ("k", c_int64), ("kpad", c_int64), ("rows", c_void_p), ("stride", c_int64),
        ("order", c_void_p), ("scales", c_void_p), ("scale_stride", c_int64), ("out", c_void_p), ("begin", c_int64),
        ("end", c_int64),
    ]  # fmt: skip


class Compacting(Structure):
    """Plain panels of bfloat16, to be stored in 12 bits per element."""

    _fields_ = [
        ("plain", c_void_p), ("kpad", c_int64), ("outputs", c_int64), ("compact", c_void_p), ("heads", c_void_p),
        ("exceptions", c_void_p), ("most", c_int64),
    ]  # fmt: skip
