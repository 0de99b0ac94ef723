"""Waiting and running sequences, and their order. Pure policy: no tensors, no memory.

A request's rank is the number of the step in which it arrived, minus `ageing` for each level of its priority, which is
clamped to -100..100; the request with the smaller rank goes first. So a request can be overtaken by requests one level
above it that arrive within `ageing` steps after it, and not by those that arrive later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from decoder.config import DecoderOptions
from decoder.request import DecoderRequest
from decoder.sequence import DraftState, Sequence, Status

MAX_LEVEL = 100
"""Priorities are clamped to this, so that no request is always first."""


class Queues:
    """All sequences that have not ended. Writes their status and their groups of samples."""

    def __init__(self, options: DecoderOptions) -> None:
        self.options = options
        self.waiting: list[Sequence] = []
        """By urgency. Without followers, which only their leaders hold: there may be 64 samples of each prompt, and
        each step goes through all waiting sequences."""
        self.running: list[Sequence] = []
        self.step_number = 0
        self._arrivals = 0

    def __iter__(self) -> Iterator[Sequence]:
        for sequence in (*self.running, *self.waiting):
            yield sequence
            yield from sequence.followers

    # -- adding and removing -------------------------------------------------------------------------------------------

    def add(self, request: DecoderRequest, leader: Sequence | None = None) -> Sequence:
        """Queues a request. Raises `ValueError`, with the numbers, if it can never be served. `leader`: a waiting
        sequence with the same prompt, which computes it for both.
        """
        limit = self._output_limit(request)
        _check_spans(request)
        level = max(-MAX_LEVEL, min(MAX_LEVEL, request.priority))
        rank = self.step_number - level * self.options.ageing
        # Samples that wait may be 64 for each long prompt, so they have neither ids nor a guide of their own.
        sequence = Sequence(request, self._arrivals, limit, rank, [] if leader is None else leader.tokens)
        self._arrivals += 1
        if leader is None:
            self._wait(sequence)
        else:
            sequence.leader = leader
            leader.followers.append(sequence)
        return sequence

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def _output_limit(self, request: DecoderRequest) -> int:
        """Largest number of output tokens of a request. Raises `ValueError` if not even one is possible."""
        prompt, output, maximum = len(request.prompt_ids), len(request.output_ids), self.options.max_len
        if prompt == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        if prompt + output >= maximum:
            raise ValueError(
                f"a prompt of {prompt} tokens with {output} output tokens leaves no room for another token in max_len "
                f"{maximum}: at most {max(0, maximum - 1 - output)} prompt tokens can be served"
            )
        limit = maximum - prompt
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.sampling.max_tokens)
        if output >= limit:
            raise ValueError(f"max_tokens {limit} is not above the {output} output tokens that the request brings")
        return limit

    def start(self, sequence: Sequence) -> None:
        """Moves a waiting sequence, which has got its memory, to the running ones."""
        sequence.start()
        sequence.status, sequence.barrier = Status.RUNNING, 0
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def requeue(self, sequence: Sequence, status: Status) -> None:
        """Moves a running sequence, which has lost its memory, back to the waiting ones, with the given status."""
        if sequence.stuck:
            sequence.barrier = sequence.ready_end() + 1
        sequence.status, sequence.draft = status, DraftState()
        self.running.remove(sequence)
        self._wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, also from its group of samples: the first of its followers then leads the others."""
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader, sequence.status = None, Status.DONE
        if sequence.followers:
            first, *rest = sequence.followers
            first.leader, first.followers, sequence.followers = None, rest, []
            self._wait(first)
            for other in rest:
                other.leader = first
        if sequence.status is not Status.DONE:
            (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        sequence.status = Status.DONE

    def ungroup(self, follower: Sequence) -> None:
        """Removes a sequence from its group: it no longer waits for its leader to compute the prompt."""
        if follower.leader is not None:
            follower.leader.followers.remove(follower)
            follower.leader, follower.tokens = None, list(follower.tokens)
            self._wait(follower)

    # -- order ---------------------------------------------------------------------------------------------------------

    def running_order(self, budget: int) -> list[Sequence]:
        """Running sequences: those that decode first, then by urgency. If there are more of them than `budget` tokens,
        those that have not advanced for longest come first.
        """
        crowded = len(self.running) > budget
        return sorted(self.running, key=lambda s: (s.last_step if crowded else 0, not s.decoding, *s.order))

    def failed(self) -> list[tuple[Sequence, Exception]]:
        """Sequences whose image sources have failed, and those of their followers."""
        failed = [s for s in (*self.running, *self.waiting) if s.request.spans and s.source_error() is not None]
        errors = ((s, s.source_error()) for sequence in failed for s in (sequence, *sequence.followers))
        return [(sequence, error) for sequence, error in errors if error is not None]


def _check_spans(request: DecoderRequest) -> None:
    last, prompt = 0, len(request.prompt_ids)
    for span in request.spans:
        if span.end <= span.start or span.start < last or span.end > prompt:
            raise ValueError(
                f"image rows {span.start} to {span.end} do not lie in the prompt of {prompt} tokens, from row {last} on"
            )
        last = span.end
