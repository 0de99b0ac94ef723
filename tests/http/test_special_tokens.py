"""Special tokens that a tokenizer adds to texts: completions, embeddings and `/tokenize` have them, chats do not. And
system messages that a template rejects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import RunningServer
from running_http import RunningHttp
from served import SPECIAL, TEMPLATE, make_served
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import saccade

BOS = SPECIAL.index("<s>")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_served(tmp_path_factory.mktemp("model") / "tiny", vision=False).path
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", BOS)])
    tokenizer.save(str(file))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
        "{% endif %}{% endfor %}" + TEMPLATE
    )
    with RunningServer(str(folder), max_seqs=4, max_len=600) as running:
        yield running.address


@pytest.fixture(scope="module")
def post(address: str) -> Iterator[Any]:
    with RunningHttp([address]) as http:
        yield lambda path, **body: httpx.post(f"{http.url}{path}", json=body, timeout=60).json()


def ids_of(post: Any, **body: Any) -> list[int]:
    ids: list[int] = post("/tokenize", **body)["tokens"]
    return ids


def test_texts_have_them_unless_told_otherwise(post: Any, address: str) -> None:
    with saccade.Client(address) as client:
        bare = client.tokenize("abé", raw=True).token_ids
        assert BOS not in bare, "raw text of the SDK is taken as it is"
        assert ids_of(post, prompt="abé") == [BOS, *bare]
        assert ids_of(post, prompt="<s>abé") == [BOS, *bare], "not twice"
        assert post("/tokenize", prompt="a")["max_model_len"] == client.get_model().limits.context_length == 600
        assert ids_of(post, prompt="abé", add_special_tokens=False) == bare
        chat = [{"role": "user", "content": "abé"}]
        assert ids_of(post, messages=chat) == client.tokenize("abé").token_ids
        options = {"max_tokens": 6, "temperature": 0}
        for ids, prompt, more in (
            ([BOS, *bare], "abé", {}), (bare, "abé", {"add_special_tokens": False}), (bare, list(bare), {})
        ):  # fmt: skip
            answer = post("/v1/completions", prompt=prompt, **options, **more)
            assert answer["choices"][0]["text"] == client.generate(ids, **options).text
            assert answer["usage"]["prompt_tokens"] == len(ids)
            vector = post("/v1/embeddings", input=prompt, **more)["data"][0]["embedding"]
            assert vector == client.embed(ids).mean.tolist()


def test_ids_of_a_chat_are_its_prompt_again(post: Any) -> None:
    text = post("/detokenize", tokens=ids_of(post, messages=[{"role": "user", "content": "abé"}]))["prompt"]
    assert "abé" in text and "<|im_end|>" in text
    ids = ids_of(post, prompt=text, add_special_tokens=False)
    assert post("/detokenize", tokens=ids)["prompt"] == text
    assert post("/detokenize", tokens=ids_of(post, prompt="a"))["prompt"] == "<s>a"


def test_echo_has_their_log_probabilities(post: Any) -> None:
    echo = {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    choice = post("/v1/completions", prompt="ab", **echo)["choices"][0]
    assert choice["text"] == "ab" and choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    ids = post("/v1/completions", prompt=ids_of(post, prompt="ab"), **echo)["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == ids["logprobs"]["token_logprobs"]


def test_messages_have_those_of_the_template(post: Any) -> None:
    refused = post("/tokenize", messages=[{"role": "user", "content": "a"}], add_special_tokens=True)
    assert "add_special_tokens" in refused["error"]["message"]


def test_late_system_messages_are_counted_as_they_are_read(post: Any, address: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    late: dict[str, Any] = {"late_system_as_user": True}
    asked = {"messages": messages, "max_tokens": 1}
    with saccade.Client(address) as client:
        told = client.tokenize(messages, **late)
        assert told.prompt_tokens == client.chat(messages, max_tokens=1, **late).usage.prompt_tokens
        with pytest.raises(saccade.errors.InvalidArgument, match="system first"):
            client.tokenize(messages)
    assert ids_of(post, messages=messages, **late) == told.token_ids
    assert post("/v1/chat/completions", **asked, **late)["usage"]["prompt_tokens"] == told.prompt_tokens
    assert "system first" in post("/tokenize", messages=messages)["error"]["message"]
