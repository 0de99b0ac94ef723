"""Mutation tests: one-line changes of behaviour, one at a time, each with the tests that should fail.

    python -m benchmarks.mutants [AREA ...] [--only TEXT] [--jobs 1] [--timeout 300] [--seconds S] [--fresh] [--write]

An area is a file of `benchmarks/mutants_lists`. Its entries name a file, a text that occurs in it exactly once, the
replacement, and test files. The checkout is copied to a temporary folder, where the named tests must first pass without
a mutant; then each mutant is applied, tested and reverted. Results are kept in `build/mutants.jsonl`, keyed by the
mutant, its file and its tests, so that an interrupted run continues and a second run repeats only what has changed;
`--fresh` discards them. Status 1 if fewer than `--least` percent are caught. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import write_result

CHECKOUT = Path(__file__).resolve().parent.parent
LISTS = Path(__file__).resolve().parent / "mutants_lists"
CAUGHT = {"caught", "hung"}
"""A mutant that makes its tests hang counts as caught: each test has a timeout."""


@dataclass(frozen=True)
class Mutant:
    area: str
    path: str
    """Path of the file, relative to the checkout."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Tests that should fail, as pytest arguments: files, or single tests (`file.py::test`)."""

    def applied(self, source: str) -> str:
        """The source with the mutant. `ValueError` unless `old` occurs in `source` exactly once."""
        if (count := source.count(self.old)) != 1 or self.old == self.new:
            raise ValueError(f"{self.area}: {self.path} holds {count} times {self.old!r}, expected once")
        return source.replace(self.old, self.new)

    def key(self, root: Path) -> str:
        """A key of the mutant and everything on which its result directly depends."""
        files = [self.path, *(test.partition("::")[0] for test in self.tests)]
        parts = [repr(self), *((root / file).read_text("utf-8") for file in files)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def areas(lists: Path = LISTS) -> list[str]:
    return sorted(path.stem for path in lists.glob("*.toml"))


def read(area: str, lists: Path = LISTS) -> list[Mutant]:
    """The mutants of an area. `KeyError` or `TypeError` for an incomplete entry."""
    content = tomllib.loads((lists / f"{area}.toml").read_text("utf-8"))
    return [Mutant(area, row["path"], row["old"], row["new"], tuple(row["tests"])) for row in content["mutant"]]


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A temporary copy of the files that git tracks or would track; of all files if there is no repository."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory(prefix="saccade-mutants-") as folder:
        to = Path(folder) / "checkout"
        if listed.returncode:
            shutil.copytree(root, to)
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, to / name)
        yield to


def run_tests(folder: Path, tests: Sequence[str], timeout: float) -> tuple[str, str]:
    """(passed, caught, hung or error; the end of the output). Ends all processes that the tests started."""
    environment = {
        **os.environ,
        # With an editable install, the tests' child processes would otherwise import the original checkout.
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        end = said.read()[-2000:]
    # 1: a test failed; 2: a file could not be collected; negative: a signal, such as after a wrong index in C++.
    if status is None:
        return "hung", end
    return ("passed" if status == 0 else "caught" if status in (1, 2) or status < 0 else "error"), end


def try_mutant(folder: Path, mutant: Mutant, timeout: float) -> tuple[str, float]:
    """Applies one mutant, runs its tests and restores `folder`. Returns (caught, hung, survived or error; seconds)."""
    file, started = folder / mutant.path, time.perf_counter()
    source = file.read_text("utf-8")
    file.write_text(mutant.applied(source), "utf-8")
    try:
        outcome, said = run_tests(folder, mutant.tests, timeout)
    finally:
        file.write_text(source, "utf-8")
    if outcome == "error":
        print(said, file=sys.stderr)
    return {"passed": "survived"}.get(outcome, outcome), round(time.perf_counter() - started, 1)


class Results:
    """Results of earlier runs, one per line of a file."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        text = path.read_text("utf-8") if path.exists() else ""
        whole, _, cut = text.rpartition("\n")
        if cut:  # because a run was killed while it wrote
            path.write_text(whole + "\n", "utf-8")
        self.known: dict[str, Any] = {}
        for row in map(json.loads, filter(None, whole.splitlines())):
            self.known[row["key"]] = row

    def add(self, key: str, **row: Any) -> None:
        self.known[key] = {"key": key, **row}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.known[key]) + "\n")


def check_unmutated(folder: Path, mutants: Sequence[Mutant], timeout: float, results: Results) -> list[str]:
    """The tests of `mutants` that fail without any mutant. Tests known to pass are not run again."""
    failed = []
    for test in sorted({test for mutant in mutants for test in mutant.tests}):
        sources = {mutant.path for mutant in mutants if test in mutant.tests} | {test.partition("::")[0]}
        parts = [test, *((folder / source).read_text("utf-8") for source in sorted(sources))]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        if key not in results.known:
            outcome, said = run_tests(folder, [test], timeout)
            print(f"as it is  {outcome:8} {test}", file=sys.stderr, flush=True)
            if outcome == "passed":
                results.add(key, outcome=outcome)
            else:
                print(said, file=sys.stderr)
                failed.append(test)
    return failed


def run(
    mutants: Sequence[Mutant], root: Path, results: Results, *, jobs: int = 1, timeout: float = 300,
    seconds: float = float("inf"),
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per mutant with an earlier or a new result; no test begins after `seconds`. `SystemExit` with the names
    of tests that fail without any mutant; `ValueError` for an entry that does not fit its file."""
    end = time.monotonic() + seconds
    for mutant in mutants:
        mutant.applied((root / mutant.path).read_text("utf-8"))  # fails now for a stale entry, not after an hour
    keys = {
        mutant: mutant.key(root) for mutant in mutants
    }  # computed now, because the checkout may be edited while the copies are tested
    todo = [mutant for mutant in mutants if keys[mutant] not in results.known and seconds > 0]
    with contextlib.ExitStack() as ends:
        folders: queue.Queue[Path] = queue.Queue()
        for _ in range(min(jobs, len(todo))):
            folders.put(ends.enter_context(copied(root)))
        if todo:
            folder = folders.get()
            if failed := check_unmutated(folder, todo, timeout, results):
                raise SystemExit(f"these fail without any mutant: {', '.join(failed)}")
            folders.put(folder)

        def one(mutant: Mutant) -> None:
            if time.monotonic() > end:
                return
            folder = folders.get()
            try:
                outcome, seconds = try_mutant(folder, mutant, timeout)
            finally:
                folders.put(folder)
            results.add(keys[mutant], outcome=outcome, seconds=seconds)
            change = f"{mutant.old.strip()!r} -> {mutant.new.strip()!r}"
            print(f"{outcome:9} {seconds:6.1f} s  {mutant.path}: {change}", file=sys.stderr, flush=True)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, todo))
    rows = []
    for mutant in mutants:
        if (known := results.known.get(keys[mutant])) is None:
            continue
        rows.append({**asdict(mutant), "outcome": known["outcome"], "seconds": known["seconds"]})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per area, one for all areas, and the names of the survivors."""
    lines = [f"{'area':12} mutants  caught  survived"]
    for area in [*sorted({row["area"] for row in rows}), "all"]:
        counts = Counter(row["outcome"] in CAUGHT for row in rows if area in (row["area"], "all"))
        lines.append(f"{area:12} {counts.total():7}  {counts[True]:6}  {counts[False]:8}")
    lines += [f"{row['outcome']}: {row['path']}: {row['new'].strip()}" for row in rows if row["outcome"] not in CAUGHT]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if fewer than `--least` percent are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"areas: {', '.join(areas())} (default: all)")
    parser.add_argument("--only", default="", help="mutants whose file or change contains this")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested concurrently, each in a copy (default: 1)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the tests of one mutant (default: 300)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further mutant after this time")
    parser.add_argument("--least", type=float, default=85, help="percent that must be caught (default: 85)")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.areas) - set(areas())):
        parser.error(f"{', '.join(unknown)}: no such area; there are {', '.join(areas())}")
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    mutants = [mutant for area in arguments.areas or areas() for mutant in read(area)]
    mutants = [mutant for mutant in mutants if arguments.only in f"{mutant.path} {mutant.old} {mutant.new}"]
    if arguments.list or not mutants:
        print("\n".join(f"{m.area}: {m.path}: {m.old.strip()} -> {m.new.strip()}" for m in mutants))
        return 0
    from benchmarks import machine

    load, started = machine.load(), time.perf_counter()
    results = Results(CHECKOUT / "build" / "mutants.jsonl", fresh=arguments.fresh)
    rows = run(mutants, CHECKOUT, results, jobs=arguments.jobs, timeout=arguments.timeout, seconds=arguments.seconds)
    print(table(rows), file=sys.stderr)
    if not rows:
        parser.error(f"none of {len(mutants)} mutants was tried in {arguments.seconds:g} s")
    caught = sum(row["outcome"] in CAUGHT for row in rows)
    result = {
        "benchmark": "mutants",
        "mutants": len(rows),
        "caught": caught,
        "not_tried": len(mutants) - len(rows),
        "percent": round(100 * caught / len(rows), 1),
        "seconds": round(time.perf_counter() - started, 1),
        "load": load,
        "machine": machine.describe(),
        "areas": {area: dict(Counter(r["outcome"] for r in rows if r["area"] == area)) for area in areas()},
        "rows": [{name: row[name] for name in ("area", "path", "old", "new", "tests", "outcome")} for row in rows],
    }
    if arguments.write:
        print(f"written to {write_result('mutants', result)}", file=sys.stderr)
    print(json.dumps({name: result[name] for name in ("mutants", "caught", "not_tried", "percent")}))
    return int(100 * caught < arguments.least * len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
