"""The decoder's interface: requests with their images, and events about them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, overload

from decoder.constraints import Constraint
from decoder.positions import Positions
from decoder.sampling import SamplingParams

if TYPE_CHECKING:
    import torch


FinishReason = Literal["stop", "length", "error"]

SAMPLE_LIMIT = 1 << 32
"""The random counter has 32 bits for the index of a sample."""


class EmbeddingSource(Protocol):
    """Rows of an image: the embeddings of prompt rows `[start, end)`, in place of those of the embedding table. The
    decoder polls the source from its own thread and never waits for it."""

    @property
    def start(self) -> int:
        """Index of the first row in the prompt."""

    @property
    def end(self) -> int:
        """Index in the prompt after the last row."""

    @property
    def key(self) -> bytes:
        """Content key: equal keys mean equal rows."""

    @property
    def complete(self) -> bool:
        """Whether the image ends here: False for all but the last temporal patch of a clip."""

    @property
    def ready(self) -> bool:
        """True once `rows()` may be called; stays true until `release()`."""

    @property
    def error(self) -> Exception | None:
        """The reason why there will be no rows, or `None`; there is one for all temporal patches of a clip, or none."""

    def rows(self) -> torch.Tensor:
        """`[end - start, hidden]` in the decoder's dtype; the decoder only reads it."""

    def release(self) -> None:
        """Releases the rows. Idempotent."""


@dataclass(frozen=True)
class DecoderRequest:
    """One sample to draw. `prompt_ids` holds a placeholder id for each image row; `spans` are in order and do not
    overlap."""

    request_id: str
    prompt_ids: SequenceOf[int]
    sampling: SamplingParams
    spans: tuple[EmbeddingSource, ...] = ()
    output_ids: SequenceOf[int] = ()
    """Output that exists already, of a resumed answer: counted as output everywhere, and not reported again."""
    eos_token_ids: frozenset[int] = frozenset()
    sample_index: int = 0
    """Index of this sample among those of one call; part of the random counter."""
    priority: int = 0
    """Larger priorities go first, equal ones in order of arrival. Waiting time counts too: see `decoder.queues`."""
    timeout: float | None = None
    """Seconds until the deadline; a request that cannot have its first tokens by then is rejected."""
    salt: bytes = b""
    """Separates tenants: nothing is shared between requests of different salts."""
    checkpoint_at: tuple[int, ...] = ()
    """Prompt positions where other prompts are likely to differ from this one (the end of a system prompt); `auto`
    keeps a state there.
    """
    pooled: bool = False
    """Whether hidden states of the prompt are wanted; the whole prompt is then computed, whatever the cache holds."""
    positions: Positions | None = None
    """For models that use positions; `None`: the tokens' indices."""
    constraint: Constraint | None = None
    """What the output may contain; `None`: anything. It has accepted `output_ids`. The decoder works on a copy.

    End and stop tokens before `min_tokens`, and end tokens under `ignore_eos`, are drawn only if the constraint allows
    nothing else, and then end the request all the same.
    """

    def __post_init__(self) -> None:
        """Raises `ValueError` for negative ids and a sample index out of range. The runner checks ids against the
        vocabulary."""
        if self.eos_token_ids and min(self.eos_token_ids) < 0:
            raise ValueError(f"eos_token_ids holds {min(self.eos_token_ids)}; ids are at least 0")
        if not 0 <= self.sample_index < SAMPLE_LIMIT:
            raise ValueError(f"sample_index must be from 0 to {SAMPLE_LIMIT - 1}, not {self.sample_index}")


@dataclass(frozen=True)
class Pooled:
    """Hidden states of a prompt after the final norm, `[d]` float32 on the host."""

    last: torch.Tensor
    """Hidden state of the last token."""
    mean: torch.Tensor
    """Mean of the hidden states of all tokens."""


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Log-probabilities at one position of a prompt: natural logs of the model's probabilities."""

    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the likeliest tokens at this position, likeliest first."""


@dataclass(frozen=True, slots=True)
class PromptScores(SequenceOf[PromptScore]):
    """The scores of a prompt, by position. Kept in arrays, of which another process gets thousands in the time that a
    few objects take."""

    width: int
    """Number of likeliest tokens at each position."""
    positions: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    top_tokens: array[int] = field(default_factory=lambda: array("q"))
    """`width` for each position, one after the other."""
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> PromptScore: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptScore]: ...
    def __getitem__(self, index: int | slice) -> PromptScore | list[PromptScore]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        first, last = at * self.width, (at + 1) * self.width
        top = zip(self.top_tokens[first:last], self.top_logprobs[first:last], strict=True)
        return PromptScore(self.positions[at], self.tokens[at], self.logprobs[at], tuple(top))


class TokenEvent(NamedTuple):
    """The result of one step for one request: a token, the end, or both."""

    request_id: str
    token_id: int | None
    """The drawn token; `None` if there is none (an error)."""
    logprob: float | None = None
    """Natural log of the token's probability in the raw distribution, if requested."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the likeliest tokens of the raw distribution, likeliest first."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    """Prompt tokens that were not computed because their state was cached."""
    stop_token: int | None = None
    """The end or stop token that ended the request: `token_id`, which is then not part of the text."""
    pooled: Pooled | None = None
    """With the first token, if requested."""
    prompt_scores: SequenceOf[PromptScore] = ()
    """With the first token, if requested."""
    scheduled: float | None = None
    """With the first token: when its first step was scheduled, by `time.monotonic`."""

    @property
    def plain(self) -> bool:
        """Whether it is a further token and nothing else, as nearly all events are."""
        return (
            self.finish_reason is None and self.logprob is None and self.scheduled is None and self.pooled is None
            and not self.prompt_scores
        )  # fmt: skip
