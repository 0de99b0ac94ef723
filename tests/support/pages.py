"""The playground as a test sees it: opens it, uses it by mouse or by keyboard, and notes its hidden errors."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "web"
"""Folder into which screenshots are written."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHAPES = "a purple triangle at the top, a blue circle at the right and a blue cross at the bottom right"
"""The embedded model's answer to the first example."""
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}
ENDED = ".pane:not([data-state=idle], [data-state=waiting], [data-state=streaming])"
AXE = """async () => {
    const rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
    const found = await axe.run(document, {runOnly: rules});
    return found.violations.flatMap(({id, nodes}) => nodes.map(node => `${id}: ${node.html} ${node.failureSummary}`));
}"""
TRANSITIONS = (
    "Promise.allSettled(document.getAnimations().filter(a => a instanceof CSSTransition).map(a => a.finished))"
)
FILES = """([target, kind, files]) => {
    const data = new DataTransfer();
    for (const [name, type, text] of files)
        data.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name, {type}));
    const where = document.querySelector(target);
    const event = kind === "paste"
        ? new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true})
        : new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
    where.dispatchEvent(event);
}"""


@contextmanager
def launched() -> Iterator[Any]:
    """Debian's chromium, without a window. Raises ImportError without Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as engine:
        # Root, as in containers, has no sandbox.
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()


class Playground:
    """One page."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.problems: list[str] = []
        """Errors of the console, the page or a request."""
        self.allowed: list[str] = []
        """Patterns of the errors that a test expects."""
        page.on("console", lambda message: self._note(message.type, message.text + " " + message.location["url"]))
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("request", self._outside)

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(re.search(pattern, text) for pattern in self.allowed):
            self.problems.append(f"{kind}: {text}")

    def _outside(self, request: Any) -> None:
        if not request.url.startswith((self.url, "blob:", "data:")):
            self.problems.append(f"outside: {request.url}")

    def open(self, view: str = "", state: str = "ready") -> None:
        self.page.goto(self.url + "/" + view)
        self.page.wait_for_selector(f"#model[data-state={state}]")

    def example(self, name: str = "shapes.png") -> None:
        self.page.locator(f".example[data-key='{name}']").click()
        self.page.wait_for_selector(".thumb-box")

    def ask(self, question: str | None = None, *, keys: bool = False) -> None:
        """Asks a question, and waits for the end of each answer."""
        if question is not None:
            self.page.fill("#question", question)
        if keys:
            self.page.keyboard.press("Control+Enter")
        else:
            self.page.click("#go")
        self.page.wait_for_selector("#go:not(.stop)", timeout=60_000)
        self.page.wait_for_selector(ENDED)

    def text(self, pane: int = 0) -> str:
        """The answer without tokens that are not text."""
        words = self.page.locator(".words").nth(pane)
        return str(words.evaluate(
            "box => [...box.childNodes].filter(n => !n.classList?.contains('outside')).map(n => n.textContent).join('')"
        ))  # fmt: skip

    def number(self, name: str, pane: int = 0) -> str:
        return str(self.page.locator(f"[data-number={name}]").nth(pane).inner_text())

    def state(self, pane: int = 0) -> str:
        return str(self.page.locator(".pane").nth(pane).get_attribute("data-state"))

    def give(self, kind: str, files: Sequence[tuple[str, str, str]], target: str = "#stage") -> None:
        """`files`: name, type and content in base64. `kind`: "drop" or "paste"."""
        self.page.evaluate(FILES, [target, kind, [list(file) for file in files]])

    def settings(self, **values: str) -> None:
        self.page.evaluate("document.querySelector('#settings').open = true")
        for name, value in values.items():
            field = self.page.locator(f"#settings [name={name}]")
            if field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)

    def check(self, axe: str, name: str) -> None:
        """Takes a screenshot of the whole page, and notes violations of accessibility."""
        # Colours are judged after their transitions, and positions before a screenshot changes the window's height.
        self.page.evaluate(TRANSITIONS)
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(axe)
        self.problems += [f"{name}: {violation}" for violation in self.page.evaluate(AXE)]
        BUILD.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=BUILD / f"{name}.png", full_page=True)


@contextmanager
def opened(
    browser: Any,
    url: str,
    size: str = "desktop",
    scheme: str = "light",
    *,
    state: str = "ready",
    allowed: Sequence[str] = (),
    script: str = "",
    scale: int = 1,
) -> Iterator[Playground]:
    """A page in a browser context of its own, as soon as the shown state of its model is this one. At the end, the page
    must have caused no error, except `allowed` ones, and no request to another host. `script` runs before the page's
    own. `scale`: pixels of a screenshot per CSS pixel."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale,
        is_mobile=size == "phone", has_touch=size == "phone", permissions=["clipboard-read", "clipboard-write"],
    )  # fmt: skip
    try:
        context.add_init_script(script)
        playground = Playground(context.new_page(), url)
        playground.allowed += allowed
        playground.open(state=state)
        yield playground
        assert not playground.problems, "\n".join(playground.problems)
    finally:
        context.close()
