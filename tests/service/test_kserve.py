"""The KServe contract itself: fresh, private, and the same on the wire as Triton's."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from service import errors, kserve

ROOT = Path(__file__).resolve().parents[2]


def test_the_descriptors_are_fresh(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "protos" / "generate.py"), str(tmp_path)], check=True, capture_output=True
    )
    fresh = (tmp_path / "service" / "kserve.binpb").read_bytes()
    assert fresh == (ROOT / "service" / "kserve.binpb").read_bytes(), "run `make protos`"


def fields(descriptor: Any) -> dict[str, tuple[Any, ...]]:
    return {f.name: (f.number, f.type, f.is_repeated) for f in descriptor.fields}


def test_every_field_is_where_tritons_client_looks_for_it() -> None:
    theirs = service_pb2.DESCRIPTOR
    ours = kserve.message("ModelInferRequest").DESCRIPTOR.file
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
    message = kserve.message("ModelInferRequest")(model_name="m")
    for name, (datatype, shape, raw) in inputs.items():
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    return message


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_bytes_tensors(values: list[bytes]) -> None:
    raw = b"".join(struct.pack("<I", len(v)) + v for v in values)
    assert kserve.read_tensors(request(image=("BYTES", [len(values)], raw)))["image"] == values


@given(st.binary(max_size=40), st.lists(st.integers(-2, 5), max_size=3))
def test_garbage_is_refused_and_nothing_else(raw: bytes, shape: list[int]) -> None:
    try:
        values = kserve.read_tensors(request(image=("BYTES", shape, raw)))["image"]
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
        question = kserve.read_request(message)
    except errors.InvalidArgument:
        return
    assert question.request.prompt.text == "a"


def test_shared_memory_is_refused_by_name() -> None:
    message = request(text_input=("BYTES", [1], b"\x01\0\0\0a"))
    message.inputs[0].parameters["shared_memory_region"].string_param = "region"
    with pytest.raises(errors.Unimplemented, match="text_input"):
        kserve.read_tensors(message)
