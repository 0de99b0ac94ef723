"""Conversion of requests for `vllm.grpc.engine.VllmEngine`. tests/e2e/test_gateway.py has the calls."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from service.common import errors
from service.rpc.vllm_engine import request_from


def with_media(url: str, modality: str) -> Any:
    request = vllm_engine_pb2.GenerateRequest(text="a")
    request.media_refs.items.add(modality=common_pb2.Modality.Value(modality), url=url)
    return request


@pytest.mark.parametrize("modality", ["IMAGE", "VIDEO"])
def test_media_are_data_urls_or_others(modality: str) -> None:
    def source(url: str) -> Any:
        prompt = request_from(with_media(url, modality)).prompt
        (file,) = prompt.images or prompt.videos
        return file

    assert source("https://x/y").uri == "https://x/y"
    for url in ("data:;base64,YW\nI=", "DATA:image/png;BASE64,YWI%3D", "data:,%61b"):
        assert source(url).data == b"ab"
    for url, problem in (("data:;base64", "comma"), ("data:;base64,YW I=", "base64")):
        with pytest.raises(errors.InvalidArgument, match=rf"media_refs.items\[0\].url: .*{problem}") as caught:
            source(url)
        assert caught.value.field == "media_refs.items[0].url"
