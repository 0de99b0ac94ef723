"""End tokens on the device: each batch slot has those of its own sequence, not of an earlier or another one."""

from __future__ import annotations

import torch
from tiny_decoder import greedy_params

from decoder.config import DecoderOptions
from decoder.flight import accepted_drafts, expect
from decoder.request import DecoderRequest
from decoder.sampling import SamplingParams
from decoder.sequence import UNREAD, Sequence
from decoder.slot_tables import EndTokens
from decoder.step import Row


def owner(
    batch_slot: int, admission: int, stop: set[int], *, eos: set[int] | None = None, drawn: int = 1, **changes: object
) -> Sequence:
    """A sequence of two prompt tokens and `drawn` output tokens."""
    params: SamplingParams = greedy_params(50, stop_token_ids=frozenset(stop), **changes)
    made = Sequence(DecoderRequest(str(admission), [1, 2], params, eos_token_ids=frozenset(eos or ())), admission, 50)
    made.held.batch_slot, made.held.admission = batch_slot, admission
    made.tokens += [3] * drawn
    return made


def reached(ends: EndTokens, owners: list[Sequence], tokens: list[int]) -> list[bool] | None:
    found = ends.reached(torch.tensor(tokens), owners)
    return None if found is None else found.tolist()


def test_ends_of_other_batch_slots_stay_when_one_brings_more() -> None:
    ends = EndTokens(DecoderOptions(max_seqs=4), 100)
    first, second, third = owner(0, 0, {5, 6}), owner(2, 1, {7}, eos={8, 9, 10}), owner(3, 2, set())
    assert reached(ends, [first], [5]) == [True]
    assert reached(ends, [first, second, third], [6, 10, 5]) == [True, True, False]
    for token in (5, 6):
        assert reached(ends, [second, first, third], [token] * 3) == [False, True, False]
    for token in (7, 8, 9, 10):
        assert reached(ends, [third, second, first], [token] * 3) == [False, True, False]
    fourth = owner(1, 3, set(range(20, 31)))
    assert reached(ends, [fourth, first, second], [30, 5, 9]) == [True, True, True]
    assert reached(ends, [fourth, first, second], [19, 4, 6]) == [False, False, False]


def test_a_batch_slot_forgets_who_had_it() -> None:
    ends = EndTokens(DecoderOptions(max_seqs=2), 100)
    assert reached(ends, [owner(0, 0, {5, 6, 7}), owner(1, 1, {6})], [7, 6]) == [True, True]
    later = owner(0, 2, {9})
    assert [reached(ends, [later], [token]) for token in (5, 6, 7, 9)] == [[False], [False], [False], [True]]
    assert reached(ends, [owner(0, 3, set())], [9]) is None
    assert reached(ends, [owner(0, 3, set()), owner(1, 1, {6})], [9, 9]) == [False, False]
    assert reached(ends, [owner(1, 1, {6})], [6]) == [True]


def test_any_number_of_stop_tokens_takes_the_same_memory() -> None:
    ends = EndTokens(DecoderOptions(max_seqs=2), 1000)
    shape = ends.bits.shape
    assert ends.bits.nbytes <= 2 * 1000 / 8 + 16
    assert reached(ends, [owner(0, 0, set(range(0, 1000, 2))), owner(1, 1, {999})], [998, 998]) == [True, False]
    for token in (0, 63, 64, 511, 998, 999):
        found = reached(ends, [owner(1, 1, {999}), owner(0, 0, set())], [token] * 2)
        assert found == [token == 999, token % 2 == 0]
    assert ends.bits.shape == shape


def test_nobody_with_an_end_asks_nothing() -> None:
    ends = EndTokens(DecoderOptions(max_seqs=2), 100)
    assert reached(ends, [owner(0, 0, set()), owner(1, 1, set(), eos={4}, ignore_eos=True)], [4, 4]) is None
    assert reached(ends, [owner(0, 2, set(), eos={4})], [4]) == [True]
    assert reached(ends, [owner(0, 3, {4}, eos={5}, ignore_eos=True)], [5]) == [False]
    assert reached(ends, [owner(0, 3, {4}, eos={5}, ignore_eos=True)], [4]) == [True]


def test_an_end_before_min_tokens_is_none() -> None:
    """The token in question is number `drawn` + 1 of the answer."""
    ends = EndTokens(DecoderOptions(max_seqs=1), 100)
    for drawn, ended in ((0, False), (3, False), (4, True), (5, True)):
        assert reached(ends, [owner(0, 0, {5}, drawn=drawn, min_tokens=4)], [5]) == [ended]


def test_what_is_expected_is_unread() -> None:
    made = [owner(0, 0, set()), owner(1, 1, set())]
    expect(made)
    assert [s.tokens for s in made] == [[1, 2, 3, UNREAD]] * 2
    assert [(s.unread, s.place, s.known, s.output_len) for s in made] == [(1, 0, 3, 2), (1, 1, 3, 2)]


def test_drafts_are_accepted_row_by_row_whatever_lies_between() -> None:
    """A row that does not draw has no token; a prompt's row has one token and no draft; the widest row is neither first
    nor last."""
    made = [owner(batch_slot, batch_slot, set()) for batch_slot in range(6)]
    rows = [Row(made[0], 1, 0), Row(made[5], 3, 0)]  # in the middle of a prompt, and at its end
    assert [row.samples for row in rows] == [False, True]
    for sequence, drafts in zip(made[1:5], ([4], [], [6, 7, 8], [9, 10]), strict=True):
        sequence.draft.tokens = drafts
        rows.append(Row(sequence, 1 + len(drafts), 2, len(drafts)))
    drawn = [40, 4, 50, 60, 6, 7, 0, 70, 9, 10, 80]  # one of the prompt; then of rows with 1, 0, 3 and 2 drafts
    assert accepted_drafts(torch.tensor(drawn), rows).tolist() == [1, 2, 2]
    for place, expected in ((1, [0, 2, 2]), (4, [1, 0, 2]), (5, [1, 1, 2]), (8, [1, 2, 0]), (9, [1, 2, 1])):
        others = [*drawn[:place], 99, *drawn[place + 1 :]]
        assert accepted_drafts(torch.tensor(others), rows).tolist() == expected
