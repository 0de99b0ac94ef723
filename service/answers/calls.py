"""Connects the services of all transports to the frontend.

`Calls` adds to `Frontend.stream` what every service needs: rejecting calls while draining, deadlines, the tenant's rate
limits and salt, and for each generation metrics, spans and a line in the access log, without prompt or answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from service.answers.frontend import Frontend
from service.common import errors
from service.common.auth import Tenant
from service.common.limits import Places
from service.common.types import Delta, Embedded, Event, Finished, GenerateSpec, Started, Tokenized
from service.telemetry.access_log import AccessLog
from service.telemetry.call_context import CallInfo, current_call
from service.telemetry.metrics import Metrics
from service.telemetry.tracing import Spans


class _Generation:
    """Counts and times of one generation."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.started: Started | None = None
        self.finished: list[Finished] = []
        self.tokens = self.cached = 0
        self.prepared: float | None = None
        self.first_token: float | None = None
        self.last_token: dict[int, float] = {}

    def see(self, event: Event) -> tuple[float, int] | None:
        """Counts an event. Returns (seconds since the sample's previous delta, tokens) for every delta of a sample but
        the first, else None."""
        match event:
            case Started():
                self.started = event
                self.prepared = time.monotonic() - self.began
            case Finished():
                self.finished.append(event)
                self.cached = max(self.cached, event.usage.cached_tokens)
            case Delta(token_ids=ids) if ids:
                now = time.monotonic()
                self.cached = max(self.cached, event.cached_tokens)
                self.tokens += len(ids)
                if self.first_token is None:
                    self.first_token = now - self.began
                previous = self.last_token.get(event.index)
                self.last_token[event.index] = now
                if previous is not None:
                    return now - previous, len(ids)
        return None


def _charge(tenant: Tenant, event: Event) -> None:
    """Charges tokens as they are generated, so that later calls see the usage of running ones."""
    match event:
        case Started(prompt_tokens=count):
            tenant.limits.charge("tokens", count)
        case Delta(token_ids=ids):
            tenant.limits.charge("tokens", len(ids))


async def _nowhere(request_id: str, salt: bytes) -> bool:
    return False


class Calls:
    """Generations, embeddings and token counts for the services. Used on the server's event loop."""

    def __init__(
        self,
        frontend: Frontend,
        *,
        default_timeout: float,
        closed: Callable[[], errors.StatusError | None],
        metrics: Metrics,
        access: AccessLog,
        spans: Spans | None,
        places: Places,
    ) -> None:
        """`closed`: the error for new calls if they are not accepted now. `spans`: None without tracing. `places`:
        limits the requests of one tenant with a key."""
        self.frontend, self.metrics, self.access = frontend, metrics, access
        self._spans, self._places = spans, places
        self._default_timeout = default_timeout
        self._closed = closed
        self.elsewhere: Callable[[str, bytes], Awaitable[bool]] = _nowhere
        """Cancels a request of another frontend process with the same engine."""

    async def stream(self, spec: GenerateSpec, *, timeout: float | None) -> AsyncGenerator[Event, None]:
        """The events of an answer. `timeout`: seconds until the caller's deadline; None: it has none, and the server's
        default applies. Raises StatusError."""
        info, generation = current_call(), _Generation()
        record = CallInfo(
            info.method, info.tenant, info.trace, request_bytes=info.request_bytes, request_id=spec.request_id,
            late=info.late,
        )  # fmt: skip
        info.generations += 1
        try:
            limit = self._admit(timeout)
            # There is always a deadline: a client that vanishes without closing its connection would otherwise keep its
            # batch slot forever.
            deadline = asyncio.get_running_loop().time() + limit
            events = self.frontend.stream(spec, salt=info.tenant.salt, timeout=limit)
            with self._places.hold(info.tenant.name):
                async with contextlib.aclosing(events):
                    while True:
                        try:
                            # Around each step, not around the yields: the deadline must not fire in the consumer's
                            # code.
                            async with asyncio.timeout_at(deadline):
                                event = await anext(events)
                        except StopAsyncIteration:
                            return
                        if (gap := generation.see(event)) is not None:
                            self.metrics.token_gap(*gap)
                        _charge(info.tenant, event)
                        yield event
        except (asyncio.CancelledError, GeneratorExit):
            if len(generation.finished) < spec.n:
                record.dropped = info.dropped
                record.cancel()
            raise
        except Exception as error:
            status = errors.to_status(error)
            record.fail(status)
            if isinstance(status, errors.DeadlineExceeded) and not status.metadata:
                status.metadata["phase"] = "generating" if generation.tokens else "queued"
            if status is error:
                raise
            raise status from error
        finally:
            self._end(record, generation)

    def _admit(self, timeout: float | None) -> float:
        if (refusal := self._closed()) is not None:
            raise refusal
        if timeout is not None and timeout <= 0:
            raise errors.DeadlineExceeded("the deadline has passed", metadata={"phase": "admission"})
        current_call().tenant.limits.admit("tokens", 0)
        return self._default_timeout if timeout is None else timeout

    def _end(self, record: CallInfo, generation: _Generation) -> None:
        """Writes the metrics, the line of the access log and the spans of a generation."""
        seconds = time.monotonic() - generation.began
        started, finished = generation.started, generation.finished
        prompt, image, video = 0, 0, 0
        if started is not None:
            prompt, image, video = started.prompt_tokens, started.image_tokens, started.video_tokens
        queue = finished[0].usage.queue_seconds if finished else None
        reasons = ",".join(sorted({f.reason for f in finished})) if record.code == "OK" else ""
        self.metrics.generation(
            record.code, prompt=prompt, image=image, video=video, cached=generation.cached, generated=generation.tokens,
            queue=queue, first_token=generation.first_token, seconds=seconds,
        )  # fmt: skip
        self.access.write(
            record, finish=reasons, prompt_tokens=prompt, image_tokens=image, video_tokens=video,
            cached_tokens=generation.cached, completion_tokens=generation.tokens, queue_seconds=queue,
            first_token_seconds=generation.first_token, seconds=seconds,
        )  # fmt: skip
        if self._spans is not None:
            attributes = {
                "rpc.method": record.method, "saccade.request_id": record.request_id,
                "saccade.tenant": record.tenant.name, "saccade.finish": reasons,
                "saccade.prompt_tokens": prompt, "saccade.cached_tokens": generation.cached,
                "saccade.image_tokens": image, "saccade.completion_tokens": generation.tokens,
            }  # fmt: skip
            failed = "" if record.code == "OK" else record.reason or record.code
            self._spans.generation(
                record.trace, attributes, seconds=seconds, prepared=generation.prepared,
                first_token=generation.first_token, failed=failed,
            )  # fmt: skip

    async def embed(self, spec: GenerateSpec, *, timeout: float | None) -> Embedded:
        """Embeds a prompt or an image. `timeout`: see `stream`. Raises StatusError."""
        info = current_call()
        tenant = info.tenant
        limit = self._admit(timeout)
        with self._places.hold(tenant.name):
            async with asyncio.timeout(limit):
                embedded = await self.frontend.embed(spec, salt=tenant.salt)
        prompt, image, video = embedded.prompt_tokens, embedded.image_tokens, embedded.video_tokens
        tenant.limits.charge("tokens", prompt)
        self.metrics.tokens(prompt=prompt, image=image, video=video)
        info.tokens = {"prompt_tokens": prompt, "image_tokens": image, "video_tokens": video}
        return embedded

    async def tokenize(self, spec: GenerateSpec, *, timeout: float | None) -> Tokenized:
        """Tokenises a prompt. `timeout`: see `stream`. Counts as a request, since it decodes images, but costs no
        tokens. Raises StatusError."""
        tenant = current_call().tenant
        limit = self._admit(timeout)
        spec = replace(spec, request_id=spec.request_id or f"tokenize-{secrets.token_hex(8)}")
        with self._places.hold(tenant.name):
            async with asyncio.timeout(limit):
                return await self.frontend.tokenize(spec, salt=tenant.salt)

    async def cancel(self, request_id: str) -> None:
        """Cancels a request of the caller's own tenant. Raises NotFound."""
        salt = current_call().tenant.salt
        if not self.frontend.cancel(request_id, salt=salt) and not await self.elsewhere(request_id, salt):
            raise errors.NotFound(f"no request {request_id!r} is running", field="request_id")
