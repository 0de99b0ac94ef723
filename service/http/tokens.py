"""`/v1/embeddings`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from saccade._core.requests import build_request, embed_request
from saccade._core.results import embedding_from
from saccade._openai.chat import chat_request
from saccade._openai.completion_schema import Detokenize, Embeddings, Tokenize, prompt_list
from saccade._openai.fields import CHAT, DETOKENIZE, prompt_rules
from saccade._openai.problems import validated
from saccade._openai.schema import ChatCompletion, Message, Templated
from saccade.errors import InvalidArgument
from saccade.types import Embedding
from saccade.v1 import inference_pb2, model_pb2
from service.http.call import HttpCall, beside
from service.http.chat import no_paths
from service.http.upstream import all_of


async def embeddings(call: HttpCall) -> None:
    """Embeddings of prompts or of messages, from the model's hidden states."""
    call.fields = prompt_rules("input")
    body = validated(Embeddings, await call.json())
    call.fields = CHAT if body.input is None else call.fields
    caller = call.caller()
    prompts: Sequence[str | list[int] | None] = [None] if body.input is None else prompt_list(body.input)

    async def one(index: int) -> Embedding:
        request_id = call.id_of_prompt(index, len(prompts))
        request = await beside(call.held, _embed_request, body, prompts[index], request_id)
        if call.priority is not None:
            request.priority = call.priority
        return embedding_from(await caller.call("inference", "Embed", request))

    async with call.connected(), caller.as_one(len(prompts) > 1):
        found = await all_of(one, range(len(prompts)))
    size = found[0].mean.shape[-1]
    if body.dimensions not in (None, size):
        raise InvalidArgument(f"dimensions: the model's embeddings have {size} numbers, got {body.dimensions}")
    tokens = sum(embedding.prompt_tokens for embedding in found)
    await call.respond({
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _vector(embedding, body)}
            for i, embedding in enumerate(found)
        ],
        "model": found[0].model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    })  # fmt: skip


def _embed_request(body: Embeddings, prompt: str | list[int] | None, request_id: str) -> inference_pb2.EmbedRequest:
    """The request for one prompt; None: the messages."""
    if prompt is None:
        chat = _chat_input(body, body.messages or [])
        return inference_pb2.EmbedRequest(request_id=request_id, model=body.model or "", chat=chat)
    request = embed_request(prompt, raw=isinstance(prompt, str), model=body.model or "")
    request.request_id = request_id
    if isinstance(prompt, str):
        request.prompt.add_special_tokens = body.add_special_tokens is not False
    return request


def _chat_input(body: Templated, messages: Sequence[Message]) -> inference_pb2.ChatInput:
    """The messages as those of a chat completion."""
    same = {name: getattr(body, name) for name in Templated.model_fields}
    return chat_request(ChatCompletion.model_construct(messages=messages, **same), no_paths).chat


def _vector(embedding: Embedding, body: Embeddings) -> Any:
    tensor = embedding.last if body.pooling == "last" else embedding.mean
    return base64.b64encode(tensor.data).decode() if body.encoding_format == "base64" else tensor.tolist()


async def tokenize(call: HttpCall) -> None:
    """The token ids of a prompt, and how many tokens of the context it takes."""
    body = validated(Tokenize, await call.json())
    call.fields = CHAT if body.prompt is None else prompt_rules("prompt")
    caller = call.caller()
    request = await beside(call.held, _tokenize_request, body)
    async with call.connected(), caller.as_one(bool(body.return_token_strs)):
        told = await caller.call("inference", "Tokenize", request)
        strings = None
        if body.return_token_strs:
            named = model_pb2.DetokenizeRequest(model=body.model or "", token_ids=told.token_ids)
            answer = await caller.call("model", "Detokenize", named)
            strings = [token.decode("utf-8", "replace") for token in answer.tokens]
    await call.respond({
        "tokens": list(told.token_ids),
        "count": told.prompt_tokens,
        "max_model_len": told.context_length,
        "token_strs": strings,
        "image_tokens": told.image_tokens,
        "tokens_per_image": list(told.tokens_per_image),
        "video_tokens": told.video_tokens,
    })  # fmt: skip


def _tokenize_request(body: Tokenize) -> inference_pb2.TokenizeRequest:
    if body.messages is None:
        built = build_request(body.prompt or "", raw=True)
        built.prompt.add_special_tokens = body.add_special_tokens is not False
        return inference_pb2.TokenizeRequest(model=body.model or "", prompt=built.prompt)
    chat = _chat_input(body, body.messages)
    return inference_pb2.TokenizeRequest(model=body.model or "", chat=chat)


async def detokenize(call: HttpCall) -> None:
    """The text of token ids, with the names of special tokens, as vLLM's."""
    call.fields = DETOKENIZE
    body = validated(Detokenize, await call.json())
    request = model_pb2.DetokenizeRequest(model=body.model or "", token_ids=body.tokens, skip_special_tokens=False)
    async with call.connected():
        told = await call.caller().call("model", "Detokenize", request)
    tokens = [token.decode("utf-8", "replace") for token in told.tokens]
    await call.respond({"prompt": told.text, "tokens": tokens})
