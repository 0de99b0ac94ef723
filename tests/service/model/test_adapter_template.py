"""The chat template in an adapter's folder."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from adapters import linear_layers, pair, write_adapter
from served import TEMPLATE, make_served

from service.common.config import ServerOptions
from service.servers.from_options import load_assets


@pytest.mark.parametrize(
    ("template", "warned"),
    [(None, False), (TEMPLATE + "\n", False), ("{{ messages }}", True), ("{% broken", False)],
    ids=["none", "the model's", "another", "broken"],
)
def test_it_is_not_used_but_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str | None, warned: bool
) -> None:
    tiny = make_served(tmp_path / "model", vision=False)
    layer, weight = next(iter(linear_layers(tiny.model).items()))
    adapter = write_adapter(tmp_path / "adapter", pair(layer, weight))
    if template is not None:
        (adapter / "chat_template.jinja").write_text(template)
    with caplog.at_level(logging.WARNING):
        assets = load_assets(ServerOptions(model=str(tiny.path), adapter=str(adapter)))
    assert assets.template.source == TEMPLATE
    assert (f"{adapter} has a chat template of its own, which is not used" in caplog.text) == warned
