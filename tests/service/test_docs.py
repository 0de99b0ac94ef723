"""The documentation's generated parts are those that the sources make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    subprocess.run([sys.executable, str(DOCS / "generate.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", ["api.md", "operations.md"])
def test_it_is_fresh(fresh: Path, name: str) -> None:
    assert (fresh / name).read_text() == (DOCS / name).read_text(), "run `make protos`"


def test_every_service_and_option_is_there(fresh: Path) -> None:
    api, operations = (fresh / "api.md").read_text(), (fresh / "operations.md").read_text()
    for word in (
        "`saccade.v1.BatchService`", "videos=()", "VIDEO_DECODE_FAILED", "WARMING", "BATCH_SPOOL_FULL", "BATCH_INVALID",
        "BATCH_INPUT_CHANGED", "KEY_REVOKED", "`RateLimited`", "client.batches.download(", "`prompt_logprobs`",
    ):  # fmt: skip
        assert word in api
    for word in ("`StreamGenerate`", "`UploadMedia`", "`FlushCache`", "#### SamplingParams", "`chunk_tokens` = 2"):
        assert word in api
    for word in ("`--tls-client-ca`", "`--max-seqs`", "`MODEL`", "`--metrics-port`"):
        assert word in operations
