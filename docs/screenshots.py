"""Makes the screenshots in docs/images from a running server with the embedded model:

playground.png   the playground with an answer to a shipped image, and the probabilities of one of its tokens
ask.svg          a terminal with `saccade ask`
top.svg          a terminal with `saccade top` while requests run

`make screenshots`; it needs chromium, Playwright and rich, and port 50051, which the commands use by default.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rich._export_format
from PIL import Image
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent
ROOT, IMAGES = DOCS.parent, DOCS / "images"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from pages import SHAPES, launched, opened  # noqa: E402 - after the path is set

import saccade  # noqa: E402
from service.commands.server_process import ServerProcess  # noqa: E402

PORT = 50051
MOST_BYTES = 200_000
QUESTION = "What does the picture show?"
IMAGE = "demo/pictures/shapes.png"
COLUMNS = 100
LOAD = 12
"""Requests that run while `saccade top` is shown."""
SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", rich._export_format.CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""rich's SVG without its fonts, which it would load from another host."""


def playground(url: str) -> None:
    """playground.png: 1280 x 720 CSS pixels, twice as many in the file."""
    path = IMAGES / "playground.png"
    with launched() as browser, opened(browser, url, scale=2) as page:
        page.page.set_viewport_size({"width": 1280, "height": 720})
        page.example("shapes.png")
        page.ask()
        page.ask()  # now the image and the beginning come from the cache
        assert page.text() == SHAPES, page.text()
        page.page.locator(".token").nth(2).hover()
        page.page.screenshot(path=path)
    # An image of few colours: a palette keeps it and takes a third of the bytes.
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    assert size < MOST_BYTES, f"{path}: {size} bytes, at most {MOST_BYTES}"


def terminal(name: str, command: Sequence[str], output: str) -> None:
    """NAME.svg: a terminal with a command and what it printed."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print(Text("$ ", style="bold green") + Text(shlex.join(command), style="bold"))
    for line in output.splitlines():
        console.print(Text.from_ansi(line), soft_wrap=True)
    (IMAGES / f"{name}.svg").write_text(console.export_svg(title=shlex.join(command[:2]), code_format=SVG) + "\n")


def in_terminal(command: Sequence[str]) -> str:
    """What a command prints to a terminal: its last screen, where it draws several."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # EIO: the command has ended
            while piece := os.read(ours, 65536):
                printed += piece
    os.close(ours)
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}: {printed.decode()}")
    screen = printed.decode().replace("\r\n", "\n").rpartition("\x1b[H")[2]
    return screen.replace("\x1b[K", "").replace("\x1b[J", "")


@contextlib.contextmanager
def load(address: str) -> Iterator[None]:
    """LOAD long answers about images, which are cancelled at the end."""
    long = {"type": "string", "minLength": 20_000, "maxLength": 20_001}
    with saccade.Client(address) as client, ThreadPoolExecutor(LOAD) as pool, contextlib.ExitStack() as ends:
        streams = [
            ends.enter_context(
                client.stream(QUESTION, images=[ROOT / IMAGE], max_tokens=3000, response_format=long, seed=number)
            )
            for number in range(LOAD)
        ]
        list(pool.map(next, streams))  # each has begun
        for stream in streams:
            pool.submit(list, stream)
        yield
        for stream in streams:
            stream.close()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    program = str(Path(sys.executable).with_name("saccade"))
    ask, top = ["saccade", "ask", IMAGE, QUESTION], ["saccade", "top"]
    with ServerProcess(["demo", "--admin", "--http-port", "0", "--log-level", "warning"], port=PORT) as server:
        playground(server.http_url)
        terminal("ask", ask, in_terminal([program, *ask[1:]]))
        with load(server.address):
            terminal("top", top, in_terminal([program, *top[1:], "--count", "3", "--interval", "0.3"]))
    for path in sorted(IMAGES.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
