"""Opens a model directory's `tokenizer.json`, with the added tokens of `tokenizer_config.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from families import CheckpointError
from families.files import optional_json

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that every tokenizer has. Files may define further names, such as `image_token`."""
_AS_THE_FILE = ("PreTrainedTokenizer", "TokenizersBackend", "LlamaTokenizer")
"""Classes, with or without `Fast`, with which transformers uses a byte-level `tokenizer.json` as it is. For others
`add_prefix_space` in `tokenizer_config.json` goes first."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of a model directory's `tokenizer_config.json`. As in transformers, named tokens of
    `special_tokens_map.json` replace those in it, but only in older directories, where it has no
    `added_tokens_decoder`. Raises CheckpointError."""
    config = optional_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    file = folder / "special_tokens_map.json"
    named = optional_json(file)
    for name, value in named.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name in SPECIAL_TOKENS and not isinstance(content, str | None):
            raise CheckpointError(f"{file}: {name} must be a string or an object with its content, not {value!r}")
    return config | named


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that have names in the configuration, as given: name -> text or object."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    return named | extra if isinstance(extra, dict) else named  # a list has no names


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that have names in the configuration, such as `eos_token`: name -> text."""
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in _named(config).items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def eos_token(folder: Path) -> str | None:
    """The text of the token with which the tokenizer ends a sequence. Raises CheckpointError."""
    return named_tokens(read_settings(folder)).get("eos_token")


def open_tokenizer(path: Path) -> Tokenizer:
    """A new tokenizer that neither truncates nor pads. Its added tokens are those of transformers: entries of
    `added_tokens_decoder` in the `tokenizer_config.json` beside `path` replace those of `tokenizer.json`; without such
    entries, those of `added_tokens.json` are added. Named tokens, such as `eos_token`, are special if the vocabulary
    has them. Raises CheckpointError."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for every malformed file
        raise CheckpointError(f"{path} is not a tokenizer file: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    file = path.with_name("tokenizer_config.json")
    config, what = read_settings(path.parent), f"{file}: added_tokens_decoder"
    if "added_tokens_decoder" not in config and (older := path.with_name("added_tokens.json")).exists():
        what, known = str(older), tokenizer.get_added_tokens_decoder()
        new = {index: name for name, index in optional_json(older).items() if index not in known}
        special = set(named_tokens(config).values())
        config["added_tokens_decoder"] = {
            index: {"content": name, "normalized": name not in special, "special": name in special}
            for index, name in new.items()
        }
    try:
        tokenizer.add_tokens(list(_declared(config, tokenizer)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be read: {error!r}") from None
    _check_prefix(config, tokenizer, file)
    return tokenizer


def _check_prefix(config: Mapping[str, Any], tokenizer: Tokenizer, file: Path) -> None:
    """Raises CheckpointError if the two files differ in whether a text gets a space at its beginning, and transformers
    reads another one than this server."""
    wanted = config.get("add_prefix_space")
    kind = str(config.get("tokenizer_class") or _AS_THE_FILE[0]).removesuffix("Fast")
    if kind in _AS_THE_FILE or not isinstance(wanted, bool) or tokenizer.pre_tokenizer is None:
        return
    step = json.loads(tokenizer.pre_tokenizer.__getstate__())
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    for found in (step["add_prefix_space"] for step in steps if step["type"] == "ByteLevel"):
        if found != wanted:
            raise CheckpointError(
                f"{file}: add_prefix_space is {json.dumps(wanted)}, and {json.dumps(found)} in the pre-tokenizer of "
                "tokenizer.json; both must be equal"
            )


def ids_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer adds before and after a text. As in transformers, its file decides, and not
    `add_bos_token` in `tokenizer_config.json`."""
    if not tokenizer.num_special_tokens_to_add(False):
        return [], []
    for text in ("a", *tokenizer.get_vocab()):
        try:
            found = tokenizer.encode(text)
        except Exception:  # the library raises a bare Exception for text without tokens
            continue
        if 0 in (added := found.special_tokens_mask):
            return found.ids[: added.index(0)], found.ids[len(added) - added[::-1].index(0) :]
    return [], []


def _declared(config: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[AddedToken]:
    """Added tokens that the configuration changes or adds, in the order of their ids."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    entries = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        token = _added(entry)
        if repr(token) != repr(known.get(token.content)):
            known[token.content] = token
            yield token
    named, listed = _special(config)
    special = {token.content: known.get(token.content, token) for token in named}
    special |= {token.content: token for token in listed if token.content not in known}
    for name, token in special.items():
        if not (name in known and token.special) and tokenizer.token_to_id(name) is not None:
            flags = {flag: getattr(token, flag) for flag in _FLAGS}
            yield AddedToken(name, **(flags | {"special": True}))


def _added(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(entry["content"], **{name: entry[name] for name in _FLAGS if name in entry})


def _special(config: Mapping[str, Any]) -> tuple[list[AddedToken], list[AddedToken]]:
    """(special tokens with a name such as `eos_token`, those without), as given, perhaps without the mark."""
    extra, listed = config.get("extra_special_tokens"), config.get("additional_special_tokens")
    if extra and not isinstance(extra, dict):
        listed = extra

    def tokens(values: Any) -> list[AddedToken]:
        entries = [{"content": value, "normalized": False} if isinstance(value, str) else value for value in values]
        known = (entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("content"), str))
        return [_added(entry) for entry in known]

    return tokens(_named(config).values()), tokens(listed if isinstance(listed, list) else ())
