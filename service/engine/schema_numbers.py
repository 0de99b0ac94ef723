"""Rejects numbers in JSON schemas that the grammar compiler would round, or with which it would crash or not end.

The compiler reads numbers as floats, and bounds of integers as floats and then as 64-bit integers. So it would round an
id of 18 digits to another one, and a minimum of 10^20 to less. A range that consists of -2^63 ends the process: the
compiler negates it, which overflows, and recurses without end. `multipleOf` becomes an automaton with a state for each
remainder, and several of them can become one with a state for each combination, which no limit of the compiler bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from service.common.types import TextFormat
from service.engine.format_parts import all_schemas
from service.engine.schema_faults import pointer

EXACT = 2**53 - 1
"""Up to this magnitude, different integers are different as floats, too."""
MAX_MULTIPLE = 50_000
"""Limit on the least common multiple of all `multipleOf` of a format, without factors 2 and 5. These cost little, since
they only concern the last decimal digits. The largest allowed multiple takes about half a second and 20 MB to
compile."""
_LARGEST = 2**63 - 1
_BOUNDS = {"minimum": math.inf, "exclusiveMinimum": math.inf, "maximum": _LARGEST, "exclusiveMaximum": _LARGEST + 1}
"""Keyword -> the smallest number beyond EXACT that is safe: the compiler reads it as the largest 64-bit integer, and
rejects it for numbers that are not integers."""
_Path = tuple[Any, ...]
"""Keys from the innermost to the outermost: `(key, (key, ...))`."""


def check_numbers(format: TextFormat) -> None:
    """Raises ValueError for a number in a format's schemas that cannot be used, with the JSON pointer to the first."""
    multiple = 1
    for name, schema in all_schemas(format):
        for path, value in _numbers(schema):
            fault = ""
            keyword = path[0]
            if keyword == "multipleOf":
                multiple = math.lcm(multiple, _digits(value))
                if multiple > MAX_MULTIPLE:
                    fault = (
                        f"multipleOf is {_short(value)}, and the least common multiple of all, without factors 2 and "
                        f"5, is {_short(multiple)}; at most {MAX_MULTIPLE} is implemented"
                    )
            elif keyword in _BOUNDS:
                if abs(value) > EXACT and value < _BOUNDS[keyword]:
                    fault = f"{keyword} is {_short(value)}; numbers beyond {EXACT} are rounded, and not implemented"
            elif not _is_exact(value) and _in_data(path):
                fault = f"{_short(value)} would be rounded; only some numbers beyond {EXACT} are implemented"
            if fault:
                raise ValueError(f"{name}{fault}, at {pointer(_keys(path))}")


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_exact(value: float) -> bool:
    return abs(value) <= _LARGEST and int(float(value)) == int(value)


def _digits(value: float) -> int:
    """The digits of a decimal number as a whole number, without factors 2 and 5."""
    digits = int("".join(map(str, Decimal(repr(value)).as_tuple().digits)))
    for factor in (2, 5):
        while digits and digits % factor == 0:
            digits //= factor
    return max(digits, 1)


def _numbers(schema: Any) -> Iterator[tuple[_Path, float]]:
    """The numbers in a document, with their paths. A reference can turn every part of it into a schema."""
    waiting: list[tuple[_Path, Any]] = [((), schema)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += (((key, path), inner) for key, inner in reversed(value.items()))
        elif isinstance(value, list):
            waiting += (((index, path), inner) for index, inner in reversed([*enumerate(value)]))
        elif isinstance(value, int | float) and not isinstance(value, bool) and path:
            yield path, value


def _keys(path: _Path) -> list[str]:
    keys = []
    while path:
        keys.append(str(path[0]))
        path = path[1]
    return keys[::-1]


def _in_data(path: _Path) -> bool:
    """Whether a number is one that an answer may contain."""
    return not {"const", "enum"}.isdisjoint(_keys(path))
