"""The work for stop strings; what they match is tested with the detokenizer, in `tests/service/model/test_text.py`."""

from __future__ import annotations

from counting import lines_run

from service.answers.stops import StopMatcher


def test_the_work_for_a_token_does_not_grow_with_the_text_that_is_held_back() -> None:
    """The text repeats the beginning of one long stop string, and nothing of the others."""

    def cost(held: int) -> int:
        matcher = StopMatcher([*["b" * 255 + str(number) for number in range(9)], "a" * 255 + "b"])
        assert matcher.push("a" * held) == ""
        return lines_run(matcher.push, "a")

    few, many = cost(3), cost(200)
    assert many == few, f"{few} lines with 3 characters held back, {many} with 200"
