"""Rows of tables as requests and answers, and options of `saccade batch --ray`; without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_server import Failure, Script

from saccade import errors
from saccade._core.results import generation_from
from saccade.cli import main
from saccade.ray.generate import Generate
from saccade.ray.ids import ID, row_id, row_seed
from saccade.ray.job import RayJob, complete, engine_of
from saccade.ray.rows import ANSWER_COLUMNS, Prices, RowFormat, Template
from saccade.ray.sources import find_source
from saccade.v1 import inference_pb2, types_pb2

Code = grpc.StatusCode
ROWS = RowFormat("What is {thing}?", id_column="id", images=["image"], keep=["note"], sampling={"max_tokens": 5})


def test_a_row_becomes_a_request() -> None:
    request = ROWS.request({"id": 7, "thing": "this", "image": b"file", "note": "n"})
    (message,) = request.chat.messages
    assert [part.WhichOneof("part") for part in message.parts] == ["image", "text"]
    assert message.parts[0].image.data == b"file" and message.parts[1].text == "What is this?"
    assert request.sampling.max_tokens == 5 and request.sampling.seed == row_seed(None, 7)
    assert ROWS.columns == ["id", "thing", "image", "note"] and ROWS.kept == ["id", "note"]
    assert not RowFormat("What?").request({}).sampling.HasField("seed"), "rows without ids have no seeds"
    system = RowFormat("What?", system="Be brief.").request({})
    assert [message.parts[0].text for message in system.chat.messages] == ["Be brief.", "What?"]


def test_files_are_bytes_mappings_paths_urls_or_lists(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"of the file")
    rows = RowFormat("?", images=["image"], folder=str(tmp_path))
    values = [b"bytes", {"bytes": b"inside", "path": "x"}, {"bytes": None, "path": "a.png"}, "a.png", "https://h/a.png"]
    (message,) = rows.request({"image": values}).chat.messages
    files = [part.image for part in message.parts if part.HasField("image")]
    assert [file.data or file.uri for file in files] == [
        b"bytes", b"inside", b"of the file", b"of the file", "https://h/a.png",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"id": 1, "image": b"x"}, "'thing' is missing"),
        ({"id": 1, "image": b"x", "thing": None}, "'thing' is null"),
        ({"id": 1, "image": b"x", "thing": b"\xff"}, "UTF-8 at byte 0"),
        ({"id": 1, "image": None, "thing": "x"}, "'image' is null"),
        ({"id": 1, "image": 3, "thing": "x"}, "got int"),
        ({"id": 1, "image": "../a.png", "thing": "x"}, "not a path"),
        ({"id": 1, "image": {"other": 1}, "thing": "x"}, "other"),
        ({"id": None, "image": b"x", "thing": "x"}, "id: expected"),
        ({"id": True, "image": b"x", "thing": "x"}, "bool"),
        ({"id": 2**63, "image": b"x", "thing": "x"}, str(2**63)),
    ],
)
def test_rows_that_cannot_be_are_errors_that_name_the_column(row: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        ROWS.request(row)
    assert named in str(caught.value)


def test_a_file_outside_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    with pytest.raises(errors.InvalidArgument) as caught:
        RowFormat("?", images=["image"], folder=str(tmp_path / "in")).request({"image": "../secret"})
    assert caught.value.reason == "IMAGE_OUTSIDE"


@pytest.mark.parametrize("text", ["", "  ", "{", "{}", "{a.b}", "{a[0]}", "{a!r}", "{a:>5}", "}"])
def test_templates_that_are_no_templates(text: str) -> None:
    with pytest.raises(errors.InvalidArgument):
        Template(text)


def test_templates() -> None:
    template = Template('{{"a": {a}, "b": {b}}} {a}')
    assert template.columns == ("a", "b")
    assert template.fill({"a": 1, "b": b"two"}) == '{"a": 1, "b": two} 1'


@pytest.mark.parametrize(
    "given", [{"id_column": "text"}, {"keep": [ID]}, {"sampling": {"no_such": 1}}, {"sampling": {"max_tokens": -1}}]
)
def test_formats_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        RowFormat("?", **given)


def test_ids_are_64_bits_and_do_not_depend_on_the_process() -> None:
    assert row_id(5) == 5 and row_id(-(2**63)) == -(2**63)
    assert row_id("a") == row_id(b"a") == 3405396810240292928
    assert len({row_id(str(number)) for number in range(10_000)}) == 10_000
    assert row_seed(1, 5) != row_seed(2, 5) != row_seed(2, 6) and 0 <= row_seed(None, -1) < 2**63


def test_answers_and_errors_are_rows_of_the_same_columns() -> None:
    prices = Prices(prompt=2.0, completion=10.0, cached=0.5)
    rows = RowFormat("?", id_column="id", keep=["note"], prices=prices)
    sample = inference_pb2.Sample(text="yes", token_ids=[1, 2])
    usage = types_pb2.Usage(prompt_tokens=100, cached_tokens=40, completion_tokens=2)
    response = inference_pb2.GenerateResponse(samples=[sample], model="m", model_version="v", seed=3)
    response.samples[0].usage.CopyFrom(usage)
    row = {"id": "a", "note": 1.5, "image": b"x"}
    good = rows.output(row, generation_from(response, types_pb2.SamplingParams()))
    bad = rows.output(row, errors.InvalidArgument("no image", reason="IMAGE_DECODE_FAILED"))
    assert list(good) == list(bad) == ["id", "note", ID, *ANSWER_COLUMNS]
    assert (good["text"], good["seed"], good["error"], good["note"], good[ID]) == ("yes", 3, None, 1.5, row_id("a"))
    assert good["cost"] == pytest.approx((60 * 2 + 40 * 0.5 + 2 * 10) / 1e6)
    assert (bad["text"], bad["error"], bad["error_reason"]) == (None, "no image", "IMAGE_DECODE_FAILED")
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(errors.InvalidArgument):
            Prices(wrong, 1.0)


@pytest.mark.parametrize(
    ("failure", "of_row"),
    [
        (Failure(Code.UNAVAILABLE, reason="MEDIA_FETCH_FAILED", pushback="-1"), True),
        (Failure(Code.PERMISSION_DENIED, reason="MEDIA_HOST_DENIED"), True),
        (Failure(Code.UNAVAILABLE, reason="QUEUE_FULL", pushback="-1"), True),
        (Failure(Code.UNAVAILABLE, reason="QUEUE_FULL"), False),
        (Failure(Code.UNAVAILABLE, pushback="-1"), False),
        (Failure(Code.PERMISSION_DENIED), False),
    ],
    ids=lambda value: f"{value.code.name}-{value.reason}-{value.pushback}" if isinstance(value, Failure) else "",
)
def test_an_error_of_one_row_does_not_end_the_job(address: str, script: Script, failure: Failure, of_row: bool) -> None:
    """The host of an image that is gone would be gone whenever the job is started again."""

    async def answer() -> dict[str, Any]:
        generate = Generate(RowFormat("?", id_column="id"), server=address, client={"max_retries": 0})
        try:
            return await generate._answer({"id": "a"})
        finally:
            await generate._client.close()

    script.failures = [failure]
    if of_row:
        assert asyncio.run(answer())["error_reason"] == failure.reason
    else:
        with pytest.raises(errors.SaccadeError):
            asyncio.run(answer())


def test_sources_have_files_of_one_format(tmp_path: Path) -> None:
    for name in ("t/b.parquet", "t/a.parquet", "w/0.tar", "i/deep/x.PNG", "i/y.jpg", "i/notes.txt", "none/z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_source(str(tmp_path / "t"))
    assert (found.format, [Path(path).name for path in found.paths]) == ("parquet", ["a.parquet", "b.parquet"])
    assert find_source(str(tmp_path / "w" / "*.tar")).format == "webdataset"
    images = find_source(str(tmp_path / "i"))
    assert images.format == "images" and len(images.paths) == 2
    assert complete(RowFormat("?"), images).columns == ["path", "bytes"]
    assert complete(RowFormat("?"), find_source(str(tmp_path / "w"))).id_column == "__key__"
    with pytest.raises(errors.InvalidArgument, match="id_column"):
        complete(RowFormat("?"), found)
    (tmp_path / "i" / "t.tar").touch()
    for wrong in ("none", "missing", "i"):
        with pytest.raises(errors.InvalidArgument, match="one format"):
            find_source(str(tmp_path / wrong))
    assert find_source(str(tmp_path / "i"), "images").format == "images"


@pytest.mark.parametrize(
    "given",
    [
        {"actors": (0, 1)},
        {"actors": (3, 2)},
        {"rows_per_task": 0},
        {"concurrency": 0},
        {"model": "m"},
        {"server": None},
    ],
)
def test_jobs_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        RayJob("in", "out", RowFormat("?"), **{"server": "h:1", **given})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prompt", "x"], "--prompt needs --ray"),
        (["--ray"], "--prompt is missing"),
        (["--ray", "--prompt", "x", "--ordered"], "--ordered is not for jobs with --ray"),
        (["--ray", "--prompt", "x", "--server-side"], "--server-side"),
        (["--ray", "--prompt", "x", "--sampling", "{"], "--sampling"),
        (["--ray", "--prompt", "x", "--prices", "1"], "--prices"),
        (["--ray", "--prompt", "x", "--actors", "two"], "--actors"),
        (["--ray", "--prompt", "{x.y}"], "prompt"),
    ],
)
def test_options_that_do_not_belong_together(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["batch", "in", "out", *options])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize("name", [".", "rows.parquet", "shard.tar"])
def test_folders_and_tables_need_ray(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["batch", str(tmp_path / name), str(tmp_path / "out")])
    assert "is no JSONL file; a folder or a table needs --ray" in capsys.readouterr().err


def test_an_engine_has_as_many_threads_as_processors_are_reserved_for_it() -> None:
    def engine(num_cpus: float | None, **options: Any) -> dict[str, Any]:
        return engine_of(RayJob("IN", "OUT", RowFormat("?"), model="demo", engine=options, num_cpus=num_cpus))

    assert engine(8, dtype="float32") == {"threads": 8, "dtype": "float32"}
    assert engine(2.5) == {"threads": 2}
    assert engine(8, threads=3) == {"threads": 3}
    assert engine(None) == engine(0.5) == {}  # a share of a processor is only for scheduling
