"""Limits the time that the regular expressions of a checkpoint take: for some of them it grows exponentially with a
name's length, and Python can interrupt neither a match nor other threads' waiting for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection

from families import CheckpointError

SECONDS = 20.0
"""Limit for all expressions of a checkpoint together. Those of published ones take milliseconds."""
_TRIAL = """
import json, re, sys
expressions, names = json.load(sys.stdin)
for number, expression in enumerate(expressions):
    print(number, flush=True)
    try:
        tried = re.compile(expression)
    except Exception:  # reported by the process that reads it
        continue
    for name in names:
        tried.match(name), tried.fullmatch(name)
"""


def check_expressions(expressions: Collection[str], names: Collection[str], where: str) -> None:
    """Compiles the expressions and matches each with all names, from their beginning and as a whole, in a process of
    its own, so that doing the same in this one is known to end. Raises CheckpointError with the expression that does
    not end in time. `where`: the file and key, for errors."""
    if not expressions:
        return
    given = list(expressions)
    command = [sys.executable, "-I", "-S", "-c", _TRIAL]
    try:
        subprocess.run(
            command, input=json.dumps([given, list(names)]).encode(), capture_output=True, timeout=SECONDS, check=True
        )
    except subprocess.TimeoutExpired as error:
        found = given[int((error.stdout or b"0").split()[-1])]
        raise CheckpointError(
            f"{where}: the regular expression {found!r} takes too long: all together may take {SECONDS:g} s for the "
            f"names of {len(names)} modules"
        ) from None
    except (OSError, subprocess.CalledProcessError) as error:
        raise CheckpointError(f"{where}: its regular expressions could not be tried: {error}") from error
