"""The documentation's generated parts are those that the sources make, and every reason of an error is explained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
GENERATED = sorted(path.name for path in DOCS.glob("*.md") if "written by docs/generate.py" in path.read_text("utf-8"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    subprocess.run([sys.executable, str(DOCS / "generate.py"), str(folder)], check=True, capture_output=True)
    return folder


def test_all_marked_pages_are_generated(fresh: Path) -> None:
    assert sorted(path.name for path in fresh.iterdir()) == GENERATED


@pytest.mark.parametrize("name", GENERATED)
def test_it_is_fresh(fresh: Path, name: str) -> None:
    assert (fresh / name).read_text("utf-8") == (DOCS / name).read_text("utf-8"), "run `make protos`"


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
