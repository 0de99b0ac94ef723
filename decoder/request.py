"""Nouns of the decoder: what comes in, what goes out, and what a request is while it runs.

Who owns what, and until when:

    image rows    the source, until `release()`: called once, after the step that consumed the last row has executed, or
                  when the request ends before that; never while a step that reads them is in flight
    slots, pages  the sequence, from admission to finish, abort or preemption. A step that is still in flight then may
                  write to them once more: whoever has them next uses them in a later step, which the device runs behind
                  it
    checkpoints   the prefix cache; between its slot being taken and the end of the step that writes it, the step
    seat          the sequence, from admission to finish, abort or preemption (row of the sampler's buffers)

Samples of one prompt: the first one leads, the others follow. Those hold nothing until the leader has read the prompt;
then each shares its whole pages, and has a copy of the page that goes on and of the state.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from decoder.cached import Checkpoint, Hit
from decoder.checkpoints import NEVER
from decoder.positions import Positions
from decoder.sampling import SamplingParams

if TYPE_CHECKING:
    import torch


FinishReason = Literal["stop", "length", "error"]

SAMPLE_LIMIT = 1 << 32
"""The random counter has 32 bits for the index of a sample."""

UNREAD = -1
"""Stands in a sequence's tokens for one that has been drawn on the device and not been read."""


class EmbeddingSource(Protocol):
    """Where the rows of one image come from. The decoder polls it from its own thread and never waits on it."""

    @property
    def ready(self) -> bool:
        """True once `rows()` may be called; stays true until `release()`."""

    @property
    def error(self) -> Exception | None:
        """Why there will be no rows, or `None`."""

    def rows(self) -> torch.Tensor:
        """`[n, hidden]` in the decoder's dtype; the decoder copies out of it, never into it."""

    def release(self) -> None:
        """Gives the rows back. Idempotent."""


@dataclass(frozen=True)
class ImageSpan:
    """Prompt rows `[start, start + length)`, whose embeddings come from `source` instead of the embedding table."""

    start: int
    length: int
    key: bytes
    """Content key: equal keys mean equal rows."""
    source: EmbeddingSource
    complete: bool = True
    """Whether the picture ends here: False for all but the last temporal patch of a clip."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class DecoderRequest:
    """One sample to draw. `prompt_ids` holds a placeholder id for each image row; `spans` are in order and apart."""

    request_id: str
    prompt_ids: SequenceOf[int]
    sampling: SamplingParams
    spans: tuple[ImageSpan, ...] = ()
    output_ids: SequenceOf[int] = ()
    """Output that exists already (a resumed answer): counted as output everywhere, not reported again."""
    eos_token_ids: frozenset[int] = frozenset()
    sample_index: int = 0
    """Which of the samples of one call this is; part of the random counter."""
    priority: int = 0
    """Larger goes first; equal ones in order of arrival. Waiting counts too: see `Scheduler`."""
    timeout: float | None = None
    """Seconds from now in which an answer is of use; a request that cannot have its first tokens by then is refused."""
    salt: bytes = b""
    """Separates tenants: nothing is shared between requests of different salts."""
    checkpoint_at: tuple[int, ...] = ()
    """Prompt positions where other prompts are likely to part from this one (the end of a system prompt); `auto` keeps
    a state there.
    """
    pooled: bool = False
    """The hidden states of the prompt are wanted; all of it is then computed, whatever the cache holds."""
    positions: Positions | None = None
    """For models that read positions; `None`: tokens count up from 0."""

    def __post_init__(self) -> None:
        """`ValueError` for numbers that could never be an id or a counter. The runner knows the vocabulary."""
        if self.eos_token_ids and min(self.eos_token_ids) < 0:
            raise ValueError(f"eos_token_ids holds {min(self.eos_token_ids)}; ids are at least 0")
        if not 0 <= self.sample_index < SAMPLE_LIMIT:
            raise ValueError(f"sample_index must be from 0 to {SAMPLE_LIMIT - 1}, not {self.sample_index}")


@dataclass(frozen=True)
class Pooled:
    """Hidden states of a prompt after the final norm, `[d]` float32 on the host."""

    last: torch.Tensor
    """Of its last token."""
    mean: torch.Tensor
    """The mean of all tokens."""


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Natural logs of the raw probabilities in one place of a prompt."""

    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the likeliest ones there, likeliest first."""


class TokenEvent(NamedTuple):
    """What one step says about one request: a token, the end, or both."""

    request_id: str
    token_id: int | None
    """The drawn token; `None` when there is none (an error)."""
    logprob: float | None = None
    """Natural log of the token's probability in the raw distribution, when asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the likeliest tokens of the raw distribution, likeliest first."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    """Prompt tokens that were not computed because their state was cached."""
    stop_token: int | None = None
    """The end or stop token that ended the request: `token_id`, which is then not part of the text."""
    pooled: Pooled | None = None
    """With the first token of a request that asked for it."""
    prompt_scores: tuple[PromptScore, ...] = ()
    """With the first token, where they were asked for."""
    scheduled: float | None = None
    """With the first token: when its first step was put together, by `time.monotonic`."""


class Status(Enum):
    WAITING = "waiting"
    """Holds no memory."""
    RUNNING = "running"
    """Holds a seat, and a slot and pages where the model has them."""
    SWAPPED = "swapped"
    """Waits; its exact state lies in host memory."""
    DONE = "done"


@dataclass(eq=False)
class Sequence:
    """A request while the decoder has it. Written by the scheduler and the runner only."""

    request: DecoderRequest
    arrival: int
    limit: int
    """Output tokens at most, `max_tokens` and `max_len` both applied."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and output; the last `unread` of them are `UNREAD`."""
    unread: int = 0
    """Tokens that the step in flight draws."""
    place: int = -1
    """Which of that step's tokens is its own."""
    computed: int = 0
    """Tokens whose state and keys are in the arena."""
    status: Status = Status.WAITING
    seat: int = -1
    admission: int = -1
    """Number of the admission that gave it its seat; tells who a seat's buffers were last written for."""
    slots: list[int] = field(default_factory=list)
    """Its state slots, from one admission to the next: one, or one for each token of a verified step."""
    accepted: int = 1
    """Which of the slots holds its current state: that after so many tokens of the last verified step."""
    replayed: int = 0
    """Inputs in its ring that come on top of the state in its slot."""
    pages: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    """What may follow its tokens, to be verified in the next step."""
    draft_limit: int = 0
    """Drafts that it is to get in the next step, as far as there is room for them."""
    next_span: int = 0
    """First span whose rows are not all consumed; those before are released."""
    cached_tokens: int = 0
    scheduled: float | None = None
    """When its first step was put together, until that has been said."""
    rank: int = 0
    """The step it came in, less what its priority is worth in steps: who has the smaller one goes first."""
    last_step: int = -1
    """Step in which it last advanced."""
    counted: bool = False
    """Whether the scheduler counts its memory as that of a request that can advance."""
    barrier: int = 0
    """Readiness that it needs before it is admitted again (it was put out while it waited for this row)."""

    chain: list[bytes] = field(default_factory=list)
    """Keys of its whole pages, for the prefix cache."""
    hit: Hit | None = None
    hit_version: int = -1
    """Version of the cache that `hit` was found in."""
    marks: tuple[int, ...] = ()
    """Prompt positions whose state is to be kept."""
    next_mark: int = NEVER
    last_mark: int = 0
    """The longest prefix of it that is known to be kept."""
    moving: Checkpoint | None = None
    """The one checkpoint that moves along with its output, under `align`."""
    deferred: bool = False
    """It has waited a step for a state that another request was about to leave."""
    leader: Sequence | None = None
    """Who reads the prompt for it, until it has."""
    followers: list[Sequence] = field(default_factory=list)
    """For whom it reads the prompt."""

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = [*self.request.prompt_ids, *self.request.output_ids]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def slot(self) -> int:
        """The slot of its current state; -1 without one."""
        return self.slots[self.accepted - 1] if self.slots else -1

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.tokens) - self.unread

    @property
    def full(self) -> bool:
        """True when it ends with its last token whatever that is."""
        return len(self.tokens) - len(self.request.prompt_ids) >= self.limit

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """True when its next row is one token on top of existing state."""
        return self.remaining == 1 and self.computed > 0

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by who goes first."""
        return (self.rank, self.arrival)

    def ready_end(self, computed: int | None = None) -> int:
        """First row whose embedding is not there yet, or the number of tokens. Polls the sources.

        `computed`: what to count as computed, when a cached prefix is about to be taken over.
        """
        done = self.computed if computed is None else computed
        for span in self.request.spans[self.next_span :]:
            if span.end > done and not span.source.ready:
                return span.start
        return len(self.tokens)

    def source_error(self) -> Exception | None:
        """The error of the first span that has one."""
        for span in self.request.spans[self.next_span :]:
            if span.source.error is not None:
                return span.source.error
        return None
