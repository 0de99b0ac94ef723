"""The generated parts of the documentation are up to date, and every reason of an error is explained."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from service.common.config import HttpFrontOptions, ServerOptions
from service.encoding.encoder_pool import EncoderPool
from service.encoding.grpc_link import GrpcLink
from service.encoding.handoff import Handoff
from service.encoding.largest_item import Largest
from service.encoding.process_link import ProcessLink
from service.engine.engine_thread import EngineThread
from service.http.call import Front
from service.http.metrics import exposition
from service.servers.encoder_process import REPORTED
from service.servers.encoder_server import EncoderServer, EncoderThread
from service.servers.from_options import load_assets
from service.servers.server import Server
from service.telemetry.metric_names import METRICS
from service.telemetry.metrics import engine_metrics

CHECKOUT = Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
PAGES = {path.name: path for path in (CHECKOUT / "README.md", *DOCS.glob("*.md"))}
GENERATED = sorted(
    name for name, path in PAGES.items() if re.search(r"written by docs/generate.py|<!-- = ", path.read_text("utf-8"))
)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as program:
        program.setattr(sys, "path", [*sys.path])
        program.setattr(sys, "argv", ["generate.py", str(folder)])
        runpy.run_path(str(DOCS / "generate.py"), run_name="__main__")
    return folder


def test_all_marked_pages_are_generated(fresh: Path) -> None:
    assert sorted(path.name for path in fresh.iterdir()) == sorted([*GENERATED, "architecture.svg"])


def test_the_diagram_is_fresh_and_shows_every_package(fresh: Path) -> None:
    diagram = (fresh / "architecture.svg").read_text("utf-8")
    assert diagram == (DOCS / "architecture.svg").read_text("utf-8"), "run `make protos`"
    packages = {path.parent.name for path in (CHECKOUT / "service").glob("*/__init__.py")}
    assert packages == set(re.findall(r">\d+  (\w+)<", diagram))


@pytest.mark.parametrize("name", GENERATED)
def test_it_is_fresh(fresh: Path, name: str) -> None:
    assert (fresh / name).read_text("utf-8") == PAGES[name].read_text("utf-8"), "run `make protos`"


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("api.md", ("`saccade.v1.BatchService`", "WARMING", "VIDEO_DECODE_FAILED")),
        ("grpc-reference.md", ("`StreamGenerate`", "`UploadMedia`", "### SamplingParams", "`chunk_tokens` = 2")),
        ("http-reference.md", ("`/v1/chat/completions`", "### ChatCompletion", "`max_tokens`")),
        ("http-reference.md", ("| `stop` | string or list of string |", "| `image_url` | string or [Location]")),
        ("http-reference.md", ("would be deleted too. |",)),
        ("sdk.md", ("videos=()", "`RateLimited`", "client.batches.download(", "`prompt_logprobs`")),
        ("metrics.md", ("| `saccade_calls_total` | counter | calls | `method`, `code` |", "`saccade_http_streams`")),
        ("options.md", ("`--tls-client-ca`", "`--max-seqs`", "`MODEL`", "`--metrics-port`", "`--servers-cert-key`")),
        ("options.md", ("| `--max-image-pixels` | count, such as 64M | 64M |",)),
    ],
)
def test_services_and_options_are_there(fresh: Path, page: str, words: tuple[str, ...]) -> None:
    text = (fresh / page).read_text("utf-8")
    assert [word for word in words if word not in text] == []


class NotConnected(GrpcLink):
    def start(self, owner: object) -> None:
        pass


class NotStarted(ProcessLink):
    def start(self, owner: object) -> None:
        pass


def exported(engine: EngineThread, encoder: EncoderThread) -> dict[str, Metric]:
    """All metrics by name, of a server, an encoder, a decoder with encoders elsewhere, and an HTTP server."""
    options = ServerOptions("demo")
    remote = NotConnected("host:1", encoder.partner, Largest(1, 1))
    process = NotStarted(options, segment_bytes=2**16)
    process._counts |= dict.fromkeys(REPORTED, 0)  # what the process reports with its first image
    pool = EncoderPool(Handoff(1024, 4, torch.float32), (remote, process), lease=1.0, step_tokens=1)
    registries = [
        Server(options, engine, load_assets(options)).metrics.registry,
        EncoderServer(ServerOptions("demo", role="encoder"), encoder).metrics.registry,
    ]
    families = [family for registry in registries for family in registry.collect()]
    families += [*engine_metrics({"encoder": pool.stats()})]
    front = Front(HttpFrontOptions())
    families += text_string_to_metric_families(exposition(front))
    front.files.close()
    pool.close()
    return {family.name.removeprefix("saccade_"): family for family in families}


@pytest.fixture(scope="module")
def metrics() -> Iterator[dict[str, Metric]]:
    """Of graphs, drafts and a prefix cache, too."""
    engine = EngineThread(ServerOptions("demo", graphs="on", speculative="ngram", max_seqs=2, max_len=64, threads=1))
    engine.start(lambda events: None)
    encoder = EncoderThread(ServerOptions("demo", role="encoder", graphs="off", threads=1))
    try:
        yield exported(engine, encoder)
    finally:
        engine.close()
        encoder.close()


def test_every_metric_of_a_server_is_declared(metrics: dict[str, Metric]) -> None:
    """A counter in a `stats` function is a metric, so it needs a line in service/telemetry/metric_names.py, from which
    the table is made."""
    assert [name for name in metrics if name not in METRICS] == []
    for name, family in metrics.items():
        assert family.type == METRICS[name].kind, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(METRICS[name].labels), sample


def test_every_declared_metric_is_exported(metrics: dict[str, Metric]) -> None:
    """Counters by reason and by graph exist from the first such step or batch on."""
    first = {"decoder_eager", "decoder_replays", "encoder_eager", "encoder_replays", "encoder_temporal_patches"}
    assert set(METRICS) - metrics.keys() <= first


def test_every_page_begins_with_what_it_is_for() -> None:
    """The first two lines under the title are sentences, not a heading, a table or a list."""
    bare = []
    for path in [*PAGES.values(), CHECKOUT / "kernels" / "native" / "README.md"]:
        title, empty, first, *_ = path.read_text("utf-8").splitlines()
        if not title.startswith("# ") or empty or not first[:1].isalpha() and not first.startswith("`"):
            bare.append(path.name)
    assert bare == []


def test_every_reason_that_a_test_expects_is_explained() -> None:
    """The table is generated from calls in the sources; this test finds reasons in another way."""
    expected = {
        reason
        for path in (CHECKOUT / "tests").rglob("*.py")
        for reason in re.findall(r"\.reason == \"([A-Z][A-Z_]+)\"", path.read_text("utf-8"))
    }
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    assert len(expected) > 30
    assert [reason for reason in sorted(expected) if f"`{reason}`" not in page] == []


MEASURED = re.compile(r"\d ?(?:tokens/s|GB/s|GFLOP/s|ms|us|%|x)(?![\w/])")
LIMITS = {
    "operations.md": 2,  # 2.5 and 50 ms, within which tokens share a message
    "scale.md": 9,  # an example of a simulation, and an assumption of it
}
"""Numbers that look like measurements but are none, by page."""


def test_numbers_of_measurements_come_from_results() -> None:
    """Each number with a unit of a measurement is in a generated part, or followed by its result and key."""
    found = {}
    for path in PAGES.values():
        if path.name in ("log.md", "profile.md", "profile-qwen3_5.md"):
            continue
        text = re.sub(
            r"<!-- begin (.+?): .*?<!-- end \1 -->|```.*?```|`[^`\n]*`", "", path.read_text("utf-8"), flags=re.S
        )
        text = re.sub(r"\d[\d,.]*[^\d<|\n]{0,12}<!-- = .*? -->", "", text)
        if numbers := MEASURED.findall(text):
            found[path.name] = len(numbers)
    assert {page: count for page, count in found.items() if count > LIMITS.get(page, 0)} == {}


def test_a_number_is_that_of_its_result(fresh: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(DOCS))
    from generators.results import fill_numbers

    old = "| 1 %<!-- = replicas hit_rate.one_replica .1f*100 --> |"
    new = "| 49.2 %<!-- = replicas hit_rate.one_replica .1f*100 --> |"
    assert fill_numbers(old) == new == fill_numbers(new)
    with pytest.raises(KeyError):
        fill_numbers(old.replace("one_replica", "two_replicas"))
