"""`saccade batch SOURCE OUT --ray`. Exit code 0 if each row has its answer, 1 if some are errors, 2 if the job failed,
130 after an interrupt."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from saccade.connection_options import tls_settings
from saccade.errors import FailedPrecondition, InvalidArgument, SaccadeError

ONLY_LINES = ("ordered", "max_errors", "overwrite", "any_model", "strict", "server_side")
"""Options of `saccade batch` for files of requests, which a job with Ray does not have."""
ONLY_RAY = (
    "prompt", "system", "id_column", "image_column", "video_column", "keep", "sampling", "prices", "format", "actors",
    "num_cpus", "num_gpus", "rows_per_task", "rows_per_file", "image_folder",
)  # fmt: skip


def add_options(batch: argparse.ArgumentParser) -> None:
    """Adds the options of jobs with Ray to the parser of `saccade batch`."""
    group = batch.add_argument_group(
        "with --ray",
        "IN is a folder, file or URL of Parquet, WebDataset (.tar) or image files, OUT a folder for Parquet files",
    )
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on this Ray cluster (default: $RAY_ADDRESS, else a cluster on this machine)",
    )
    group.add_argument("--prompt", metavar="TEXT", help="the prompt; {column} is replaced by a row's value")
    group.add_argument("--system", metavar="TEXT", help="the system message")
    group.add_argument(
        "--id-column", metavar="NAME", help="column with unique integers or strings (default: path or __key__)"
    )
    group.add_argument("--image-column", action="append", metavar="NAME", help="column with images, paths or URLs")
    group.add_argument("--video-column", action="append", metavar="NAME", help="the same for videos")
    group.add_argument("--image-folder", metavar="DIR", help="folder of the paths in columns, on every node")
    group.add_argument("--keep", metavar="NAMES", help="columns to copy to the output, separated by commas")
    group.add_argument("--sampling", metavar="JSON", help="options of generate: '{\"max_tokens\": 64}'")
    group.add_argument(
        "--prices", metavar="IN,OUT[,CACHED]", help="prices per million tokens, for the output column `cost`"
    )
    group.add_argument(
        "--format", choices=("auto", "parquet", "webdataset", "images"), help="format of IN (default: by its suffixes)"
    )
    group.add_argument(
        "--actors", metavar="N[:MOST]", help="processes that send requests or hold an engine (default: 1)"
    )
    group.add_argument(
        "--num-cpus",
        type=float,
        metavar="N",
        help="CPUs reserved for an actor, and threads of its engine (default: 1 with --model, whose engine uses all "
        "cores of its node, else 0)",
    )
    group.add_argument("--num-gpus", type=float, metavar="N", help="GPUs reserved for an actor (default: none)")
    group.add_argument(
        "--rows-per-task",
        type=int,
        metavar="N",
        help="rows per task; if an actor dies, its tasks are repeated (default: 64)",
    )
    group.add_argument("--rows-per-file", type=int, metavar="N", help="minimum rows of an output file (default: 1024)")


def check_options(options: argparse.Namespace) -> None:
    """Raises InvalidArgument for options that do not belong together."""
    names = ONLY_LINES if options.ray is not None else ONLY_RAY
    for name in names:
        if getattr(options, name) not in (None, False):
            why = "is not for jobs with --ray" if options.ray is not None else "needs --ray"
            raise InvalidArgument(f"--{name.replace('_', '-')} {why}")
    if options.adapter is not None and options.model is None:
        raise InvalidArgument("--adapter is for --model; a server has its own")
    if options.ray is None and (os.path.isdir(options.input) or options.input.endswith((".parquet", ".tar"))):
        raise InvalidArgument(f"IN: {options.input!r} is no JSONL file; a folder or a table needs --ray")
    if options.ray is not None and options.prompt is None:
        raise InvalidArgument("--prompt is missing; it is the question about each row")


def run(options: argparse.Namespace) -> int:
    """Runs the job. The last line on stdout is a summary in JSON."""
    try:
        job = _job(options)
        _connect(options)
        from saccade.ray.job import run_ray_job

        summary = run_ray_job(job)
    except KeyboardInterrupt:
        print("saccade: interrupted; the same command continues from here", file=sys.stderr)
        return 130
    except SaccadeError as error:
        print(f"saccade: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(summary)), flush=True)
    return 1 if summary.failed else 0


def _connect(options: argparse.Namespace) -> None:
    try:
        import ray
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise FailedPrecondition("--ray needs Ray: pip install 'saccade[ray]'", reason="NOT_INSTALLED") from error
    try:
        ray.init(address=options.ray or None, log_to_driver=not options.quiet, include_dashboard=False)
    except ConnectionError as error:
        raise FailedPrecondition(f"cannot connect to the Ray cluster at {options.ray!r}: {error}") from error


def _job(options: argparse.Namespace) -> Any:
    from saccade.ray.job import RayJob
    from saccade.ray.rows import RowFormat

    client: dict[str, Any] = {
        "tls": tls_settings(options), "affinity": options.affinity,
        "max_retries": options.max_retries,
    }  # fmt: skip
    if options.timeout is not None:
        client["timeout"] = options.timeout
    rows = RowFormat(
        prompt=options.prompt,
        id_column=options.id_column or "",
        images=tuple(options.image_column or ()),
        videos=tuple(options.video_column or ()),
        keep=tuple(name for name in (options.keep or "").split(",") if name),
        system=options.system or "",
        sampling=_sampling(options.sampling),
        folder=options.image_folder or "",
        prices=_prices(options.prices),
    )
    chosen = {
        name: getattr(options, name)
        for name in ("num_cpus", "num_gpus", "rows_per_task", "rows_per_file", "format", "concurrency")
        if getattr(options, name) is not None
    }
    return RayJob(
        options.input,
        options.output,
        rows,
        server=None if options.model else options.server,
        model=options.model,
        client={} if options.model else client,
        engine={} if options.adapter is None else {"adapter": options.adapter},
        actors=_actors(options.actors or "1"),
        progress=not options.quiet,
        **chosen,
    )


def _sampling(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidArgument(f"--sampling: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"--sampling: expected an object, got {type(found).__name__}")
    return found


def _prices(text: str | None) -> Any:
    from saccade.ray.rows import Prices

    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3):
        raise InvalidArgument(f"--prices: expected two or three numbers separated by commas, got {text!r}")
    return Prices(*numbers)


def _actors(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    if not fewest.isdecimal() or (most and not most.isdecimal()):
        raise InvalidArgument(f"--actors: expected N or N:MOST, got {text!r}")
    return int(fewest), int(most or fewest)
