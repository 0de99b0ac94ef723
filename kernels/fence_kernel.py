"""Ordering of shared memory between threads and the matrix units of NVIDIA's sm_90."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import architecture


def needs_fences(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of this type run on matrix units that read shared memory asynchronously: of 16-bit numbers on
    sm_90. (sm_100 has such units too, but no wrong result is known from there.)"""
    return dtype.itemsize == 2 and architecture(device) == "sm_90" and not triton.knobs.runtime.interpret


@triton.jit
def fence(FENCES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Makes what this thread has stored to shared memory visible to products that follow the next barrier. FENCES:
    `needs_fences`. For loops whose loads are pipelined: they wait for loads at a barrier, and a further one would
    prevent the pipelining."""
    if FENCES:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def publish(FENCES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Makes what the threads of a program have stored to shared memory visible to the products (`tl.dot`) that follow.
    FENCES: `needs_fences`.

    Each thread has to fence its stores before the barrier that the products wait for. Triton 3.6 fences immediately
    before a product and trusts in any earlier barrier after the stores, so the product may read old values if another
    operation had a barrier in between (`kernels.aot` looks for such products).
    """
    fence(FENCES)
    if FENCES:
        tl.debug_barrier()
