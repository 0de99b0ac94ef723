"""Jobs with Ray Data on a cluster of real processes. Skipped where Ray is not installed (extra `saccade[ray]`)."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import PLAIN
from images import png

import saccade
from saccade import errors
from service.commands.server_process import ServerProcess

ray = pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` installs it")
parquet = pytest.importorskip("pyarrow.parquet", reason="Ray is not installed: `make test-ray` installs it")

ROWS = 40


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    with ServerProcess([str(model), *PLAIN, "--max-seqs", "16"]) as running:
        yield running.address


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


def job(source: Path, output: Path, **options: Any) -> Any:
    from saccade.ray import RayJob, RowFormat

    prompt = {"prompt": "What is {thing}?", "images": ["image"], "id_column": "id", "keep": ["thing"]}
    rows = RowFormat(**{**prompt, "sampling": {"max_tokens": 6, "temperature": 1.0}, **options.pop("rows", {})})
    return RayJob(str(source), str(output), rows, progress=False, rows_per_task=8, rows_per_file=10, **options)


def actors() -> list[str]:
    """The classes of all actors that the cluster has had. Ray's public list needs its dashboard."""
    return [actor["ActorClassName"] for actor in ray._private.state.actors().values()]


def table(path: Path, numbers: range) -> None:
    import pyarrow as pa

    images = [png(number) if number % 10 != 3 else b"no image" for number in numbers]
    names = [f"thing {number}" for number in numbers]
    parquet.write_table(pa.table({"id": [f"r{n}" for n in numbers], "thing": names, "image": images}), path)


def test_a_job_answers_each_row_once_and_only_what_is_new(server: str, cluster: None, tmp_path: Path) -> None:
    from saccade.ray import run_ray_job
    from saccade.ray.ids import row_id, row_seed

    (tmp_path / "in").mkdir()
    table(tmp_path / "in" / "a.parquet", range(ROWS // 2))
    first = run_ray_job(job(tmp_path / "in", tmp_path / "out", server=server))
    assert (first.rows, first.failed, first.resumed) == (20, 2, False)
    assert len(actors()) < 8, "one that generates and Ray's own, but none for each part of a Parquet file"
    # Rows that an interrupted run has not answered.
    table(tmp_path / "in" / "b.parquet", range(ROWS // 2, ROWS))
    summary = run_ray_job(job(tmp_path / "in", tmp_path / "out", server=server))
    assert (summary.rows, summary.failed, summary.resumed) == (ROWS, 4, True)
    assert summary.errors == {"IMAGE_DECODE_FAILED": 4} and sum(summary.model_versions.values()) == ROWS - 4
    rows = {row["id"]: row for row in parquet.read_table(tmp_path / "out").to_pylist()}
    assert len(rows) == ROWS and rows["r5"]["thing"] == "thing 5" and rows["r3"]["text"] is None
    with saccade.Client(server) as client:
        for number in (0, 5, 39):
            seed = row_seed(None, row_id(f"r{number}"))
            found = client.generate(
                f"What is thing {number}?", images=[png(number)], max_tokens=6, temperature=1.0, seed=seed
            )
            assert (rows[f"r{number}"]["text"], rows[f"r{number}"]["seed"]) == (found.text, seed)
    with pytest.raises(errors.AlreadyExists, match="rows"):
        run_ray_job(job(tmp_path / "in", tmp_path / "out", server=server, rows={"prompt": "Another {thing}?"}))


def test_wrong_inputs_are_named_before_anything_is_answered(server: str, cluster: None, tmp_path: Path) -> None:
    import pyarrow as pa

    from saccade.ray import run_ray_job

    twice = pa.table({"id": ["a", "b", "a"], "thing": ["x"] * 3, "image": [png(1)] * 3})
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(errors.InvalidArgument, match="1 rows have the id of another row, for example 'a'"):
        run_ray_job(job(tmp_path / "twice.parquet", tmp_path / "out", server=server))
    with pytest.raises(errors.InvalidArgument, match="not other"):
        run_ray_job(job(tmp_path / "twice.parquet", tmp_path / "out", server=server, rows={"keep": ["other"]}))
    assert not (tmp_path / "out").exists()
    table(tmp_path / "good.parquet", range(3))
    unreachable = job(tmp_path / "good.parquet", tmp_path / "out", server="127.0.0.1:1", client={"timeout": 1.0})
    with pytest.raises(errors.SaccadeError) as caught:
        run_ray_job(unreachable)
    assert isinstance(caught.value, errors.Unavailable | errors.DeadlineExceeded)


def test_shards_and_folders(server: str, cluster: None, tmp_path: Path) -> None:
    from saccade.ray import run_ray_job

    (tmp_path / "images").mkdir()
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number in range(6):
            (tmp_path / "images" / f"{number}.png").write_bytes(png(number))
            for name, data in ((f"k{number}.png", png(number)), (f"k{number}.txt", b"a thing")):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    rows = {"prompt": "What is {txt}?", "images": ["png"], "id_column": "", "keep": []}
    assert run_ray_job(job(tmp_path / "0.tar", tmp_path / "out", server=server, rows=rows)).rows == 6
    again = run_ray_job(job(tmp_path / "0.tar", tmp_path / "out", server=server, rows=rows))
    assert (again.rows, again.failed, again.resumed) == (6, 0, True)
    keys = parquet.read_table(tmp_path / "out")["__key__"].to_pylist()
    assert sorted(keys) == [f"k{number}" for number in range(6)]
    plain = {"prompt": "What is it?", "images": (), "id_column": "", "keep": []}
    folder = run_ray_job(job(tmp_path / "images", tmp_path / "folder-out", server=server, rows=plain))
    assert (folder.rows, folder.failed) == (6, 0)


def test_an_engine_in_each_actor_and_plain_map_batches(model: Path, cluster: None, tmp_path: Path) -> None:
    from saccade.ray import Generate, RowFormat

    engine = {"dtype": "float32", "threads": 1, "max_seqs": 8, "max_len": 600}
    rows = RowFormat("What is {item}?", sampling={"max_tokens": 4, "seed": 1})
    dataset = ray.data.from_items([{"item": number} for number in range(6)]).map_batches(
        Generate,
        fn_constructor_kwargs={"rows": rows, "model": str(model), "engine": engine, "concurrency": 3},
        concurrency=1, batch_size=3,
    )  # fmt: skip
    found = dataset.take_all()
    with saccade.LocalClient(model, **engine) as client:
        texts = [client.generate(f"What is {n}?", max_tokens=4, seed=1).text for n in range(6)]
    assert sorted(row["text"] for row in found) == sorted(texts)


def test_costs_of_further_rows_are_told_from_those_of_a_start() -> None:
    from benchmarks.ray_jobs import costs

    found = costs((1000, 4000), own=(9.0, 33.0), rays=(13.0, 40.0))
    assert found["row_ms"] == {"own": 8.0, "ray": 9.0} and found["row_overhead"] == 0.125
    assert found["start_seconds"] == {"own": 1.0, "ray": 4.0} and found["overhead"] == [0.444, 0.212]


def test_a_job_survives_its_driver_and_an_actor(tmp_path: Path) -> None:
    """`python -m benchmarks.ray_jobs faults` is the same with 20,000 rows, and with nodes that die."""
    from benchmarks.ray_jobs import FaultRun

    numbers = FaultRun(tmp_path / "run", 600, seed=1).run(2)
    assert sorted(strike.partition(",")[0] for strike in numbers["strikes"]) == ["actor", "driver"]
