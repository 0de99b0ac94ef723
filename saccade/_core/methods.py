"""The unary methods: the calls that they make and how their results are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade._core.ranges import check_string
from saccade._core.results import embedding_from, generation_from, model_from, tensor_from, tokens_from
from saccade._core.steps import Call, Do, Steps
from saccade._core.uploads import call_steps
from saccade.types import Embedding, Generation, Model, Tensor, Tokens
from saccade.v1 import inference_pb2, model_pb2


def one_call(call: Call) -> Steps[Any]:
    return (yield call)


def answer_steps(
    request: inference_pb2.GenerateRequest, upload_above: int | None
) -> Steps[inference_pb2.GenerateResponse]:
    """Sends a request that has been built and returns the server's answer."""
    response: inference_pb2.GenerateResponse = yield from call_steps(
        Call("inference", "Generate", request), upload_above
    )
    return response


def generate_steps(build: Callable[[], inference_pb2.GenerateRequest], upload_above: int | None) -> Steps[Generation]:
    request = yield Do(build)
    response = yield from answer_steps(request, upload_above)
    return generation_from(response, request.sampling)


def tokenize_steps(build: Callable[[], inference_pb2.TokenizeRequest], upload_above: int | None) -> Steps[Tokens]:
    answer = yield from call_steps(Call("inference", "Tokenize", (yield Do(build))), upload_above)
    return tokens_from(answer)


def embed_steps(build: Callable[[], inference_pb2.EmbedRequest], upload_above: int | None) -> Steps[Embedding]:
    answer = yield from call_steps(Call("inference", "Embed", (yield Do(build))), upload_above)
    return embedding_from(answer)


def embed_image_steps(build: Callable[[], inference_pb2.EmbedRequest], upload_above: int | None) -> Steps[Tensor]:
    answer = yield from call_steps(Call("inference", "Embed", (yield Do(build))), upload_above)
    return tensor_from(answer.image_embedding)


def models_steps() -> Steps[list[Model]]:
    found: list[Model] = []
    token = ""
    while True:
        page = yield Call("model", "ListModels", model_pb2.ListModelsRequest(page_token=token))
        found += map(model_from, page.models)
        if not (token := page.next_page_token):
            return found


def get_model_steps(name: str) -> Steps[Model]:
    request = model_pb2.GetModelRequest(name=check_string("name", name))
    return model_from((yield Call("model", "GetModel", request)).model)
