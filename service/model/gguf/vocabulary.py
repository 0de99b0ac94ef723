"""The tokenizer's files of a model directory, from the vocabulary in a GGUF file's metadata. Only byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from families import CheckpointError
from families.gguf_model import Metadata
from families.pre_tokenizers import PreTokenizer, pre_tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""`tokenizer.ggml.token_type` of ordinary and special tokens, added tokens that are text, and ids without a token."""
MOST_TOKENS = 1 << 20
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"}
"""Name of a special token in `tokenizer_config.json` -> its name in keys, as they are spelled."""
ENDS = (
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>",
)  # fmt: skip
"""Special tokens at which llama.cpp ends an answer, whichever the file's end-of-sequence token is."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def tokens_of(metadata: Metadata) -> list[str]:
    """The vocabulary, by id. Raises CheckpointError."""
    if (model := metadata.text("tokenizer.ggml.model")) != "gpt2":
        raise CheckpointError(
            f"{metadata.file}: tokenizer.ggml.model is {model!r}; only byte-level BPE, 'gpt2', can be converted"
        )
    tokens = metadata.listed("tokenizer.ggml.tokens", str)
    if len(tokens) > MOST_TOKENS:
        raise CheckpointError(
            f"{metadata.file}: tokenizer.ggml.tokens has {len(tokens)} entries; {MOST_TOKENS} are most"
        )
    return tokens


def tokenizer_files(metadata: Metadata, tokens: Sequence[str], vocab_size: int) -> dict[str, Any]:
    """`tokenizer.json`, `tokenizer_config.json` and `generation_config.json`. `vocab_size`: rows of the table of
    embeddings. Raises CheckpointError naming the key."""
    cut = pre_tokenizer(metadata.text("tokenizer.ggml.pre"), metadata.file)
    kinds = metadata.listed("tokenizer.ggml.token_type", int, len(tokens))
    merges = [_pair(metadata, merge) for merge in metadata.listed("tokenizer.ggml.merges", str)]
    named = {name: metadata.count(f"tokenizer.ggml.{key}_token_id", least=0, most=len(tokens) - 1)
             for name, key in NAMED.items() if f"tokenizer.ggml.{key}_token_id" in metadata}  # fmt: skip
    vocabulary: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == UNUSED and token == f"[PAD{index}]":
            continue  # an id without a token
        if index >= vocab_size:
            raise CheckpointError(
                f"{metadata.file}: tokenizer.ggml.tokens has the id {index}, and token_embd.weight {vocab_size} rows"
            )
        if token in vocabulary:
            raise CheckpointError(
                f"{metadata.file}: tokenizer.ggml.tokens has {token!r} as {vocabulary[token]} and as {index}"
            )
        vocabulary[token] = index
    added = [
        {
            "id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": kinds[index] == CONTROL,
        }
        for token, index in vocabulary.items() if kinds[index] in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    tokenizer = _tokenizer(cut, vocabulary, merges, added)
    around = {
        place: tokens[named[name]]
        for place, name, default in (("before", "bos", cut.begins), ("after", "eos", False))
        if metadata.flag(f"tokenizer.ggml.add_{name}_token", default and name in named) and name in named
    }
    if around:
        tokenizer["post_processor"] = _around(around, vocabulary)
    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(f"{metadata.file}: tokenizer.ggml.merges and its tokens do not fit: {error}") from None
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _settings(
            metadata, {name: tokens[index] for name, index in named.items() if kinds[index] != NORMAL}
        ),
        "generation_config.json": _generation(metadata, vocabulary, kinds, named),
    }


def _pair(metadata: Metadata, merge: str) -> list[str]:
    at = merge.find(" ", 1)
    if at < 0 or at == len(merge) - 1:
        raise CheckpointError(f"{metadata.file}: tokenizer.ggml.merges has {merge[:100]!r}, which is not two tokens")
    return [merge[:at], merge[at + 1 :]]


def _tokenizer(
    cut: PreTokenizer, vocabulary: dict[str, int], merges: list[list[str]], added: list[dict[str, Any]]
) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in cut.expressions
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if cut.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, _BYTE_LEVEL]},
        "post_processor": _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": cut.whole_words,
            "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip


def _around(tokens: dict[str, str], vocabulary: dict[str, int]) -> dict[str, Any]:
    """The step that adds tokens before and after a text."""

    def template(*texts: str) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": tokens[place], "type_id": 0}}] if place in tokens else []
            for place in ("before", "after")
        )
        return [
            part for index, text in enumerate(texts)
            for part in (*before, {"Sequence": {"id": text, "type_id": index}}, *after)
        ]  # fmt: skip

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in tokens.values()
        },
    }


def _settings(metadata: Metadata, named: dict[str, str]) -> dict[str, Any]:
    """`tokenizer_config.json` with the chat templates. `named`: the special tokens. Files also name ordinary tokens if
    config.json had an id that nothing used, such as 0 for padding; to name one here would make it special."""
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    found |= {f"{name}_token": token for name, token in named.items()}
    templates = [
        {"name": name, "template": metadata.text(f"tokenizer.chat_template.{name}")}
        for name in metadata.listed("tokenizer.chat_templates", str, default=[])
    ]
    if "tokenizer.chat_template" in metadata:
        default = metadata.text("tokenizer.chat_template")
        found["chat_template"] = [{"name": "default", "template": default}, *templates] if templates else default
    return found


def _generation(
    metadata: Metadata, vocabulary: dict[str, int], kinds: Sequence[int], named: dict[str, int]
) -> dict[str, Any]:
    """`generation_config.json`: where answers end, and the recommended sampling."""
    ends = [named["eos"]] if "eos" in named else []
    for key in ("eot", "eom"):
        if (name := f"tokenizer.ggml.{key}_token_id") in metadata:
            ends.append(metadata.count(name, least=0, most=len(kinds) - 1))
    ends += [vocabulary[token] for token in ENDS if token in vocabulary and kinds[vocabulary[token]] == CONTROL]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    if "bos" in named:
        found["bos_token_id"] = named["bos"]
    for name, key in (("temperature", "temp"), ("top_p", "top_p"), ("min_p", "min_p"),
                      ("repetition_penalty", "penalty_repeat")):  # fmt: skip
        if f"general.sampling.{key}" in metadata:
            found[name] = metadata.number(f"general.sampling.{key}")
    if "general.sampling.top_k" in metadata:
        found["top_k"] = metadata.count("general.sampling.top_k", least=0)
    return found | ({"do_sample": found["temperature"] > 0} if "temperature" in found else {})
