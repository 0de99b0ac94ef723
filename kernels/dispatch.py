"""Selects the implementation of an operation: the torch reference or the Triton kernel.

Callers import an operation from its folder (`from kernels.rms_norm import rms_norm`) and get a `dispatched` function
that looks at the device of its first tensor: CUDA and ROCm devices use the kernel, CPUs the reference. The first use of
each choice is logged with its reason, except that of the reference on a CPU. If a kernel is needed but cannot be
imported, that is an error; there is no fallback.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, ParamSpec, TypeVar, cast

from torch import Tensor

log = logging.getLogger(__name__)

Implementation = Literal["reference", "triton"]
P = ParamSpec("P")
R = TypeVar("R")

_forced: Implementation | None = None
_logged: set[tuple[str, str, str]] = set()


def implementation(device_type: str) -> tuple[Implementation, str]:
    """The implementation for a device type, and the reason."""
    if _forced is not None:
        return _forced, "the caller forced it"
    if device_type == "cuda":
        return "triton", "the tensors are on a GPU"
    return "reference", f"there are no kernels for {device_type} tensors"


def is_forced() -> bool:
    """Whether `forced` is active."""
    return _forced is not None


@contextmanager
def forced(choice: Implementation) -> Iterator[None]:
    """Inside this context every operation that has a kernel runs `choice`, on any device. For tests and measurements:
    the setting applies to the whole process and is not thread-safe."""
    global _forced
    before, _forced = _forced, choice
    try:
        yield
    finally:
        _forced = before


def dispatched(reference: Callable[P, R], *, kernel: bool = True) -> Callable[P, R]:
    """Makes the operation from its reference, such as `kernels.rms_norm.reference.rms_norm`.

    The Triton version is the function of the same name in `kernel.py` of the same folder, imported when first needed.
    `kernel=False`: there is none, and the reference runs everywhere. The operation raises `RuntimeError` if the kernel
    is needed and cannot be imported.
    """
    name = reference.__name__
    module = reference.__module__.removesuffix("reference") + "kernel"

    @functools.cache
    def twin() -> Callable[P, R]:
        try:
            return cast(Callable[P, R], getattr(importlib.import_module(module), name))
        except ImportError as error:
            raise RuntimeError(f"{name} on a GPU needs Triton: {module} cannot be imported ({error})") from error

    @functools.wraps(reference)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if device == "cpu" and _forced is None:
            return reference(*args, **kwargs)
        choice, reason = implementation(device)
        if not kernel:
            choice, reason = "reference", "it has no kernel"
        if (name, device, choice) not in _logged:
            _logged.add((name, device, choice))
            log.info("%s on %s runs the %s implementation: %s", name, device, choice, reason)
        return twin()(*args, **kwargs) if choice == "triton" else reference(*args, **kwargs)

    return operation
