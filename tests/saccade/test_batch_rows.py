"""Valid lines of a batch file, and the errors for invalid ones."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import errors
from saccade._jobs.input import BatchInput, BatchInvalid
from saccade._jobs.lines import output_line
from saccade._jobs.rows import ImageFolder, parse_line, request_from
from saccade._openai.errors import is_transient, status_code
from saccade.types import Generation, Sample, TokenLogprob, TopLogprob, Usage
from saccade.v1 import types_pb2

HERE = ImageFolder(Path("."))
MESSAGES = [{"role": "user", "content": "hi"}]


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    body = {"messages": MESSAGES, **changes.pop("body", {})}
    row = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **changes}
    return json.dumps({key: value for key, value in row.items() if value is not ...}).encode()


def request(body: dict[str, Any], folder: ImageFolder = HERE) -> Any:
    return request_from(parse_line(line(body=body), 0, folder), folder, priority=-10)


def image_message(url: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def test_a_whole_row() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "developer", "content": "be brief"},
                     {"role": "user", "content": ["a", {"type": "text", "text": "b"}]}],
        "max_completion_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": -1, "n": 2, "seed": 2**63, "stop": "x",
        "logprobs": True, "top_logprobs": 3, "logit_bias": {"7": -100}, "presence_penalty": None, "stream": False,
        "user": "u", "metadata": {"k": "v"}, "response_format": {"type": "text"}, "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    built = request(body)
    sampling = built.sampling
    assert [m.role for m in built.chat.messages] == [types_pb2.ROLE_SYSTEM, types_pb2.ROLE_USER]
    assert [p.text for p in built.chat.messages[1].parts] == ["a", "b"]
    assert built.model == "m" and built.priority == -10
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0, 0.5, 0)
    assert (sampling.n, sampling.seed, list(sampling.stop), sampling.logprobs) == (2, 2**63, ["x"], 3)
    assert dict(sampling.logit_bias) == {7: -100.0} and sampling.ignore_eos
    assert not sampling.HasField("presence_penalty") and not sampling.HasField("min_p")
    assert built.chat.chat_template_kwargs["enable_thinking"] is False


def test_a_row_may_continue_its_last_message() -> None:
    said = {"messages": [{"role": "assistant", "content": "It is"}]}
    for begins in ({"add_generation_prompt": False}, {"add_generation_prompt": None}, {}):
        assert request({**said, "continue_final_message": True, **begins}).chat.continue_final_message
    for begins in ({"add_generation_prompt": True}, {"continue_final_message": False}, {}):
        assert not request({**said, **begins}).chat.continue_final_message


def test_an_id_may_have_512_characters() -> None:
    assert parse_line(line(custom_id="x" * 512), 0, HERE).custom_id == "x" * 512


def test_method_and_url_may_be_left_out() -> None:
    assert parse_line(line(method=..., url=...), 3, HERE).position == 3


WRONG = [
    (b"{", "not JSON"),
    (b"[]", "expected an object"),
    (b"\xff{}", "not UTF-8 at byte 0"),
    (b'{"custom_id": NaN}', "NaN"),
    (b'{"custom_id": -1e999}', "the number -1e999 is outside of the range of doubles"),
    (b'{"custom_id": "a", "custom_id": "b"}', "twice"),
    (b'{"a":' * 100_000, "nested 100000 deep; at most 128 are allowed"),
    (line(method="GET"), "method"),
    (line(url="/v1/embeddings"), "/v1/chat/completions"),
    (line(custom_id=...), "custom_id"),
    (line(custom_id=""), "custom_id"),
    (line(custom_id=3), "custom_id"),
    (line(custom_id="x" * 513), "512"),
    (line(extra=1), "extra"),
    (line(body={"messages": []}), "messages"),
    (line(body={"messages": "hi"}), "messages"),
    (line(body={"messages": [{"role": "wizard", "content": "x"}]}), r"messages\[0\].role"),
    (line(body={"messages": [{"role": "user", "content": [{"type": "audio"}]}]}), r"content\[0\]"),
    (line(body={"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]}), "unknown keys b"),
    (line(body={"temperature": "0"}), "temperature"),
    (line(body={"temperature": True}), "temperature"),
    (line(body={"temperature": -0.1}), "temperature"),
    (line(body={"top_p": 0}), "top_p"),
    (line(body={"max_tokens": 0}), "max_tokens"),
    (line(body={"max_tokens": 1.5}), "max_tokens"),
    (line(body={"max_tokens": 1, "max_completion_tokens": 2}), "differ"),
    (line(body={"seed": -1}), "seed"),
    (line(body={"seed": 2**64}), "seed"),
    (line(body={"stop": ["a", 1]}), "stop"),
    (line(body={"stream": True}), "stream"),
    (line(body={"tools": [{"type": "function"}]}), "tools"),
    (line(body={"response_format": {"type": "json"}}), "response_format"),
    (line(body={"response_format": {"type": ["text"]}}), "response_format: expected an object whose type is one of"),
    (line(body={"response_format": {"type": "regex", "regex": 3}}), "response_format.regex: expected str, got int"),
    (line(body={"top_logprobs": 2}), "top_logprobs"),
    (line(body={"add_generation_prompt": False}), "add_generation_prompt: false needs continue_final_message"),
    (line(body={"add_generation_prompt": True, "continue_final_message": True}), "add_generation_prompt: true and"),
    (line(body={"logit_bias": {"x": 1}}), "logit_bias"),
    *((line(body={"logit_bias": {key: 1}}), "logit_bias") for key in ("01", "00", " 1", "+1", "1_0", "\u0661", "1\n")),
    (line(body={"temprature": 1}), "temprature"),
    (line(body={"allowed_token_ids": []}), "allowed_token_ids: expected at least one token id"),
    (line(body=image_message("data:image/png;base64,???")), "base64"),
    (line(body=image_message("")), "image_url.url"),
    (line(body=image_message(None)), "image_url.url"),
    (line(body=image_message("file:///etc/passwd")), "file:"),
    (line(body={"messages": [{"role": "user", "content": "\ud800"}]}), "surrogate"),
    (line(body={"temperature": 1}).replace(b'"temperature": 1', b'"temperature": 1e999'), "range"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_is_wrong_is_named(content: bytes, message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        parse_line(content, 0, HERE)


def test_images(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"png")
    (tmp_path / "in" / "link.png").symlink_to("a.png")
    folder = ImageFolder(tmp_path / "in")

    def image(url: str) -> types_pb2.Image:
        return request(image_message(url), folder).chat.messages[0].parts[0].image

    assert image("data:;base64," + base64.b64encode(b"x").decode()).data == b"x"
    assert image("media:abc").media_id == "abc"
    assert image("https://example.com/a.png").uri == "https://example.com/a.png"
    assert image("a.png").data == image("link.png").data == image(str(tmp_path / "in" / "a.png")).data == b"png"
    part = {"type": "image", "media_id": "abc"}
    message = {"messages": [{"role": "user", "content": [part]}]}
    assert request(message, folder).chat.messages[0].parts[0].image.media_id == "abc"


def test_a_path_does_not_leave_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "in"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "in-secret").mkdir()
    for secret in (tmp_path / "secret.png", tmp_path / "in-secret" / "x.png"):
        secret.write_bytes(b"secret")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    os.mkfifo(root / "pipe.png")
    folder = ImageFolder(root)
    for url in (
        "../secret.png", "sub/../../secret.png", "link.png", "up/secret.png", str(tmp_path / "secret.png"),
        "../in-secret/x.png", "/etc/passwd", "sub", "pipe.png", "nothing.png", "a\0b", "x" * 5000,
    ):  # fmt: skip
        with pytest.raises(errors.InvalidArgument) as caught:
            request(image_message(url), folder)
        assert caught.value.reason in ("IMAGE_OUTSIDE", "IMAGE_UNREADABLE")
    with pytest.raises(errors.InvalidArgument, match="not a path"):
        request(image_message("a.png"), ImageFolder(None))


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    def digest(content: bytes) -> bytes:
        return parse_line(content, 0, ImageFolder(tmp_path)).digest

    row = json.loads(line(body={"seed": 1}))
    spaced = json.dumps(dict(reversed(row.items())), indent=1).replace("\n", " ").encode()
    assert digest(line(body={"seed": 1})) == digest(spaced) != digest(line(body={"seed": 2}))
    assert digest(line("b", body={"seed": 1})) != digest(spaced)
    (tmp_path / "a.png").write_bytes(b"1")
    before = digest(line(body=image_message("a.png")))
    (tmp_path / "a.png").write_bytes(b"22")
    assert digest(line(body=image_message("a.png"))) != before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["messages", "model", "temperature", "top_k", "stop", "seed", "n", "logit_bias", "logprobs", "stop_token_ids",
     "chat_template_kwargs", "max_tokens", "top_logprobs", "tools", "user", "min_p"]
)  # fmt: skip
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "image_url", "x"])}, optional={
    "text": JSON, "image": JSON, "image_url": JSON, "media_id": JSON,
})  # fmt: skip
CONTENTS = JSON | st.lists(PARTS | JSON, max_size=3)
BODIES = st.dictionaries(FIELDS, JSON, max_size=4) | st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": CONTENTS}) | JSON, max_size=3)},
    optional={"temperature": JSON, "stop": JSON, "logit_bias": JSON},
)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.binary(max_size=60), JSON.map(lambda v: json.dumps(v).encode()), BODIES.map(lambda b: line(body=b)))
)
def test_any_line_is_a_request_or_an_invalid_argument(content: bytes) -> None:
    """A line that passes the check can be sent: nothing fails later."""
    try:
        row = parse_line(content, 0, HERE)
    except errors.InvalidArgument as error:
        assert error.message
        return
    built = request_from(row, HERE, priority=0)
    assert built.SerializeToString() and built.chat.messages


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, list[int], int]:
    """The lines of a file, the numbers of the invalid ones (from 1), and the number of valid ones."""
    content, wrong, used, right = b"", [], set(), 0
    for number in range(1, draw(st.integers(1, 25)) + 1):
        kind = draw(st.sampled_from(["good", "good", "good", "blank", "duplicate", "bad"]))
        if kind == "duplicate" and used:
            content += line(draw(st.sampled_from(sorted(used))))
            wrong.append(number)
        elif kind == "bad":
            content += draw(st.sampled_from([b"{", b"null", line(body={"n": 0}), line(custom_id=1)]))
            wrong.append(number)
        elif kind == "good":
            custom_id = f"row {number}"
            content += line(custom_id)
            used.add(custom_id)
            right += 1
        else:
            content += draw(st.sampled_from([b"", b"  \t", b"\r"]))
        content += b"\n"
    return (content[:-1] if draw(st.booleans()) else content), wrong, right


@settings(max_examples=80, deadline=None)
@given(files())
def test_a_file_is_right_or_each_wrong_line_is_named(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[bytes, list[int], int]
) -> None:
    content, wrong, right = made
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    path.write_bytes(content)
    try:
        checked = BatchInput(path, HERE)
    except BatchInvalid as error:
        assert wrong or not right
        named = [int(problem.split()[1].rstrip(":")) for problem in error.problems if problem.startswith("line ")]
        assert named == wrong[:20]
        return
    assert not wrong and checked.total == right
    assert len(list(checked.rows())) == right
    checked.close()


def test_a_byte_order_mark_and_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line("a") + b"\r\n" + line("b") + b"\r\n")
    checked = BatchInput(path, HERE)
    assert [row.custom_id for row in checked.rows()] == ["a", "b"]
    checked.close()


def test_a_duplicate_names_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line("a") + b"\n\n" + line("a"))
    with pytest.raises(BatchInvalid) as caught:
        BatchInput(path, HERE)
    assert caught.value.problems == ["line 3: custom_id 'a' is already used in line 1"]


def test_the_check_keeps_little_of_a_file(tmp_path: Path) -> None:
    """Peak memory for a file with large rows is that of one row, not of the file."""
    import tracemalloc

    path = tmp_path / "in.jsonl"
    big = "x" * 1_000_000
    with open(path, "wb") as file:
        for i in range(30):
            file.write(line(str(i), body={"messages": [{"role": "user", "content": big}]}) + b"\n")
    tracemalloc.start()
    checked = BatchInput(path, HERE)
    rows = sum(1 for _ in checked.rows())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    checked.close()
    assert rows == 30 and peak < 12_000_000


def test_output_lines() -> None:
    tokens = [TokenLogprob(5, -0.5, (TopLogprob(5, -0.5), TopLogprob(6, -1.0)))]
    samples = [
        Sample("a\udc80", [5], "stop", Usage(9, 4, 2, 3), tokens, 0, "."),
        Sample("b", [6], "length", Usage(9, 4, 2, 5, reasoning_tokens=2), None, 1, reasoning="so"),
    ]
    answer = Generation("a", [5], "stop", samples[0].usage, tokens, samples, "r1", "m", "v", 7)
    row = json.loads(output_line("id", "é", answer))
    assert (row["id"], row["custom_id"], row["error"]) == ("id", "é", None)
    body = row["response"]["body"]
    assert row["response"]["status_code"] == 200 and row["response"]["request_id"] == "r1"
    assert [c["message"]["content"] for c in body["choices"]] == ["a?", "b"]
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["token"] == "token_id:6"
    assert body["choices"][1]["logprobs"] is None and body["choices"][1]["finish_reason"] == "length"
    assert [c["message"].get("reasoning") for c in body["choices"]] == [None, "so"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert body["usage"]["completion_tokens"] == 8 and body["usage"]["total_tokens"] == 17
    failure = errors.Overloaded("full", reason="QUEUE_FULL", request_id="r2")
    row = json.loads(output_line("id", "x", failure))
    assert row["error"] == {"code": "QUEUE_FULL", "message": "full"}
    assert row["response"]["status_code"] == 503 and row["response"]["body"]["error"]["type"] == "Overloaded"


def test_errors_name_the_fields_of_the_row() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 101}
    with pytest.raises(errors.InvalidArgument, match="^top_logprobs is 101; it must be from 0 to 100$"):
        parse_line(json.dumps({"custom_id": "a", "body": body}).encode(), 0, HERE)
    said = {
        "sampling.max_tokens": ("max_tokens 600 and a prompt of 20", "max_completion_tokens 600 and a prompt of 20"),
        "chat.messages[0].parts[1].image": (
            "chat.messages[0].parts[1].image: the image has 9 bytes", "messages[0].content[1]: the image has 9 bytes"
        ),
    }  # fmt: skip
    body = {"messages": body["messages"], "max_completion_tokens": 600}
    row = parse_line(json.dumps({"custom_id": "a", "body": body}).encode(), 0, HERE)
    for field, (sent, shown) in said.items():
        line = json.loads(output_line("id", "a", errors.InvalidArgument(sent, field=field), row.fields))
        assert line["error"]["message"] == line["response"]["body"]["error"]["message"] == shown


def test_each_error_has_a_status() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SaccadeError)]
    codes = {kind.__name__: status_code(kind("x")) for kind in kinds}
    assert all(400 <= code <= 504 for code in codes.values())
    assert codes["Internal"] == 500 and codes["InvalidArgument"] == 400 and codes["RateLimited"] == 429
    again = {name for name, code in codes.items() if is_transient(code)}
    assert {"Unavailable", "Overloaded", "RateLimited", "Internal", "DeadlineExceeded", "Cancelled"} <= again
    assert not again & {"InvalidArgument", "NotFound", "MessageTooLarge", "Unimplemented", "FailedPrecondition"}
