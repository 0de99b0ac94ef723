"""A job over files: reads rows, answers them in actors, writes Parquet files with each row exactly once.

Ray's checkpoints record the ids of written rows. Each file of the output is written in two phases, so that a file whose
ids are not recorded is deleted when the job starts again. Rows that were in progress when the driver died are answered
again, with the same seeds.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from saccade.errors import FailedPrecondition, InvalidArgument, SaccadeError
from saccade.ray.generate import Generate
from saccade.ray.ids import ID
from saccade.ray.rows import RowFormat
from saccade.ray.sources import DEFAULT_IDS, DEFAULT_IMAGES, Source, find_source

_LOG = logging.getLogger("saccade")


@dataclass(frozen=True)
class RayJob:
    """A job's options.

    Raises:
        InvalidArgument: a number is out of its range, or the rows have no ids.
    """

    source: str
    output: str
    """Folder, or URL, for Parquet files. Next to it are the checkpoints and a file that describes the job."""
    rows: RowFormat
    server: Any = None
    model: str | None = None
    format: str = "auto"
    client: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    actors: tuple[int, int] = (1, 1)
    """The minimum and the maximum number of actors."""
    concurrency: int = 32
    """Requests in flight in each actor."""
    num_cpus: float | None = None
    """Processors that Ray reserves for an actor, and threads of its engine unless `engine` has `threads`; None: 1 for
    an engine, which computes on all cores of its node, and 0 for a client."""
    num_gpus: float | None = None
    """GPUs that Ray reserves for an actor; None: none."""
    rows_per_task: int = 64
    """Rows of one task, which are all answered again if an actor dies while it answers them."""
    rows_per_file: int = 1024
    """Minimum number of rows in a file of the output, except for the last files. A row is safe once its file has been
    written."""
    progress: bool = True

    def __post_init__(self) -> None:
        fewest, most = self.actors
        if not 1 <= fewest <= most:
            raise InvalidArgument(f"actors: expected 1 <= fewest <= most, got {fewest} and {most}")
        for name in ("rows_per_task", "rows_per_file", "concurrency"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if (self.server is None) == (self.model is None):
            raise InvalidArgument("server, model: expected either of them, got both or neither")

    def described(self, source: Source) -> dict[str, Any]:
        """The options on which the answers depend."""
        rows = asdict(self.rows)
        return {
            "source": _absolute(self.source), "format": source.format, "rows": rows, "model": self.model,
            "engine": dict(self.engine),
        }  # fmt: skip


@dataclass
class RaySummary:
    """The result of a job. Counts refer to the whole output, `seconds` to this run."""

    rows: int = 0
    failed: int = 0
    resumed: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float | None = None
    model_versions: dict[str, int] = field(default_factory=dict)
    """Rows by model and version."""
    errors: dict[str, int] = field(default_factory=dict)
    """Failed rows by reason."""
    seconds: float = 0.0


def complete(rows: RowFormat, source: Source) -> RowFormat:
    """The row format, completed by the id column and image columns that a source has by default. Raises
    InvalidArgument."""
    id_column = rows.id_column or DEFAULT_IDS.get(source.format, "")
    if not id_column:
        raise InvalidArgument("id_column: rows of Parquet files need a column of ids")
    return replace(rows, id_column=id_column, images=rows.images or DEFAULT_IMAGES.get(source.format, ()))


def run_ray_job(job: RayJob) -> RaySummary:
    """Runs the job on the Ray cluster that this process is connected to, or on this machine. Started again after an
    interruption, it continues.

    Raises:
        InvalidArgument: the source or an option is wrong, or two rows of the source have the same id.
        AlreadyExists: the output is another job's.
        FailedPrecondition: Ray is not installed, or the output has a row twice.
        SaccadeError: no server can be reached, or it rejects the key.
    """
    try:
        from ray import data

        from saccade.ray.checkpoints import checkpoint_config, claim
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("ray", "pyarrow"):
            raise
        raise FailedPrecondition("this needs Ray: pip install 'saccade[ray]'", reason="NOT_INSTALLED") from error
    began = time.monotonic()
    source = find_source(job.source, job.format)
    job = replace(job, rows=complete(job.rows, source), output=_absolute(job.output))
    assert job.rows.id_column
    context = data.DataContext.get_current().copy()
    context.checkpoint_config = checkpoint_config(f"{job.output.rstrip('/')}.checkpoint", job.rows.id_column)
    context.enable_progress_bars = job.progress
    context.raise_original_map_exception = True  # else Ray keeps no more than the text of an actor's error
    # The newer reader of Parquet starts 32 processes at a time to read footers, whatever the number of files: 30 CPU
    # seconds at the start of a job.
    context.use_datasource_v2 = False
    try:
        with data.DataContext.current(context):
            dataset = _answers(source.read(job.rows), job)
            if source.format == "parquet":
                _check_ids(source, job.rows.id_column)
            resumed = claim(job.output, job.described(source))
            _warn_if_too_small(job)
            dataset.write_parquet(job.output, min_rows_per_file=job.rows_per_file)
    except Exception as error:
        found = _ours(error)
        if found is None or found is error:
            raise
        raise found from error
    summary = summarize(job.output)
    summary.resumed, summary.seconds = resumed, round(time.monotonic() - began, 3)
    return summary


def _ours(error: BaseException | None) -> SaccadeError | None:
    """The SaccadeError in an error of Ray, which wraps the errors of actors in several layers; None if it has none."""
    while error is not None:
        inner = getattr(error, "cause", None)
        for found in (inner, error):
            # Ray makes classes that inherit from the cause's class but lack its fields.
            if isinstance(found, SaccadeError) and not type(found).__module__.startswith("ray."):
                return found
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__
    return None


def _answers(dataset: Any, job: RayJob) -> Any:
    """The dataset of answers."""
    from ray.data import ActorPoolStrategy

    fewest, most = job.actors
    # At least two tasks at a time: with one, an actor would be idle at the end of each.
    calls = max(2, -(-job.concurrency // job.rows_per_task) + 1)
    pool = ActorPoolStrategy(
        min_size=fewest, max_size=most, max_concurrent_calls_per_actor=calls, max_tasks_in_flight_per_actor=2 * calls
    )
    return dataset.repartition(target_num_rows_per_block=job.rows_per_task).map_batches(
        Generate,
        batch_size=None,
        batch_format="pyarrow",
        compute=pool,
        fn_constructor_kwargs={
            "rows": job.rows, "server": job.server, "model": job.model, "concurrency": job.concurrency,
            "client": dict(job.client), "engine": engine_of(job),
        },
        num_cpus=job.num_cpus if job.num_cpus is not None else 0 if job.model is None else 1,
        num_gpus=job.num_gpus,
    )  # fmt: skip


def engine_of(job: RayJob) -> dict[str, Any]:
    """Options of each actor's engine, which computes with as many threads as the job reserves processors for it."""
    if job.num_cpus is None or job.num_cpus < 1:
        return dict(job.engine)
    return {"threads": int(job.num_cpus), **job.engine}


def _warn_if_too_small(job: RayJob) -> None:
    """Logs a warning if the cluster has too few CPUs: Ray would wait for them without an error."""
    import ray

    engines = 0.0 if job.model is None else job.actors[0] * (1 if job.num_cpus is None else job.num_cpus)
    needed, found = 2 + engines, ray.cluster_resources().get("CPU", 0.0)
    if found < needed:
        _LOG.warning("the Ray cluster has %g CPUs and the job needs %g: it waits until nodes are added", found, needed)


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def _check_ids(source: Source, column: str) -> None:
    """Raises InvalidArgument if two rows have the same id: the second would be lost when the job is started again."""
    from pyarrow import dataset

    _count_ids(dataset.dataset(list(source.paths), format="parquet"), column)


def _count_ids(table: Any, column: str) -> int:
    """The number of rows. Raises InvalidArgument if two have the same id. Takes 8 bytes of memory for each."""
    import numpy as np

    from saccade.ray.ids import row_id

    found = [np.empty(0, np.int64)]
    for batch in table.to_batches(columns=[column]):
        values = batch.column(0).to_pylist()
        found.append(np.fromiter(map(row_id, values), np.int64, len(values)))
    ids = np.sort(np.concatenate(found))
    again = ids[1:][ids[1:] == ids[:-1]]
    if len(again):
        values = (value for batch in table.to_batches(columns=[column]) for value in batch.column(0).to_pylist())
        example = next(value for value in values if row_id(value) == again[0])
        raise InvalidArgument(f"{column}: {len(again)} rows have the id of another row, for example {example!r}")
    return len(ids)


def summarize(output: str) -> RaySummary:
    """The summary of an output. Raises FailedPrecondition if the output has a row twice."""
    from pyarrow import dataset, fs

    files, path = fs.FileSystem.from_uri(output) if "://" in output else (None, output)
    table = dataset.dataset(path, format="parquet", filesystem=files)
    summary, reasons, versions, costs = RaySummary(), Counter[str](), Counter[str](), list[float]()
    if not table.files:
        return summary
    try:
        summary.rows = _count_ids(table, ID)
    except InvalidArgument as error:
        raise FailedPrecondition(f"{output!r}: {error.message}") from None
    names = ["prompt_tokens", "completion_tokens", "cached_tokens", "cost", "model", "model_version", "error_reason"]
    for batch in table.to_batches(columns=names):
        columns = {name: batch.column(name).to_pylist() for name in names}
        for name in names[:3]:
            setattr(summary, name, getattr(summary, name) + sum(value or 0 for value in columns[name]))
        costs += [cost for cost in columns["cost"] if cost is not None]
        reasons.update(reason for reason in columns["error_reason"] if reason is not None)
        versions.update(
            f"{model} {version}" for model, version in zip(columns["model"], columns["model_version"]) if model
        )
    summary.failed, summary.errors, summary.model_versions = reasons.total(), dict(reasons), dict(versions)
    summary.cost = round(sum(costs), 6) if costs else None
    return summary
