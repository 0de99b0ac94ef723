"""The playground's appearance: screenshots of its states, no violations of accessibility, no layout shifts."""

from __future__ import annotations

from typing import Any

import pytest
from pages import Playground, opened

from service.commands.server_process import ServerProcess

pytestmark = pytest.mark.whole

SCHEMES = ("light", "dark")


def states(playground: Playground, axe: str, name: str) -> None:
    page = playground.page
    playground.check(axe, f"{name}-empty")
    playground.example()
    playground.ask()
    playground.check(axe, f"{name}-answer")
    token, card = page.locator(".token").nth(3), page.locator("#token-card")
    if name.startswith("phone"):
        token.tap()
    else:
        token.hover()
    assert card.is_visible()
    playground.check(axe, f"{name}-token")
    if name.startswith("phone"):
        page.locator(".answers h2").tap()
    page.mouse.move(2, 2)
    card.wait_for(state="hidden")
    for opener, dialog in (("code", "code"), ("help", "help"), ("key", "key")):
        page.click(f"#{opener}-open")
        page.wait_for_selector(f"#{dialog}-dialog[open]")
        playground.check(axe, f"{name}-{dialog}")
        page.keyboard.press("Escape")
    page.locator("label:has(#compare)").click()
    playground.settings(temperature="1.3", seed="18446744073709551615", format="json_schema")
    playground.check(axe, f"{name}-settings")
    outside = page.evaluate("""[...document.querySelectorAll(".prompt > *")]
        .filter(box => box.getBoundingClientRect().right > box.parentElement.getBoundingClientRect().right + 1)
        .map(box => box.className)""")
    assert not outside, "wider than their column, so that they cover the answer"
    playground.settings(format="")
    playground.ask()
    page.evaluate("document.querySelector('#settings').open = false")
    playground.check(axe, f"{name}-compare")
    assert "seed 18446744073709551615" in page.locator(".pane footer").nth(1).inner_text()
    playground.allowed.append("400")
    playground.settings(max_tokens="9999999")
    playground.ask()
    playground.check(axe, f"{name}-error")
    page.click("#nav-status")
    page.wait_for_selector(".card")
    page.wait_for_selector("#status-note.live")
    playground.check(axe, f"{name}-status")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_each_state_is_accessible(browser: Any, server: ServerProcess, axe: str, size: str, scheme: str) -> None:
    with opened(browser, server.http_url, size, scheme) as playground:
        states(playground, axe, f"{size}-{scheme}")
        wide = playground.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "the page is wider than its window"


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_nothing_moves_while_an_answer_is_written(browser: Any, server: ServerProcess, size: str) -> None:
    with opened(browser, server.http_url, size) as playground:
        playground.page.evaluate(
            """() => { window.shifts = [];
            new PerformanceObserver(list => shifts.push(...list.getEntries().map(e => [e.value,
                e.sources.map(s => s.node?.className ?? String(s.node))])))
                .observe({type: "layout-shift", buffered: true}); }"""
        )
        playground.example()
        playground.ask()
        playground.ask("Which shape is the purple one?")
        shifts = playground.page.evaluate("shifts")
        assert sum(value for value, _ in shifts) < 0.02, shifts


def test_nothing_overlaps_in_the_narrowest_window(desktop: Playground) -> None:
    """320 pixels are a window of 1280 at four times the size."""
    page = desktop.page
    page.set_viewport_size({"width": 320, "height": 700})
    page.locator("label:has(#compare)").click()
    outside = page.evaluate("""[...document.querySelectorAll(".send > *, .numbers dt, .numbers dd")].filter(box => {
        const range = document.createRange();
        range.selectNodeContents(box);
        return range.getBoundingClientRect().right > box.parentElement.getBoundingClientRect().right + 1;
    }).map(box => box.textContent)""")
    assert not outside


def test_states_are_seen_in_the_system_s_own_colours(desktop: Playground) -> None:
    """A forced palette has one background for everything."""
    page = desktop.page
    page.emulate_media(forced_colors="active")
    page.locator("label:has(#compare)").click()
    assert page.evaluate("getComputedStyle(document.querySelector('#compare')).appearance") == "auto"
    for chosen, other in (("#nav-ask", "#nav-status"), ("[value=b] + span", "[value=a] + span")):
        styles = [
            page.locator(selector).evaluate("box => getComputedStyle(box).outlineStyle") for selector in (chosen, other)
        ]
        assert styles == ["solid", "none"], chosen


def test_the_colours_are_the_system_s_until_one_is_chosen(browser: Any, server: ServerProcess) -> None:
    with opened(browser, server.http_url, scheme="dark") as playground:
        page = playground.page

        def paper() -> str:
            return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))

        dark = paper()
        page.click("#theme")
        light = paper()
        assert light != dark
        page.reload()
        assert paper() == light
        page.keyboard.press("t")
        assert paper() == dark
        page.keyboard.press("t")  # as the system's setting again
        page.emulate_media(color_scheme="light")
        assert paper() == light
