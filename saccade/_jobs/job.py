"""Jobs over JSONL files: checked as a whole, answered with bounded memory, resumed after interruptions.

check      reads and checks every line; keeps its id and hash in a temporary file
open       asks for the model's revision and reads what an earlier run has written
run        reads each row again when its request may start, and writes each answer or error at once
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypedDict

from saccade import errors
from saccade._core.ranges import check_flag, check_integer, check_path, check_seconds
from saccade._jobs.input import BatchInput
from saccade._jobs.journal import COUNTS, Journal, Written, check_apart, helper_files, real_output
from saccade._jobs.lines import output_line
from saccade._jobs.rows import BATCH_PRIORITY, ImageFolder, Row, concerns_row, request_from
from saccade._map.window import Prepared, check_concurrency
from saccade._openai.errors import status_code
from saccade.errors import FailedPrecondition, InvalidArgument, SaccadeError, Unavailable
from saccade.types import Generation, Model

CONCURRENCY = 32
"""Requests that a job has in progress by default."""


@dataclass(frozen=True)
class BatchOptions:
    """Options of a batch."""

    concurrency: int = CONCURRENCY
    """Requests in progress at a time."""
    ordered: bool = False
    """Write the answers in the order of the requests instead of as they complete."""
    max_errors: int | None = None
    """Stop when this run has had more error rows than this. None: never."""
    overwrite: bool = False
    """Start from the first row, whatever the output contains."""
    any_model: bool = False
    """Also answer rows that name another model."""
    strict: bool = False
    """Reject the whole input, instead of only the row, if a file that the row names cannot be read."""
    timeout: float | None = None
    """Seconds for one row. None: the client's."""
    priority: int = BATCH_PRIORITY
    on_progress: Callable[[BatchSummary, int, bool], None] | None = None
    """Called after each row with the counts of rows and tokens so far, the row's completion tokens and whether it
    failed."""
    on_start: Callable[[BatchSummary], None] | None = None
    """Called when the input has been checked and the existing output has been read."""

    def __post_init__(self) -> None:
        check_concurrency(self.concurrency)
        for name in ("ordered", "overwrite", "any_model", "strict"):
            check_flag(name, getattr(self, name))
        if self.max_errors is not None:
            check_integer("max_errors", self.max_errors)
        check_integer("priority", self.priority)
        check_seconds("timeout", self.timeout)

    @classmethod
    def of(cls, options: BatchKeywords) -> BatchOptions:
        """Makes options from keyword arguments. Raises InvalidArgument for unknown names."""
        known = [item.name for item in fields(cls)]
        if unknown := sorted(options.keys() - set(known)):
            raise InvalidArgument(f"unknown options: {', '.join(unknown)}; known are {', '.join(known)}")
        return cls(**options)


class BatchKeywords(TypedDict, total=False):
    """The fields of `BatchOptions` as keyword arguments."""

    concurrency: int
    ordered: bool
    max_errors: int | None
    overwrite: bool
    any_model: bool
    strict: bool
    timeout: float | None
    priority: int
    on_progress: Callable[[BatchSummary, int, bool], None] | None
    on_start: Callable[[BatchSummary], None] | None


@dataclass
class BatchSummary:
    """The result of a batch. Counts refer to the whole output, `seconds` and `errors` to this run."""

    input: str
    output: str
    model: str = ""
    model_version: str = ""
    total: int = 0
    """Rows of the input."""
    completed: int = 0
    failed: int = 0
    resumed: int = 0
    """Number of completed and failed rows that an earlier run had answered."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Those of `prompt_tokens` that were in the prefix cache."""
    reasoning_tokens: int = 0
    """Those of `completion_tokens` that are reasoning."""
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    """Completion tokens of this run per second."""
    errors: dict[str, int] = field(default_factory=dict)
    """Number of this run's error rows by reason."""

    @property
    def finished(self) -> bool:
        """Whether each row has an output line."""
        return self.completed + self.failed == self.total

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


class BatchJob:
    """One run over a file, driven by a client: call `check`, `open`, `rows` and `take`, `finish`, `close` in this
    order."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        output: str | os.PathLike[str],
        options: BatchOptions,
        folder: ImageFolder | None = None,
    ) -> None:
        """`folder`: that of the images to which rows refer; None: the source's folder."""
        self._source, self._output = check_path("source", source), check_path("output", output)
        self.options = options
        self._folder = folder or ImageFolder(self._source.parent)
        self._input: BatchInput | None = None
        self._journal: Journal | None = None
        self._errors: Counter[str] = Counter()
        self._unreachable = self._tokens = 0
        self._began = time.monotonic()
        self.summary = BatchSummary(str(source), str(output))

    def check(self) -> None:
        """Reads and checks the whole input. Raises InvalidArgument."""
        if self._input is not None:
            return
        output = real_output(self._output)
        check_apart(self._source, (output, *helper_files(output)))
        self._input = BatchInput(self._source, self._folder, strict=self.options.strict)

    def open(self, model: Model) -> None:
        """Reads what an earlier run has written. Raises FailedPrecondition and AlreadyExists, see `Journal`."""
        assert self._input is not None
        others = sorted(self._input.models - {"", model.name})
        if others and not self.options.any_model:
            from saccade._openai.problems import short  # it needs Pydantic: see `saccade._jobs.rows`

            raise InvalidArgument(
                f"model: rows name {', '.join(map(short, others[:5]))}, but {model.name!r} is served; any_model "
                "(--any-model) answers them anyway",
                reason="BATCH_MODEL",
            )
        self._input.bind(model)
        self._journal = Journal(self._output, self._input.identify, overwrite=self.options.overwrite)
        self._input.skip(self._journal.positions())
        self._began = time.monotonic()
        self.summary.model, self.summary.model_version = model.name, model.version
        self.summary.total = self._input.total
        self._count()
        self.summary.resumed = self.summary.completed + self.summary.failed
        if self.options.on_start is not None:
            self.options.on_start(self.summary)

    def rows(self) -> Generator[Row, None, None]:
        """The rows that have to be answered."""
        assert self._input is not None
        return self._input.rows()

    def prepare(self, row: Row) -> Prepared:
        """The request for a row."""
        options = self.options
        request = request_from(row, self._folder, priority=options.priority, model=not options.any_model)
        row.body = {}  # frees the images; the answer may have to wait for earlier rows
        return request, options.timeout

    def take(self, row: Row, result: Generation | SaccadeError) -> None:
        """Writes a row's line.

        Raises:
            FailedPrecondition: there have been too many errors, or the output cannot be written.
            Unavailable: no server can be reached any more.
        """
        assert self._input is not None and self._journal is not None
        failed = isinstance(result, SaccadeError)
        self._stop_if_hopeless(result)
        row_id = self._input.row_id(row.digest)
        status, counts = 200, dict.fromkeys(COUNTS, 0)
        if isinstance(result, SaccadeError):
            status = status_code(result)
            self._errors[result.reason or type(result).__name__] += 1
        else:
            usages = [sample.usage for sample in result.samples]
            counts = {
                "prompt_tokens": result.usage.prompt_tokens, "cached_tokens": result.usage.cached_tokens,
                "completion_tokens": sum(usage.completion_tokens for usage in usages),
                "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages),
            }  # fmt: skip
        line = output_line(row_id, row.custom_id, result, row.fields)
        self._journal.append(line, Written(row_id, row.custom_id, row.position, status, **counts))
        completion = counts["completion_tokens"]
        self._tokens += completion
        summary = self.summary
        summary.completed += not failed
        summary.failed += failed
        for name, count in counts.items():
            setattr(summary, name, getattr(summary, name) + count)
        if self.options.on_progress is not None:
            self.options.on_progress(summary, completion, failed)
        check_errors(self._errors.total(), self.options.max_errors)

    def _stop_if_hopeless(self, result: Generation | SaccadeError) -> None:
        """Raises an error if the following rows would fail in the same way; this row is left for the next run."""
        if isinstance(result, errors.Unauthenticated):
            raise result
        if isinstance(result, errors.PermissionDenied) and not concerns_row(result):
            raise result
        unreachable = isinstance(result, errors.Unavailable | errors.Overloaded) and not concerns_row(result)
        self._unreachable = self._unreachable + 1 if unreachable else 0
        if isinstance(result, SaccadeError) and self._unreachable > self.options.concurrency:
            raise Unavailable(
                f"the last {self._unreachable} rows could not be sent to any server: {result.message}",
                reason=result.reason or "BATCH_UNREACHABLE", retryable=True,
            ) from result  # fmt: skip

    def finish(self) -> BatchSummary:
        """To be called after the last row."""
        assert self._journal is not None
        self._journal.commit()
        if self.options.ordered:
            self._journal.sort()
        self._count()
        return self.summary

    def _count(self) -> None:
        assert self._journal is not None
        totals, summary = self._journal.totals(), self.summary
        summary.completed, summary.failed = totals["rows"] - totals["failed"], totals["failed"]
        for name in COUNTS:
            setattr(summary, name, totals[name])
        summary.seconds = round(time.monotonic() - self._began, 3)
        summary.tokens_per_second = round(self._tokens / summary.seconds, 1) if summary.seconds else 0.0
        summary.errors = dict(self._errors.most_common())

    def close(self) -> None:
        """Writes everything to the disk. Idempotent."""
        if self._journal is not None:
            with suppress(FailedPrecondition, sqlite3.Error):
                self._journal.commit()
                self._count()
            self._journal.close()
            self._journal = None
        if self._input is not None:
            self._input.close()


def check_errors(failed: int, limit: int | None) -> None:
    """Raises FailedPrecondition if more rows than the limit have failed."""
    if limit is not None and failed > limit:
        raise FailedPrecondition(f"{failed} rows have failed, more than max_errors = {limit}", reason="BATCH_ERRORS")
