"""The documentation's generated parts are those that the sources make, and every reason of an error is explained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
PAGES = {path.name: path for path in (CHECKOUT / "README.md", *DOCS.glob("*.md"))}
GENERATED = sorted(
    name for name, path in PAGES.items() if re.search(r"written by docs/generate.py|<!-- = ", path.read_text("utf-8"))
)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    subprocess.run([sys.executable, str(DOCS / "generate.py"), str(folder)], check=True, capture_output=True)
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
        ("sdk.md", ("videos=()", "`RateLimited`", "client.batches.download(", "`prompt_logprobs`")),
        ("options.md", ("`--tls-client-ca`", "`--max-seqs`", "`MODEL`", "`--metrics-port`")),
    ],
)
def test_services_and_options_are_there(fresh: Path, page: str, words: tuple[str, ...]) -> None:
    text = (fresh / page).read_text("utf-8")
    assert [word for word in words if word not in text] == []


def test_every_reason_that_a_test_expects_is_explained() -> None:
    """The table is made from the sources by reading calls; this finds reasons in another way."""
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
    "operations.md": 1,  # 50 ms, within which tokens share a message
    "scale.md": 9,  # an example of a simulation, and an assumption of it
}
"""Numbers that look like measurements and are not, by page."""


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
