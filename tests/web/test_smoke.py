"""The small check of the playground that is part of the suite; see conftest.py."""

from __future__ import annotations

from typing import Any

from conftest import WebServer
from pages import opened

SHAPES = "a purple triangle at the top, a blue circle at the right and a blue cross at the bottom right"


def test_a_person_asks_about_an_example(browser: Any, server: WebServer) -> None:
    with opened(browser, server.url) as playground:
        playground.example()
        playground.ask()
        assert playground.text() == SHAPES and playground.state() == "done"
        assert playground.number("image") == "64" and playground.number("rate") != "–"
        assert playground.page.locator("#frame svg").get_attribute("viewBox") == "0 0 16 16"
        playground.ask("Which shape is the purple one?", keys=True)
        assert playground.text() == "triangle" and int(playground.number("cached")) > 64
        playground.page.keyboard.press("Tab")  # out of the text field
        playground.page.evaluate("document.activeElement.blur()")
        playground.page.keyboard.press("2")
        playground.page.wait_for_selector(".card")
        assert "Encoder budgets" in playground.page.locator("#servers").inner_text()
