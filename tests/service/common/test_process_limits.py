"""Limits that a process sets for itself, within those that it was started with."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from service.common.process_limits import allow_descriptors, allow_seconds, confine

resource.setrlimit(resource.{kind}, ({start}))
{call}
print(*resource.getrlimit(resource.{kind}))
"""


def limits_after(call: str, kind: str, start: str) -> tuple[int, ...]:
    """Soft and hard limit of this kind after the call, in a process in which they were `start`."""
    program = PROGRAM.format(kind=kind, start=start, call=call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


def test_no_number_of_bytes_is_too_large_for_a_limit() -> None:
    unlimited = "resource.RLIM_INFINITY, resource.RLIM_INFINITY"
    assert limits_after("confine(2**70)", "RLIMIT_AS", unlimited) == (2**63 - 1,) * 2


@pytest.mark.parametrize(
    ("call", "kind", "start"),
    [("confine(2**40)", "RLIMIT_AS", 2**36), ("allow_seconds(10**6)", "RLIMIT_CPU", 1000)],
    ids=["memory", "processor time"],
)
def test_a_lower_limit_of_the_process_stays(call: str, kind: str, start: int) -> None:
    assert limits_after(call, kind, f"{start}, {start}") == (start, start)


@pytest.mark.parametrize(("start", "raised"), [((256, 700), 700), ((700, 700), 700)])
def test_descriptors_are_allowed_as_far_as_possible(start: tuple[int, int], raised: int) -> None:
    assert limits_after("allow_descriptors()", "RLIMIT_NOFILE", str(start)) == (raised, start[1])
