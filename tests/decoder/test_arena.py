"""Sizes, views and the numbers in error messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_decoder import tiny_config

from decoder.arena import Arena, ArenaLayout
from decoder.config import DecoderConfig, DecoderOptions
from families.nemotron_h.config import NemotronHConfig
from kernels.machine_memory import machine_memory
from kernels.native import state_blocks


def nano_12b() -> DecoderConfig:
    return NemotronHConfig(
        pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
        vocab_size=131072,
        hidden_size=5120,
        num_attention_heads=40,
        num_key_value_heads=8,
        mamba_head_dim=80,
    ).decoder


def test_a_slot_of_a_released_model() -> None:
    """148.9 MB for a slot and 393,216 bytes for a page of 16 tokens: 379 pages, 0.1 % wasted."""
    layout = ArenaLayout.of(nano_12b(), DecoderOptions(dtype=torch.bfloat16, native="off"))
    assert layout.page_bytes == 393_216
    assert layout.slot_bytes == pytest.approx(148.9e6, rel=1e-3)
    assert layout.pages_per_block == 379
    assert layout.block_bytes <= 1.002 * layout.slot_bytes


@pytest.mark.parametrize(("chosen", "share"), [("avx512bf16", 0.07), ("avx2", 0.14)])
def test_a_slot_has_room_for_pending_tokens_where_code_is_compiled(
    chosen: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 tokens beside a state of 80 x 128 for each head, in bfloat16 or float32."""
    monkeypatch.setattr(state_blocks, "bf16_pairs", lambda: chosen == "avx512bf16")
    options = [DecoderOptions(dtype=torch.bfloat16, native=native) for native in ("off", "auto")]
    sizes = [ArenaLayout.of(nano_12b(), each).slot_bytes for each in options]
    assert sizes[1] / sizes[0] == pytest.approx(1 + share, abs=0.01)


@given(st.sampled_from(["M", "*", "M*", "MM*-", "E"]), st.integers(1, 40), st.integers(1, 200))
def test_sequences_for_is_the_inverse_of_blocks_for(pattern: str, blocks: int, tokens: int) -> None:
    layout = ArenaLayout.of(tiny_config(pattern), DecoderOptions())
    if not layout.slot_bytes and not layout.page_bytes:
        return
    count = layout.sequences_for(blocks, tokens)
    assert layout.blocks_for(count, tokens) <= blocks < layout.blocks_for(count + 1, tokens)


def make(pattern: str = "M*M*", **options: Any) -> Arena:
    return Arena(tiny_config(pattern), DecoderOptions(**({"max_seqs": 3, "max_len": 64} | options)))


def test_views_of_one_slot_do_not_overlap() -> None:
    arena = make()
    arena.buffer.zero_()
    for layer, (window, state) in enumerate(zip(arena.windows, arena.states, strict=True)):
        window[1] = layer + 1
        state[1] = -layer - 1
    for layer, (window, state) in enumerate(zip(arena.windows, arena.states, strict=True)):
        assert (window[1] == layer + 1).all() and (state[1] == -layer - 1).all()
        assert (window[0] == 0).all() and (window[2] == 0).all() and (state[0] == 0).all() and (state[2] == 0).all()
    assert all((kv[2 * arena.layout.pages_per_block :] == 0).all() for kv in arena.kv)


def test_pages_of_a_block_lie_in_its_bytes() -> None:
    arena = make()
    arena.buffer.zero_()
    per = arena.layout.pages_per_block
    for kv in arena.kv:
        kv[per : 2 * per] = 1.0
    used = arena.buffer.view(arena.pool.num_blocks, -1).ne(0).any(1)
    assert used.tolist() == [False, True] + [False] * (arena.pool.num_blocks - 2)
    for layer, kv in enumerate(arena.kv):
        kv[per] = layer + 2.0
    assert [kv[per].unique().tolist() for kv in arena.kv] == [[2.0], [3.0]]


def test_fresh_pages_are_finite_and_others_untouched() -> None:
    arena = make()
    arena.buffer.fill_(255)
    arena.clear_pages([0, 3])
    for kv in arena.kv:
        assert (kv[[0, 3]] == 0).all()
        assert kv[[1, 2, 4]].isnan().all()


def test_saved_content_comes_back_elsewhere() -> None:
    arena = make()
    arena.buffer.random_(0, 100)
    before = [state[0].clone() for state in arena.states], [kv[[8, 6]].clone() for kv in arena.kv]
    saved = arena.save(0, [8, 6])
    arena.buffer.zero_()
    arena.load(2, [9, 10, 11], saved)
    assert all(torch.equal(state[2], old) for state, old in zip(arena.states, before[0], strict=True))
    assert all(torch.equal(kv[[9, 10]], old) for kv, old in zip(arena.kv, before[1], strict=True))


@pytest.mark.parametrize("pattern", ["M", "*", "-"])
def test_models_without_one_of_the_kinds(pattern: str) -> None:
    arena = make(pattern)
    assert (len(arena.states), len(arena.kv)) == (pattern.count("M"), pattern.count("*"))
    saved = arena.save(0 if pattern == "M" else -1, [0, 1] if pattern == "*" else [])
    arena.load(1 if pattern == "M" else -1, [1, 0] if pattern == "*" else [], saved)


def test_memory_that_is_too_small_names_what_would_do() -> None:
    layout = make(native="off").layout
    needed = layout.blocks_for(1, 64)
    with pytest.raises(ValueError, match=f"at least {needed * layout.block_bytes} bytes") as raised:
        make(memory_bytes=(needed - 1) * layout.block_bytes, native="off")
    longest = (needed - 2) * layout.pages_per_block * 16
    assert f"max_len to at most {longest}" in str(raised.value)
    make(memory_bytes=(needed - 1) * layout.block_bytes, max_len=longest, native="off")
    make(memory_bytes=needed * layout.block_bytes, native="off")


def test_a_share_that_is_too_small_is_named_with_the_memory_of_which_it_is_one() -> None:
    memory = machine_memory()
    shown = rf"^memory_share 1e-06 of the {memory} bytes of cpu \({memory // 10**6} bytes\) is \d+ superblocks"
    with pytest.raises(ValueError, match=shown):
        make(max_len=10**6, memory_share=1e-6)


def test_memory_that_the_machine_lacks_is_refused_with_both_numbers() -> None:
    memory = machine_memory()
    with pytest.raises(
        ValueError, match=f"^memory_bytes {memory + 1} is more than the {memory} bytes of memory of cpu$"
    ):
        make(memory_bytes=memory + 1)


def test_default_holds_max_seqs_of_max_len() -> None:
    arena = make()
    assert arena.layout.sequences_for(arena.pool.num_blocks, 64) == 3
