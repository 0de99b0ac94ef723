"""How byte-level tokenizers cut a text into words, inside which the merges of the vocabulary apply, by the names that
GGUF files have for them (`tokenizer.ggml.pre`).

The expressions are those of the released `tokenizer.json`, as llama.cpp's `src/llama-vocab.cpp` quotes them.
"""

from __future__ import annotations

from typing import NamedTuple

from families.files import CheckpointError

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LED = r"[^\r\n\p{L}\p{N}]?"
_MARKS = r" ?[^\s\p{L}\p{N}]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """How a text becomes words."""

    expressions: tuple[str, ...]
    """Each match is a word of its own, and so is what is between matches; the next expression cuts these words."""
    composed: bool = False
    """Whether a text is brought to Unicode's composed form (NFC) first."""
    whole_words: bool = False
    """Whether a word that is in the vocabulary is one token, whatever the merges say."""
    begins: bool = False
    """Whether texts get a beginning-of-sequence token, in files that do not say so."""


_LLAMA3 = PreTokenizer(
    (rf"{_SHORT}|{_LED}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|{_SPACES}",), whole_words=True, begins=True
)
_QWEN2 = PreTokenizer((rf"{_SHORT}|{_LED}\p{{L}}+|\p{{N}}|{_MARKS}[\r\n]*|{_SPACES}",), composed=True)
_QWEN35 = PreTokenizer(
    (rf"{_SHORT}|{_LED}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",), composed=True
)
_TEKKEN = PreTokenizer(
    (rf"{_LED}{_UPPER}*{_LOWER}+|{_LED}{_UPPER}+{_LOWER}*|\p{{N}}|{_MARKS}[\r\n/]*|{_SPACES}",),
    whole_words=True, begins=True,
)  # fmt: skip
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(_LLAMA3.expressions)),
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("refact", "starcoder"), _DIGITS),
    "gpt-2": PreTokenizer((_GPT2,)),
}


def pre_tokenizer(name: str, file: str) -> PreTokenizer:
    """The pre-tokenizer of a name in `file`. Raises CheckpointError that lists the known ones."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{file}: tokenizer.ggml.pre {name!r} is not known; known are {known}")
    return PRE_TOKENIZERS[name]
