"""docs/models.md says what the server would reserve for published configurations, and names every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_models import HUB_IDS, models

from families.registry import served_model_types
from service.commands.plan import arena_layout, size, weight_bytes
from service.common.config import EngineOptions
from service.model.checkpoint import open_checkpoint

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()


@pytest.mark.parametrize("name", models())
def test_the_numbers_are_those_of_the_plan(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(models()[name]))
    options = EngineOptions(model=str(tmp_path), max_seqs=1, max_len=1024, native="off")
    checkpoint = open_checkpoint(options.model, outline=True)
    layout = arena_layout(options, checkpoint)
    quantised = EngineOptions(model=str(tmp_path), weights="int8")
    cells = (
        name, f"{checkpoint.parameters() / 1e9:.1f} B", size(weight_bytes(options, checkpoint)),
        size(weight_bytes(quantised, checkpoint)), size(layout.slot_bytes),
        size(layout.page_bytes * 1024 // layout.page_size), f"`saccade serve {HUB_IDS.get(name, 'FOLDER')}`",
    )  # fmt: skip
    row = f"| {' | '.join(cells)} |"
    assert row in PAGE, f"docs/models.md should have: {row}"


@pytest.mark.parametrize("kind", served_model_types())
def test_every_family_is_there(kind: str) -> None:
    assert f"`{kind}`" in PAGE
