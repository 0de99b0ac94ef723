"""The whole engine with overlapping steps, as on a GPU: answers are the same."""

from __future__ import annotations

from typing import Any

import saccade

PROMPTS = [[1, 5, 9, 20], [1, 5, 9, 21], [40, 41]]


def answers(overlap: str) -> list[Any]:
    fixed: dict[str, Any] = {"dtype": "float32", "threads": 1, "graphs": "off", "max_seqs": 4}
    with saccade.LocalClient(model="demo", **fixed, overlap=overlap) as client:
        found: list[Any] = []
        for index, prompt in enumerate(PROMPTS):
            whole = client.generate(prompt, max_tokens=20, temperature=0.5 * index, seed=3, n=1 + index, logprobs=0)
            found += [(sample.token_ids, sample.finish_reason) for sample in whole.samples]
            pieces = [delta.token_ids for delta in client.stream(prompt, max_tokens=12, temperature=0, ignore_eos=True)]
            found.append([token for piece in pieces for token in piece])
        return found


def test_overlapping_steps_answer_alike() -> None:
    plain, overlapped = answers("off"), answers("on")
    assert plain == overlapped
    assert [len(found) for found in plain if isinstance(found, list)] == [12, 12, 12]
