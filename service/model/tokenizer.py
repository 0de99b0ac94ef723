"""Tokenizer and streaming detokenizer, on the `tokenizers` library."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from families import CheckpointError
from service.model.token_bytes import check_decoder, fallback_byte, has_fallback, joins_bytes, to_bytes
from service.model.tokenizer_file import ids_around, open_tokenizer

# Private-use code points, which do not occur in exchanged text.
_LITERAL_OPEN, _LITERAL_CLOSE = "\ufdd0", "\ufdd1"
_REPLACEMENT = "\ufffd"
_BEFORE = 2
"""Number of preceding ids on which a token's text depends: a decoder may remove the space of the first token, and one
at the beginning of the text."""
MOST_IDS = 1 << 24
"""Limit on ids, since there is a table of all of them. It is above the vocabulary of every published model."""
_strict_utf8 = codecs.getincrementaldecoder("utf-8")


class NotEncodable(ValueError):
    """A text has no tokens: the vocabulary lacks a character, and has no token for unknown ones."""

    def __init__(self, character: str, reason: str) -> None:
        """`character`: the first one that cannot be encoded; empty if each can be, but not together. `reason`: the
        library's message."""
        named = f"{character!r} (U+{ord(character):04X})" if character else "the text"
        super().__init__(f"{named} cannot be encoded by the model's tokenizer: {reason}")


class Tokenizer:
    """The tokenizer of one checkpoint. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = open_tokenizer(path)
        # A second instance that treats special tokens in the text as ordinary characters.
        self._plain = open_tokenizer(path)
        self._plain.encode_special_tokens = True
        try:
            check_decoder(self._tokenizer)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        largest = max(vocabulary.values(), default=-1)
        if largest >= MOST_IDS:
            raise CheckpointError(f"{path}: a token has the id {largest}; ids must be below {MOST_IDS}")
        self.longest = max(map(len, vocabulary), default=1)
        """Largest number of characters of one token."""
        self._to_bytes = to_bytes(self._tokenizer)
        self.joins_bytes = joins_bytes(self._tokenizer)
        """Whether text is the bytes of its tokens, one after another."""
        self._has_fallback = has_fallback(self._tokenizer)
        self._shown: dict[int, bytes] = {}
        self._empty: dict[int, bool] = {}
        self._around = ids_around(self._tokenizer)
        # The library decodes a special token whose name its normalizer changes (`▁<s>`) to text.
        self._special = {
            i for i, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and self.token(i) == token.content
        }  # fmt: skip
        self._kinds = bytearray(largest + 1)
        """By id, because asking the library takes longer: 0 without an entry, 1 special, 2 text."""
        for i in vocabulary.values():
            self._kinds[i] = 1 if i in self._special else 2

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        value = self._tokenizer.token_to_id(token)
        return None if value is None else int(value)

    def token(self, token_id: int) -> str | None:
        value = self._tokenizer.id_to_token(token_id)
        return None if value is None else str(value)

    def token_bytes(self, token_id: int) -> bytes:
        """The text of one token in UTF-8, which may end within a character: the name of a special token, nothing for an
        id without an entry."""
        entry = self.token(token_id)
        if entry is None:
            return b""
        return entry.encode() if self._to_bytes is None or token_id in self._special else self._to_bytes(entry)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with special tokens recognised and none added. Spans marked by `literal` are treated as
        characters. Raises NotEncodable."""
        ids: list[int] = []
        rest = text
        while rest:
            before, mark, after = rest.partition(_LITERAL_OPEN)
            if before:
                ids.extend(_encode(self._tokenizer, before))
            if not mark:
                break
            plain, _, rest = after.partition(_LITERAL_CLOSE)
            ids.extend(_encode(self._plain, plain))
        return ids

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """A text's `ids` between those that the tokenizer adds to texts, such as a beginning-of-sequence token. Those
        before the text are not added again if it begins with them."""
        before, after = self._around
        return [*([] if ids[: len(before)] == before else before), *ids, *after]

    def silent(self, token_id: int, *, special: bool = False) -> bool:
        """Whether a token has no text: an id without an entry, or a special token. `special`: special tokens have their
        names as text; likewise below."""
        return token_id >= len(self._kinds) or self._kinds[token_id] < 2 - special

    def empty(self, token_id: int) -> bool:
        """Whether a token that is not `silent` decodes to no text at any position."""
        found = self._empty.get(token_id)
        if found is None:
            # A decoder may remove the space of the first token, and another one at the beginning of the text.
            found = self._empty[token_id] = not self.decode([token_id] * 3)
        return found

    def fallback_byte(self, token_id: int) -> bytes | None:
        """The byte of a byte-fallback token such as `<0xE2>`; None for other tokens."""
        entry = self.token(token_id) if self._has_fallback else None
        return None if entry is None else fallback_byte(entry)

    def shown_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes of a token in decoded text, if `joins_bytes`: none of a token without text."""
        found = self._shown.get(token_id)
        if found is None:
            if self.silent(token_id):
                return self.token_bytes(token_id) if special else b""
            found = self._shown[token_id] = self.token_bytes(token_id)
        return found

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `ids`; special tokens and ids without an entry decode to nothing."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))


def _encode(tokenizer: _Tokenizer, text: str) -> list[int]:
    """The ids of a text. It is encoded as a batch of one, since `encode` holds the GIL and a batch does not. Raises
    NotEncodable."""
    try:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except Exception as error:  # the library raises a bare Exception for text without tokens
        raise NotEncodable(_first_unknown(tokenizer, text), str(error)) from None
    return ids


def _first_unknown(tokenizer: _Tokenizer, text: str) -> str:
    """The first character that cannot be encoded alone; empty if there is none."""
    left = list(dict.fromkeys(text))
    while left:  # at the end of each step the character is in `left`, if there is one
        half = left[: (len(left) + 1) // 2]
        try:
            tokenizer.encode_batch_fast(half, add_special_tokens=False)
        except Exception:
            if len(half) == 1:
                return half[0]
            left = half
        else:
            left = left[len(half) :]
    return ""


def literal(text: str, *tokens: str) -> str:
    """Marks each occurrence of `tokens` in a user's text so that `Tokenizer.encode` takes it for characters: `<image>`
    in a user's text is seven characters and not an image."""
    text = text.replace(_LITERAL_OPEN, "").replace(_LITERAL_CLOSE, "")
    for token in tokens:
        text = text.replace(token, f"{_LITERAL_OPEN}{token}{_LITERAL_CLOSE}")
    return text


def without_literals(text: str) -> str:
    """The text without the spans that `literal` has marked."""
    return re.sub(f"{_LITERAL_OPEN}.*?{_LITERAL_CLOSE}", "", text, flags=re.DOTALL)


def substitute(text: str, token: str, words: Iterable[str | None]) -> str:
    """Replaces each `token` in `text` that `literal` has not marked by the next of `words`. A token whose word is None,
    and those after the last word, stay."""
    given = iter(words)

    def replaced(found: re.Match[str]) -> str:
        next_words = next(given, None) if found[0] == token else None
        return found[0] if next_words is None else next_words

    return re.sub(f"{_LITERAL_OPEN}.*?{_LITERAL_CLOSE}|{re.escape(token)}", replaced, text, flags=re.DOTALL)


class Detokenizer:
    """Converts ids to text as soon as the text is certain: the texts together are that of `Tokenizer.decode`.

    A character may span several byte-level tokens; an incomplete one at the end is held back. In other vocabularies a
    token's text depends on whether it is the first, so it is decoded together with the tokens before it, whose text is
    then left out. With byte fallback, a run of byte tokens is text if all of it is UTF-8, and otherwise one U+FFFD per
    byte: it is held back until it ends or cannot become text.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, special: bool = False) -> None:
        """`special`: special tokens have their names as text."""
        self._tokenizer, self._special = tokenizer, special
        self._before: list[int] = []
        """The last ids whose text is certain."""
        self._run: list[int] = []
        """A run of byte tokens that may become text."""
        self._run_utf8 = _strict_utf8()
        self._broken = False
        """Whether the last token was a byte of a run that is not UTF-8."""
        joins_bytes = tokenizer is not None and tokenizer.joins_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if joins_bytes else None

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with `ids`."""
        if self._tokenizer is None:
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(b"".join([self._tokenizer.shown_bytes(i, special=self._special) for i in ids]))
        return "".join([self._pushed(i) for i in ids if not self._tokenizer.silent(i, special=self._special)])

    def flush(self) -> str:
        """The text that was held back, an incomplete character as U+FFFD."""
        return self._ended_run() if self._utf8 is None else self._utf8.decode(b"", final=True)

    def _pushed(self, token: int) -> str:
        assert self._tokenizer is not None
        byte = self._tokenizer.fallback_byte(token)
        if byte is None:
            text = self._ended_run()
            if self._tokenizer.silent(token) or not self._tokenizer.empty(token):
                return text + self._decoded([token])
            if not self._before or self._tokenizer.fallback_byte(self._before[-1]) is not None:
                self._before = [*self._before[-1:], token]  # it is the first token, or ends a run of bytes
            return text
        if self._broken:
            return _REPLACEMENT
        self._run.append(token)
        try:
            self._run_utf8.decode(byte)
        except UnicodeDecodeError:
            text, self._broken = self._ended_run(), True
            return text
        return ""

    def _ended_run(self) -> str:
        run, self._run = self._run, []
        self._run_utf8.reset()
        self._broken = False
        return self._decoded(run)

    def _decoded(self, ids: list[int]) -> str:
        """The text of `ids` after those before them; nothing after `ids` can change it."""
        if self._tokenizer is None or not ids:
            return ""
        shown = self._tokenizer.decode(self._before, special=self._special)
        text = self._tokenizer.decode(self._before + ids, special=self._special)
        self._before = (self._before + ids)[-_BEFORE:]
        return text[len(shown) :]
