"""Added tokens of `tokenizer.json` and `tokenizer_config.json`: ids and text are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from served import SPECIAL, make_served
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer

import saccade
from families import CheckpointError
from service.common.types import Message
from service.model.chat import load_template
from service.model.token_bytes import ByteVocabulary
from service.model.tokenizer import Detokenizer, Tokenizer

TEXTS = ("hello <|end|>  a <|end|> b<|end|>c", "x <tool> y<tool>z  <tool>  w", "TOOL <tool>1 tool<tool>tool <TOOL>")
END, TOOL = 256, 257
"""Ids: of `<|end|>`, an entry of the vocabulary, and of `<tool>`, the first one after it."""


def save(
    path: Path, added: list[AddedToken], config: dict[str, Any], *, lower: bool = False, around: Any = None
) -> None:
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = RawTokenizer(models.BPE({**vocabulary, "<|end|>": END}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    if lower:
        raw.normalizer = normalizers.Lowercase()
    raw.add_tokens(added)
    if around is not None:
        raw.post_processor = around
    raw.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def tool(**flags: bool) -> dict[str, Any]:
    """`added_tokens_decoder` with `<tool>`; flags that are not given are false."""
    names = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {"added_tokens_decoder": {str(TOOL): {"content": "<tool>", **dict.fromkeys(names, False), **flags}}}


def named(**flags: bool) -> dict[str, Any]:
    """`<|end|>`, which the file does not have as an added token, as the value of a name."""
    names = ("lstrip", "rstrip", "normalized", "single_word")
    return {"__type": "AddedToken", "content": "<|end|>", **dict.fromkeys(names, False), **flags}


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        pytest.param({"lstrip": True}, {}, id="file-alone"),
        pytest.param({"normalized": True}, {}, id="normalised"),
        pytest.param(None, tool(), id="configuration-alone"),
        pytest.param({"special": True}, tool(), id="not-special"),
        pytest.param({}, tool(special=True, lstrip=True), id="special-left"),
        pytest.param({}, tool(rstrip=True), id="right"),
        pytest.param({}, tool(single_word=True), id="word"),
        pytest.param({}, tool(normalized=True), id="now-normalised"),
        pytest.param({}, {"added_tokens_decoder": {str(TOOL): {"content": "<tool>"}}}, id="no-flags"),
        pytest.param(None, {"eos_token": "<|end|>"}, id="named"),
        pytest.param({}, {"tool_token": "<tool>"}, id="other-name"),
        pytest.param({}, {"extra_special_tokens": {"tool": "<tool>"}}, id="name-in-object"),
        pytest.param({}, {"extra_special_tokens": ["<tool>"]}, id="list"),
        pytest.param(None, {"extra_special_tokens": ["<|end|>"]}, id="list-of-an-entry"),
        pytest.param(None, {"additional_special_tokens": ["<|end|>"]}, id="older-list"),
        pytest.param(None, {"eos_token": named(lstrip=True, rstrip=True)}, id="named-with-flags"),
        pytest.param(None, {"eos_token": named(special=True)}, id="named-and-special"),
    ],
)
@pytest.mark.parametrize("lower", [False, True])
def test_ids_and_text_are_those_of_transformers(
    tmp_path: Path, flags: dict[str, bool] | None, config: dict[str, Any], lower: bool
) -> None:
    save(tmp_path, [] if flags is None else [AddedToken("<tool>", **flags)], config, lower=lower)
    released, found = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path / "tokenizer.json")
    for text in TEXTS:
        ids = released(text, add_special_tokens=False).input_ids
        assert found.encode(text) == ids
        assert found.decode(ids) == released.decode(ids, skip_special_tokens=True)
    special = {i for i, token in released.added_tokens_decoder.items() if token.special}
    assert set(ByteVocabulary(tmp_path / "tokenizer.json", 300).special) == special


@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}], ids=str
)
@pytest.mark.parametrize(
    "around", [None, ["$A"], ["<tool>", "$A"], ["$A", "<|end|>"], ["<tool>", "<tool>", "$A", "<|end|>"]]
)
def test_tokens_around_a_text_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], around: list[str] | None
) -> None:
    ids = [("<tool>", TOOL), ("<|end|>", END)]
    template = None if around is None else processors.TemplateProcessing(single=around, special_tokens=ids)
    named = {"bos_token": "<|end|>", "eos_token": "<tool>", **config}
    save(tmp_path, [AddedToken("<tool>", special=True)], named, around=template)
    released, found = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path / "tokenizer.json")
    for text in ("hello", "a <|end|>"):
        ids = released(text).input_ids
        assert found.with_special_tokens(found.encode(text)) == ids
    begin = ids[: len(ids) - len(found.encode(text))]
    if ids[: len(begin)] == begin != []:
        assert found.with_special_tokens(ids)[: len(ids)] == ids, "those before a text are not added twice"


def test_a_named_token_that_the_vocabulary_lacks_is_not_added(tmp_path: Path) -> None:
    """transformers adds it, with an id that the model may not have."""
    save(tmp_path, [], {"pad_token": "[PAD]"})
    found = Tokenizer(tmp_path / "tokenizer.json")
    assert found.vocab_size == TOOL and found.decode(found.encode("[PAD]")) == "[PAD]"


@pytest.mark.parametrize("decoder", [{}, {"added_tokens_decoder": {}}], ids=["older", "newer"])
def test_files_of_older_versions_are_read_where_transformers_reads_them(
    tmp_path: Path, decoder: dict[str, Any]
) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ messages[0].content }}"
    save(tmp_path, [AddedToken("<tool>", special=True)], {"eos_token": "<tool>", "chat_template": template, **decoder})
    named = {"bos_token": {"content": "<|end|>", "lstrip": False, "rstrip": False}, "eos_token": "<|end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": TOOL + 1, "<tool>": TOOL}))
    released, found = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path / "tokenizer.json")
    for text in (*TEXTS, "<x> a<x>"):
        ids = released(text, add_special_tokens=False).input_ids
        assert found.encode(text) == ids
        assert found.decode(ids) == released.decode(ids, skip_special_tokens=True)
    expected = released.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert load_template(tmp_path, image_token=None).render([Message("user", ("a",))]) == expected


def test_a_special_token_in_a_file_of_older_versions_that_is_no_text_is_named(tmp_path: Path) -> None:
    save(tmp_path, [], {})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": 5}')
    with pytest.raises(CheckpointError, match="special_tokens_map.json: eos_token must be a string or an object"):
        Tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "added_tokens.json").write_text('{"<x>": "y"}')
    with pytest.raises(CheckpointError, match="added_tokens.json cannot be read"):
        Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast"])
def test_a_space_before_a_text_is_added_as_in_transformers_or_the_file_is_refused(tmp_path: Path, kind: str) -> None:
    """For some classes of tokenizers transformers reads the flag of the configuration."""
    save(tmp_path, [], {"tokenizer_class": kind, "add_prefix_space": True})
    released = AutoTokenizer.from_pretrained(tmp_path)
    if kind == "PreTrainedTokenizerFast":
        assert Tokenizer(tmp_path / "tokenizer.json").encode("a") == released("a").input_ids
        return
    assert released("a", add_special_tokens=False).input_ids == released(" a", add_special_tokens=False).input_ids
    with pytest.raises(CheckpointError, match="tokenizer_config.json: add_prefix_space is true, and false in the pre-"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_a_special_token_that_is_normalised_is_streamed_as_it_decodes(tmp_path: Path) -> None:
    """Older files of SentencePiece models have `normalized: true` for special tokens; transformers shows them."""
    raw = RawTokenizer(models.BPE({"<unk>": 0, "a": 1, "▁": 2, "▁a": 3}, [("▁", "a")], unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    raw.add_tokens([AddedToken("<s>", normalized=True, special=True), AddedToken("</s>", special=True)])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    released, found = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path / "tokenizer.json")
    for ids in ([4, 3, 5, 4, 1], [3, 4, 5], [4], [5, 4, 3]):
        stream = Detokenizer(found)
        text = "".join([stream.push([i]) for i in ids]) + stream.flush()
        assert text == found.decode(ids) == released.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("entries", [[5], {"x": {"content": "a"}}, {"1": 5}, {"1": {}}, {"1": {"content": 5}}], ids=str)
def test_entries_that_cannot_be_read_are_named(tmp_path: Path, entries: object) -> None:
    save(tmp_path, [], {"added_tokens_decoder": entries})
    with pytest.raises(CheckpointError, match="tokenizer_config.json: added_tokens_decoder cannot be read"):
        Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("named", [{"content": "</img>"}, "no entry"], ids=str)
def test_the_tokenizers_own_end_ends_an_answer(tmp_path: Path, named: Any) -> None:
    """Beside the ids of `generation_config.json`, which fine-tuned models often keep from their base model."""
    make_served(tmp_path, vision=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    own, base = SPECIAL.index("</img>"), SPECIAL.index("<|im_end|>")
    with saccade.LocalClient(tmp_path, max_seqs=1, max_len=64, threads=1) as client:
        ending = {token: client.generate("a", max_tokens=3, logit_bias={token: 100}) for token in (own, base)}
        model = client.get_model()
    ends = {base} if named == "no entry" else {base, own}
    assert set(model.eos_token_ids) == ends
    assert {token for token, answer in ending.items() if answer.finish_reason == "stop"} == ends
