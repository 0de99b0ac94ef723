"""Activations of MLPs by the names that transformers gives them. Does not import torch; `kernels.activations` has the
functions."""

from kernels.native.structs import Activation

COMPILED = {
    "gelu": Activation.GELU,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.GELU_QUICK,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "silu": Activation.SILU,
}
"""Each activation as compiled code names it."""
GROUPED = ("relu2", "relu", "silu", "gelu", "gelu_pytorch_tanh")
"""Those that `kernels.moe`'s grouped products support."""
