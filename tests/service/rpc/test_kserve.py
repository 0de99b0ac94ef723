"""The KServe contract: fresh, in a private pool, and identical to Triton's on the wire."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzz import kserve_request
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from service.answers import convert
from service.common import errors
from service.rpc import kserve_messages
from service.rpc.kserve_requests import LONGEST_TIMEOUT, read_request
from service.rpc.kserve_tensors import read_tensors
from service.rpc.statuses import trailers

ROOT = Path(__file__).resolve().parents[3]


def test_the_descriptors_are_fresh(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "protos" / "generate.py"), str(tmp_path)], check=True, capture_output=True
    )
    fresh = (tmp_path / "service" / "rpc" / "kserve.binpb").read_bytes()
    assert fresh == (ROOT / "service" / "rpc" / "kserve.binpb").read_bytes(), "run `make protos`"


def fields(descriptor: Any) -> dict[str, tuple[Any, ...]]:
    return {f.name: (f.number, f.type, f.is_repeated) for f in descriptor.fields}


def test_every_field_is_where_tritons_client_looks_for_it() -> None:
    theirs = service_pb2.DESCRIPTOR
    ours = kserve_messages.message("ModelInferRequest").DESCRIPTOR.file
    assert {m.name for m in ours.services_by_name["GRPCInferenceService"].methods} == {
        m.name for m in theirs.services_by_name["GRPCInferenceService"].methods
    }
    from tritonclient.grpc import model_config_pb2

    def compare(mine: Any, other: Any) -> None:
        known = fields(other)
        for name, place in fields(mine).items():
            assert known[name] == place, f"{mine.full_name}.{name}"
        for name, nested in mine.nested_types_by_name.items():
            compare(nested, other.nested_types_by_name[name])

    for name, mine in ours.message_types_by_name.items():
        other = theirs.message_types_by_name.get(name) or model_config_pb2.DESCRIPTOR.message_types_by_name[name]
        compare(mine, other)
        if name in theirs.message_types_by_name:
            assert set(fields(mine)) == set(fields(other)), name


def request(**inputs: tuple[str, list[int], bytes]) -> Any:
    message = kserve_messages.message("ModelInferRequest")(model_name="m")
    for name, (datatype, shape, raw) in inputs.items():
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    return message


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_bytes_tensors(values: list[bytes]) -> None:
    raw = b"".join(struct.pack("<I", len(v)) + v for v in values)
    assert read_tensors(request(image=("BYTES", [len(values)], raw)))["image"] == values


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("BYTES", [2**16 + 1], bytes(4)), "image has 65537 elements; at most 65536 are allowed"),
        (("BYTES", [2**40, 0, 2**40], bytes(4)), "image has the shape .*, but more than 0 elements"),
        (("BYTES", [1] * 9, bytes(4)), "of 9 dimensions; at most 8 are allowed"),
        (("BYTES", [2**62] * 50_000, bytes(4)), "of 50000 dimensions; at most 8 are allowed"),
        (("BYTES", [-1], bytes(4)), r"shape \[-1\] of 1 dimensions"),
        (("BYTES", [3], bytes(4 * 2**20)), "but more than 3 elements"),
    ],
)
def test_elements_are_counted_before_they_are_read(tensor: tuple[str, list[int], bytes], message: str) -> None:
    """A raw tensor is one field of a message, and may have a million elements of no bytes."""
    with pytest.raises(errors.InvalidArgument, match=message) as refused:
        read_tensors(request(image=tensor))
    assert len(str(refused.value)) < 300


def test_an_output_that_is_named_twice_is_sent_once() -> None:
    message = request(text_input=("BYTES", [1], b"\x01\0\0\0x"))
    for name in ("token_ids", "text_output", "token_ids"):
        message.outputs.add(name=name)
    assert read_request(message).outputs == ("token_ids", "text_output")


def of_parts(*parts: Any) -> Any:
    text = json.dumps([{"role": "user", "content": parts}]).encode()
    return request(messages=("BYTES", [1], struct.pack("<I", len(text)) + text))


def test_videos_of_messages() -> None:
    data = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}, "max_frames": 8}
    elsewhere = {"type": "video_url", "video_url": "https://example.com/a.mp4"}
    (message,) = read_request(of_parts(data, elsewhere, {"type": "text", "text": "?"})).request.chat.messages
    first, second, text = message.parts
    assert (first.video.data, first.video.max_frames, text.text) == (b"hi", 8, "?")
    assert second.video.uri == "https://example.com/a.mp4" and not second.video.HasField("max_frames")
    for most in (0, 2**31, "8", True, 1.5):
        words = re.escape(f"messages[0]: max_frames is {str(most)!r}; it must be a whole number, at least 1")
        with pytest.raises(errors.InvalidArgument, match=words):
            read_request(of_parts({**data, "max_frames": most}))
    with pytest.raises(errors.InvalidArgument, match="neither text, image nor video"):
        read_request(of_parts({"type": "audio"}))


@given(st.binary(max_size=40), st.lists(st.integers(-2, 5), max_size=3))
def test_garbage_is_refused_and_nothing_else(raw: bytes, shape: list[int]) -> None:
    try:
        values = read_tensors(request(image=("BYTES", shape, raw)))["image"]
    except errors.InvalidArgument:
        return
    assert sum(4 + len(v) for v in values) == len(raw)


NAMES = st.sampled_from(["max_tokens", "stop", "seed", "logit_bias", "n", "x"])
VALUES = st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.lists(st.integers()))


@given(st.dictionaries(NAMES, VALUES))
def test_sampling_parameters_are_taken_or_refused(values: dict[str, Any]) -> None:
    raw = json.dumps(values).encode()
    message = request(
        text_input=("BYTES", [1], b"\x01\0\0\0a"),
        sampling_parameters=("BYTES", [1], struct.pack("<I", len(raw)) + raw),
    )
    try:
        question = read_request(message)
    except errors.InvalidArgument:
        return
    assert question.request.prompt.text == "a"


def test_shared_memory_is_refused_by_name() -> None:
    message = request(text_input=("BYTES", [1], b"\x01\0\0\0a"))
    message.inputs[0].parameters["shared_memory_region"].string_param = "region"
    with pytest.raises(errors.Unimplemented, match="text_input"):
        read_tensors(message)


def element(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def chat(messages: Any) -> Any:
    return request(messages=("BYTES", [1], element(json.dumps(messages).encode())))


def prompt(**parameters: Any) -> Any:
    message = request(text_input=("BYTES", [1], element(b"a")))
    for name, value in parameters.items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        setattr(message.parameters[name], f"{kind}_param", value)
    return message


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (prompt(priority="high"), "priority is 'high'; it must be a whole number, at least 0"),
        (prompt(priority=-1), "priority is '-1'"),
        (prompt(priority=True), "priority is 'True'"),
        (prompt(timeout=float("inf")), "timeout is 'inf'"),
        (prompt(timeout=float("nan")), "timeout is 'nan'"),
        (prompt(timeout=-5), "timeout is '-5'"),
        (prompt(stream="false"), "stream is 'false'; it must be true or false"),
        (prompt(triton_enable_empty_final_response=1), "triton_enable_empty_final_response is '1'"),
        (prompt(exclude_input_in_output=0), "exclude_input_in_output is '0'"),
        (prompt(sequence_id=3), "stateful sequences"),
        (prompt(enable_thinking="yes"), "enable_thinking is 'yes'; it must be true or false"),
        (prompt(reasoning_effort=3), "reasoning_effort is '3'; it must be a string"),
        (chat([{"role": [], "content": "a"}]), "needs a role"),
        (chat([{"role": {}, "content": "a"}]), "needs a role"),
        (chat([{"role": "user", "content": 5}]), "neither text nor a list"),
        (chat([{"role": "user", "content": {"type": "text"}}]), "neither text nor a list"),
        (chat([{"role": "user", "content": [5]}]), "neither text, image nor video"),
        (chat([{"role": "user", "content": "\ud800"}]), "half of a surrogate pair"),
        (
            chat([{"role": "user", "content": [{"type": "image_url", "image_url": "a\udfff"}]}]),
            "half of a surrogate pair",
        ),
        (chat([USER, "user"]), "needs a role"),
        (chat([USER, {"role": "assistant", "content": "a", "reasoning": 5}]), "has reasoning that is not text"),
        (chat({"role": "user"}), "must be a JSON list"),
        (request(messages=("BYTES", [1], element(b"[" + b"1" * 5000 + b"]"))), "is not JSON"),
        (request(messages=("BYTES", [1], element(b"[" * 60_000))), "nested 60000 deep; at most 100"),
        (request(messages=("BYTES", [1], element(b"[" + b"{}," * 65_536 + b"1]"))),
         "messages has 65537 objects and arrays; at most 65536"),
        (request(messages=("BYTES", [1], element(b"[" + b'"ab",' * 262_144 + b"1]"))),
         "messages has 262146 values and keys; at most 262144"),
        (request(messages=("BYTES", [1], element(b"\xff"))), "not UTF-8"),
    ],
)  # fmt: skip
def test_nonsense_is_an_invalid_argument_that_says_which(message: Any, words: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        read_request(message)
    assert words in str(refused.value)
    trailers(refused.value, "id")


@pytest.mark.parametrize("key", ["01", "00", "+1", "1_0", " 1", "\u0661", ""])
def test_a_token_id_is_written_in_one_way(key: str) -> None:
    message = prompt()
    message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(element(json.dumps({"logit_bias": {"1": 5, key: 1}}).encode()))
    with pytest.raises(errors.InvalidArgument, match="logit_bias cannot be"):
        read_request(message)


def test_what_makes_sense_is_taken() -> None:
    question = read_request(prompt(priority=2**40, timeout=2_500_000, stream=True))
    assert (question.request.priority, question.timeout, question.stream) == (-(2**31 - 1), 2.5, True)
    question = read_request(prompt(priority=1, timeout=0))
    assert (question.request.priority, question.timeout, question.stream) == (-1, None, False)
    assert read_request(prompt(timeout=2**63 - 1)).timeout == LONGEST_TIMEOUT
    question = read_request(chat([{"role": "user", "content": "\ud83d\ude00"}, {"role": "assistant"}]))
    assert question.request.chat.messages[0].parts[0].text == "\N{GRINNING FACE}"


def test_messages_have_what_they_have_over_http() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YW\nJj\n"}}
    turns = [
        {"role": "developer", "content": "a"}, {"role": "user", "content": [image]},
        {"role": "assistant", "content": "b", "reasoning": "hm"}, {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "so"},
    ]  # fmt: skip
    messages = read_request(chat(turns)).request.chat.messages
    assert [message.role for message in messages] == [1, 2, 3, 2, 3]
    assert messages[1].parts[0].image.data == b"abc"
    assert [message.reasoning for message in messages] == ["", "", "hm", "", "so"]
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    ask = request(
        messages=("BYTES", [1], element(json.dumps(turns).encode())),
        tools=("BYTES", [1], element(json.dumps([tool]).encode())),
    )
    assert [tool.name for tool in read_request(ask).request.chat.tools] == ["f"]


@pytest.mark.parametrize("thinking", [{"enable_thinking": False}, {"enable_thinking": True, "reasoning_effort": "low"}])
def test_options_of_the_template_are_parameters_or_in_the_tensor(thinking: dict[str, Any]) -> None:
    """A prompt with images becomes a chat of one message, which the template gets either way."""
    parts = [{"type": "image"}, {"type": "text", "text": "a"}]
    for tensor in (False, True):
        read = []
        for message in (prompt(), with_images([{"role": "user", "content": parts}])):
            message.inputs.add(name="image", datatype="BYTES", shape=[1])
            message.raw_input_contents.append(element(b"one"))
            if tensor:
                message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
                message.raw_input_contents.append(element(json.dumps({**thinking, "max_tokens": 3}).encode()))
            for name, value in () if tensor else thinking.items():
                setattr(message.parameters[name], "string_param" if isinstance(value, str) else "bool_param", value)
            read.append(read_request(message).request)
            convert.spec_from_proto(read[-1])
        assert read[0] == read[1] and read[0].chat.enable_thinking == thinking["enable_thinking"]
        assert read[0].chat.HasField("enable_thinking")
        assert read[0].chat.reasoning_effort == thinking.get("reasoning_effort", "")
        assert read[0].sampling.max_tokens == (3 if tensor else 0)


def test_a_message_is_continued() -> None:
    message = chat([{"role": "assistant", "content": "It is"}])
    message.parameters["continue_final_message"].bool_param = True
    assert read_request(message).request.chat.continue_final_message


def test_the_input_is_in_the_output_only_where_that_is_asked_for() -> None:
    """As in Triton's own vLLM back end, except for the default."""
    for value, prefix in ((b"\x01", ""), (b"\x00", "a")):
        message = prompt()
        message.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
        message.raw_input_contents.append(value)
        assert read_request(message).prefix == prefix
    assert read_request(prompt()).prefix == ""
    with pytest.raises(errors.InvalidArgument, match="on a stream"):
        read_request(prompt(exclude_input_in_output=False, stream=True))
    message = chat([USER])
    message.parameters["exclude_input_in_output"].bool_param = False
    with pytest.raises(errors.InvalidArgument, match="with messages"):
        read_request(message)


def test_random_requests_are_taken_or_refused_by_name() -> None:
    """Neither reading nor the error message ever raises another kind of exception."""
    rng, taken = random.Random(7), 0
    for _ in range(3000):
        try:
            convert.spec_from_proto(read_request(kserve_request(rng)).request)
        except errors.StatusError as error:
            assert error.code.name in ("INVALID_ARGUMENT", "UNIMPLEMENTED"), error
            trailers(error, "id")
        else:
            taken += 1
    assert 100 < taken < 2900, "the generator has lost its aim"


def with_images(messages: Any, *images: bytes, urls: tuple[str, ...] = ()) -> Any:
    message = chat(messages)
    for name, values in (("image", images), ("image_url", [url.encode() for url in urls])):
        if values:
            message.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
            message.raw_input_contents.append(b"".join(map(element, values)))
    return message


def test_images_go_to_their_places_in_order() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "t"}, {"type": "image"},
             {"type": "image_url", "image_url": {"url": "https://x/y"}},
             {"type": "image_url", "image_url": "data:image/png;base64,YWI="}]  # fmt: skip
    message = with_images([{"role": "user", "content": parts}], b"one", urls=("data:;base64,dHdv",))
    found = read_request(message).request.chat.messages[0].parts
    assert [(p.text, p.image.data, p.image.uri) for p in found] == [
        ("", b"one", ""), ("t", b"", ""), ("", b"two", ""), ("", b"", "https://x/y"), ("", b"ab", ""),
    ]  # fmt: skip
    prompt_images = prompt()
    prompt_images.inputs.add(name="image", datatype="BYTES", shape=[1])
    prompt_images.raw_input_contents.append(element(b"one"))
    assert [i.data for i in read_request(prompt_images).request.prompt.images] == [b"one"]


IMAGE = {"role": "user", "content": [{"type": "image"}]}


@pytest.mark.parametrize("url", ["DATA:image/png;BASE64,YWI=", "data:;base64,YWI%3D", "data:image/png,%61b"])
def test_every_form_of_a_data_url(url: str) -> None:
    (part,) = read_request(with_images([IMAGE], urls=(url,))).request.chat.messages[0].parts
    assert part.image.data == b"ab"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (with_images([IMAGE]), "more image parts than there are images"),
        (with_images([USER], b"one"), "more images than image parts"),
        (with_images([IMAGE], b"one", b"two"), "more images than image parts"),
        (with_images([IMAGE], urls=("data:;base64",)), "image_url: a data URL needs a comma"),
        (with_images([IMAGE], urls=("data:;base64,a",)), "base64 cannot be decoded"),
        (with_images([IMAGE], urls=("data:;base64,YW I=",)), "base64 cannot be decoded"),
        (request(), "one of the inputs text_input and messages"),
        (
            request(text_input=("BYTES", [1], element(b"a")), messages=("BYTES", [1], element(b"[]"))),
            "one of the inputs text_input",
        ),
        (request(text_input=("BYTES", [2], element(b"a") * 2)), "has 2 elements; it must have one"),
        (request(text_input=("BYTES", [2], element(b"a"))), "has the shape [2], but 1 elements"),
        (request(text_input=("BYTES", [-1], element(b"a"))), "has the shape [-1]"),
        (request(text_input=("BYTES", [-1, -1], element(b"a"))), "has the shape [-1, -1]"),
        (request(text_input=("BOOL", [1], b"a")), "must be BYTES"),
        (request(stream=("BYTES", [1], element(b"a"))), "must be BOOL"),
        (request(other=("BYTES", [1], element(b"a"))), "no input 'other'"),
        (prompt(n=2), "no parameter 'n'"),
        (prompt(max_tokens="many"), "max_tokens cannot be 'many'"),
    ],
)
def test_inputs_that_do_not_fit_together(message: Any, words: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        read_request(message)
    assert words in str(refused.value)


def test_what_is_sent_twice_or_beside_itself() -> None:
    twice = request(text_input=("BYTES", [1], element(b"a")))
    twice.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    twice.raw_input_contents.append(element(b"b"))
    beside = prompt()
    beside.inputs[0].contents.bytes_contents.append(b"a")
    short = prompt()
    short.inputs.add(name="image", datatype="BYTES", shape=[0])
    unset, output = prompt(), prompt()
    unset.parameters["seed"].SetInParent()
    output.outputs.add(name="logits")
    cases = [
        (twice, "given twice"), (beside, "has contents as well"), (short, "1 raw_input_contents for 2"),
        (unset, "has no value"), (output, "no output 'logits'"),
    ]  # fmt: skip
    for message, words in cases:
        with pytest.raises(errors.InvalidArgument, match=words):
            read_request(message)


def test_values_of_parameters_and_of_the_tensor() -> None:
    message = prompt(
        max_tokens=5, temperature=0.5, stop="end", ignore_eos=True, triton_enable_empty_final_response=True
    )
    message.outputs.add(name="token_ids")
    raw = json.dumps({"max_tokens": 9, "top_k": 3, "stop_token_ids": 7, "logit_bias": {"4": -1.5}}).encode()
    message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(element(raw))
    question = read_request(message)
    sampling = question.request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.ignore_eos) == (5, 0.5, 3, True)
    assert (list(sampling.stop), list(sampling.stop_token_ids), dict(sampling.logit_bias)) == (["end"], [7], {4: -1.5})
    assert question.outputs == ("token_ids",) and question.empty_final
    assert read_request(prompt()).outputs == ("text_output", "token_ids", "finish_reason", "reasoning", "tool_calls")
