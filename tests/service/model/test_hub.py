"""Downloads of models by hub id, from a hub on this host."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import pair, write_adapter
from full_disk import file_size_limit
from hub_server import HubServer
from tiny_checkpoint import make_checkpoint

import saccade
from families import CheckpointError
from saccade import cli
from service.commands.cli import main
from service.commands.server_process import ServerProcess
from service.common.config import ConfigError, EngineOptions
from service.model import hub as downloads
from service.model.cache import ADAPTER_CONFIG, ADAPTER_WEIGHTS, resolve_model
from service.model.chat import TEMPLATES
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.hub import fetch, fetched
from service.model.resolve import checkpoint_of

ROOT = Path(__file__).resolve().parents[3]
MODEL = "some/model"
COMMIT, OTHER = "a" * 40, "b" * 40
TOKEN = "hf_aSecretThatNobodyMaySee"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with several weight files, and further files of a repository."""
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    make_checkpoint(folder, 1, text={"pattern": "M*-"}, shard="60KB")
    for name in (
        "modeling_evil.py",
        "pytorch_model.bin",
        "README.md",
        "onnx/model.safetensors",
        "consolidated.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not wanted")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / TEMPLATES).mkdir()
    (folder / TEMPLATES / "tool_use.jinja").write_text("{{ tools }}")
    return folder


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add(MODEL, tiny)
        # huggingface_hub reads the variable once, and conftest.py has set it.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(downloads, "RETRY_SECONDS", 0.0)
        yield hub


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def shards(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("model-*.safetensors"))


def test_a_whole_download_takes_safetensors_and_json_and_nothing_else(hub: HubServer, tiny: Path) -> None:
    snapshot = fetch(MODEL)
    assert snapshot.name == COMMIT and len(shards(tiny)) > 1
    wanted = {p.name for p in tiny.glob("*.json")} | {"chat_template.jinja", *shards(tiny)}
    assert files(snapshot) == {name: (tiny / name).read_bytes() for name in wanted}
    assert files(snapshot / TEMPLATES) == {"tool_use.jinja": b"{{ tools }}"}
    assert not [path for path in hub.fetched() if path.endswith((".py", ".bin", ".md", "onnx/model.safetensors"))]
    checkpoint = open_checkpoint(MODEL)
    assert checkpoint.config.name == MODEL and checkpoint.revision == open_checkpoint(str(tiny)).revision
    before = len(hub.fetched())
    assert fetch(MODEL) == snapshot
    assert hub.fetched()[before:] == [f"/api/models/{MODEL}/revision/main"]  # only the commit of `main`, and no file
    asked = len(hub.requests)
    assert fetch(MODEL, COMMIT) == snapshot and len(hub.requests) == asked


def test_a_connection_that_breaks_off_is_taken_up_where_it_was(hub: HubServer, tiny: Path) -> None:
    hub.cut_after = 20_000
    snapshot = fetch(MODEL)
    first = shards(tiny)[0]
    assert (snapshot / first).read_bytes() == (tiny / first).read_bytes()
    ranges = [
        headers.get("range") for method, path, headers in hub.requests if method == "GET" and path.endswith(first)
    ]
    assert ranges[:3] == [None, "bytes=20000-", "bytes=40000-"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_killed_download_goes_on_where_it_was(hub: HubServer, tiny: Path, tmp_path: Path, ranges: bool) -> None:
    hub.hold_after = 31_000
    code = f"from service.model.hub import fetch; fetch({MODEL!r})"
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment)
    blobs = downloads.repository_of(MODEL) / "blobs"
    deadline = time.monotonic() + 60
    while sizes(blobs.glob("*.incomplete")) != [31_000] * len(shards(tiny)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    with pytest.raises(CheckpointError, match="holds only a part of it"):
        fetch_offline()
    hub.hold_after, hub.ranges = None, ranges
    hub.go.set()
    hub.requests.clear()
    snapshot = fetch(MODEL)
    for name in shards(tiny):
        asked = [headers["range"] for method, path, headers in hub.requests if method == "GET" and path.endswith(name)]
        assert asked == ["bytes=31000-"]
        assert (snapshot / name).read_bytes() == (tiny / name).read_bytes()
    assert not list(blobs.glob("*.incomplete"))


def sizes(files: Iterable[Path]) -> list[int]:
    """Of the files that exist: a finished one is renamed meanwhile."""
    found = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found.append(file.stat().st_size)
    return found


def fetch_offline(revision: str | None = None) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return fetch(MODEL, revision)


def test_what_arrives_damaged_is_not_kept(hub: HubServer, tiny: Path) -> None:
    blobs = downloads.repository_of(MODEL) / "blobs"
    blobs.mkdir(parents=True)
    content = (tiny / shards(tiny)[0]).read_bytes()
    (blobs / f"{hashlib.sha256(content).hexdigest()}.incomplete").write_bytes(bytes(100))  # another file's beginning
    with pytest.raises(CheckpointError, match="arrived damaged .* start again"):
        fetch(MODEL)
    assert (fetch(MODEL) / shards(tiny)[0]).read_bytes() == content


def test_a_file_that_fails_stops_the_others(hub: HubServer, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first download never finishes; the second, which begins once the first has, is damaged."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 2)
    first, second = shards(tiny)
    hub.hold_after, hub.hold_only = 20_000, first
    blobs = downloads.repository_of(MODEL) / "blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256((tiny / second).read_bytes()).hexdigest()
    (blobs / f"{digest}.incomplete").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=f"{second} of .* arrived damaged"):
        fetch(MODEL)
    assert len(hub.fetched(first)) == 1
    (partial,) = blobs.glob("*.incomplete")
    received = partial.read_bytes()  # as far as it had come
    assert len(received) <= 20_000 and (tiny / first).read_bytes().startswith(received)


def test_a_library_that_was_told_to_be_offline_is_a_hub_out_of_reach(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="cannot be reached .* run `hf download some/model`"):
        fetch(MODEL)


def test_a_model_that_is_not_served_is_refused_before_its_weights_are_fetched(hub: HubServer) -> None:
    config = json.loads(hub.repositories[MODEL].files["config.json"])
    hub.repositories[MODEL].files["config.json"] = json.dumps({**config, "model_type": "gpt17"}).encode()
    with pytest.raises(CheckpointError, match="'gpt17' is not served"):
        fetch(MODEL)
    assert not hub.fetched(".safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.json": None}, "has no config.json"),
        ({"": ".safetensors"}, "no safetensors weights; other formats are not fetched"),
        (
            {"model.safetensors.index.json": {"weight_map": {"a": "../../evil.safetensors"}}},
            "not a safetensors file next to it",
        ),
        (
            {"model.safetensors.index.json": {"weight_map": {"a": "pytorch_model.bin"}}},
            "not a safetensors file next to it",
        ),
        ({"model.safetensors.index.json": {"weight_map": {"a": "gone.safetensors"}}}, "lacks gone.safetensors"),
        ({"model.safetensors.index.json": {"weight_map": {}}}, "weight_map must map each weight to its file"),
    ],
)
def test_repositories_that_hold_no_model(hub: HubServer, change: dict[str, object], message: str) -> None:
    here = hub.repositories[MODEL].files
    for name, value in change.items():
        if value is None:
            del here[name]
        elif name == "":
            for file in [file for file in here if file.endswith(str(value))]:
                del here[file]
        else:
            here[name] = json.dumps(value).encode()
    with pytest.raises(CheckpointError, match=message):
        fetch(MODEL)
    assert not hub.fetched(".safetensors") and not hub.fetched(".bin")


@pytest.mark.parametrize("way", ["variable", "file"])
def test_private_models_need_the_token_and_nobody_reads_it(
    hub: HubServer, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    hub.repositories[MODEL].token = TOKEN
    said = []
    with pytest.raises(
        CheckpointError, match=r"no such model \(401\) for callers without a token; set HF_TOKEN"
    ) as error:
        fetch(MODEL)
    said.append(str(error.value))
    monkeypatch.setenv("HF_TOKEN", TOKEN + "x")
    with pytest.raises(CheckpointError, match=r"does not accept the token .*\(401\): check HF_TOKEN") as error:
        fetch(MODEL)
    said.append(str(error.value))
    monkeypatch.delenv("HF_TOKEN")
    if way == "variable":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    else:
        (tmp_path / "token").write_text(TOKEN + "\n")
    assert fetch(MODEL).name == COMMIT
    output = capfd.readouterr()
    assert TOKEN not in " ".join([*said, caplog.text, output.out, output.err])
    assert not [p for p in (tmp_path / "cache").rglob("*.json") if TOKEN in p.read_text()]


def test_gated_models_say_where_their_terms_are(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[MODEL].gated = True
    with pytest.raises(CheckpointError, match=rf"{hub.endpoint}/{MODEL} is gated \(403\) and no token was sent"):
        fetch(MODEL)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(CheckpointError, match=r"is gated \(403\) and this token has no access: accept its terms"):
        fetch(MODEL)


def test_the_token_is_not_told_to_the_host_that_weights_are_redirected_to(
    hub: HubServer, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[MODEL].token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with HubServer() as elsewhere:
        elsewhere.add(MODEL, tiny)
        hub.elsewhere = elsewhere
        assert (fetch(MODEL) / shards(tiny)[0]).read_bytes() == (tiny / shards(tiny)[0]).read_bytes()
        assert len(elsewhere.fetched(".safetensors")) == len(shards(tiny))
        assert not [1 for _, _, headers in elsewhere.requests if "authorization" in headers]


def test_names_and_revisions_that_the_hub_does_not_have(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=rf"'no/such' is not a folder here, and {hub.endpoint} has no such model"):
        fetch("no/such")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(
        CheckpointError, match=r"'no/such' is not a folder here, .* no such model \(404\) for this token"
    ):
        fetch("no/such")
    with pytest.raises(CheckpointError, match=r"'some/model' on .* has no revision 'v9'"):
        fetch(MODEL, "v9")
    for revision in ("../../x", "", "a b", "/etc"):
        with pytest.raises(CheckpointError, match="is not a branch, tag or commit"):
            fetch(MODEL, revision)
    hub.status = 503
    with pytest.raises(CheckpointError, match="answers 503 for 'some/model': try again later"):
        fetch(MODEL)


def test_each_revision_is_a_model_of_its_own(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    repository = hub.repositories[MODEL]
    repository.revisions |= {"v1": OTHER, "refs/pr/1": OTHER}
    assert fetch(MODEL).name == COMMIT and fetch(MODEL, "v1").name == OTHER
    options = fetched(EngineOptions(model=MODEL, revision="v1"))
    assert options.revision == OTHER and options.model == MODEL
    repository.revisions["main"] = OTHER  # the branch has moved on; what was started stays with its commit
    assert resolve_model(MODEL, COMMIT).name == COMMIT
    assert fetch(MODEL).name == OTHER and fetch_offline().name == OTHER and fetch_offline("v1").name == OTHER
    assert fetch_offline(COMMIT).name == COMMIT
    with pytest.raises(CheckpointError, match="does not hold it, and HF_HUB_OFFLINE is set"):
        fetch_offline("v2")


def test_offline_only_the_cache_counts(hub: HubServer) -> None:
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set: unset it, or run `hf download some/model`"):
        fetch_offline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFORMERS_OFFLINE", "1")
        with pytest.raises(CheckpointError, match="TRANSFORMERS_OFFLINE is set: unset it"):
            fetch(MODEL)
    fetch(MODEL)
    asked = len(hub.requests)
    assert fetch_offline().name == COMMIT and len(hub.requests) == asked


def test_without_a_hub_the_cache_is_served_with_a_warning(
    hub: HubServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.close()
    with pytest.raises(CheckpointError) as error:
        fetch(MODEL)
    assert str(error.value).count(". ") == 0  # one sentence
    for part in (hub.endpoint, "cannot be reached", "hf download some/model", "name that folder"):
        assert part in str(error.value)
    with HubServer() as again:
        again.repositories = hub.repositories
        monkeypatch.setenv("HF_ENDPOINT", again.endpoint)
        fetch(MODEL)
        for status in (401, 503):
            again.status = status
            caplog.clear()
            assert fetch(MODEL).name == COMMIT
            assert f"serving commit {COMMIT} from the cache" in caplog.text
    caplog.clear()
    assert fetch(MODEL).name == COMMIT
    assert "cannot be reached" in caplog.text and f"serving commit {COMMIT} from the cache" in caplog.text


def test_a_full_disk_is_refused_with_both_numbers(hub: HubServer, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = sum((tiny / name).stat().st_size for name in shards(tiny))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - need + 1, need - 1))
    with pytest.raises(CheckpointError, match=rf"\({need} bytes\) in .* \({need - 1} bytes\) are free .*HF_HUB_CACHE"):
        fetch(MODEL)
    assert not hub.fetched(".safetensors")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - need, need))
    fetch(MODEL)


@pytest.mark.parametrize("missing", [100, 20_000])
def test_a_disk_that_fills_up_is_named(
    hub: HubServer, tiny: Path, missing: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = max((tiny / name).stat().st_size for name in shards(tiny)) - missing
    with file_size_limit(limit):
        status = main(["quantize", MODEL, str(tmp_path / "out"), "--weights", "int8"])
    said = capsys.readouterr().err
    assert status == 2 and "Traceback" not in said
    assert "could not be written to" in said and f"after {limit} of" in said


def test_a_cache_that_cannot_be_written_is_named(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match=r"'some/model' cannot be kept in .*/cache: "):
        fetch(MODEL)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "nor a hub id such as"),
        ("a/b/c", "nor a hub id such as"),
        ("./some/model", "nor a hub id such as"),
        ("some/..", "nor a hub id such as"),
        ("https://huggingface.co/some/model/tree/main", "the hub id in this address is 'some/model'"),
        ("hf://some/model", "the hub id in this address is 'some/model'"),
    ],
)
def test_names_that_mean_nothing(hub: HubServer, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        fetched(EngineOptions(model=name))
    assert not hub.requests


def test_without_a_home_directory_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)
    with pytest.raises(CheckpointError, match="has no home directory: set HF_HUB_CACHE"):
        fetch(MODEL)
    with pytest.raises(CheckpointError, match="no model '~no-such-user/model'"):
        resolve_model("~no-such-user/model")


def test_a_local_folder_always_wins(
    hub: HubServer, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(MODEL)
    hub.requests.clear()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny, tmp_path / "some" / "model")
    options = fetched(EngineOptions(model=MODEL))
    assert options.revision is None and resolve_model(options.model) == Path(MODEL)
    with pytest.raises(CheckpointError, match="revision: 'v1' would not be used: 'some/model' is a folder here"):
        fetched(EngineOptions(model=MODEL, revision="v1"))
    with pytest.raises(CheckpointError, match="revision: 'v1' would not be used"):
        fetched(EngineOptions(revision="v1"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="'file' is a file"):
        fetched(EngineOptions(model="file"))
    shutil.copytree(tiny, tmp_path / "demo")
    with pytest.raises(CheckpointError, match=r"the embedded model and a model's folder here: use './demo'"):
        fetched(EngineOptions())
    assert not hub.requests


@pytest.mark.parametrize("beginning", ["model", "model/"], ids=["itself", "its files"])
def test_a_folder_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beginning: str) -> None:
    """What a user sees who lacks the permission. The superuser, as whom tests may run, has it always."""
    (tmp_path / "model").mkdir()
    stat = os.stat

    def denied(path: Any, *more: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/{beginning}"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", denied)
        for options in ({"model": f"{tmp_path}/model"}, {"model": "demo", "adapter": f"{tmp_path}/model"}):
            with pytest.raises(CheckpointError, match="/model' cannot be read: Permission denied"):
                open_checkpoint(**options)


def test_the_commands_and_the_local_client_download(
    hub: HubServer, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", MODEL, "--max-seqs", "2", "--max-len", "128"]
    assert main(plan) == 0 and not hub.fetched(".safetensors")
    assert "as config.json describes it, without weights" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="holds only a part of it"):
        fetch_offline()
    assert main(["quantize", MODEL, str(tmp_path / "small"), "--weights", "int8", "--revision", "main"]) == 0
    with saccade.LocalClient(MODEL, threads=1, max_seqs=2, max_len=128, revision=COMMIT) as client:
        assert client.get_model().name == MODEL
    assert len(hub.fetched(".safetensors")) == len(shards(tiny))
    assert main(plan) == 0 and "without weights" not in capsys.readouterr().out


def test_a_server_of_several_processes_downloads_once(hub: HubServer, tiny: Path) -> None:
    arguments = [MODEL, "--threads", "1", "--max-seqs", "2", "--max-len", "128", "--frontends", "2", "--no-warmup"]
    with ServerProcess(arguments) as server, saccade.Client(server.address) as client:
        assert client.get_model().name == MODEL
    assert hub.fetched(".safetensors") == [f"/{MODEL}/resolve/{COMMIT}/{name}" for name in hub_order(hub)]
    assert len(hub.fetched(".safetensors")) == len(shards(tiny))
    assert [path for path in hub.fetched() if path.startswith("/api/models")] == [f"/api/models/{MODEL}/revision/main"]


def hub_order(hub: HubServer) -> list[str]:
    return [path.rpartition("/")[2] for path in hub.fetched(".safetensors")]


ADAPTER = "some/adapter"


@pytest.fixture
def adapter(hub: HubServer, tiny: Path, tmp_path: Path) -> Path:
    """The folder of an adapter of one layer, which the hub has with other files that are not wanted."""
    table = Checkpoint(tiny).files.table
    name = next(name for name in table if name.endswith("mixer.q_proj.weight"))
    layer = name.removesuffix(".weight").replace("backbone.", "model.")
    folder = write_adapter(tmp_path / "adapter", pair(layer, torch.zeros(table[name].shape)))
    for other in ("adapter_model.bin", "tokenizer.json", "checkpoint-9/adapter_model.safetensors", "training_args.bin"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"not wanted")
    hub.add(ADAPTER, folder).revisions["v1"] = OTHER
    return folder


def test_an_adapter_is_downloaded_with_its_model(hub: HubServer, adapter: Path) -> None:
    options = fetched(EngineOptions(model=MODEL, adapter=ADAPTER, adapter_revision="v1"))
    assert (options.revision, options.adapter_revision) == (COMMIT, OTHER)
    snapshot = resolve_model(ADAPTER, OTHER, "adapter")
    assert files(snapshot) == {name: (adapter / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    checkpoint, local = (
        checkpoint_of(options),
        checkpoint_of(replace(options, adapter=str(adapter), adapter_revision=None)),
    )
    assert checkpoint.config.name == f"{MODEL}+{ADAPTER}" and local.config.name == f"{MODEL}+adapter"
    assert checkpoint.revision == local.revision != open_checkpoint(MODEL).revision
    asked = len(hub.requests)
    assert fetched(options) == options and len(hub.requests) == asked  # both are commits


def test_an_adapter_that_is_not_served_is_refused_before_any_weights(hub: HubServer, adapter: Path) -> None:
    repository = hub.repositories[ADAPTER]
    wanted = EngineOptions(model=MODEL, adapter=ADAPTER)
    repository.files["adapter_config.json"] = json.dumps({"peft_type": "IA3"}).encode()
    with pytest.raises(CheckpointError, match="peft_type is 'IA3'"):
        fetched(wanted)
    shutil.rmtree(downloads.repository_of(ADAPTER))
    repository.files["adapter_config.json"] = (adapter / "adapter_config.json").read_bytes()
    del repository.files["adapter_model.safetensors"]
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors; other formats are not fetched"):
        fetched(wanted)
    with pytest.raises(
        CheckpointError, match=r"is not a model: it has no config.json; name its base model, and it with"
    ):
        fetched(EngineOptions(model=ADAPTER))
    with pytest.raises(CheckpointError, match=r"'some/model' on .* is not an adapter: it has no adapter_config.json$"):
        fetched(EngineOptions(model=MODEL, adapter=MODEL))
    with pytest.raises(CheckpointError, match="adapter_revision: 'a b' is not a branch"):
        fetched(EngineOptions(model=MODEL, adapter=ADAPTER, adapter_revision="a b"))
    with pytest.raises(CheckpointError, match="adapter_revision: 'v1' would not be used: .* is a folder here"):
        fetched(EngineOptions(model=MODEL, adapter=str(adapter), adapter_revision="v1"))
    with pytest.raises(ConfigError, match="adapter_revision: v1 would not be used without adapter"):
        EngineOptions(model=MODEL, adapter_revision="v1")
    assert not hub.fetched(".safetensors")


def test_commands_with_an_adapter(
    hub: HubServer, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", MODEL, "--max-seqs", "2", "--max-len", "128", "--adapter"]
    assert main([*plan, ADAPTER]) == 0 and not hub.fetched(".safetensors")
    assert "some/adapter, of which only the configuration is here and was checked" in capsys.readouterr().out
    assert main([*plan, str(adapter)]) == 0
    shown = capsys.readouterr().out
    assert f"{MODEL}+adapter, as config.json describes it" in shown
    assert "adapter, merged into 1 weights while they are loaded" in shown
    with saccade.LocalClient(MODEL, adapter=ADAPTER, threads=1, max_seqs=2, max_len=128) as client:
        model = client.get_model()
        assert model.name == f"{MODEL}+{ADAPTER}" and model.version != open_checkpoint(MODEL).revision
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "a", "body": {"messages": [{"role": "user", "content": "x"}]}})
    )
    batch = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--quiet"]
    assert cli.main([*batch, "--model", MODEL, "--adapter", ADAPTER]) == 1  # without a tokenizer there are no answers
    assert json.loads(capsys.readouterr().out)["model"] == f"{MODEL}+{ADAPTER}"
    with pytest.raises(SystemExit):
        cli.main([*batch, "--adapter", ADAPTER])
    assert "--adapter is for --model; a server has its own" in capsys.readouterr().err
    bad = write_adapter(tmp_path / "bad", {"model.layers.0.nothing.weight": torch.zeros(2)})
    assert main([*plan, str(bad)]) == 2
    assert "the model has no parameter model.layers.0.nothing.weight" in capsys.readouterr().err
