"""The nesting depth of JSON texts, computed without parsing them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade._core.json_nesting import MAX_CONTAINERS, MAX_VALUES, excessive_nesting
from saccade._openai.documents import load_json
from saccade.errors import InvalidArgument

TEXTS = st.text(alphabet='[]{}"\\\n/u00e9é😀', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(value=VALUES, most=st.integers(0, 6), escaped=st.booleans(), indent=st.sampled_from([None, 1]))
def test_depth_of_documents(value: Any, most: int, escaped: bool, indent: int | None) -> None:
    depth = depth_of(value)
    text = json.dumps(value, ensure_ascii=escaped, indent=indent).encode()
    assert excessive_nesting(text, most) == (depth if depth > most else 0)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (b"[" * 100_000, 100_000),
        (b'{"a":' * 500, 500),
        (b'["' + b"[" * 500, 0),
        (b'["\\"' + b"[" * 500 + b'"]', 0),
        (b'["\\\\"' + b"[" * 500, 501),
        (b"[]" * 500, 0),
        (b"]" * 50 + b"[" * 150, 0),  # the parser stops at the first bracket
        (b"\xff" + b"[" * 300, 300),
        (b'["' + b'\\\\\\"[' * 500 + b'"' + b"[" * 500, 501),
    ],
)
def test_depth_of_what_is_no_whole_document(text: bytes, depth: int) -> None:
    assert excessive_nesting(text, 100) == depth


def test_other_threads_run_while_a_large_document_is_looked_at() -> None:
    """One of these threads writes a server's other answers. In processor time: a busy machine may stop all threads."""
    gaps: list[float] = []
    over = threading.Event()

    def tick() -> None:
        last = time.process_time()
        while not over.is_set():
            now = time.process_time()
            gaps.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.process_time()
    assert excessive_nesting(b"[" * 2_000_000, 100) == 2_000_000
    took = time.process_time() - began
    over.set()
    ticking.join()
    assert max(gaps) < took / 3


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"[" + b"[]," * MAX_CONTAINERS + b"1]", f"{MAX_CONTAINERS + 1} objects and arrays; at most {MAX_CONTAINERS}"),
        (b"[" + b"1," * MAX_VALUES + b"1]", f"{MAX_VALUES + 2} values and keys; at most {MAX_VALUES}"),
        (b"[" + b'"",' * (MAX_VALUES + 1) + b"1]", f"{MAX_VALUES + 1} values and keys; at most {MAX_VALUES}"),
        (b'["' + b"[" * (MAX_CONTAINERS + 1) + b'"]', ""),
        (b'["' + b'\\",' * (MAX_VALUES + 1) + b'"]', ""),
        (b'{"ids": [' + b"12," * 2**20 + b"1]}", ""),
    ],
    ids=["arrays", "numbers", "texts", "brackets in a text", "escaped quotes", "a prompt of a million ids"],
)
def test_values_of_a_document_are_counted_before_it_is_parsed(data: bytes, problem: str) -> None:
    if not problem:
        assert load_json(data)
        return
    with pytest.raises(InvalidArgument, match=problem):
        load_json(data)
