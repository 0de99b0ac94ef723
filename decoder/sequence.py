"""A request in the decoder: its parameters, its progress, and the memory that it holds.

Writers of each part:

    Sequence        `decoder.queues` (`status`, `leader`, `followers`, `guide`, and `tokens` of one that has followed),
                    the scheduler (`computed`, fields of admission) and `decoder.answers` (`tokens`, `unread`,
                    `next_span`); its parameters never change
    Holding         `decoder.memory`
    Lookup          `decoder.prefix_cache`
    CacheCursor     `decoder.checkpointing`
    DraftState      `decoder.speculation`
    Guide           `decoder.answers` (accepted tokens), and itself

Owners, and until when:

    image rows      the source, until `release()`: called once, after the step that consumed the last row has executed,
                    or when the request ends before that; never while a step that reads them is in flight
    batch slot,     the sequence, from admission to finish, abort or preemption. A step in flight at that time may
    state slots,    write to them once more; their next owner uses them in a later step, which the device runs
    pages           after that one. The batch slot is the sequence's row in buffers of the sampler and of the batch
    checkpoints     the step, from taking the slot until the step that writes it ends; then the prefix cache

Samples of one prompt: the first one leads, the others follow. Followers hold nothing until the leader has computed the
prompt; then each shares its whole pages, and has a copy of the last, partial page and of the state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from decoder.cached import Checkpoint, Hit
from decoder.checkpoints import NEVER
from decoder.guide import Guide
from decoder.request import DecoderRequest, EmbeddingSource

UNREAD = -1
"""Placeholder in a sequence's tokens for a token that has been drawn on the device and has not been read."""


class Status(Enum):
    WAITING = "waiting"
    """Holds no memory."""
    RUNNING = "running"
    """Holds a batch slot, and state slots and pages where the model has them."""
    SWAPPED = "swapped"
    """Waits; its exact state is in host memory."""
    DONE = "done"


@dataclass(slots=True)
class Holding:
    """The memory that a sequence holds while it runs."""

    batch_slot: int = -1
    """Index of its row in buffers that have a row for each running sequence."""
    admission: int = -1
    """Number of the admission that gave it its batch slot; identifies the sequence for which a buffer's row was
    written."""
    slots: list[int] = field(default_factory=list)
    """Its state slots: one, or one for each token of a verified step."""
    accepted: int = 1
    """Which slot has its current state, counted from 1: the state after this many tokens of the last verified step."""
    replayed: int = 0
    """Inputs in its ring that come after the state in its slot."""
    pages: list[int] = field(default_factory=list)
    counted: bool = False
    """Whether this memory is counted as that of a sequence that can advance."""


@dataclass(slots=True)
class Lookup:
    """Data that the prefix cache keeps in a sequence between lookups."""

    chain: list[bytes] = field(default_factory=list)
    """Keys of its whole pages."""
    hit: Hit | None = None
    version: int = -1
    """Version of the cache that `hit` was found in."""


@dataclass(slots=True)
class CacheCursor:
    """Which states of a sequence are to be kept, and which have been."""

    marks: tuple[int, ...] = ()
    """Prompt positions whose state is to be kept."""
    next_mark: int = NEVER
    """The next position whose state is to be kept."""
    last_mark: int = 0
    """The longest prefix whose state is known to be kept."""
    moving: Checkpoint | None = None
    """The checkpoint that moves along with its output, under `align`."""


@dataclass(slots=True)
class DraftState:
    """The drafts of a sequence."""

    tokens: list[int] = field(default_factory=list)
    """Drafts, to be verified in the next step."""
    limit: int = 0
    """Number of drafts that it is to get in the next step, if the token budget and memory allow."""
    forced: bool = False
    """Whether the drafts are tokens that its constraint forces."""


@dataclass(eq=False)
class Sequence:
    """A request in the decoder."""

    request: DecoderRequest
    arrival: int
    limit: int
    """Largest number of output tokens, from `max_tokens` and `max_len`."""
    rank: int = 0
    """The step in which it arrived, minus `ageing` steps for each level of its priority; the smaller rank goes first.
    """

    tokens: list[int] = field(default_factory=list)
    """Prompt and output; the last `unread` of them are `UNREAD`. A follower has its leader's list."""
    unread: int = 0
    """Number of tokens that have been drawn and not read."""
    place: int = -1
    """Index of the unread token among those of the in-flight step."""
    next_span: int = 0
    """First span whose rows have not all been read; the spans before it are released."""

    computed: int = 0
    """Number of tokens whose state and keys are in the arena, or in host memory if it is swapped."""
    last_step: int = -1
    """Number of the step in which it last advanced."""
    status: Status = Status.WAITING
    barrier: int = 0
    """Number of tokens that must be ready before it is admitted again, if it was preempted while waiting for an image.
    """
    deferred: bool = False
    """Whether it has waited one step for a state that another request was about to leave in the cache."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed because their state was cached."""
    scheduled: float | None = None
    """When its first step was scheduled, by `time.monotonic`; `None` once that has been reported."""
    leader: Sequence | None = None
    """The sequence that computes the prompt for it, until that is done."""
    followers: list[Sequence] = field(default_factory=list)
    """The sequences for which it computes the prompt."""

    held: Holding = field(default_factory=Holding)
    lookup: Lookup = field(default_factory=Lookup)
    cursor: CacheCursor = field(default_factory=CacheCursor)
    draft: DraftState = field(default_factory=DraftState)
    guide: Guide | None = None
    """The guide of a request with a constraint, from its first start on. It has accepted the output tokens that the
    host knows."""
    plain: bool = field(init=False)
    """Whether its next token is always the one with the largest raw logit, and nothing else is requested."""
    reads_prompt: bool = field(init=False)
    """Whether log-probabilities or hidden states of its prompt are wanted."""
    last_spans: tuple[EmbeddingSource, ...] = field(init=False)
    """The last span of each image and clip."""

    def __post_init__(self) -> None:
        self.last_spans = tuple(span for span in self.request.spans if span.complete)
        self.plain = self.request.sampling.plain and self.request.constraint is None
        self.reads_prompt = self.request.pooled or self.request.sampling.prompt_logprobs is not None
        if not self.tokens:
            self.tokens = [*self.request.prompt_ids, *self.request.output_ids]

    def start(self) -> None:
        """Makes its guide, unless it has started before."""
        if self.request.constraint is not None and self.guide is None:
            self.guide = Guide(self.request)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def slot(self) -> int:
        """The slot of its current state; -1 if it has none."""
        held = self.held
        return held.slots[held.accepted - 1] if held.slots else -1

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def known(self) -> int:
        """Number of tokens whose ids the host knows."""
        return len(self.tokens) - self.unread

    @property
    def full(self) -> bool:
        """Whether it has as many output tokens as its limit, so that it ends whatever its last token is."""
        return len(self.tokens) - len(self.request.prompt_ids) >= self.limit

    @property
    def decoding(self) -> bool:
        """Whether its next row is one token after an existing state."""
        return self.computed == len(self.tokens) - 1 > 0

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of urgency."""
        return (self.rank, self.arrival)

    @property
    def stuck(self) -> bool:
        """True while it waits for image rows."""
        return self.ready_end() <= self.computed

    def ready_end(self, computed: int | None = None) -> int:
        """Index of the first token whose embedding is not ready, or the number of tokens. Polls the sources.

        `computed`: number of tokens to count as computed, if it is to start from a cached prefix.
        """
        done = self.computed if computed is None else computed
        for span in self.request.spans[self.next_span :]:
            if span.end > done and not span.ready:
                return span.start
        return len(self.tokens)

    def source_error(self) -> Exception | None:
        """The error of the first image or clip that has one. Asked in each step, so of each clip only its last span is
        asked: there may be hundreds of thousands of spans in the queue."""
        if self.next_span < len(self.request.spans):
            for span in self.last_spans:
                if span.error is not None:
                    return span.error
        return None
