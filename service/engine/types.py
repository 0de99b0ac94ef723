"""Types that are exchanged between the frontend and the engine: requests, events, and the engine's description."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from decoder.constraints import ConstraintError
from decoder.request import PromptScore
from decoder.sampling import SamplingParams
from service.common.types import ConstraintSpec
from service.media.prepared import PreparedItem

ErrorKind = Literal["invalid", "deadline", "internal", "unavailable", "full", "died"]
Query = Literal["stats", "integrity", "flush", "histogram", "beat"]
Embedding = Literal["hidden", "image"]
"""What to embed. `hidden`: a prompt's last and mean hidden state. `image`: an image's rows, as the decoder reads
them."""


class UnusableConstraint(ConstraintError, ValueError):
    """A constraint that cannot be served, or tokens that do not satisfy it. `field`: path in the request."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(f"{field.rpartition('.')[2]}: {message}")
        self.message, self.field = message, field


class ConstraintFailed(RuntimeError):
    """The server failed to build a constraint; its log has the cause."""


@dataclass(frozen=True)
class EngineRequest:
    """One sample to draw, or several of one prompt, as the frontend submits it."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    images: tuple[PreparedItem, ...] = ()
    output_ids: tuple[int, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    sample_index: int = 0
    priority: int = 0
    salt: bytes = b""
    embed: Embedding | None = None
    """Requests embeddings instead of an answer; with `image`, `images` has one image, whose `start` is not used."""
    timeout: float | None = None
    """Seconds after submission in which an answer is useful."""
    checkpoint_at: tuple[int, ...] = ()
    """Prompt positions, before the first image, where other prompts are likely to differ from this one."""
    siblings: tuple[str, ...] = ()
    """Ids of further samples, whose indices follow `sample_index`. Each sample runs and ends independently."""
    constraint: ConstraintSpec | None = None
    whole: bool = False
    """Whether its tokens may be delivered late, since they are not needed before its end."""

    @property
    def names(self) -> tuple[str, ...]:
        """Ids of all its samples, by index."""
        return (self.request_id, *self.siblings)

    @property
    def numbers(self) -> int:
        """How many token ids and other numbers it contains: the time to pickle it grows with them."""
        sampling = self.sampling
        return sum(map(len, (self.prompt_ids, self.output_ids, sampling.logit_bias, sampling.stop_token_ids)))

    def packed(self) -> tuple[EngineRequest, tuple[int, ...]]:
        """The request without its patches, and the descriptors of their files, which the caller must close. Patches in
        this process's memory are copied to files. Raises OSError if there is no memory for them."""
        sealed = [image.sealed() for image in self.images]
        bare = replace(self, images=tuple(replace(image, file=None) for image in sealed))
        return bare, tuple(image.file.take() for image in sealed if image.file is not None)

    def unpacked(self, descriptors: Sequence[int]) -> EngineRequest:
        """The inverse of `packed`: patches are views of the mapped files. Takes ownership of the descriptors."""
        pairs = zip(self.images, descriptors, strict=True)
        return replace(self, images=tuple(image.opened(descriptor) for image, descriptor in pairs))


class EngineEvent(NamedTuple):
    """What happened to one request: a token, its end, or an error that ended it."""

    request_id: str
    token_id: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: ErrorKind | None = None
    message: str = ""
    embedded: tuple[bytes, ...] = ()
    """Little-endian float32: (last, mean) for `hidden`, (rows,) for `image`."""
    prompt_scores: Sequence[PromptScore] = ()
    """With a first token, if the request asks for them."""
    scheduled: float | None = None
    """With a first token: when the decoder scheduled its first step, by `time.monotonic`, which is the same in all
    processes of a host."""
    field: str = ""
    """With an `invalid` request: the path of the field at fault, where it is known."""

    @property
    def plain(self) -> bool:
        """Whether it is a token that does not end its request and has no log-probabilities: nearly all events are."""
        if self.token_id is None or self.finish_reason or self.error:
            return False
        return self.logprob is None and not self.embedded and not self.prompt_scores


def error_events(names: Iterable[str], kind: ErrorKind, message: str, field: str = "") -> list[EngineEvent]:
    """The events of samples that an error has ended."""
    return [EngineEvent(name, finish_reason="error", error=kind, message=message, field=field) for name in names]


@dataclass(frozen=True)
class EngineInfo:
    """Properties of a running engine that the frontend needs to validate requests."""

    model: str
    revision: str
    max_len: int
    max_seqs: int
    max_image_tokens: int
    """The largest image that fits the handoff. 0: the model takes no images."""
    dtype: str
    """Dtype of computation and of patches, by torch's name. Quantised weights are stored in others."""
    takes_video: bool = False


EventSink = Callable[[list[EngineEvent]], None]


class EngineHandle(Protocol):
    """The interface that a frontend submits requests to: an engine in this process, or the client of one in another."""

    info: EngineInfo

    @property
    def alive(self) -> bool: ...

    def start(self, on_events: EventSink) -> None: ...

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def query(self, what: Query) -> Future[dict[Any, Any]]: ...

    def close(self) -> None: ...
