"""Tokenizer, detokeniser, chat template, stop strings."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from qwen_prompt import TEMPLATE as QWEN
from served import TEMPLATE as SERVED
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from families import CheckpointError
from saccade._openai.errors import in_words
from saccade._openai.fields import MESSAGES
from saccade.errors import InvalidArgument
from service.answers.stops import StopMatcher
from service.common.types import Message
from service.model.chat import ChatTemplate, Marked, NotContinued, load_template
from service.model.tokenizer import Detokenizer, Tokenizer, literal

SPECIAL = ["<image>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module", params=["bytes", "fused"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, so that characters are split in every possible way. With and without a second step of
    decoding, which changes nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    if request.param == "fused":
        raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    raw.save(str(path))
    made = Tokenizer(path)
    assert made.joins_bytes
    return made


SPACES = decoders.Replace("\u2581", " ")
BYTES, FUSE, STRIP = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
DECODERS = {
    "none": None,
    "llama": decoders.Sequence([SPACES, BYTES, FUSE, STRIP]),
    "gemma": decoders.Sequence([SPACES, BYTES, FUSE]),
    "metaspace": decoders.Metaspace(),
    "first": decoders.Metaspace(prepend_scheme="first"),
    "never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace-bytes": decoders.Sequence([decoders.Metaspace(), BYTES, FUSE, STRIP]),
    "wordpiece": decoders.WordPiece(),
    "wordpiece-as-it-is": decoders.WordPiece(cleanup=False),
    "bpe": decoders.BPEDecoder(),
}
PIECES = [
    "\u2581", "\u2581\u2581", "\u2581a", "a", "é", "", "##", "##b", ".", "b</w>", "</w>", " do not", "\u2581a\u2581",
]  # fmt: skip
BYTE_IDS = 256
IDS = BYTE_IDS + len(PIECES) + 2


def of_pieces(path: Path, decoder: decoders.Decoder | None) -> Tokenizer:
    """A token for each byte, then pieces of words, a special and an added token."""
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(BYTE_IDS)), *PIECES]
    raw = RawTokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="a"))
    if decoder is not None:
        raw.decoder = decoder
    raw.add_special_tokens([AddedToken("<s>", special=True)])
    raw.add_tokens([AddedToken("<call>", special=False)])
    assert raw.get_vocab_size() == IDS
    raw.save(str(path / "tokenizer.json"))
    return Tokenizer(path / "tokenizer.json")


@pytest.fixture(scope="module", params=DECODERS)
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary that is not byte-level, with one decoder of those that published tokenizers have."""
    return of_pieces(tmp_path_factory.mktemp("pieces"), DECODERS[request.param])


@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1")), cut=st.integers(1, 5))
def test_streamed_text_equals_the_whole_and_is_never_half_a_character(
    tokenizer: Tokenizer, text: str, cut: int
) -> None:
    assume(not any(token in text for token in SPECIAL))  # which decode to nothing
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids[i : i + cut]) for i in range(0, len(ids), cut)]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + detokenizer.flush() == text == tokenizer.decode(ids)


@given(
    parts=st.lists(
        st.text("aé€😀", max_size=2).map(lambda text: list(text.encode()))
        | st.lists(st.integers(0, IDS) | st.integers(BYTE_IDS, IDS) | st.sampled_from([0x80, 0xE2, 0xFF]), max_size=5),
        max_size=8,
    )
)
@example(parts=[[BYTE_IDS + PIECES.index(piece) for piece in ("a", "", "", "\u2581a")]])
@example(parts=[[BYTE_IDS + PIECES.index(piece) for piece in ("", "", "\u2581a")]])
@example(parts=[[0xFF, BYTE_IDS + PIECES.index(""), 0x41]])
def test_pieces_of_words_are_streamed_as_they_decode(pieces: Tokenizer, parts: list[list[int]]) -> None:
    """A run of byte tokens is no text at all if one of them makes it none, even if it began with whole characters."""
    ids = [i for part in parts for i in part]
    for division in (parts, [[i] for i in ids]):
        for special in (False, True):
            detokenizer = Detokenizer(pieces, special=special)
            shown = "".join(map(detokenizer.push, division)) + detokenizer.flush()
            assert shown == pieces.decode(ids, special=special)


def test_bytes_of_no_text_are_shown_at_once(tmp_path: Path) -> None:
    detokenizer = Detokenizer(of_pieces(tmp_path, DECODERS["llama"]))
    shown = [detokenizer.push([i]) for i in (0xE2, 0x82, 0xAC, 0xFF, 0x41, BYTE_IDS + PIECES.index("a"), 0x41)]
    assert shown == ["", "", "", "\ufffd" * 4, "\ufffd", "a", ""] and detokenizer.flush() == "A"


@pytest.mark.parametrize("run", ["FF", "E2 82 AC", None], ids=["no text", "characters", "empty pieces"])
def test_a_long_answer_of_pieces_costs_no_more_for_each_token(pieces: Tokenizer, run: str | None) -> None:
    decoded = 0

    class Counting:
        silent, empty, joins_bytes, fallback_byte = (
            pieces.silent, pieces.empty, pieces.joins_bytes, pieces.fallback_byte
        )  # fmt: skip

        def decode(self, ids: list[int], *, special: bool) -> str:
            nonlocal decoded
            decoded += len(ids)
            return pieces.decode(ids, special=special)

    detokenizer = Detokenizer(Counting())  # type: ignore[arg-type]
    ids = [*(bytes.fromhex(run) if run else [BYTE_IDS + PIECES.index(piece) for piece in ("##", "")])] * 500
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert text == pieces.decode(ids) and decoded <= 6 * len(ids)


@pytest.mark.parametrize(
    ("decoder", "fault"),
    [
        (decoders.CTC(), "its decoder is CTC"),
        (decoders.Sequence([FUSE, SPACES]), "its decoder is Fuse Replace"),
        (decoders.Sequence([decoders.ByteLevel(), STRIP]), "its decoder is ByteLevel Strip"),
        (decoders.Sequence([FUSE, decoders.Strip(" ", 0, 1)]), "strips 0 characters at the beginning and 1 at the end"),
        (decoders.Sequence([FUSE, decoders.Strip(" ", 2, 0)]), "strips 2 characters at the beginning and 0 at the end"),
        (decoders.BPEDecoder("##"), "'##b' has the decoder's suffix '##' before its end"),
    ],
    ids=["ctc", "replace", "bytes", "end", "two", "suffix"],
)
def test_a_decoder_whose_text_may_change_later_is_refused(
    tmp_path: Path, decoder: decoders.Decoder, fault: str
) -> None:
    with pytest.raises(CheckpointError, match=fault):
        of_pieces(tmp_path, decoder)


def test_an_incomplete_character_is_shown_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é!")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_ids_without_an_entry_decode_to_nothing(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = [*tokenizer.encode("a"), 5000, *tokenizer.encode("b")]
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == "ab"
    assert Detokenizer(None).push([1, 2]) == ""


@given(ids=st.lists(st.integers(0, 262) | st.integers(100, 230), max_size=60))
def test_ids_that_are_no_text_are_streamed_as_they_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Bytes of no character, special tokens and ids without an entry, in any order."""
    for special in (False, True):
        detokenizer = Detokenizer(tokenizer, special=special)
        shown = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
        assert shown == tokenizer.decode(ids, special=special)


def test_a_character_among_bytes_of_none_is_not_cut_in_two(tokenizer: Tokenizer) -> None:
    garbage = [tokenizer.token_id("\u0122")] * 20
    for text in ("é", "€", "😀"):
        ids: list[int] = [*garbage, *tokenizer.encode(text), *garbage[:2]]  # type: ignore[list-item]
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.push(ids) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("token", ["\u0122", "<|im_end|>", None], ids=["half a character", "special", "no entry"])
def test_a_long_answer_of_no_text_costs_no_more_for_each_token(tokenizer: Tokenizer, token: str | None) -> None:
    """Continuing an answer of 8,000 tokens took two seconds."""
    decoded = 0

    class Counting:
        silent, joins_bytes, shown_bytes = tokenizer.silent, tokenizer.joins_bytes, tokenizer.shown_bytes

        def decode(self, ids: list[int], *, special: bool) -> str:
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, special=special)

    detokenizer = Detokenizer(Counting())  # type: ignore[arg-type]
    one = 5000 if token is None else tokenizer.token_id(token)
    assert one is not None
    text = "".join(detokenizer.push([one]) for _ in range(1000)) + detokenizer.flush()
    assert text == tokenizer.decode([one] * 1000) and decoded <= 150 * 1000


def test_a_long_text_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """The event loop is one of them."""
    over, beats = threading.Event(), 0
    seen: list[int] = []

    def encode() -> None:
        seen.append(beats)
        tokenizer.encode("word " * 60_000)
        seen.append(beats)
        over.set()

    worker = threading.Thread(target=encode)
    worker.start()
    while not over.wait(0.001):
        beats += 1
    worker.join()
    assert seen[1] - seen[0] >= 3


def test_the_longest_token_bounds_what_one_can_stand_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest == len("<|im_start|>")


def test_literal_image_tokens_are_characters(tokenizer: Tokenizer) -> None:
    image = tokenizer.token_id("<image>")
    assert tokenizer.encode("a<image>b").count(image) == 1  # type: ignore[arg-type]
    ids = tokenizer.encode(literal("a<image>b", "<image>"))
    assert image not in ids and tokenizer.decode(ids) == "a<image>b"


def template(source: str | None = TEMPLATE) -> ChatTemplate:
    return ChatTemplate(source, image_token="<image>", special_tokens={"bos_token": "<s>"})


def test_an_id_that_no_model_has_is_refused(tmp_path: Path) -> None:
    raw = json.loads(RawTokenizer(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a")).to_str())
    raw["model"]["vocab"]["b"] = 4_000_000_000  # the library's own writer allocates memory for the ids in between
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="tokenizer.json: a token has the id 4000000000; ids must be below 16777"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_parts_keep_their_order_and_arguments_reach_the_template() -> None:
    messages = [Message("system", ("be brief",)), Message("user", ("left", None, "right", None))]
    text = template().render(messages, {"enable_thinking": True})
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nleft<image>right<image><|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )


STRIPPING = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
DEMO = Path("demo/model/chat_template.jinja").read_text()


@pytest.mark.parametrize(
    "source", [TEMPLATE, SERVED, QWEN, DEMO, STRIPPING], ids=["own", "served", "qwen", "demo", "strip"]
)
@pytest.mark.parametrize(
    "content", ["a cat", "a", "a cat \n", " a  ", "a<|im_end|>b", "<think>\nso", "<think>a</think>\nb", ""]
)
def test_a_continued_message_ends_where_transformers_ends_it(source: str, content: str) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_object=RawTokenizer(models.WordLevel({"a": 0}, "a")))
    said = [("system", "be"), ("user", "what?"), ("assistant", "a cat"), ("user", "sure?"), ("assistant", content)]
    expected = oracle.apply_chat_template(
        [{"role": role, "content": text} for role, text in said], chat_template=source, tokenize=False,
        continue_final_message=True,
    )  # fmt: skip
    messages = [Message(role, (text,)) for role, text in said]
    assert template(source).render(messages, continue_final=True) == expected
    assert expected.rstrip().endswith(content.strip())


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}{% endfor %}", "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:4] }}{% endfor %}",
        "{% for m in messages %}{{ m.content | replace('a', 'b') }}{% endfor %}",
    ],
)  # fmt: skip
def test_a_message_that_the_template_changes_cannot_be_continued(source: str) -> None:
    with pytest.raises(NotContinued, match="does not print the last message's text unchanged"):
        template(source).render([Message("user", ("what?",)), Message("assistant", ("a cat",))], continue_final=True)


def test_other_ends_of_a_continued_message() -> None:
    messages = [Message("user", (None, "what?")), Message("assistant", ("left ", None, "right <image>"))]
    text = template().render(messages, continue_final=True)
    assert text.endswith(f"<|im_start|>assistant\nleft <image>right {literal('<image>', '<image>')}")
    text_only = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}."
    assert (
        template(text_only)
        .render(messages, continue_final=True)
        .startswith("[user]<image>what?[assistant]left <image>")
    )
    assert template(None).render(messages[1:], continue_final=True) == template(None).render(messages[1:])


def test_a_text_only_template_still_places_images() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert template(source).render([Message("user", (None, "what?"))]) == "[user]<image>what?"


def test_without_a_template_contents_are_joined() -> None:
    assert template(None).render([Message("user", (None, "a")), Message("user", ("b",))]) == "<image>a\nb"


def test_a_user_cannot_smuggle_an_image_place(tokenizer: Tokenizer) -> None:
    text = template().render([Message("user", (None, "is <image> a word?"))])
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.token_id("<image>")) == 1  # type: ignore[arg-type]
    assert "is <image> a word?" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "chat template"),
        ("{{ nothing.attribute }}", "chat template"),
        ("no images here", "does not place all 1 images"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{{ 10.0 ** 1000 }}", "chat template: .*out of range"),
        ("{{ 'a' * 10 ** 15 }}", "chat template: MemoryError"),
    ],
)
def test_refusals_of_a_template(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        template(source).render([Message("user", (None, "a"))])


def test_a_refusal_does_not_begin_with_the_name_of_a_field() -> None:
    """HTTP names fields as the request does: 'chat template' became 'messages template'."""
    with pytest.raises(ValueError, match="roles must alternate") as caught:
        template("{{ raise_exception('roles must alternate') }}").render([Message("user", ("a",))])
    refused = InvalidArgument(str(caught.value), field="chat")
    assert in_words(refused, MESSAGES) == "the chat template: roles must alternate"


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path) -> None:
    assert not load_template(tmp_path, image_token=None).present
    config = {"chat_template": [{"name": "default", "template": "D{{ bos_token }}"}], "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_template(tmp_path, image_token=None).render([Message("user", ("a",))]) == "D<s>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "P{{ bos_token }}"}))  # a processor's
    assert load_template(tmp_path, image_token=None).render([Message("user", ("a",))]) == "P<s>"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_template(tmp_path, image_token=None).render([Message("user", ("a",))]) == "J"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="line 1"):
        load_template(tmp_path, image_token=None)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.jinja", b"{% endfor %}"),
        ("chat_template.jinja", b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}"),
        ("chat_template.json", b'{"chat_template": [1]}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": []}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 7}]}'),
        ("tokenizer_config.json", b'{"bos_token": {"text": "<s>"}}'),
        ("tokenizer_config.json", b'{"eos_token": ["</s>"]}'),
    ],
)
def test_a_file_with_a_broken_template_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / file))):
        load_template(tmp_path, image_token=None)


@pytest.mark.parametrize("default", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_broken_template_for_tools_is_named(tmp_path: Path, default: str) -> None:
    (tmp_path / default).write_text("D" if default.endswith(".jinja") else '{"chat_template": "D"}')
    (tools := tmp_path / "additional_chat_templates" / "tool_use.jinja").parent.mkdir()
    tools.write_text("{% endfor %}")
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tools))}: chat template, line 1"):
        load_template(tmp_path, image_token=None)


def test_what_training_marks_in_a_template_changes_nothing() -> None:
    marked = "{% for m in messages %}{% generation %}{{ m.role }}:{{ m.content }}{% endgeneration %};{% endfor %}"
    assert template(marked).render([Message("user", ("a",)), Message("assistant", ("b",))]) == "user:a;assistant:b;"
    inner = "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}"
    assert template(inner).render([Message("user", ("a",))]) == "1False", "as in transformers"


def test_the_default_template_is_chosen_by_its_name(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D{{ eos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "</s>"}))
    assert load_template(tmp_path, image_token=None).render([Message("user", ("a",))]) == "D</s>"


DEFAULT, WITH_TOOLS = "D{{ tools is none }}", "T{{ tools | length }}"
NAMED = {"default": DEFAULT, "tool_use": WITH_TOOLS}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": [{"name": name, "template": text} for name, text in NAMED.items()]},
        {"tokenizer_config.json": NAMED},
        {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": WITH_TOOLS},
        {"tokenizer_config.json": DEFAULT, "additional_chat_templates/tool_use.jinja": WITH_TOOLS},
    ],
    ids=["list", "object", "files", "field-and-file"],
)  # fmt: skip
def test_messages_with_tools_take_the_template_for_tools(tmp_path: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = content if name.endswith(".jinja") else json.dumps({"chat_template": content})
        (tmp_path / name).write_text(str(text))
    found, messages = load_template(tmp_path, image_token=None), [Message("user", ("a",))]
    assert found.render(messages) == found.render(messages, {"tools": None}) == "DTrue"
    assert found.render(messages, {"tools": [{"name": "f"}]}) == "T1"
    assert found.names >= {"none", "length"} and found.source == f"{DEFAULT}\n{WITH_TOOLS}"


def test_a_template_in_a_file_replaces_those_of_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "chat_template.jinja").write_text(DEFAULT)
    assert load_template(tmp_path, image_token=None).render([Message("user", ("a",))], {"tools": [1]}) == "DFalse"


def test_templates_see_all_named_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    """Including a model's own names, as in transformers; flags are none of them."""
    config = {
        "chat_template": "{{ bos_token }}{{ sep_token }}{{ image_token }}{{ audio }}{{ add_bos_token }}{{ tokenizer }}",
        "bos_token": {"content": "<s>"}, "sep_token": "<sep>", "image_token": "<img>", "add_bos_token": True,
        "tokenizer": "x", "extra_special_tokens": {"audio": "<audio>"}, "mask_token": None,
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_template(tmp_path, image_token=None)
    assert loaded.render([Message("user", ("a",))]) == "<s><sep><img><audio>"


@pytest.mark.parametrize(
    ("source", "arguments", "text"),
    [
        ("{{ messages[0].content }}", {"messages": []}, "a"),
        ("{% if tools is not none %}T{% endif %}{% if documents is not none %}D{% endif %}x", {}, "x"),
        ("{% if tools is not none %}{{ tools | length }}{% endif %}", {"tools": [{}]}, "1"),
        ("{{ bos_token }}", {"bos_token": "<t>"}, "<t>"),
        ("{{ add_generation_prompt }}", {}, "True"),
        ("{{ add_generation_prompt }}", {"add_generation_prompt": False}, "False"),
        ("x\n  {% if true %}\nA\n  {% endif %}\nB", {}, "x\nA\nB"),
        ("{{ {'a': 'é'} | tojson }}", {}, '{"a": "é"}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}, "01"),
    ],
)
def test_what_templates_see_and_how_they_are_read(source: str, arguments: dict[str, object], text: str) -> None:
    """As in transformers; and a caller's arguments cannot replace the messages."""
    assert template(source).render([Message("user", ("a",))], arguments) == text


@pytest.mark.parametrize("read", ["message | tojson", "message.thinking", "message.reasoning_content"])
def test_reasoning_has_the_names_that_transformers_gives_it(read: str) -> None:
    source = "{% for message in messages %}{{ " + read + " }};{% endfor %}"
    oracle = PreTrainedTokenizerFast(tokenizer_object=RawTokenizer(models.WordLevel({"a": 0}, "a")))
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning_content": "so", "content": "b"}]
    expected = oracle.apply_chat_template(said, chat_template=source, tokenize=False)
    messages = [Message("user", ("a",)), Message("assistant", ("b",), reasoning="so")]
    assert template(source).render(messages) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% set _ = messages.append(messages[0]) %}",
        "{% set _ = messages[0].update(role='system') %}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_templates_change_nothing_and_reach_nothing(source: str) -> None:
    with pytest.raises(ValueError, match="chat template: .*(unsafe|not safely)"):
        template(source).render([Message("user", ("a",))])


def test_a_model_without_images_refuses_them() -> None:
    text_only = ChatTemplate(None, image_token=None, special_tokens={})
    assert text_only.render([Message("user", ("a",))]) == "a"
    with pytest.raises(ValueError, match="contain 2 images, but this model takes none"):
        text_only.render([Message("user", (None, "a", None))])


def test_the_words_of_a_clip_may_hold_image_tokens(tokenizer: Tokenizer) -> None:
    words = Marked("Frame 1: <img><image></img>")
    for source in (TEMPLATE, "{% for m in messages %}{{ m.content }}{% endfor %}", None):
        ids = tokenizer.encode(template(source).render([Message("user", (words, "and <image>", None))]))
        assert ids.count(tokenizer.token_id("<image>")) == 2  # type: ignore[arg-type]


def test_marks_of_ours_in_a_users_text_are_dropped(tokenizer: Tokenizer) -> None:
    assert literal("a\ufdd0b\ufdd1c") == "abc"
    image = tokenizer.token_id("<image>")
    for text in ("\ufdd1<image>", "\ufdd0x\ufdd1<image>", "<ima\ufdd1ge>", "<ima\ufdd0ge>"):
        assert image not in tokenizer.encode(literal(text, "<image>"))


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "ab"


def test_a_file_s_truncation_padding_and_own_tokens_are_not_applied(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    raw = RawTokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    raw.enable_truncation(2)
    raw.enable_padding(length=9, pad_id=1)
    raw.save(str(path))
    assert Tokenizer(path).encode("a a a") == Tokenizer(path).encode(literal("a a a", "a a a")) == [0, 0, 0]


def test_a_token_s_text_may_depend_on_what_is_before_it(tmp_path: Path) -> None:
    """A decoder that drops the space before the first word: it is dropped once, however the ids are divided."""
    raw = RawTokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1}, unk_token="\u2581one"))
    raw.decoder = decoders.Metaspace()
    raw.save(str(tmp_path / "tokenizer.json"))
    detokenizer = Detokenizer(Tokenizer(tmp_path / "tokenizer.json"))
    assert [detokenizer.push([i]) for i in (0, 1, 0)] == ["one", " two", " one"]


def test_the_longest_of_the_stop_strings_that_begin_first_matches() -> None:
    for stops in (["ab", "abc"], ["abc", "ab"]):
        matcher = StopMatcher([*stops, "c"])
        assert matcher.push("xabcd") == "x" and matcher.matched == "abc"
        assert matcher.push("more") == matcher.flush() == ""
    matcher = StopMatcher(["abcd", "x"])
    assert matcher.push("zab") == "z" and matcher.push("c") == "" and matcher.push("e") == "abce"
    assert matcher.flush() == "" and matcher.matched is None


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json")


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=10),
)
def test_stop_strings_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    """The shown text is that before the stop string that is complete first; no part of the stop string is shown."""
    matcher = StopMatcher(stops)
    shown, position, i = "", 0, 0
    while position < len(text) and matcher.matched is None:
        cut = cuts[i % len(cuts)]
        shown += matcher.push(text[position : position + cut])
        position, i = position + cut, i + 1
    shown += matcher.flush()
    if matcher.matched is None:
        assert shown == text and not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + matcher.matched)
        assert not any(stop in shown for stop in stops)
