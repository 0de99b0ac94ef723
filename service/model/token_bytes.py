"""The bytes of the tokens of a `tokenizer.json`. A token may end within a character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from families import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ToBytes = Callable[[str], bytes]
_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")
_DECODERS = re.compile(
    r"ByteLevel( Fuse)?|WordPiece|BPEDecoder|(\b(Replace|Metaspace) ?)*(\bByteFallback ?)?(\bFuse( Strip)?)?"
)
"""Sequences of decoder steps with which a token does not change the text of earlier tokens, except within a run of
bytes."""


def to_bytes(tokenizer: Tokenizer) -> ToBytes | None:
    """A function from vocabulary entries to their bytes, for byte-level vocabularies and for those of SentencePiece
    with or without byte fallback. None for other vocabularies, whose entries have no bytes of their own."""
    steps = _decoder_steps(tokenizer)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    replaced: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Metaspace":
            replaced.append((step["replacement"], " "))
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            replaced.append((step["pattern"]["String"], step["content"]))
        elif step["type"] not in ("ByteFallback", "Fuse", "Strip"):
            return None
    if not replaced:
        return None
    return lambda entry: _pieces(entry, replaced, fallback="ByteFallback" in kinds)


def joins_bytes(tokenizer: Tokenizer) -> bool:
    """Whether decoding joins the bytes of tokens and does nothing else."""
    return _kinds(_decoder_steps(tokenizer)).startswith("ByteLevel")


def has_fallback(tokenizer: Tokenizer) -> bool:
    """Whether tokens such as `<0xE2>` stand for bytes."""
    return "ByteFallback" in _kinds(_decoder_steps(tokenizer))


def fallback_byte(entry: str) -> bytes | None:
    """The byte of a vocabulary entry for byte fallback; None for others."""
    return bytes.fromhex(entry[3:5]) if _FALLBACK.fullmatch(entry) else None


def check_decoder(tokenizer: Tokenizer) -> None:
    """Raises ValueError for decoders with which a token may change the text of earlier tokens, and for those with which
    `tokenizers` fails."""
    steps = _decoder_steps(tokenizer)
    kinds = _kinds(steps)
    if not _DECODERS.fullmatch(kinds):
        raise ValueError(
            f"its decoder is {kinds}, with which later tokens may change earlier text; supported are ByteLevel, "
            "WordPiece, BPEDecoder, and, in this order and each optional, Replace or Metaspace, ByteFallback, Fuse, "
            "Strip"
        )
    for step in steps:
        if step["type"] == "Strip" and (step["start"] > 1 or step["stop"] > 0):
            raise ValueError(
                f"its decoder strips {step['start']} characters at the beginning and {step['stop']} at the end of a "
                "text; at most 1 and 0 are supported"
            )
        if step["type"] == "BPEDecoder":
            suffix = step["suffix"]
            for entry in tokenizer.get_vocab(with_added_tokens=True):
                if suffix in entry[:-1]:
                    raise ValueError(f"its token {entry!r} has the decoder's suffix {suffix!r} before its end")


def _kinds(steps: Sequence[Mapping[str, Any]]) -> str:
    return " ".join(step["type"] for step in steps)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _pieces(entry: str, replaced: list[tuple[str, str]], *, fallback: bool) -> bytes:
    if fallback and (byte := fallback_byte(entry)) is not None:
        return byte
    for old, new in replaced:
        entry = entry.replace(old, new)
    return entry.encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: the byte's own character if that is printable, otherwise one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _byte_level(entry: str) -> bytes:
    """The bytes of an entry. An entry with a character outside of the alphabet, such as an added token, is plain text,
    as in the decoder of `tokenizers`."""
    try:
        return bytes(_ALPHABET[character] for character in entry)
    except KeyError:
        return entry.encode()


_BEFORE = ("", "\n", "\x02")
"""Prefixes after which a text is encoded as it would be within a longer text: some tokenizers add a space at the
beginning of a text."""


class ByteVocabulary:
    """A vocabulary with the bytes of its tokens."""

    def __init__(self, path: Path, size: int) -> None:
        """`path`: of `tokenizer.json`. `size`: number of the model's ids. Raises CheckpointError if the file cannot be
        read or its tokens have no bytes."""
        # imported here: an engine process needs it for the first constraint
        from service.model.tokenizer_file import open_tokenizer

        self._tokenizer = open_tokenizer(path)
        self._tokenizer.encode_special_tokens = True
        read = to_bytes(self._tokenizer)
        if read is None:
            raise CheckpointError(f"{path}: its tokens have no bytes of their own, so answers cannot be constrained")
        self.special = {i: t.content for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        """Id -> name of each token that is not text."""
        entries = self._tokenizer.get_vocab(with_added_tokens=True)
        self.tokens = [b""] * size
        """By id; empty for ids without an entry. Special tokens have their names."""
        for entry, token in entries.items():
            if token < size:
                self.tokens[token] = entry.encode() if token in self.special else read(entry)

    def encode(self, text: str) -> list[int]:
        """Ids whose bytes are exactly those of `text`; names of special tokens are ordinary characters. Empty if there
        are none."""
        data = text.encode()
        for before in _BEFORE:
            head, ids = self._ids(before), self._ids(before + text)
            found = ids[len(head) :]
            if ids[: len(head)] == head and max(found, default=0) < len(self.tokens):
                if b"".join(self.tokens[i] for i in found) == data:
                    return found
        return self._longest(data)

    def _ids(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except Exception:  # the library raises a bare Exception for text without tokens
            return []

    def _longest(self, data: bytes) -> list[int]:
        """The ids from taking the longest token at each place, from the beginning; empty if there is none."""
        ids, at = [], 0
        while at < len(data):
            pieces = (data[at:end] for end in range(min(len(data), at + self._most), at, -1))
            found = next((piece for piece in pieces if piece in self._by_bytes), None)
            if found is None:
                return []
            ids.append(self._by_bytes[found])
            at += len(found)
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {token: i for i, token in enumerate(self.tokens) if token and i not in self.special}

    @cached_property
    def _most(self) -> int:
        return max(map(len, self._by_bytes), default=0)
