"""The small check of the playground that is part of the suite; see conftest.py."""

from __future__ import annotations

from pages import SHAPES, Playground


def test_a_person_asks_about_an_example(desktop: Playground) -> None:
    desktop.example()
    desktop.ask()
    assert desktop.text() == SHAPES and desktop.state() == "done"
    assert desktop.number("image") == "64" and desktop.number("rate") != "–"
    assert desktop.page.locator("#frame svg").get_attribute("viewBox") == "0 0 16 16"
    desktop.ask("Which shape is the purple one?", keys=True)
    assert desktop.text() == "triangle" and int(desktop.number("cached")) > 64
    desktop.page.keyboard.press("Tab")  # out of the text field
    desktop.page.evaluate("document.activeElement.blur()")
    desktop.page.keyboard.press("2")
    desktop.page.wait_for_selector(".card")
    assert "Encoder budgets" in desktop.page.locator("#servers").inner_text()
