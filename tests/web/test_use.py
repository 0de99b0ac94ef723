"""What a person can do in the playground, by mouse and by keyboard, with the embedded model behind it."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from clips import animation, film, moving_frames
from keys import KEYS
from pages import ENDED, ROOT, SHAPES, Playground, opened

from service.commands.server_process import ServerProcess

pytestmark = pytest.mark.whole

LONG = json.dumps({"type": "string", "minLength": 6000, "maxLength": 7000})
FOCUS = """() => { const e = document.activeElement, s = getComputedStyle(e), near = e.nextElementSibling;
    const rings = [s, near && e.type === "radio" ? getComputedStyle(near) : s];
    const seen = rings.some(r => r.outlineStyle !== "none" && parseFloat(r.outlineWidth) > 0);
    return [e.id || e.className || e.name || e.tagName, seen]; }"""


def file(name: str) -> tuple[str, str, str]:
    return name, "image/png", base64.b64encode((ROOT / "demo" / "pictures" / name).read_bytes()).decode()


def thumbs(playground: Playground, count: int) -> None:
    playground.page.wait_for_selector(f".thumb-box:nth-child({count})")
    assert playground.page.locator(".thumb-box").count() == count


def test_images_are_dropped_pasted_picked_and_removed(desktop: Playground) -> None:
    page = desktop.page
    desktop.give("drop", [file("pair-first.png")])
    thumbs(desktop, 1)
    desktop.give("paste", [file("pair-second.png")], "#question")
    thumbs(desktop, 2)
    with page.expect_file_chooser() as chooser:
        page.click(".thumb.add")
    chooser.value.set_files(ROOT / "demo" / "pictures" / "shapes.png")
    thumbs(desktop, 3)
    page.locator(".remove").nth(2).click()
    thumbs(desktop, 2)
    questions = json.loads((ROOT / "demo" / "questions.json").read_text("utf-8"))
    asked = next(entry for entry in questions if entry["images"] == ["pair-first.png", "pair-second.png"])
    desktop.ask(asked["question"])
    assert desktop.text() == asked["answer"]
    with page.expect_file_chooser() as chooser:
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("o")
    chooser.value.set_files([])
    page.locator(".thumb[aria-pressed]").nth(1).focus()
    page.keyboard.press("Delete")
    thumbs(desktop, 1)
    desktop.give("drop", [("notes.txt", "text/plain", "aGk=")])
    page.wait_for_selector("#caption:text-is('notes.txt: neither an image nor a clip.')")
    desktop.give("drop", [("notes.txt", "text/plain", "aGk="), file("wide.png")])
    page.wait_for_selector("#frame img[alt='wide.png']")
    page.wait_for_function("document.querySelector('#frame img').complete")
    assert "notes.txt" in page.inner_text("#caption")


def test_a_question_waits_for_files_that_are_being_read(desktop: Playground) -> None:
    page, sent = desktop.page, []
    page.evaluate(
        """() => {
            const read = FileReader.prototype.readAsDataURL;
            FileReader.prototype.readAsDataURL = function (file) { window.finish = () => read.call(this, file); };
        }"""
    )
    page.on("request", lambda request: sent.append(request) if request.method == "POST" else None)
    desktop.give("drop", [file("shapes.png")])
    page.fill("#question", "What does the picture show?")
    page.click("#go")
    page.click("#go")  # asks nothing more
    page.evaluate("window.finish()")
    page.wait_for_selector(ENDED)
    (request,) = sent
    assert '"image_url"' in request.post_data


def test_an_example_is_added_once_and_keeps_the_user_s_question(desktop: Playground) -> None:
    page = desktop.page
    page.locator(".example[data-key='wide.png']").dblclick()
    thumbs(desktop, 1)
    assert page.input_value("#question") == "In which place is the circle?"
    page.locator(".remove").click()
    desktop.example("number.png")
    assert page.input_value("#question") == "What number is printed here?"  # one suggestion replaces another
    page.locator(".remove").click()
    page.fill("#question", "Is it blue?")
    desktop.example("shapes.png")
    assert page.input_value("#question") == "Is it blue?"


def test_everything_is_reached_by_the_keyboard(desktop: Playground) -> None:
    page = desktop.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "question"
    page.evaluate("document.activeElement.blur(); document.querySelector('#settings').open = true; scrollTo(0, 0)")
    page.locator(".brand").focus()
    page.keyboard.press("Tab")
    seen: dict[str, bool] = {}
    for _ in range(60):
        name, ring = page.evaluate(FOCUS)
        if name in seen and name == "brand" or name == "BODY":
            break
        seen[name] = ring
        page.keyboard.press("Tab")
    assert all(seen.values()), seen
    wanted = {"nav-ask", "nav-status", "key-open", "theme", "help-open", "pick", "grid-on", "question", "compare", "go"}
    assert wanted | {"code-open", "temperature", "seed", "format", "thumb example"} <= set(seen), seen


def test_shortcuts_are_listed_and_can_be_switched_off(desktop: Playground) -> None:
    page = desktop.page
    page.keyboard.press("?")
    page.wait_for_selector("#help-dialog[open]")
    assert page.locator("#shortcuts dt").count() >= 12
    page.locator("label:has(#letters)").click()
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("c")
    assert page.locator(".pane").count() == 1
    page.click("#help-open")
    page.locator("label:has(#letters)").click()
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("c")
    assert page.locator(".pane").count() == 2
    page.keyboard.press("/")
    page.keyboard.type("cc?")  # in a text field these keys are letters
    assert page.input_value("#question") == "cc?" and page.locator(".pane").count() == 2


@pytest.mark.parametrize("keys", [False, True], ids=["mouse", "keyboard"])
def test_an_answer_is_stopped(desktop: Playground, server: ServerProcess, keys: bool) -> None:
    page = desktop.page
    desktop.allowed.append("ERR_ABORTED")
    desktop.settings(format="json_schema", schema=LONG, max_tokens="4000")
    page.fill("#question", "Write.")
    if keys:
        page.keyboard.press("Control+Enter")
    else:
        page.click("#go")
    page.wait_for_selector(".pane[data-state=streaming]")
    page.wait_for_selector(".token >> nth=20")
    if keys:
        page.keyboard.press("Escape")
    else:
        page.click("#go")
    page.wait_for_selector(".pane[data-state=stopped]")
    assert desktop.text() and desktop.number("rate") != "–"
    page.click("#nav-status")
    page.wait_for_selector(".card:first-child .facts dd:text-is('0 of 32')")  # the server has stopped, too


def test_two_settings_are_compared(desktop: Playground) -> None:
    page = desktop.page
    desktop.example()
    page.locator("label:has(#compare)").click()
    desktop.settings(max_tokens="3")
    assert page.locator(".differs").nth(1).inner_text() == "tokens 3"
    page.locator("#which label").first.click()
    assert page.input_value("[name=max_tokens]") == "256"
    desktop.ask(keys=True)
    page.wait_for_selector(f":nth-match({ENDED}, 2)")
    assert desktop.text(0) == SHAPES and SHAPES.startswith(desktop.text(1)) and desktop.text(1) != SHAPES
    assert desktop.number("output", 1) == "3" and desktop.number("output", 0) == "22"
    assert page.locator(".finish").nth(1).inner_text() == "Output limit reached"


def test_tokens_tell_their_probabilities(desktop: Playground) -> None:
    page = desktop.page
    desktop.example()
    desktop.ask()
    page.locator(".token").nth(2).hover()
    card = page.locator("#token-card")
    assert card.locator("li").count() == 5 and "triangle" in card.inner_text()
    page.mouse.move(2, 2)
    card.wait_for(state="hidden")
    page.locator(".words").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    assert "im_end" in card.inner_text() and "%" in page.locator("#live").inner_text()
    page.keyboard.press("Escape")
    card.wait_for(state="hidden")
    desktop.settings(logprobs="")
    desktop.ask()
    assert desktop.text() == SHAPES and page.locator(".token").count() == 0


def test_the_patch_grid_is_the_server_s(desktop: Playground) -> None:
    page = desktop.page
    desktop.example("wide.png")
    desktop.ask()
    rows, columns = (int(part) for part in page.locator("#frame svg").get_attribute("viewBox").split()[:1:-1])
    assert rows * columns // 4 == int(desktop.number("image")) and columns > rows
    assert f"{rows} × {columns} patches" in page.inner_text("#caption")
    box = page.locator("#frame").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] - 3)
    last = f"Token {rows * columns // 4} of {rows * columns // 4}: row {rows // 2}, column {columns // 2}"
    assert page.inner_text("#caption") == last
    page.mouse.move(2, 2)
    page.locator("#frame").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#caption").endswith("row 1, column 2")
    page.keyboard.press("g")
    assert page.locator("#frame svg").count() == 0


def test_clips_are_sent_as_clips(desktop: Playground) -> None:
    page = desktop.page
    gif = base64.b64encode(animation(moving_frames(5, 64, 64, 3), "GIF")).decode()
    desktop.give("drop", [("moving.gif", "image/gif", gif)])
    page.wait_for_selector(".badge:text-is('clip')")
    desktop.ask("What does the picture show?")
    assert desktop.state() == "done" and "5 frames" in page.inner_text("#caption")
    page.locator("label:has(#as-clip)").click()
    desktop.ask()
    assert desktop.state() == "done" and "frames" not in page.inner_text("#caption")
    webm = base64.b64encode(film("webm", "libvpx-vp9", 6, 64, 64, 60)).decode()
    desktop.give("drop", [("film.webm", "video/webm", webm)])
    page.wait_for_selector("#frame video")
    desktop.ask()
    assert desktop.state() == "done" and "frames" in page.inner_text("#caption")


def test_an_answer_is_held_to_a_schema(desktop: Playground) -> None:
    desktop.example()
    desktop.settings(format="json_schema", schema='{"enum": ["red", "purple"]')
    desktop.page.click("#go")  # not JSON: nothing is sent, and the field is shown
    assert desktop.page.evaluate("document.activeElement.name") == "schema"
    assert "not JSON" in desktop.page.inner_text("#schema-note") and desktop.state() == "idle"
    desktop.settings(schema='{"enum": ["red", "purple"]}')
    desktop.ask("What colour is the triangle?")
    assert json.loads(desktop.text()) in ("red", "purple")


@pytest.mark.parametrize("language", ["curl", "python", "grpc"])
def test_the_code_gives_the_same_answer(desktop: Playground, tmp_path: Path, language: str) -> None:
    page = desktop.page
    name = "it's a: $(touch wrong) `\"\\ \u00e9.png"
    desktop.give("drop", [(name, *file("shapes.png")[1:])])
    thumbs(desktop, 1)
    desktop.settings(system="", seed="18446744073709551615", temperature="0", max_tokens="12", stop="blue")
    desktop.ask('What does the picture show? `$HOME` "\\n" \U0001f642')
    answer = desktop.text()
    page.keyboard.press("Tab")
    page.click("#code-open")
    page.click(f"#tab-{language}")
    page.click("#code-copy")
    page.wait_for_selector("#code-copy:text-is('Copied')")
    code = page.evaluate("navigator.clipboard.readText()")
    (tmp_path / name).write_bytes((ROOT / "demo" / "pictures" / "shapes.png").read_bytes())
    command = ["bash", "-c", code] if language == "curl" else [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    output = done.stdout.strip()
    if language == "curl":
        chunks = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("data: {")]
        output = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert output.strip() == answer.strip() and [path.name for path in tmp_path.iterdir()] == [name]


def test_errors_have_a_reason_and_a_request(desktop: Playground) -> None:
    page = desktop.page
    desktop.allowed.append("status of 400")
    broken = base64.b64encode(b"this is no image").decode()
    desktop.give("drop", [("broken.png", "image/png", broken)])
    page.wait_for_selector(".unseen")
    desktop.ask("What is it?")
    error = page.locator(".error")
    assert desktop.state() == "failed" and error.locator("strong").inner_text() == "IMAGE_DECODE_FAILED"
    request = error.locator(".ids").inner_text()
    assert request.startswith("HTTP 400 · request ")
    error.locator("button:text-is('Copy request id')").click()
    page.wait_for_selector(".error button:text-is('Copied')")
    assert request.endswith(page.evaluate("navigator.clipboard.readText()"))


def test_the_status_is_live_and_can_be_paused(desktop: Playground) -> None:
    page = desktop.page
    page.click("#nav-status")
    page.wait_for_selector("#status-note.live")
    titles = page.locator(".card h3").all_inner_texts()
    assert titles == [
        "Requests", "Tokens/s", "Decoder memory", "Image embeddings", "Encoder budgets", "Messages",
    ]  # fmt: skip
    page.click("#pause")
    assert page.inner_text("#status-note") == "Paused"
    with page.expect_request("**/status"):
        page.click("#pause")
    page.keyboard.press("1")
    page.wait_for_selector("#ask:not([hidden])")


def test_settings_that_are_no_numbers_are_shown_and_not_sent(desktop: Playground) -> None:
    page = desktop.page
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    for name, value in (("temperature", "warm"), ("top_p", "0,9"), ("seed", "-1"), ("max_tokens", "1e")):
        desktop.settings(**{name: value})
        page.fill("#question", "What is it?")
        page.click("#go")
        said = page.evaluate("[document.activeElement.name, document.activeElement.validationMessage]")
        assert said[0] == name and value in said[1], said
        desktop.settings(**{name: ""})
    assert not sent and desktop.state() == "idle"
    page.fill("#question", " ")
    page.click("#go")
    assert page.evaluate("document.querySelector('#question').validationMessage") == "The question is empty."
    desktop.settings(top_p="0.93", temperature="0.05", max_tokens="3")
    desktop.ask("What is it?")
    assert desktop.state() == "done" and len(sent) == 1


def test_a_setting_of_blanks_is_none(desktop: Playground) -> None:
    bodies: list[dict[str, Any]] = []
    desktop.page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    desktop.settings(temperature=" ", top_k="  ", seed=" 7 ", max_tokens=" 3")
    desktop.ask("What is it?")
    (body,) = bodies
    assert desktop.state() == "done" and not body.keys() & {"temperature", "top_k"}
    assert body["seed"] == 7 and body["max_completion_tokens"] == 3


def test_a_setting_that_the_server_refuses_is_shown(desktop: Playground) -> None:
    page = desktop.page
    desktop.allowed.append("status of 400")
    for name, value in (("max_tokens", "9999999"), ("top_p", "7")):
        desktop.settings(**{name: value})
        desktop.ask("What is it?")
        page.evaluate("document.querySelector('#settings').open = false")
        page.click(".error button:text-is('Show the setting')")
        shown = page.evaluate("[document.activeElement.name, document.activeElement.validationMessage]")
        assert shown[0] == name and value in shown[1], shown
        desktop.settings(**{name: ""})
    desktop.settings(format="json_schema", schema='{"type": "nothing"}')
    desktop.ask("What is it?")
    page.click(".error button:text-is('Show the setting')")
    assert page.evaluate("document.activeElement.name") == "schema"


def test_keys_of_questions_show_their_view(desktop: Playground) -> None:
    page = desktop.page
    page.click("#nav-status")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate("[document.activeElement.id, location.hash]") == ["question", "#ask"]
    page.keyboard.type("What is it?")
    page.click("#nav-status")
    desktop.allowed.append("ERR_ABORTED")  # the request for the status that was in progress
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(ENDED)
    assert page.is_visible("#ask") and desktop.state() == "done"


def test_text_that_comes_with_an_image_is_pasted_as_text(desktop: Playground) -> None:
    """As copied from tables and documents."""
    left = desktop.page.evaluate(
        """([name, type, data]) => ["#question", "#stage"].map(target => {
            const clipboardData = new DataTransfer();
            clipboardData.setData("text/plain", "12");
            clipboardData.items.add(new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], name, {type}));
            const event = new ClipboardEvent("paste", {clipboardData, bubbles: true, cancelable: true});
            return document.querySelector(target).dispatchEvent(event);  // true: to the browser
        })""",
        file("wide.png"),
    )
    assert left == [True, False]
    thumbs(desktop, 1)


def test_there_is_nothing_to_copy_before_the_first_answer(desktop: Playground) -> None:
    assert desktop.page.inner_text(".state") == "Ready" and desktop.page.is_disabled(".pane .copy")


def test_a_key_is_asked_for_and_reasoning_is_shown_apart(browser: Any, locked: ServerProcess, axe: str) -> None:
    with opened(browser, locked.http_url, state="failed", allowed=["401"]) as playground:
        page = playground.page
        assert page.inner_text("#model-text") == "Needs an API key"
        playground.ask("What is it?")
        assert playground.state() == "failed" and page.inner_text(".error strong") == "UNAUTHENTICATED"
        playground.check(axe, "no-key")
        page.click(".error button:text-is('Enter an API key')")
        page.fill("#key", "not äscii")
        page.click("#key-use")
        assert "ASCII" in page.evaluate("document.querySelector('#key').validationMessage")
        page.fill("#key", KEYS["one"])
        page.keyboard.press("Enter")
        page.wait_for_selector("#model[data-state=ready]")
        playground.settings(max_reasoning_tokens="5", max_tokens="30")
        playground.example()
        playground.ask("What does the picture show?")
        reasoning = page.locator(".reasoning")
        assert reasoning.locator("summary").inner_text() == "Reasoning 5 tokens"
        reasoning.evaluate("box => box.open = true")
        assert reasoning.locator("div").inner_text().strip() and playground.text().strip()
        assert "think>" not in page.inner_text(".body")
        playground.check(axe, "reasoning")
        page.click("#nav-status")
        page.wait_for_selector(".problem:has-text('scope admin')")
        playground.check(axe, "no-status")
        page.click("#nav-ask")
        page.keyboard.press("k")
        page.click("#key-forget")
        page.wait_for_selector("#model[data-state=failed]")


def test_a_lost_server_is_said_and_asked_again(desktop: Playground) -> None:
    page = desktop.page
    desktop.allowed.append("ERR_FAILED|ERR_CONNECTION")
    page.route("**/v1/**", lambda route: route.abort())
    desktop.ask("What is it?")
    assert desktop.state() == "failed" and page.inner_text(".error strong") == "UNREACHABLE"
    page.wait_for_selector("#model[data-state=failed]")
    page.unroute("**/v1/**")
    page.wait_for_selector("#model[data-state=ready]")
    page.route("**/v1/**", lambda route: route.abort())
    page.reload()
    page.wait_for_selector("#model[data-state=failed]:has-text('The server cannot be reached.')")
    page.unroute("**/v1/**")
    page.wait_for_selector("#model[data-state=ready]")  # without a click
    desktop.ask("What is it?")
    assert desktop.state() == "done"


def test_a_connection_lost_within_an_answer_is_said(desktop: Playground) -> None:
    page = desktop.page
    desktop.allowed.append("ERR_INCOMPLETE_CHUNKED_ENCODING")
    event = b"data: " + json.dumps({"id": "chatcmpl-7", "choices": [{"delta": {"content": "so"}}]}).encode() + b"\n\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            """One piece of a response body that continues after the page has shown it."""
            with listener.accept()[0] as connection:
                connection.recv(65536)
                head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                connection.sendall(head + b"%x\r\n%s\r\n" % (len(event), event))
                shown.wait(60)

        shown = threading.Event()
        thread = threading.Thread(target=answer)
        thread.start()
        cut = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        page.route("**/v1/chat/completions", lambda route: route.continue_(url=cut))
        page.fill("#question", "What is it?")
        page.click("#go")
        page.wait_for_selector(".pane[data-state=streaming]")
        shown.set()
        thread.join()
    page.wait_for_selector(ENDED)
    assert desktop.state() == "failed" and page.inner_text(".error strong") == "STREAM_CUT"
    assert desktop.text() == "so" and "request 7" in page.inner_text(".request")
    page.unroute("**/v1/chat/completions")
    page.focus(".error button:text-is('Ask again')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".pane[data-state=done]")
    assert page.evaluate("document.activeElement.id") == "go"


def test_a_pause_holds_although_a_status_comes_later(desktop: Playground) -> None:
    page = desktop.page
    page.click("#nav-status")
    page.wait_for_selector("#status-note.live")
    held: list[Any] = []
    with page.expect_request("**/status"):
        page.route("**/status", lambda route: held.append(route))
    page.click("#pause")
    with page.expect_response("**/status"):
        held[0].continue_()
    page.evaluate("new Promise(requestAnimationFrame)")
    assert page.inner_text("#status-note") == "Paused" and page.inner_text("#pause") == "Resume"


def test_copying_works_without_the_clipboard_of_secure_pages(browser: Any, server: ServerProcess) -> None:
    with opened(browser, server.http_url, script="delete Navigator.prototype.clipboard") as playground:
        page = playground.page
        page.click("#code-open")
        page.click("#code-copy")
        page.wait_for_selector("#code-copy:text-is('Copied')")
        page.keyboard.press("Escape")
        page.focus("#question")
        page.keyboard.press("Control+V")
        assert page.input_value("#question").startswith("curl -sN http")


ONE, CLOSE, TWO, END = (
    {"token": token, "bytes": list(token.encode()), "logprob": -0.5} for token in ("so", "</think>", " \u00e4", "<end>")
)


@pytest.mark.parametrize(
    "chunks",
    [
        [("", "so", [ONE]), ("", "", [CLOSE]), (" \u00e4", "", [TWO]), ("", "", [END])],
        [("", "so", [ONE, CLOSE]), (" \u00e4", "", [TWO, END])],
        [(" \u00e4", "so", [ONE, CLOSE, TWO]), ("", "", [END])],
        [("", "", [ONE]), ("", "so", [CLOSE]), ("", "", [TWO]), (" \u00e4", "", []), ("", "", [END])],
    ],
    ids=["a token each", "few", "one", "late"],
)
def test_tokens_of_the_reasoning_are_not_shown_in_the_text(
    desktop: Playground, chunks: list[tuple[str, str, list[object]]]
) -> None:
    """How tokens are divided into chunks depends on the network's pace."""
    deltas = [
        {"choices": [{"delta": {"content": text, "reasoning_content": reasoning}, "logprobs": {"content": tokens}}]}
        for text, reasoning, tokens in chunks
    ]
    shown = desktop.page.evaluate(
        """async deltas => {
            const {Run} = await import("./js/run.js");
            const run = new Run({async *chat() { yield* deltas; }}, {});
            const shown = [];
            run.addEventListener("piece", ({detail}) => shown.push(...detail.tokens.map(token => token.token)));
            await new Promise(resolve => run.addEventListener("end", resolve));
            return shown;
        }""",
        deltas,
    )
    assert [token for token in shown if token != "<end>"] == [" \u00e4"]
