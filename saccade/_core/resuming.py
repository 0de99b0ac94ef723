"""A streamed answer over all its attempts: what has been received, what to request next, how to join the parts.

A broken answer is resumed by sending the request again with the seed from `Started` and the ids received so far as
`continued_token_ids`. Several samples cannot be resumed: the same request with the same seed gives the same answer
again, and the part that was delivered is skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from saccade._core.results import Assembler
from saccade._core.retrying import Deadline, Retries
from saccade._core.settings import CallSettings
from saccade._core.steps import Actions, Call, Open, Receive, Steps, Wait, with_retries
from saccade._core.uploads import Uploads
from saccade.errors import DeadlineExceeded, SaccadeError, Unavailable
from saccade.types import Delta, ToolCall
from saccade.v1 import inference_pb2, types_pb2


@dataclass
class _Passed:
    """The part of a sample that has been delivered and will be received again."""

    ids: list[int]
    text: str
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)

    @property
    def left(self) -> bool:
        return bool(self.ids or self.text or self.reasoning or any(call.arguments for call in self.calls.values()))

    def new_calls(self, parts: Iterable[types_pb2.ToolCallDelta]) -> list[types_pb2.ToolCallDelta] | None:
        """The parts that have not been delivered; None if they differ from those that have been."""
        made = []
        for part in parts:
            given = self.calls.get(part.index)
            if given is None:
                made.append(part)
                continue
            shared = len(given.arguments)
            named = not part.id or (part.id, part.name) == (given.id, given.name)
            if not named or part.arguments[:shared] != given.arguments[: len(part.arguments)]:
                return None
            self.calls[part.index] = replace(given, arguments=given.arguments[len(part.arguments) :])
            if part.arguments[shared:]:
                made.append(types_pb2.ToolCallDelta(index=part.index, arguments=part.arguments[shared:]))
        return made


class StreamState:
    """One stream over all its attempts.

    Args:
        resume: continue after a break even if messages have been received; otherwise only before the first.
    """

    def __init__(
        self, request: inference_pb2.GenerateRequest, calls: CallSettings, deadline: Deadline, resume: bool
    ) -> None:
        self.request = request
        self.calls = calls
        self.deadline = deadline
        self.resume = resume and calls.max_retries != 0
        self.assembler = Assembler(request)
        self.failure: Exception | None = None
        """The error that ended the stream for good; raised again by later calls."""
        self._uploads = Uploads(request, calls.upload_above)
        self._retries = Retries(calls.max_retries, deadline, registers=True)
        self._waited = 0.0
        self._begun = False
        self._sequence: dict[int, int] = {}
        self._passed: dict[int, _Passed] = {}

    @property
    def seed(self) -> int | None:
        return self.assembler.started.seed if self.assembler.started else None

    # -- attempts ------------------------------------------------------------------------------------------------------

    def begin(self) -> Actions[None]:
        """Uploads large files and opens the first attempt."""
        yield from self._with_retries(self._uploads.steps())
        yield self._open()

    def read(self) -> Actions[Delta | None]:
        """The next delta, of this attempt or of a further one; None at the end. Raises SaccadeError."""
        while (response := (yield from self._receive())) is not None:
            delta = self.take(response)
            if delta is not None:
                return delta
        return None

    def _receive(self) -> Actions[inference_pb2.StreamGenerateResponse | None]:
        while True:
            began = time.monotonic()
            try:
                response: inference_pb2.StreamGenerateResponse | None = yield Receive(self.patience())
                return response
            except TimeoutError:
                raise self.out_of_patience() from None
            except SaccadeError as caught:
                error = caught
            finally:
                self.waited(time.monotonic() - began)
            if self.assembler.complete:
                return None  # the answer is complete; only the call's status was lost
            recovery = self._uploads.recovery(error)
            if recovery is not None:
                yield from self._with_retries(recovery)
            else:
                delay = self.delay_after(error)
                yield Wait(delay)
                self.waited(delay)
            yield self._open()

    def _open(self) -> Open:
        message = inference_pb2.StreamGenerateRequest(request=self.next_request())
        call = Call("inference", "StreamGenerate", message, stays=self._uploads.too_large)
        return Open(call.after(self._retries.rejections), self.deadline.remaining(), self.request.request_id)

    def _with_retries(self, steps: Steps[None]) -> Actions[None]:
        return with_retries(steps, self.calls.max_retries, self.deadline)

    # -- messages ------------------------------------------------------------------------------------------------------

    def take(self, response: inference_pb2.StreamGenerateResponse) -> Delta | None:
        """Adds a message; returns the delta for the user if it has something new.

        Raises:
            Unavailable: the attempt does not continue what has been delivered (RESUME_DIVERGED).
        """
        event = response.WhichOneof("event")
        if event == "started":
            first = self.assembler.started
            if first is not None:
                if (first.model, first.model_version) != (response.started.model, response.started.model_version):
                    raise self._diverged("the model has changed since the stream began")
                return None
        elif event == "delta":
            self._waited = 0.0
            response = self._unseen(response)
            if not response.HasField("delta"):
                return None
            self._retries.progress()
            self._begun = True
        return self.assembler.take(response)

    def _unseen(self, response: inference_pb2.StreamGenerateResponse) -> inference_pb2.StreamGenerateResponse:
        """The message without what has been delivered before; empty if nothing is left."""
        delta = response.delta
        passed = self._passed.get(delta.index)
        if passed is not None and passed.left:
            calls = passed.new_calls(delta.tool_calls)
            ids, text, thought = len(passed.ids), len(passed.text), len(passed.reasoning)
            if (
                list(delta.token_ids[:ids]) != passed.ids[: len(delta.token_ids)]
                or delta.text[:text] != passed.text[: len(delta.text)]
                or delta.reasoning[:thought] != passed.reasoning[: len(delta.reasoning)]
                or calls is None
            ):
                raise self._diverged("the repeated answer differs from the one that was delivered")
            logprobs = list(delta.logprobs[ids:])
            passed.ids, new_ids = passed.ids[len(delta.token_ids) :], list(delta.token_ids[ids:])
            passed.text, new_text = passed.text[len(delta.text) :], delta.text[text:]
            passed.reasoning, new_thought = passed.reasoning[len(delta.reasoning) :], delta.reasoning[thought:]
            if not new_ids and not new_text and not new_thought and not calls:
                return inference_pb2.StreamGenerateResponse()
            delta = inference_pb2.Delta(
                index=delta.index, text=new_text, token_ids=new_ids, logprobs=logprobs, reasoning=new_thought,
                tool_calls=calls,
            )  # fmt: skip
            response = inference_pb2.StreamGenerateResponse(delta=delta)
        response.delta.sequence = self._sequence.get(delta.index, 0)
        if response.delta.sequence:
            response.delta.cached_tokens = 0  # the sample has had its first delta, in an earlier attempt
        self._sequence[delta.index] = response.delta.sequence + 1
        return response

    def _diverged(self, why: str) -> Unavailable:
        return Unavailable(
            f"the stream broke and cannot be continued: {why}",
            reason="RESUME_DIVERGED",
            request_id=self.request.request_id,
        )

    # -- breaks --------------------------------------------------------------------------------------------------------

    def delay_after(self, error: SaccadeError) -> float:
        """Seconds to wait before the next attempt. Raises the error if there is to be none."""
        if self.assembler.started is not None and not self.resume:
            raise error from error.__cause__
        return self._retries.delay_after(error, self.patience())

    def failed(self, error: BaseException) -> None:
        """Keeps the error that ended the stream. An interrupt concerns only the thread that reads, and is not kept."""
        if isinstance(error, Exception):
            self.failure = error

    def next_request(self) -> inference_pb2.GenerateRequest:
        """The request of the next attempt."""
        started = self.assembler.started
        if started is None:
            return self.request
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        request.sampling.seed = started.seed
        if request.sampling.n > 1:
            self._passed = {
                index: _Passed(
                    self.assembler.token_ids(index),
                    self.assembler.text(index),
                    self.assembler.reasoning(index),
                    self.assembler.tool_calls(index),
                )  # fmt: skip
                for index in self._sequence
            }
        else:
            request.continued_token_ids.extend(self.assembler.token_ids())
        return request

    # -- patience ------------------------------------------------------------------------------------------------------

    def patience(self) -> float | None:
        """Seconds that the reader may wait for the next piece, including retries and the pauses between them; None: no
        limit."""
        limit = self.calls.idle_timeout if self._begun else self.calls.first_token_timeout
        return None if limit is None else max(0.001, limit - self._waited)

    def waited(self, seconds: float) -> None:
        """Adds time that the reader has waited for a piece."""
        self._waited += seconds

    def out_of_patience(self) -> DeadlineExceeded:
        """The error for a wait that was longer than `patience`."""
        name = "idle_timeout" if self._begun else "first_token_timeout"
        what = "no further part" if self._begun else "no part"
        return DeadlineExceeded(
            f"{what} of the answer arrived within {name} = {getattr(self.calls, name):g} seconds",
            reason=name.upper(),
            request_id=self.request.request_id,
        )


def stream_settings(calls: CallSettings, first_token_timeout: float | None, idle_timeout: float | None) -> CallSettings:
    """The client's settings with those of one stream over them; None keeps the client's."""
    given = {"first_token_timeout": first_token_timeout, "idle_timeout": idle_timeout}
    return replace(calls, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
