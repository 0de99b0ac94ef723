"""Prompts compared with transformers' tokenizer, template renderer and processor: equal ids for any content."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_prompt import processor, processor_ids, write_prompting
from qwen_vision import random_item

from families.qwen3_5.vision import QwenVision
from service.answers.prompts import Prompt, prompt_ids, system_end, widen
from service.common import errors
from service.common.types import ChatInput, GenerateSpec, Message, RawInput, TokensInput
from service.engine.types import EngineInfo
from service.media.prepared import PreparedItem
from service.model.assets import ModelAssets
from service.model.modelconfig import load_config

INFO = EngineInfo("m", "r", 100_000, 4, 50_000, "float32")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What it is like <outside>, naïvely",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1}},
                "required": ["days"],
            },
        },
    }
]


class Oracle:
    """One directory, as read by this server and by transformers."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = write_prompting(path)
        config = load_config(path)
        self.assets = ModelAssets(config, config.vision)
        assert isinstance(config.vision, QwenVision)
        self.vision = config.vision
        self.processor = processor(self.tokenizer)

    def media(self, items: list[dict[str, Any]]) -> list[PreparedItem]:
        """Images of a `grid`, clips of a `grid`, `fps` and `indices`."""
        made = []
        for number, item in enumerate(items):
            *time, rows, columns = item["grid"]
            grid, labels = (rows, columns), ()
            if time:
                rule = self.vision.video_rule
                labels = tuple(rule.labels(len(item["indices"]), fps=item["fps"], indices=item["indices"]))
            found = random_item(self.vision, grid, pairs=time[0] if time else 0)
            key = b"key%d" % number
            made.append(PreparedItem(found, None, f"images[{number}]", key, labels, len(labels)))
        return made

    def expected(self, text: str, items: list[dict[str, Any]]) -> list[int]:
        images = [item["grid"] for item in items if len(item["grid"]) == 2]
        return processor_ids(self.processor, text, images, [item for item in items if len(item["grid"]) == 3])

    def found(self, given: Any, items: list[dict[str, Any]]) -> Prompt:
        media = self.media(items)
        return widen(prompt_ids(GenerateSpec("r", "", given), media, self.assets), media, 0, self.assets, INFO)

    def chat(self, turns: list[tuple[str, Any]], items: list[dict[str, Any]], **arguments: Any) -> None:
        """Compares the ids of a conversation, whose contents are text or lists of text, `image` and `video`, with
        transformers'."""
        kinds = {"image": {"type": "image"}, "video": {"type": "video"}}
        conversation, messages = [], []
        for role, content in turns:
            parts = [content] if isinstance(content, str) else content
            listed = [kinds.get(part) or {"type": "text", "text": part} for part in parts]
            conversation.append({"role": role, "content": content if isinstance(content, str) else listed})
            messages.append(Message(role, tuple(None if part in kinds else part for part in parts)))
        text = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False, **arguments)
        prompt = self.found(ChatInput(tuple(messages), arguments), items)
        assert prompt.ids == self.expected(text, items)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("prompting"))


SMALL, WIDE, TALL = {"grid": (2, 2)}, {"grid": (4, 10)}, {"grid": (8, 2)}
CLIP = {"grid": (3, 4, 6), "fps": 2.0, "indices": [0, 5, 9, 12, 16]}
SHORT = {"grid": (1, 2, 2), "fps": None, "indices": [0, 30]}
THOUGHT = "<think>\nhm\n</think>\n\nA cat."


@pytest.mark.parametrize(
    ("turns", "items", "arguments"),
    [
        pytest.param([("user", "what?")], [], {}, id="text"),
        pytest.param([("user", "what?")], [], {"enable_thinking": False}, id="no-thinking"),
        pytest.param([("user", "what?")], [], {"enable_thinking": True}, id="thinking"),
        pytest.param([("system", "be brief"), ("user", "what?")], [], {}, id="system"),
        pytest.param([("system", "be brief"), ("user", "hot?")], [], {"tools": TOOLS}, id="tools"),
        pytest.param(
            [("user", "hot?"), ("assistant", "<tool_call>\n<function=weather>\n</function>\n</tool_call>"),
             ("tool", '{"C": 3}'), ("user", "and now?")], [], {"tools": TOOLS}, id="tool-calls",
        ),
        pytest.param([("user", "a"), ("assistant", THOUGHT), ("user", "b")], [], {}, id="earlier-thoughts"),
        pytest.param([("user", ["image", "what is it?"])], [WIDE], {}, id="image"),
        pytest.param([("user", ["image", "image", "or", "image", "?"])], [WIDE, SMALL, TALL], {}, id="images"),
        pytest.param([("user", ["a", "image"]), ("assistant", THOUGHT), ("user", ["image", "b"])], [TALL, WIDE], {},
                     id="images-in-turns"),
        pytest.param([("user", ["video", "what happens?"])], [CLIP], {}, id="clip"),
        pytest.param([("user", ["video"])], [SHORT], {"enable_thinking": False}, id="clip-of-one-pair"),
        pytest.param([("user", ["image", "video", "and", "video", "then", "image", "?"])], [WIDE, CLIP, SHORT, SMALL],
                     {}, id="both"),
        pytest.param([("system", "s"), ("user", ["video", "1"]), ("assistant", "2"), ("user", ["image", "3"])],
                     [CLIP, SMALL], {"tools": TOOLS}, id="both-with-tools"),
        pytest.param([("user", unicodedata.normalize("NFD", "naïve café 사진 Å"))], [], {}, id="decomposed"),
        pytest.param([("user", "写真\t\r\n\n   x  'LL 12345 <|im_end|> <think>")], [], {}, id="odd-text"),
    ],
)  # fmt: skip
def test_conversations(
    oracle: Oracle, turns: list[tuple[str, Any]], items: list[dict[str, Any]], arguments: dict[str, Any]
) -> None:
    oracle.chat(turns, items, **arguments)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text(oracle: Oracle, text: str) -> None:
    """Any text except private-use code points, with which this test marks literal text."""
    text = text.replace("\ufdd0", "").replace("\ufdd1", "")
    oracle.chat([("user", text), ("assistant", text), ("user", "x" + text)], [])


def test_placeholders_in_somebody_s_text_are_text(oracle: Oracle) -> None:
    """transformers would treat them as images, or fail."""
    plain = oracle.found(ChatInput((Message("user", ("<|video_pad|> <|image_pad|>",)),)), [])
    assert oracle.assets.image_token_id not in plain.ids and oracle.assets.video_token_id not in plain.ids
    mixed = oracle.found(ChatInput((Message("user", (None, "<|video_pad|>", None, "<|image_pad|>")),)), [CLIP, SMALL])
    assert mixed.ids.count(oracle.assets.video_token_id) == 18 and mixed.ids.count(oracle.assets.image_token_id) == 1
    assert mixed.tokens_per_video == (18,) and mixed.tokens_per_image == (1,)


@pytest.mark.parametrize("items", [[WIDE], [CLIP], [SHORT], [SMALL, CLIP, WIDE], [SHORT, CLIP]], ids=str)
def test_raw_text_and_ids_of_it(oracle: Oracle, items: list[dict[str, Any]]) -> None:
    """A rendered template, as text, as its ids, and as the ids that this server returns for it."""
    pads = ["<|video_pad|>" if len(item["grid"]) == 3 else "<|image_pad|>" for item in items]
    text = "".join(f"look:{i} {pad} <|vision_start|>" for i, pad in enumerate(pads)) + "?"
    whole = oracle.found(RawInput(text), items)
    assert whole.ids == oracle.expected(text, items)
    wrapped = "hi" + "".join(f"<|vision_start|>{pad}<|vision_end|>" for pad in pads) + "?"
    expected = oracle.expected(wrapped, items)
    for given_text in (wrapped, wrapped.replace("<|video_pad|>", "<|image_pad|>")):  # that of images stands for both
        narrow = TokensInput(tuple(oracle.tokenizer(given_text)["input_ids"]))
        once = oracle.found(narrow, items)
        assert once.ids == expected
        again = oracle.found(TokensInput(once.narrow_ids), items)
        assert again.ids == expected and again.narrow_ids == once.narrow_ids
    first = oracle.found(RawInput("?"), items)
    assert first.ids == oracle.expected(wrapped.removeprefix("hi"), items)


@pytest.mark.parametrize("items", [[CLIP, SMALL], [SHORT, WIDE, CLIP, TALL], [WIDE, CLIP, SMALL]], ids=str)
def test_a_placeholder_takes_the_next_of_its_kind(oracle: Oracle, items: list[dict[str, Any]]) -> None:
    """Requests list images before videos."""
    pads = ["<|video_pad|>" if len(item["grid"]) == 3 else "<|image_pad|>" for item in items]
    text = "".join(f"{i}<|vision_start|>{pad}<|vision_end|>" for i, pad in enumerate(pads)) + "?"
    expected = oracle.expected(text, items)
    listed = sorted(items, key=lambda item: len(item["grid"]))
    ids = TokensInput(tuple(oracle.tokenizer(text)["input_ids"]))
    for given_input in (RawInput(text), ids, TokensInput(oracle.found(ids, listed).narrow_ids)):
        prompt = oracle.found(given_input, listed)
        assert prompt.ids == expected
        grids = [layout.grid for layout in prompt.media]
        assert grids == [tuple(item["grid"][-2:]) for item in items]


def test_a_template_without_a_place_for_clips_says_so(oracle: Oracle, tmp_path: Path) -> None:
    write_prompting(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    config = load_config(tmp_path)
    assets = ModelAssets(config, config.vision)
    for item, kind in ((SMALL, "images"), (CLIP, "videos")):
        spec = GenerateSpec("r", "", ChatInput((Message("user", (None,)),)))
        with pytest.raises(errors.InvalidArgument, match=f"does not place all 1 {kind}"):
            prompt_ids(spec, oracle.media([item]), assets)


def test_an_image_is_no_clip(oracle: Oracle) -> None:
    ids = oracle.tokenizer("a <|vision_start|><|video_pad|><|vision_end|>")["input_ids"]
    with pytest.raises(errors.InvalidArgument, match=r"images\[0\] is an image, but the prompt has the video token"):
        oracle.found(TokensInput(tuple(ids)), [SMALL])
    with pytest.raises(errors.InvalidArgument, match="has 1 image tokens .* for 1 images and 1 videos of 3"):
        oracle.found(TokensInput(tuple(ids)), [SMALL, CLIP])


def test_media_in_a_system_message_is_refused_in_the_template_s_words(oracle: Oracle) -> None:
    with pytest.raises(errors.InvalidArgument, match="System messages hold no media"):
        oracle.found(ChatInput((Message("system", (None,)), Message("user", ("a",)))), [SMALL])


def test_a_clip_ends_what_the_system_prompt_shares(oracle: Oracle) -> None:
    spec = GenerateSpec("r", "", ChatInput((Message("system", ("be",)), Message("user", (None, "what?")))))
    media = oracle.media([CLIP])
    ids = prompt_ids(spec, media, oracle.assets)
    end = system_end(spec, ids, oracle.assets)
    assert 0 < end < ids.index(oracle.assets.video_token_id or -1)
    text = replace(spec, input=ChatInput((Message("system", ("be",)), Message("user", ("z",)))))
    assert ids[:end] == prompt_ids(text, [], oracle.assets)[:end]


def test_rows_of_clips_are_where_their_ids_are(oracle: Oracle) -> None:
    """The text between the temporal patches is known from the start, since nothing is pruned."""
    prompt = oracle.found(ChatInput((Message("user", (None, "what?")),)), [CLIP])
    [image] = prompt.take_images()
    assert len(image.between) == 2
    places = [place for place, token in enumerate(prompt.ids) if token == oracle.assets.video_token_id]
    assert places[0] == image.start and places[-1] == image.start + image.length - 1
    assert torch.tensor(places).diff().gt(1).sum() == 2
