"""Runs one batch, with the same code as the SDK (`saccade._jobs.job`) and a client that calls this server directly."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from saccade._async.jobs import run_job
from saccade._core.retrying import Deadline, retry_delay
from saccade._jobs.job import BatchJob, BatchOptions, BatchSummary, check_errors
from saccade._jobs.journal import recount
from saccade._jobs.rows import ImageFolder
from saccade.errors import DeadlineExceeded, InvalidArgument, error_from_service
from saccade.types import Model
from saccade.v1 import inference_pb2, types_pb2
from service.answers import convert
from service.answers.calls import Calls
from service.batches.batch_store import BatchRecord, BatchStore
from service.common import errors
from service.common.auth import Tenant
from service.common.limits import ByteBudget
from service.media.media import Spool, tenant_folder
from service.telemetry.call_context import CallInfo, set_current_call

_MEDIA = re.compile(rb'"(?:media:)?([0-9a-f]{64})"', re.IGNORECASE)
"""An uploaded file's id in a row: in a URL, or as the value of `media_id`."""
_MEDIA_BYTES = 72
"""The longest match of `_MEDIA`."""
METHOD = "/saccade.v1.BatchService/Row"
"""The method name of a row's call in metrics and logs."""


class Uploaded(ImageFolder):
    """Resolves the images that a row may refer to, a tenant's uploaded media, and renews their expiry."""

    def __init__(self, spool: Spool, tenant: Tenant) -> None:
        super().__init__(None)
        self._spool, self._tenant = spool, tenant_folder(tenant.salt)

    def look(self, image: types_pb2.Image, where: str) -> None:
        if image.WhichOneof("source") == "uri":
            raise InvalidArgument(f"{where}: an image of a batch must be a data URL or a media id, not a URL")
        if image.WhichOneof("source") == "media_id":
            try:
                self._spool.renew(self._tenant, image.media_id)
            except errors.NotFound as error:
                raise InvalidArgument(f"{where}: {error}", reason=error.reason) from None

    def keep(self, source: Path) -> None:
        """Renews the expiry of the media that an input names, as far as they are there. Reads the whole file, of which
        nothing has been checked: a line may be as long as the file."""
        with open(source, "rb") as file:
            text = b""
            while block := file.read(2**20):
                text = text[-_MEDIA_BYTES:] + block
                for media_id in set(_MEDIA.findall(text)):
                    with contextlib.suppress(errors.NotFound):
                        self._spool.renew(self._tenant, media_id.decode())


@dataclass(frozen=True)
class Inside:
    """The two client methods that a batch needs, as calls within the server."""

    calls: Calls
    model: Model
    tenant: Callable[[], Tenant]
    """Looked up for each row, because keys may change while the server runs. Raises StatusError."""
    gate: asyncio.Semaphore
    """Limits the rows in progress of all batches together."""
    row_timeout: float
    """Seconds that a row may take, all attempts together."""
    budget: ByteBudget
    """Limits the bytes that rows and their media hold while they run."""

    async def get_model(self) -> Model:
        return self.model

    async def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> inference_pb2.GenerateResponse:
        """Retries while that may help: a full queue, a dead engine or an exhausted rate limit is not the row's
        fault."""
        deadline, failures = Deadline(self.row_timeout), 0
        while True:
            try:
                async with self.gate:
                    return await self._once(request, deadline.left())
            except errors.StatusError as status:
                error = error_from_service(status, request.request_id)
            failures += 1
            delay = retry_delay(error, failures, None, deadline.remaining())
            if delay is None and error.retryable:
                raise DeadlineExceeded(
                    f"no answer within the batch_row_timeout of {self.row_timeout:g} seconds; the last of {failures} "
                    f"attempts: {error.message}",
                    request_id=error.request_id,
                ) from error
            if delay is None:
                raise error from error.__cause__
            await asyncio.sleep(delay)

    async def _once(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> inference_pb2.GenerateResponse:
        tenant, size = self.tenant(), request.ByteSize()
        with self.budget.hold(tenant.name) as add:
            add(size)
            set_current_call(CallInfo(METHOD, tenant, request_bytes=size, hold_bytes=add))
            builder = convert.ResponseBuilder()
            spec = convert.spec_from_proto(request, whole=True)
            async with contextlib.aclosing(self.calls.stream(spec, timeout=timeout)) as events:
                async for event in events:
                    builder.add(event)
            return builder.response()


def counts_of_files(store: BatchStore, record: BatchRecord) -> dict[str, int]:
    """The counts of a batch that has answers of an earlier run, and whose job has not read them: it ended soon after a
    restart. An incomplete last line, which a crash may leave, is cut off."""
    where = store.folder(record.batch_id)
    counted = recount(where / "output.jsonl")
    rows, failed = counted.pop("rows"), counted.pop("failed")
    with open(where / "input.jsonl", "rb") as file:
        total = sum(not line.isspace() for line in file)
    return {"total": total, "completed": rows - failed, "failed": failed, **counted}


async def run_batch(
    store: BatchStore, record: BatchRecord, client: Inside, folder: ImageFolder, *, concurrency: int,
    on_start: Callable[[BatchSummary], None], on_row: Callable[[BatchSummary], None],
) -> BatchSummary:  # fmt: skip
    """Answers the rows that have no answer yet. Raises SaccadeError. `on_start` and `on_row`, which is called after
    each row, are called from another thread. `max_errors` counts all failed rows, also those before a restart, which a
    job does not count."""

    def start(summary: BatchSummary) -> None:
        on_start(summary)
        check_errors(summary.failed, record.max_errors)

    def progress(summary: BatchSummary, tokens: int, failed: bool) -> None:
        on_row(summary)
        check_errors(summary.failed, record.max_errors)
        try:
            store.check_output(record)
        except errors.StatusError as error:
            raise error_from_service(error, "") from error

    where = store.folder(record.batch_id)
    options = BatchOptions(concurrency=concurrency, ordered=record.ordered, on_start=start, on_progress=progress)
    return await run_job(client, BatchJob(where / "input.jsonl", where / "output.jsonl", options, folder))
