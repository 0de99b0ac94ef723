"""Other projects' kernels, imported from the sources that `make peers` has fetched; nothing of them is copied into this
project.

The `__init__` files of their packages are skipped, because they import compiled extensions and much of an engine. What
vLLM's modules import from the rest of vLLM (the GPU's kind, a logger, the id of the padding block) is replaced here.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).resolve().parent.parent / ".peers" / "src"
VLLM_NULL_BLOCK = -1
"""vLLM's id for padding (0 by default) is set to Saccade's, so that both sides use the same slots."""


def runnable(device: str) -> bool:
    """Whether plain Triton kernels run on this device: on a GPU, or in Triton's interpreter."""
    return device != "cpu" or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def function(package: str, module: str, name: str) -> Callable[..., Any] | None:
    """A function of a fetched source; None if it has not been fetched."""
    top = package.replace("-", "_")
    folder = SOURCES / package / top
    if not folder.is_dir():
        return None
    if top not in sys.modules:
        sys.modules[top] = _module(top, __path__=[str(folder)])
        for inside, members in (_vllm() if top == "vllm" else {}).items():
            sys.modules[f"{top}.{inside}"] = _module(f"{top}.{inside}", **members)
    found: Callable[..., Any] = getattr(importlib.import_module(f"{top}.{module}"), name)
    return found


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def _vllm() -> Mapping[str, Mapping[str, Any]]:
    """By module, the names that vLLM's Mamba operations import from elsewhere in vLLM."""
    import triton
    import triton.language as tl

    return {
        "envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
        "_custom_ops": {},
        "logger": {"init_logger": _logger},
        "platforms": {"current_platform": _Platform()},
        "triton_utils": {"HAS_TRITON": True, "triton": triton, "tl": tl},
        "utils.platform_utils": {"get_device_name_as_file_name": _device_file_name},
        "v1.attention.backends.utils": {"NULL_BLOCK_ID": VLLM_NULL_BLOCK, "PAD_SLOT_ID": VLLM_NULL_BLOCK},
    }


def _logger(name: str) -> Any:
    log: Any = logging.getLogger(name)
    log.info_once = log.warning_once = lambda message, *values, **_: log.info(message, *values)
    return log


def _device_file_name() -> str:
    """The GPU's name as in the file names of vLLM's tuned configurations."""
    return re.sub(r"[\s/]+", "_", torch.cuda.get_device_name()) if torch.cuda.is_available() else "none"


class _Platform:
    """The part of vLLM's platform interface that its kernels use."""

    def is_cuda(self) -> bool:
        return torch.version.cuda is not None

    def is_cpu(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_device_capability(self, capability: int) -> bool:
        return torch.cuda.is_available() and divmod(capability, 10) == torch.cuda.get_device_capability()

    def is_arch_support_pdl(self) -> bool:
        """Programmatic dependent launch: from Hopper on, a kernel may begin before the previous one has ended."""
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
