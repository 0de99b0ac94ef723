"""Which step sizes get a graph, and when the arena is too small for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.capture import Bucket, CapturePlan, capture_sizes, check_state_slots, decode_sizes, padded_size


@pytest.mark.parametrize(
    ("tokens", "cap", "length", "tail"),
    [
        pytest.param(8192, 512, 51, [480, 496, 512], id="default-512"),
        pytest.param(257, 2048, 36, [248, 256, 257], id="off-stride-257"),
        pytest.param(700, 1024, 63, [672, 688, 700], id="off-stride-700"),
        pytest.param(768, 1024, 67, [736, 752, 768], id="on-stride-768"),
        pytest.param(3, 512, 3, [1, 2, 3], id="three"),
        pytest.param(7, 512, 4, [1, 2, 4, 7], id="seven"),
        pytest.param(8192, 5, 4, [1, 2, 4, 5], id="cap-5-is-kept"),
        pytest.param(8192, 255, 35, [240, 248, 255], id="cap-255"),
        pytest.param(8192, 256, 35, [240, 248, 256], id="cap-256"),
        pytest.param(8192, 300, 38, [272, 288, 300], id="off-stride-cap-300"),
    ],
)
def test_balanced_sizes(tokens: int, cap: int, length: int, tail: list[int]) -> None:
    sizes = capture_sizes(tokens, cap)
    assert len(sizes) == length
    assert sizes[-len(tail) :] == tail


def test_interactivity_has_every_small_size() -> None:
    sizes = capture_sizes(8192, 512, mode="interactivity")
    assert sizes[:35] == [*range(1, 33), 40, 48, 56]
    assert len(sizes) == 76
    assert capture_sizes(8192, 20, mode="interactivity") == list(range(1, 21))


def test_given_sizes_are_taken_exactly() -> None:
    assert capture_sizes(8192, 1, sizes=[700, 1, 2, 2]) == [1, 2, 700]
    assert capture_sizes(8192, 512, sizes=[]) == []


@pytest.mark.parametrize("bad", [9000, 0, -1])
def test_given_size_that_cannot_be_is_named(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"{bad} .* 8192"):
        capture_sizes(8192, 512, sizes=[1, bad])


def test_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="'fast'"):
        capture_sizes(10, 10, mode="fast")


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from(["balanced", "interactivity"]))
def test_cap_is_always_last(tokens: int, cap: int, mode: str) -> None:
    sizes = capture_sizes(tokens, cap, mode=mode)
    assert sizes[-1] == min(tokens, cap)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 1


@given(st.integers(1, 600), st.integers(1, 600))
def test_decode_sizes_end_at_their_cap(max_seqs: int, cap: int) -> None:
    sizes = decode_sizes(max_seqs, cap)
    assert sizes[-1] == min(max_seqs, cap)
    assert set(sizes) <= set(capture_sizes(600, 600)) | {min(max_seqs, cap)}


def test_padded_size_of_the_upstream_cases() -> None:
    assert padded_size(257, capture_sizes(257, 2048)) == 257
    sizes = capture_sizes(700, 1024)
    assert padded_size(690, sizes) == 700
    assert padded_size(701, sizes) is None
    assert padded_size(1, []) is None


@given(st.integers(1, 400), st.lists(st.integers(1, 400), max_size=8))
def test_padded_size_is_the_smallest_that_holds(n: int, sizes: list[int]) -> None:
    assert padded_size(n, sorted(set(sizes))) == min((size for size in sizes if size >= n), default=None)


CASES = [
    pytest.param({"max_seqs": 1024, "slots": 658}, True, id="short"),
    pytest.param({"max_seqs": 658, "slots": 658}, False, id="equal"),
    pytest.param({"max_seqs": 1024, "slots": 658, "full_graphs": False}, False, id="no-full-graphs"),
    pytest.param({"max_seqs": 1024, "slots": 658, "profiling": True}, False, id="profiling"),
    pytest.param({"max_seqs": 1024, "slots": 658, "has_mamba": False}, False, id="no-mamba"),
    pytest.param({"max_seqs": 256, "slots": 361}, False, id="enough"),
    pytest.param({"max_seqs": 256, "slots": 361, "slots_per_seq": 2}, True, id="speculation-doubles-the-need"),
]


@pytest.mark.parametrize(("arguments", "fails"), CASES)
def test_state_slots(arguments: dict[str, int], fails: bool) -> None:
    if not fails:
        check_state_slots(**arguments)  # type: ignore[arg-type]
        return
    per = arguments.get("slots_per_seq", 1)
    with pytest.raises(ValueError, match=f"at most {arguments['slots'] // per}") as raised:
        check_state_slots(**arguments)  # type: ignore[arg-type]
    assert str(arguments["max_seqs"]) in str(raised.value)
    assert str(arguments["slots"]) in str(raised.value)


def test_state_slots_names_real_concurrency() -> None:
    with pytest.raises(ValueError, match="109 requests run at once"):
        check_state_slots(1024, 658, concurrent=109)


def test_a_shortage_of_slots_never_shortens_the_list() -> None:
    before = capture_sizes(8192, 512)
    check_state_slots(256, 361)
    assert capture_sizes(8192, 512) == before
    assert before[-1] == 512


@pytest.mark.parametrize(
    ("requests", "tokens", "prefills", "verified", "expected"),
    [
        pytest.param(3, 3, 0, 0, Bucket("decode", 4), id="decode"),
        pytest.param(3, 9, 1, 0, Bucket("mixed", 16), id="a-prefill-makes-it-mixed"),
        pytest.param(9, 9, 0, 0, Bucket("mixed", 16), id="more-requests-than-captured-still-replay"),
        pytest.param(3, 17, 1, 0, None, id="larger-than-all"),
        pytest.param(4, 9, 0, 3, Bucket("verify", 4), id="drafts"),
        pytest.param(8, 20, 0, 5, None, id="more-drafting-than-captured"),
    ],
)
def test_the_bucket_of_a_step(
    requests: int, tokens: int, prefills: int, verified: int, expected: Bucket | None
) -> None:
    plan = CapturePlan((1, 2, 4), (1, 2, 4, 8, 16), drafts=3)
    assert plan.choose(requests, tokens, prefills, verified) == expected


def test_buckets_are_captured_from_the_most_tokens_down() -> None:
    plan = CapturePlan((1, 4), (1, 8), drafts=3)
    assert [(str(b), plan.tokens(b)) for b in plan.buckets] == [
        ("verify_4", 20), ("mixed_8", 8), ("verify_1", 5), ("decode_4", 4), ("mixed_1", 1), ("decode_1", 1)
    ]  # fmt: skip
    assert {b.kind for b in CapturePlan((1, 4), (1, 8)).buckets} == {"decode", "mixed"}
