"""The requests of an engine: what each of them holds, when it is submitted to the decoder, and where the rows of its
images and clips lie in its prompt.

An image is one run of rows or, if it is cut into slices, one run for the whole image and one for each slice. A clip is
one run for each temporal patch. There are text tokens between the runs. Pruning drops rows after encoding: the number
of rows that the whole clip keeps follows from its shape, but that of each temporal patch is known only after encoding.
So the prompt's length, which admission and limits need, is known at once, and a request with a pruned clip is submitted
to the decoder when its clip has been encoded for the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, KeysView, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch

from decoder.constraints import Constraint, ConstraintError
from decoder.pace import DeadlineError
from decoder.positions import Positions
from decoder.request import DecoderRequest, TokenEvent
from decoder.runner import DecoderRunner
from encoder.item import Grid
from families import VisionSpec
from service.encoding.entries import EncoderUnavailable, Lease, Run
from service.encoding.handoff import Handoff
from service.engine.constraining import Constraining
from service.engine.types import ConstraintFailed, EngineEvent, EngineRequest, ErrorKind, EventSink, error_events
from service.media.prepared import PreparedItem


class Requests:
    """All requests that have not ended. Used only by the engine's thread."""

    def __init__(
        self, model: str, decoder: DecoderRunner, handoff: Handoff | None, vision: VisionSpec | None,
        constraining: Constraining, emit: EventSink, wake: Callable[[], None],
    ) -> None:  # fmt: skip
        """`handoff` and `vision`: None for text-only models. `emit` gets the events of requests, in order. `wake` is
        called from any thread when `advance` has work."""
        self._model, self._decoder, self._handoff, self._emit = model, decoder, handoff, emit
        self._vision, self._constraining, self._wake = vision, constraining, wake
        self.streamed: set[str] = set()
        """Live samples whose tokens are needed before their end."""
        self._leases: dict[str, list[Lease]] = {}
        """Of each sample that has not ended, also of one without images."""
        self._embedded: dict[str, Lease] = {}
        """Requests for the embedding of an image."""
        self._unsettled: dict[str, EngineRequest] = {}
        """Requests with a pruned clip that has not been encoded, so that their prompt is not complete, and requests
        whose constraint is not ready."""
        self._unsettled_of: dict[str, EngineRequest] = {}
        """The same by the ids of their live samples."""
        self._constraints: dict[str, Future[Constraint]] = {}
        """By request id, until the request is submitted to the decoder or ends."""

    @property
    def live(self) -> KeysView[str]:
        """The ids of samples that have not ended."""
        return self._leases.keys()

    @property
    def waiting(self) -> bool:
        """Whether a request waits for rows or its constraint before it can be submitted to the decoder."""
        return bool(self._unsettled or self._embedded)

    def advance(self) -> None:
        """Answers embedding requests whose rows are ready, and submits requests whose clips have been encoded and whose
        constraints are ready."""
        self._give_images()
        self._settle()

    def die(self) -> None:
        """The engine has stopped: sends an error event to all requests, without freeing anything."""
        doomed = sorted(self.live)
        self._leases.clear()
        self.streamed.clear()
        self.refuse(doomed, "died", "the engine stopped")

    def check_integrity(self) -> None:
        """`AssertionError` if anything is held while no request is live."""
        if not self.live:
            assert not self._unsettled, "requests that have ended"
            assert not self._unsettled_of, "samples of requests that have ended"
            assert not self.streamed, "streams that have ended"
            assert not self._constraints, "constraints of requests that have ended"
            assert not self._decoder.has_work, "the decoder still has work"

    def add(self, request: EngineRequest) -> None:
        """Starts a request; an error in it is delivered as its error event."""
        try:
            if request.embed == "image":
                self._embed_image(request)
                return
            for name in request.names:
                if not request.whole:
                    self.streamed.add(name)
                self._lease(request, name)
            self._begin_constraint(request)
            if self._ready(request, request.request_id):
                self._admit(request, request.names)
            else:
                self._unsettled[request.request_id] = request
                self._unsettled_of |= dict.fromkeys(request.names, request)
        except (ValueError, DeadlineError, ConstraintFailed) as error:
            self._give_up(request, error)

    def _begin_constraint(self, request: EngineRequest) -> None:
        """Starts to build the request's constraint, if it has one."""
        if request.constraint is None:
            return
        future = self._constraining.begin(
            request.constraint, request.eos_token_ids, request.sampling.stop_token_ids, request.output_ids, request.salt
        )
        self._constraints[request.request_id] = future
        future.add_done_callback(lambda _: self._wake())

    def _ready(self, request: EngineRequest, name: str) -> bool:
        """Whether a request can be submitted to the decoder. `name`: one of its samples that is live."""
        constraint = self._constraints.get(request.request_id)
        return (constraint is None or constraint.done()) and _is_settled(request, self._leases[name])

    def _lease(self, request: EngineRequest, name: str) -> None:
        """Takes leases on all images for one sample, which is live from then on; samples share the pixels. Raises
        ValueError."""
        leases = self._leases[name] = list[Lease]()
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        for image in request.images:
            if self._handoff is None:
                raise ValueError(f"{self._model} takes no images")
            leases.append(self._handoff.lease(image.key, image.encoder_item, request.priority, deadline))

    def _give_up(self, request: EngineRequest, error: Exception) -> None:
        """Frees everything that the request holds and sends an error event to each sample that is still live."""
        names = [name for name in request.names if name in self.live]
        for name in names:
            self._forget(name)
        self._constraints.pop(request.request_id, None)
        self.refuse(names, _kind(error), str(error), getattr(error, "field", ""))

    def _embed_image(self, request: EngineRequest) -> None:
        """Starts a request for an image's rows. Raises ValueError."""
        self._lease(request, request.request_id)
        (self._embedded[request.request_id],) = self._leases[request.request_id]

    def _give_images(self) -> None:
        """Answers embedding requests whose rows are ready."""
        for request_id, lease in list(self._embedded.items()):
            if lease.error is not None:
                events = error_events([request_id], _kind(lease.error), str(lease.error))
            elif lease.ready:
                events = [EngineEvent(request_id, finish_reason="length", embedded=(_bytes(lease.rows()),))]
            else:
                continue
            self._forget(request_id)
            self._emit(events)

    def _settle(self) -> None:
        """Submits requests whose pruned clips have been encoded and whose constraints are ready."""
        for request_id, request in list(self._unsettled.items()):
            if not self._ready(request, next(name for name in request.names if name in self.live)):
                continue
            del self._unsettled[request_id]
            names = [name for name in request.names if self._unsettled_of.pop(name, None) is not None]
            try:
                self._admit(request, names)
            except (ValueError, DeadlineError, ConstraintFailed) as error:
                self._give_up(request, error)

    def _admit(self, request: EngineRequest, names: Iterable[str]) -> None:
        """Submits these samples of a request to the decoder. Raises ValueError if the decoder cannot run the request or
        its constraint cannot be served, ConstraintFailed if the server failed to build the constraint, and
        DeadlineError if the decoder cannot run the request in time."""
        made: list[DecoderRequest] = []
        future, sampling = self._constraints.pop(request.request_id, None), request.sampling
        constraint = None if future is None else future.result()
        for name in names:
            leases = self._leases[name]
            ids, runs = _lay_out(request, leases)
            # equal for all samples, which share the memory
            prompt_ids = made[0].prompt_ids if made else ids
            positions = made[0].positions if made else _positions(self._vision, request, leases, ids)
            if self._handoff is not None:
                leases = [part for lease, own in zip(leases, runs) for part in self._handoff.split(lease, own)]
                self._leases[name] = leases
            made.append(
                DecoderRequest(
                    request_id=name,
                    prompt_ids=prompt_ids,
                    sampling=sampling,
                    spans=tuple(leases),
                    output_ids=request.output_ids,
                    eos_token_ids=request.eos_token_ids,
                    sample_index=request.sample_index + request.names.index(name),
                    priority=request.priority,
                    salt=request.salt,
                    pooled=request.embed == "hidden",
                    timeout=request.timeout,
                    checkpoint_at=request.checkpoint_at,
                    positions=positions,
                    constraint=constraint,
                )
            )
            if sampling.prompt_logprobs is not None:  # the other samples may then start from a cached prefix
                sampling = replace(sampling, prompt_logprobs=None)
        if made:
            self._decoder.add(*made)

    def refuse(self, names: Iterable[str], kind: ErrorKind, message: str, field: str = "") -> None:
        """Sends each of the samples an error event."""
        self._emit(error_events(names, kind, message, field))

    def abort(self, request_id: str) -> None:
        """Frees everything that the request holds, without an event."""
        if request_id in self.live:
            self._decoder.abort(request_id)
            request = self._unsettled_of.pop(request_id, None)
            self._forget(request_id)
            if request is None or not self.live.isdisjoint(request.names):
                return
            del self._unsettled[request.request_id]
            if (constraint := self._constraints.pop(request.request_id, None)) is not None:
                constraint.cancel()  # else it would be built, and delay those of other requests

    def _forget(self, request_id: str) -> None:
        self.streamed.discard(request_id)
        self._embedded.pop(request_id, None)
        for lease in self._leases.pop(request_id, ()):
            lease.release()

    def publish(self, events: list[TokenEvent]) -> None:
        """Emits what the decoder has produced for requests that are still live."""
        out: list[EngineEvent] = []
        for event in events:
            if event.request_id not in self._leases:
                continue
            if event.finish_reason is not None:
                self._forget(event.request_id)
            elif event.plain:
                out.append(EngineEvent(event.request_id, event.token_id, cached_tokens=event.cached_tokens))
                continue
            kind: ErrorKind | None = None
            message = ""
            if event.error is not None:
                kind = _kind(event.error)
                message = str(event.error)
            out.append(
                EngineEvent(
                    event.request_id, event.token_id, event.logprob, event.top, event.finish_reason, event.stop_token,
                    event.cached_tokens, kind, message,
                    () if event.pooled is None else (_bytes(event.pooled.last), _bytes(event.pooled.mean)),
                    event.prompt_scores, event.scheduled, getattr(event.error, "field", ""),
                )
            )  # fmt: skip
        if out:
            self._emit(out)


def _bytes(values: torch.Tensor) -> bytes:
    """Rows, one after the other, as little-endian float32. Waits for the device."""
    return values.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes()


def _kind(error: Exception) -> ErrorKind:
    if isinstance(error, ValueError) or (isinstance(error, ConstraintError) and error.__cause__ is None):
        return "invalid"  # also if the request's constraints leave no token that could follow
    if isinstance(error, DeadlineError):
        return "deadline"
    return "unavailable" if isinstance(error, EncoderUnavailable) else "internal"


def _is_settled(request: EngineRequest, leases: Sequence[Lease]) -> bool:
    """Whether the place of every row is known, or an image has failed so that its rows will never come."""
    return any(lease.error is not None for lease in leases) or all(
        _counts(image, lease) is not None for image, lease in zip(request.images, leases, strict=True)
    )


def _lay_out(request: EngineRequest, leases: Sequence[Lease]) -> tuple[list[int], list[list[Run]]]:
    """The prompt's ids, and the runs of each image's rows in order. The request must be settled."""
    ids = list(request.prompt_ids)
    runs: list[list[Run]] = []
    for image, lease in zip(request.images, leases, strict=True):
        if not image.between:
            runs.append([(image.start, 0, image.length)])
            continue
        # A clip that failed is one run: the decoder finds its error there.
        counts = _counts(image, lease) or (image.layout.tokens, *[0] * len(image.between))
        token, laid, row = ids[image.start], list[int](), 0
        own: list[Run] = []
        for count, words in zip(counts, (*image.between, ()), strict=True):
            if count:
                own.append((image.start + len(laid), row, count))
            laid += [token] * count
            laid += words
            row += count
        ids[image.start : image.start + image.length] = laid
        runs.append(own)
    return ids, runs


def _positions(
    vision: VisionSpec | None, request: EngineRequest, leases: Sequence[Lease], prompt_ids: Sequence[int]
) -> Positions | None:
    """The positions that the model's family gives a prompt with images. Raises ValueError for images that overlap, lie
    outside the prompt, or are not surrounded by the tokens that the model needs there."""
    if vision is None or not request.images:
        return None
    return vision.positions(prompt_ids, _blocks(request, leases))


def _blocks(request: EngineRequest, leases: Sequence[Lease]) -> list[tuple[int, Grid]]:
    """Where the attention sequences of images and clips begin in a settled prompt, and their grids; without those of
    clips that failed or were pruned."""
    found: list[tuple[int, Grid]] = []
    for image, lease in zip(request.images, leases, strict=True):
        item, start = image.layout, image.start
        counts = _counts(image, lease)
        if counts is None or sum(counts) != sum(item.sequence_tokens):
            continue
        between = (*image.between, *[()] * (item.num_sequences - len(image.between)))
        for grid, rows, words in zip(item.grids, item.sequence_tokens, between, strict=True):
            found.append((start, grid))
            start += rows + len(words)
    return found


def _counts(image: PreparedItem, lease: Lease) -> tuple[int, ...] | None:
    item = image.layout
    if not image.between:
        return (item.tokens,)
    if item.tokens == sum(item.sequence_tokens):
        return item.sequence_tokens
    return lease.counts
