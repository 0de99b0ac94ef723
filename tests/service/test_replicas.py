"""The capacity calculator against queueing theory, and its limits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from service.commands import replicas
from service.commands.cli import main
from service.commands.replicas import Load, growth_table, held, needed, simulate
from service.common.config import ConfigError

LOAD = Load(rate=16.0, seconds=1.0, slots=8, wait=0.5)


def erlang_p99(rate: float, seconds: float, slots: int) -> float:
    """The 99th percentile of the waits of M/M/c: P(W > t) = C exp(-(c/s - rate) t), with Erlang's C formula."""
    offered = rate * seconds
    sums = sum(offered**n / math.factorial(n) for n in range(slots))
    last = offered**slots / math.factorial(slots) * slots / (slots - offered)
    waits = last / (sums + last)
    return max(0.0, math.log(waits / 0.01) / (slots / seconds - rate))


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
def test_one_replica_waits_as_erlang_says(share: float) -> None:
    load = replace(LOAD, rate=share * LOAD.of_one, slots=8)
    found = [simulate(replace(load), 1, affinity=False, seed=seed).p99 for seed in range(40)]
    assert sum(found) / len(found) == pytest.approx(erlang_p99(load.rate, 1.0, 8), rel=0.15, abs=0.03)


def test_needed_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "MOST", 50)
    turns, sticky = needed(LOAD, affinity=False), needed(LOAD, affinity=True)
    assert turns is not None and sticky is not None and 3 <= turns <= sticky
    assert simulate(LOAD, turns, affinity=False).p99 <= LOAD.wait < simulate(LOAD, turns - 1, affinity=False).p99
    # One key has one replica: if all requests have the same, more replicas do not help.
    assert needed(replace(LOAD, keys=1), affinity=True) is None
    assert needed(replace(LOAD, rate=2 * replicas.MOST * LOAD.of_one), affinity=False) is None


def test_what_is_held_is_less_than_what_all_slots_could_do() -> None:
    for count in (1, 3, 10):
        turns, sticky = held(LOAD, count, affinity=False), held(LOAD, count, affinity=True)
        assert 0.3 * count * LOAD.of_one < sticky + 1e-9 and turns < count * LOAD.of_one
        assert sticky <= 1.05 * turns


def test_shared_parts_saturate_in_proportion() -> None:
    load = replace(LOAD, request_bytes=1e9, network=1e9)
    rows = growth_table(load, (1, 3)).rows
    router = [float(row[5].rstrip("%")) for row in rows[1:]]
    assert router[1] > 2.5 * router[0] > 100, "one router has less network than three replicas"


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0}, {"seconds": -1}, {"slots": 0}, {"wait": math.inf}, {"skew": -1}, {"keys": 0}, {"rate": math.nan},
        {"frontend_tokens": 0}, {"frontend_tokens": math.nan}, {"slots": 10**12}, {"keys": 10**11}, {"rate": 1e300},
        {"seconds": 1e-300}, {"request_bytes": 1e300},
    ],
)  # fmt: skip
def test_loads_that_cannot_be(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"^{name.replace('_', '-')}: expected a number from .* to .*, got "):
        replace(LOAD, **wrong)


def test_the_largest_load_that_can_be() -> None:
    assert needed(Load(rate=1e15, seconds=1e6), affinity=False) is None


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--replicas", "--rate", "4", "--seconds", "1", "--slots", "2", "--sizes", "1,3"]) == 0
    told = capsys.readouterr().out
    assert "4 requests/s" in told and "affinity" in told
    for wrong in (["--rate", "-4"], ["--rate", "4", "--sizes", "0"]):
        assert main(["plan", "--replicas", "--seconds", "1", *wrong]) != 0
        assert wrong[-2].strip("-") in capsys.readouterr().err
