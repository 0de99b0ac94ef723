"""The clients' methods that end in one answer, written once: what is sent, in which order, and what becomes of it."""

from __future__ import annotations

from typing import Any

from saccade._core.results import embedding_from, model_from, tensor_from, tokens_from
from saccade._core.steps import Call, Steps
from saccade._core.uploads import call_steps
from saccade.types import Embedding, Model, Tensor, Tokens
from saccade.v1 import inference_pb2, model_pb2


def one_call(call: Call) -> Steps[Any]:
    return (yield call)


def generate_steps(request: inference_pb2.GenerateRequest, upload_above: int | None) -> Steps[Any]:
    return (yield from call_steps(Call("inference", "Generate", request), upload_above))


def tokenize_steps(request: inference_pb2.TokenizeRequest, upload_above: int | None) -> Steps[Tokens]:
    answer = yield from call_steps(Call("inference", "Tokenize", request), upload_above)
    return tokens_from(answer)


def embed_steps(request: inference_pb2.EmbedRequest, upload_above: int | None) -> Steps[Embedding]:
    answer = yield from call_steps(Call("inference", "Embed", request), upload_above)
    return embedding_from(answer)


def embed_image_steps(request: inference_pb2.EmbedRequest, upload_above: int | None) -> Steps[Tensor]:
    answer = yield from call_steps(Call("inference", "Embed", request), upload_above)
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
    return model_from((yield Call("model", "GetModel", model_pb2.GetModelRequest(name=name))).model)
