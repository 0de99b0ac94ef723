"""Rows of a table: the request for a row, and the columns of its answer."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from saccade import errors
from saccade._core.images import ImageInput
from saccade._core.requests import build_request
from saccade._jobs.rows import ImageFolder
from saccade.errors import InvalidArgument, SaccadeError
from saccade.ray.ids import ID, row_id, row_seed
from saccade.types import Generation
from saccade.v1 import inference_pb2

ANSWER_COLUMNS = (
    "text", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "cost", "seed", "model",
    "model_version", "error", "error_reason",
)  # fmt: skip
ROW_ERRORS = (
    errors.InvalidArgument,
    errors.NotFound,
    errors.FailedPrecondition,
    errors.OutOfRange,
    errors.MessageTooLarge,
    errors.AlreadyExists,
    errors.DeadlineExceeded,
    errors.Internal,
)
"""Errors that concern one row. All others would recur in the following rows and end the job, unless they say that a
server has rejected one row: see `saccade._jobs.rows.concerns_row`."""


@dataclass(frozen=True)
class Prices:
    """Prices per million tokens, in any currency."""

    prompt: float
    completion: float
    cached: float | None = None
    """Price of prompt tokens that were in the prefix cache. None: that of other prompt tokens."""

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "cached"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidArgument(f"prices: {name}: expected a number of 0 or more, got {value}")

    def cost(self, prompt: int, completion: int, cached: int) -> float:
        """The cost of one answer."""
        of_cached = self.prompt if self.cached is None else self.cached
        return ((prompt - cached) * self.prompt + cached * of_cached + completion * self.completion) / 1e6


class Template:
    """A prompt with names of columns in braces, such as `{caption}`; literal braces are doubled.

    Raises:
        InvalidArgument: the text is empty, or braces contain something other than a column's name.
    """

    def __init__(self, text: str) -> None:
        if not text.strip():
            raise InvalidArgument("prompt: expected text, got an empty string")
        try:
            self._pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise InvalidArgument(f"prompt: {error}; literal braces have to be doubled") from None
        for _, name, form, conversion in self._pieces:
            if name is not None and (not name or form or conversion or set(name) & set("[].")):
                raise InvalidArgument(f"prompt: expected a column's name in braces, got {name!r}")
        self.columns = tuple(dict.fromkeys(name for _, name, _, _ in self._pieces if name is not None))

    def fill(self, row: Mapping[str, Any]) -> str:
        """The prompt for a row. Raises InvalidArgument for a column that is missing, null or not UTF-8."""
        pieces = []
        for literal, name, _, _ in self._pieces:
            pieces.append(literal)
            if name is not None:
                pieces.append(_text(_value(row, name), name))
        return "".join(pieces)


def _value(row: Mapping[str, Any], column: str) -> Any:
    value = row.get(column)
    if value is None:
        raise InvalidArgument(f"column {column!r} is {'null' if column in row else 'missing'}")
    return value


def _text(value: Any, column: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"column {column!r} is not UTF-8 at byte {error.start}") from None
    return str(value)


@dataclass(frozen=True)
class RowFormat:
    """How a row becomes a request.

    Raises:
        InvalidArgument: the prompt's template, or an option of `sampling`, is wrong.
    """

    prompt: str
    """A template, see `Template`."""
    id_column: str = ""
    """Column with unique integers, strings or bytes. Empty: rows have no ids, and the server draws their seeds."""
    images: Sequence[str] = ()
    """Columns with encoded images: bytes, mappings with `bytes` or `path`, paths, URLs, or lists of these."""
    videos: Sequence[str] = ()
    """The same for video files."""
    keep: Sequence[str] = ()
    """Columns of the input that are copied to the output, in addition to the id."""
    system: str = ""
    """The system message."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Options of `generate`."""
    folder: str = ""
    """The folder to which paths are relative; only files inside it are read. Empty: paths are errors."""
    prices: Prices | None = None

    def __post_init__(self) -> None:
        taken = {ID, *ANSWER_COLUMNS} & {self.id_column, *self.keep}
        if taken:
            raise InvalidArgument(f"columns: {min(taken)!r} is a column of the answer; rename the input's column")
        _ = self.template
        try:
            build_request(self._messages(""), images=[], **dict(self.sampling))
        except TypeError as error:
            raise InvalidArgument(f"sampling: {error}") from None

    @cached_property
    def template(self) -> Template:
        return Template(self.prompt)

    @cached_property
    def _folder(self) -> ImageFolder:
        return ImageFolder(Path(self.folder) if self.folder else None)

    @property
    def columns(self) -> list[str]:
        """The columns of the input that are needed, each once."""
        named = (self.id_column, *self.template.columns, *self.images, *self.videos, *self.keep)
        return [name for name in dict.fromkeys(named) if name]

    @property
    def kept(self) -> list[str]:
        """The columns of the input that are copied to the output."""
        return [name for name in dict.fromkeys((self.id_column, *self.keep)) if name]

    def _messages(self, prompt: str) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": prompt}]

    def request(self, row: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
        """The request for a row. Raises InvalidArgument."""
        sampling = dict(self.sampling)
        if self.id_column:
            sampling["seed"] = row_seed(sampling.get("seed"), row_id(row.get(self.id_column)))
        return build_request(
            self._messages(self.template.fill(row)),
            images=[file for column in self.images for file in self._file(_value(row, column), column)],
            videos=[file for column in self.videos for file in self._file(_value(row, column), column)],
            **sampling,
        )

    def _file(self, value: Any, column: str) -> Iterable[ImageInput]:
        if isinstance(value, list | tuple):
            for one in value:
                yield from self._file(one, column)
        elif isinstance(value, Mapping):
            found = value.get("bytes") or value.get("path")
            if not isinstance(found, bytes | str):
                raise InvalidArgument(f"column {column!r}: expected bytes or path in a mapping, got {sorted(value)}")
            yield from self._file(found, column)
        elif isinstance(value, bytes):
            yield value
        elif isinstance(value, str):
            is_url = value.startswith(("http://", "https://", "data:"))
            yield value if is_url else self._folder.read(value, f"column {column!r}")
        else:
            raise InvalidArgument(f"column {column!r}: expected encoded bytes or a path, got {type(value).__name__}")

    def identity(self, row: Mapping[str, Any]) -> int | None:
        return row_id(row.get(self.id_column)) if self.id_column else None

    def output(self, row: Mapping[str, Any], result: Generation | SaccadeError) -> dict[str, Any]:
        """The row of the output."""
        found: dict[str, Any] = {name: row.get(name) for name in self.kept}
        found[ID] = self.identity(row)
        found |= dict.fromkeys(ANSWER_COLUMNS)
        if isinstance(result, SaccadeError):
            reason = result.reason or type(result).__name__
            return found | {"error": str(result.message), "error_reason": reason}
        usage = result.usage
        completion = sum(sample.usage.completion_tokens for sample in result.samples)
        prices = self.prices
        return found | {
            "text": result.text,
            "finish_reason": result.finish_reason,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": completion,
            "cached_tokens": usage.cached_tokens,
            "cost": None if prices is None else prices.cost(usage.prompt_tokens, completion, usage.cached_tokens),
            "seed": result.seed,
            "model": result.model,
            "model_version": result.model_version,
        }
