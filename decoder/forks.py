"""Several samples of one prompt: when the first has computed it, the others continue from its state."""

from __future__ import annotations

from decoder.checkpointing import Checkpointing
from decoder.memory import SequenceMemory
from decoder.queues import Queues
from decoder.step import Fork, Row, Step


class Forks:
    """Starts the further samples of prompts that have been computed."""

    def __init__(self, queues: Queues, memory: SequenceMemory, checkpointing: Checkpointing | None) -> None:
        self.queues, self.memory, self.checkpointing = queues, memory, checkpointing
        self.forks = 0
        self.misses = 0
        """Samples for which there was no batch slot or memory when their prompt had been computed; they are queued
        as requests of their own."""

    def fork(self, row: Row, step: Step) -> list[Fork]:
        """Starts the further samples of a sequence whose prompt ends with this row. Whole pages are shared; from the
        prompt's end on, each sample has its own. Samples for which there is no memory are queued as requests of their
        own."""
        leader, forks = row.sequence, list[Fork]()
        for follower in list(leader.followers):
            self.queues.ungroup(follower)
            copies = self.memory.share(leader, follower, row.end)
            if copies is None:
                self.misses += 1
                continue
            follower.computed, follower.last_step = row.end, self.queues.step_number
            follower.cached_tokens = leader.cached_tokens
            if self.checkpointing is not None:
                self.checkpointing.follow(leader, follower)
            self.queues.start(follower)
            forks.append(Fork(leader, follower, (leader.slot, follower.slot), copies[0] if copies else None))
        self.forks += len(forks)
        step.forks += forks
        return forks
