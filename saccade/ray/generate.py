"""A callable class for `ray.data.Dataset.map_batches`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from saccade._core.results import generation_from
from saccade._jobs.rows import concerns_row
from saccade._map.window import check_concurrency
from saccade.errors import InvalidArgument, SaccadeError
from saccade.ray.ids import ID
from saccade.ray.rows import ANSWER_COLUMNS, ROW_ERRORS, RowFormat
from saccade.types import Generation
from saccade.v1 import inference_pb2


class Generate:
    """Answers the rows of a dataset: a client of a server, or with `model` an engine in each actor.

        ds.map_batches(
            saccade.ray.Generate,
            fn_constructor_kwargs={"rows": RowFormat("What is in it?", images=["image"]), "server": "127.0.0.1:50051"},
            concurrency=(1, 8),
        )

    The output has the columns of `rows.keep`, the row's id, and those of the answer (`rows.ANSWER_COLUMNS`). A row that
    cannot be answered has an `error`. Errors that concern all rows, such as a server that is unavailable for as long as
    the client's timeout, are raised and end the job.

    Args:
        rows: how a row becomes a request.
        server: the server's address, for example 127.0.0.1:50051 if each node has a server, or several addresses; see
            `saccade.AsyncClient`.
        model: load this model in each actor instead of using a server.
        concurrency: requests in flight in each actor.
        client: further arguments of `saccade.AsyncClient`: api_key, tls, timeout, affinity, ...
        engine: further arguments of `saccade.LocalClient`: dtype, device and other options of `saccade serve`.

    Raises:
        InvalidArgument: both or neither of `server` and `model` are given.
    """

    def __init__(
        self,
        rows: RowFormat,
        *,
        server: Any = None,
        model: str | None = None,
        concurrency: int = 32,
        client: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        if (server is None) == (model is None):
            raise InvalidArgument("Generate: expected either server or model, got both or neither")
        self._rows = rows
        self._concurrency = check_concurrency(concurrency)
        self._limit: asyncio.Semaphore | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._client: Any
        if model is None:
            from saccade._async.client import AsyncClient

            self._client = AsyncClient(server, **(client or {}))
        else:
            from saccade.local import LocalClient

            self._client = LocalClient(model, **(engine or {}))
            self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="saccade-ray")

    async def __call__(self, batch: Any) -> AsyncGenerator[Any, None]:
        """Yields one `pyarrow.Table` with the answers to the rows of a batch, in their order.

        Args:
            batch: a `pyarrow.Table`, or a mapping from columns to their values.
        """
        tasks = [asyncio.ensure_future(self._answer(row)) for row in as_rows(batch)]
        try:
            yield as_table(await asyncio.gather(*tasks), self._rows, getattr(batch, "schema", None))
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if self._limit is None:
            self._limit = asyncio.Semaphore(self._concurrency)
        async with self._limit:
            try:
                request = await asyncio.to_thread(self._rows.request, row)
                result: Generation | SaccadeError = generation_from(await self._send(request), request.sampling)
            except SaccadeError as error:
                if not (isinstance(error, ROW_ERRORS) or concerns_row(error)):
                    raise
                result = error
        return self._rows.output(row, result)

    async def _send(self, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateResponse:
        if self._pool is None:
            answer: inference_pb2.GenerateResponse = await self._client._generate(request, None)
            return answer
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._client._generate, request, None)


def as_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch in any of Ray's formats."""
    if hasattr(batch, "to_pylist"):
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    if hasattr(batch, "to_dict"):
        return list(batch.to_dict("records"))
    columns = {name: values.tolist() if hasattr(values, "tolist") else values for name, values in batch.items()}
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def as_table(rows: list[dict[str, Any]], form: RowFormat, schema: Any) -> Any:
    """A `pyarrow.Table` whose columns have the same types in every batch.

    Args:
        schema: the `pyarrow.Schema` of the input; with None, the types of kept columns follow from their values.
    """
    import pyarrow as pa

    of_input = {item.name: item.type for item in schema} if isinstance(schema, pa.Schema) else {}
    types = {
        **dict.fromkeys(ANSWER_COLUMNS, pa.string()), **dict.fromkeys(form.kept), **of_input,
        "prompt_tokens": pa.int32(), "completion_tokens": pa.int32(), "cached_tokens": pa.int32(),
        "cost": pa.float64(), "seed": pa.uint64(), ID: pa.int64(),
    }  # fmt: skip
    names = list(dict.fromkeys((*form.kept, ID, *ANSWER_COLUMNS)))
    return pa.table({name: pa.array([row[name] for row in rows], types[name]) for name in names})
