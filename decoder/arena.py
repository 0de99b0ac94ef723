"""The decoder's memory: convolution windows, recurrent states and KV pages of all layers, in one buffer of superblocks.

A superblock contains either the windows and states of every recurrent layer of one sequence, or `pages_per_block` pages
of keys and values of `page_size` tokens over every attention layer. Each layer has a strided view of the buffer,
`[slots, ...]` or `[pages, ...]`; changing the use of a superblock copies nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.blocks import SuperblockPool
from decoder.config import RING, DecoderConfig, DecoderOptions
from decoder.layers.spec import PageSpec
from kernels.host_memory import use_huge_pages
from kernels.machine_memory import machine_memory
from kernels.slots import SlotRun
from kernels.transfer import upload

ALIGNMENT = 64


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _aligned(size: int) -> int:
    return _cdiv(size, ALIGNMENT) * ALIGNMENT


def paged(config: DecoderConfig, options: DecoderOptions) -> tuple[PageSpec, ...]:
    """Key-value pages of the model's layers, then those of the MTP head."""
    return config.pages + (config.mtp_pages if options.speculative == "mtp" else ())


@dataclass(frozen=True)
class ArenaLayout:
    """Sizes in bytes of one model's memory. Pure arithmetic; `saccade plan` prints it."""

    window_bytes: tuple[int, ...]
    """Bytes of each recurrent layer's convolution window, padded to the alignment."""
    state_bytes: tuple[int, ...]
    """Bytes of each recurrent layer's state, padded to the alignment."""
    page_bytes: int
    """Bytes of one page over all attention layers; 0 without attention."""
    page_size: int
    slots_per_seq: int = 1
    """State slots that a running sequence holds."""
    ring_bytes: int = 0
    """Bytes of the ring of one running sequence, over all recurrent layers; 0 unless states are replayed."""
    carry_bytes: int = 0
    """Bytes of the hidden row that a drafter continues from, in each slot; 0 without a drafter that needs it."""

    @classmethod
    def of(cls, config: DecoderConfig, options: DecoderOptions) -> ArenaLayout:
        element, state_element = options.dtype.itemsize, options.state_dtype.itemsize
        compiled = options.native != "off" and torch.device(options.device).type == "cpu"
        page = sum(of.numbers(options.page_size) for of in paged(config, options)) * element
        ring = 0
        if options.num_drafts and options.spec_state == "replay":
            ring = RING * sum(slot.inputs for slot in config.slots) * torch.float32.itemsize
        return cls(
            tuple(_aligned(math.prod(slot.window) * element) for slot in config.slots),
            tuple(_aligned(slot.state_bytes(element, state_element, compiled)) for slot in config.slots),
            _aligned(page),
            options.page_size,
            options.slots_per_seq,
            ring,
            _aligned(config.hidden_size * element) if options.speculative == "mtp" else 0,
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of the windows, states and drafter's row of one sequence; 0 for a model that has none."""
        return sum(self.window_bytes) + sum(self.state_bytes) + self.carry_bytes

    @property
    def pages_per_block(self) -> int:
        """Pages of one superblock: as many as cover a slot, 1 without recurrent layers, 0 without attention."""
        if self.page_bytes == 0:
            return 0
        return max(1, _cdiv(self.slot_bytes, self.page_bytes))

    @property
    def block_bytes(self) -> int:
        """Bytes of one superblock. A model with neither states nor pages has blocks of one alignment unit, which are
        never accessed."""
        return max(ALIGNMENT, self.pages_per_block * self.page_bytes or self.slot_bytes)

    def blocks_for(self, sequences: int, tokens: int) -> int:
        """Superblocks that `sequences` requests of `tokens` tokens each need together."""
        slots = sequences * self.slots_per_seq if self.slot_bytes else 0
        pages = sequences * _cdiv(tokens, self.page_size)
        return slots + (_cdiv(pages, self.pages_per_block) if self.pages_per_block else 0)

    def sequences_for(self, blocks: int, tokens: int) -> int:
        """Number of requests of `tokens` tokens that fit together."""
        low, high = 0, blocks * max(1, self.pages_per_block) + 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle, tokens) <= blocks else (low, middle - 1)
        return low


def device_memory(device: str) -> int:
    """Bytes of memory of a device; on a CPU, what this machine or container allows."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
    return machine_memory()


def resolve_blocks(layout: ArenaLayout, options: DecoderOptions, reserved: int = 0) -> int:
    """The number of superblocks of the arena. Raises `ValueError` if one request of `max_len` does not fit, or if
    `memory_bytes` is more than the device has.

    `reserved`: bytes of the memory share that are needed for other purposes, such as graphs.
    """
    needed = layout.blocks_for(1, options.max_len)
    if options.memory_bytes is None:
        memory = device_memory(options.device)
        share = max(0, int(memory * options.memory_share) - reserved)
        blocks = min(layout.blocks_for(options.max_seqs, options.max_len), max(1, share // layout.block_bytes))
        less = f", less {reserved} bytes for graphs," if reserved else ""
        source = (
            f"memory_share {options.memory_share:g} of the {memory} bytes of {options.device}{less} ({share} bytes)"
        )
    else:
        _check_memory(options.memory_bytes, options.device)
        blocks = options.memory_bytes // layout.block_bytes
        source = f"memory_bytes {options.memory_bytes}"
    if blocks < needed:
        ways = _ways_to_fit(layout, blocks, needed * layout.block_bytes, options)
        raise ValueError(
            f"{source} is {blocks} superblocks of {layout.block_bytes} bytes, but one request of max_len "
            f"{options.max_len} needs {needed}: {ways}"
        )
    return blocks


def _check_memory(memory_bytes: int, device: str) -> None:
    """Raises `ValueError` if the device has less memory. For a GPU nothing is checked on a machine without GPUs, which
    may plan for one."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        return
    if memory_bytes > (memory := device_memory(device)):
        raise ValueError(f"memory_bytes {memory_bytes} is more than the {memory} bytes of memory of {device}")


def _ways_to_fit(layout: ArenaLayout, blocks: int, needed: int, options: DecoderOptions) -> str:
    """How to make one request of max_len fit, which takes `needed` bytes: with more memory, if the device has it, or
    with the largest max_len for these blocks, if there is one."""
    spare = blocks - (layout.slots_per_seq if layout.slot_bytes else 0)
    tokens = spare * layout.pages_per_block * layout.page_size
    ways = [f"lower max_len to at most {tokens}"] if tokens >= 2 else []
    try:
        _check_memory(needed, options.device)
        ways.insert(0, f"set memory_bytes to at least {needed} bytes")
    except ValueError as error:
        return ways[0] if ways else str(error)
    return ", or ".join(ways)


class Saved(NamedTuple):
    """A copy of one sequence's arena memory, in host memory."""

    state: Tensor | None
    pages: Tensor | None
    ring: tuple[Tensor, ...] = ()
    """The inputs of each recurrent layer since the state."""


class Arena:
    """The buffer, its views for each layer, and its bookkeeping (`pool`)."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, *, reserved: int = 0) -> None:
        """Memory is reserved but not touched: on a CPU, unused pages take no physical memory. `ValueError` and
        `reserved`: see `resolve_blocks`."""
        self.layout = ArenaLayout.of(config, options)
        blocks = resolve_blocks(self.layout, options, reserved)
        self.pool = SuperblockPool(blocks, self.layout.pages_per_block, has_slots=self.layout.slot_bytes > 0)
        self.buffer = torch.empty(blocks * self.layout.block_bytes, dtype=torch.uint8, device=options.device)
        use_huge_pages(self.buffer)
        self.windows, self.states = self._state_views(config, options)
        self.kv = self._page_views(config, options)
        """For each attention layer: `[pages, 2, page_size, kv heads, head dim]`, where the tokens of one head are
        adjacent, because threads divide the heads; those of a drafter come last."""
        rings = options.max_seqs if self.layout.ring_bytes else 0
        self.rings = [
            torch.empty(rings, RING, slot.inputs, dtype=torch.float32, device=options.device) for slot in config.slots
        ]
        """For each recurrent layer, by batch slot: the inputs since the state in the state slot, unrounded."""
        self.carry = self._carry_view(config, options)
        """`[slots, hidden]`: the hidden row after the last token, where a drafter needs it."""

    @property
    def total_bytes(self) -> int:
        return self.buffer.numel()

    def _slot_view(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
        flat = self.buffer.view(dtype)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        stride = self.layout.block_bytes // dtype.itemsize
        return flat.as_strided((self.pool.num_blocks, *shape), (stride, *strides), offset // dtype.itemsize)

    def _state_views(self, config: DecoderConfig, options: DecoderOptions) -> tuple[list[Tensor], list[Tensor]]:
        """Windows and states of each recurrent layer: all states come first in a slot."""
        windows, states = [], []
        window, state = sum(self.layout.state_bytes), 0
        for index, slot in enumerate(config.slots):
            states.append(self._slot_view(options.state_dtype, state, slot.state))
            windows.append(self._slot_view(options.dtype, window, slot.window))
            state += self.layout.state_bytes[index]
            window += self.layout.window_bytes[index]
        return windows, states

    def _carry_view(self, config: DecoderConfig, options: DecoderOptions) -> Tensor | None:
        if not self.layout.carry_bytes:
            return None
        offset = self.layout.slot_bytes - self.layout.carry_bytes
        return self._slot_view(options.dtype, offset, (config.hidden_size,))

    def _page_views(self, config: DecoderConfig, options: DecoderOptions) -> list[Tensor]:
        if not self.layout.page_bytes:
            return []
        pages = self.pool.num_blocks * self.layout.pages_per_block
        flat = self.buffer.view(options.dtype).view(pages, -1)
        views, begin = [], 0
        for of in paged(config, options):
            end = begin + of.numbers(options.page_size)
            by_head = flat[:, begin:end].unflatten(1, (2, of.heads, options.page_size, of.width))
            views.append(by_head.transpose(2, 3))
            begin = end
        return views

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zeroes newly taken pages: bytes of an old state, read as keys or values, may be NaN, and NaN x 0 is not 0."""
        if not pages or not self.layout.page_bytes:
            return
        if self.buffer.device.type == "cpu":  # torch would wake its threads for a few microseconds of work
            address, size = self.buffer.data_ptr(), self.layout.page_bytes
            for run in SlotRun.of(pages, len(pages)):
                ctypes.memset(address + run.slot * size, 0, (run.end - run.begin) * size)
        else:
            self._pages().index_fill_(0, upload(pages, torch.int64, self.buffer.device), 0)

    def _pages(self) -> Tensor:
        """`[pages, integers]`: each page as the widest integers that divide it; torch fills bytes one by one."""
        pages = self.pool.num_blocks * self.layout.pages_per_block
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[math.gcd(self.layout.page_bytes, 8)]
        return self.buffer.view(dtype).view(pages, -1)

    def save(self, slot: int, pages: Sequence[int], batch_slot: int = -1, inputs: int = 0) -> Saved:
        """A copy in host memory of a slot's bytes, of pages' bytes and of the first `inputs` of a batch slot's ring."""
        state = self._slot(slot).cpu().clone() if slot >= 0 else None
        ring = tuple(of[batch_slot, :inputs].cpu().clone() for of in self.rings) if inputs else ()
        if not pages or not self.layout.page_bytes:
            return Saved(state, None, ring)
        index = upload(pages, torch.int64, self.buffer.device)
        return Saved(state, self._pages().index_select(0, index).cpu(), ring)

    def load(self, slot: int, pages: Sequence[int], saved: Saved, batch_slot: int = -1) -> None:
        """Copies a saved copy back to a slot, pages and a batch slot's ring, not necessarily the original ones."""
        state, content, ring = saved
        for of, inputs in zip(self.rings, ring, strict=False):
            of[batch_slot, : inputs.shape[0]] = inputs.to(of.device)
        if state is not None:
            self._slot(slot).copy_(state)
        if content is not None:
            index = upload(pages[: content.shape[0]], torch.int64, self.buffer.device)
            self._pages().index_copy_(0, index, content.to(self.buffer.device))

    def _slot(self, slot: int) -> Tensor:
        start = slot * self.layout.block_bytes
        return self.buffer[start : start + self.layout.slot_bytes]

    def copy_slot(self, source: int, target: int) -> None:
        """Copies windows and states of all layers from one slot to another."""
        self._slot(target).copy_(self._slot(source))

    def copy_page(self, source: int, target: int) -> None:
        """Copies keys and values of all layers from one page to another."""
        pages = self._pages()
        pages[target].copy_(pages[source])
