"""Compiles text formats to grammars and constraints, with llguidance. A format is compiled once and cached; each sample
gets a copy of the compiled matcher. What the library does not implement is rejected: an `UnusableConstraint` names the
field and has the library's message.

Hostile formats: size and nesting of the source are limited before compilation, and `LIMITS` bounds what the compiler
and each mask may build. A grammar that exceeds its processor time for compilation or for a mask is rejected from then
on. Each format is compiled in a separate process first (`service.engine.trials`): one that still takes too much ends
that process instead of the engine.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from decoder.constraints import FULL, Mask
from service.common.types import TextFormat
from service.engine.grammar_sources import field_of, grammar_source, json_grammar
from service.engine.schema_faults import SECONDS, located
from service.engine.types import UnusableConstraint
from service.model.token_bytes import ByteVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CACHED = 256
MAX_CACHED_BYTES = 128 * 2**20
"""Limit on the cached matchers, by `_cost`."""
COMPILE_SECONDS = 3.0
"""Limit on the processor time of a compilation, including the first mask."""
MASK_SECONDS = 0.5
"""Limit on the processor time of one mask, for which all other requests of the batch wait."""
LIMITS = {
    "max_items_in_row": 1000, "initial_lexer_fuel": 500_000, "step_lexer_fuel": 100_000, "step_max_items": 50_000,
    "max_lexer_states": 50_000, "max_grammar_size": 100_000, "verbose_errors": False,
}  # fmt: skip
"""Arguments of `llguidance.LLParserLimits`, which documents their units."""
_MAX_MESSAGE = 300
MAX_TOKENIZED = 4096
"""Number of forced texts whose tokens are cached; tokenizing one takes longer than the rest of computing a mask."""
_MAX_TEXT = 1024
"""Maximum number of characters of a cached text."""
_OVERLAP = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""The library's message about alternatives that it cannot prove to be disjoint. Requests cannot set that option."""


class Grammar:
    """A compiled format."""

    def __init__(self, matcher: LLMatcher, field: str, placeholder: int) -> None:
        """`matcher`: in its initial state. `field`: of the request, for errors. `placeholder`: the id that the matcher
        treats as the only end of text."""
        self._matcher, self.field, self.placeholder = matcher, field, placeholder
        self._refused = ""

    def start(self, ends: Collection[int]) -> GrammarConstraint:
        """A constraint that has accepted nothing. `ends`: the ids that end the text; none of them is text. Raises
        UnusableConstraint."""
        if self._refused:
            raise UnusableConstraint(self._refused, self.field)
        return GrammarConstraint(self, self._matcher.deep_copy(), frozenset(ends))

    def refuse(self, why: str) -> UnusableConstraint:
        """The error for this request; later uses of the grammar get the same error."""
        self._refused = why
        return UnusableConstraint(why, self.field)


class GrammarConstraint:
    """A `decoder.constraints.Constraint` that allows what a grammar allows."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, ends: frozenset[int], ended: int = 0) -> None:
        self._grammar, self._matcher, self._ends = grammar, matcher, ends
        self._ended = ended
        """Number of accepted tokens that end the text; the matcher does not get them."""

    def copy(self) -> GrammarConstraint:
        return GrammarConstraint(self._grammar, self._matcher.deep_copy(), self._ends, self._ended)

    def fill_mask(self, mask: Mask) -> None:
        """As in `Constraint`. Raises UnusableConstraint if the library reaches one of its limits."""
        if self._ended:
            mask.words.fill(0)
            return
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.address, 4 * len(mask.words))
        self._check()
        if (took := time.thread_time() - started) > MASK_SECONDS:
            raise self._grammar.refuse(f"one step of this grammar takes {took:.2g} s; at most {MASK_SECONDS} s allowed")
        if self._matcher.is_accepting():  # only then does the library allow the placeholder
            placeholder = self._grammar.placeholder
            mask.words[placeholder // 32] &= FULL ^ (1 << placeholder % 32)
            for end in self._ends:
                mask.words[end // 32] |= 1 << end % 32
        else:
            for end in self._ends:
                if mask.words[end // 32] >> end % 32 & 1:
                    self._check_end(end)

    def accept(self, token: int) -> None:
        assert not self._ended, "the text has ended"
        if token in self._ends:
            assert self._matcher.is_accepting(), "the text cannot end here"
            self._ended += 1
        elif not self._matcher.consume_token(token):
            raise UnusableConstraint(_short(self._matcher.get_error()), self._grammar.field)

    def rollback(self, count: int) -> None:
        ended = min(count, self._ended)
        self._ended -= ended
        if count > ended:
            assert self._matcher.rollback(count - ended), "more tokens than were accepted"

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        if self._ended:
            return 0
        at = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        body = list(tokens[:at])
        valid: int = self._matcher.validate_tokens(body) if body else 0
        if valid < at or at == len(tokens):
            return valid
        return at + self._may_end(body)

    def _may_end(self, body: list[int]) -> bool:
        """Whether the text may end after these tokens, which are allowed."""
        if not body:
            return bool(self._matcher.is_accepting())
        probe = self._matcher.deep_copy()
        return bool(probe.consume_tokens(body) and probe.is_accepting())

    def forced(self) -> list[int]:
        if self._ended:
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens[: self._matcher.validate_tokens(tokens)]

    def _check_end(self, end: int) -> None:
        """Raises UnusableConstraint if the grammar itself has a token that ends the text, and more after it."""
        probe = self._matcher.deep_copy()
        if not (probe.consume_token(end) and probe.is_accepting()):
            raise UnusableConstraint(f"it continues after the token {end}, which ends the text", self._grammar.field)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UnusableConstraint(_short(self._matcher.get_error()), self._grammar.field)


class Grammars:
    """Compiles formats for one model and caches the results. Used by one thread."""

    def __init__(
        self, vocabulary: ByteVocabulary, ends: Collection[int], check: Callable[[TextFormat], None] | None = None
    ) -> None:
        """`ends`: the model's end-of-sequence ids, which are not text in any grammar. `check`: called before a format
        is compiled; may raise UnusableConstraint."""
        from llguidance import LLTokenizer

        textless = set(ends) | vocabulary.special.keys() | {i for i, t in enumerate(vocabulary.tokens) if not t}
        if not textless:
            raise UnusableConstraint(
                "the model's vocabulary has no token that could end a text", "sampling.response_format"
            )
        self._placeholder = min(ends or textless)
        self._specials = {name: token for token, name in vocabulary.special.items()}
        special = sorted({*ends, *vocabulary.special})
        self._tokenizer = LLTokenizer(_Wrapper(vocabulary, self._placeholder, special))
        self._cached: OrderedDict[TextFormat, Grammar | UnusableConstraint] = OrderedDict()
        self._bytes = 0
        self._check = check

    def grammar(self, format: TextFormat) -> Grammar:
        """The compiled format. Raises UnusableConstraint."""
        found = self._cached.get(format)
        if found is None:
            try:
                if self._check is not None:
                    self._check(format)
                found = self.compile(format)
            except UnusableConstraint as error:
                found = error
            self._cached[format] = found
            self._bytes += _cost(format)
            while len(self._cached) > MAX_CACHED or (self._bytes > MAX_CACHED_BYTES and len(self._cached) > 1):
                self._bytes -= _cost(self._cached.popitem(last=False)[0])
        self._cached.move_to_end(format)
        if isinstance(found, UnusableConstraint):
            raise UnusableConstraint(found.message, found.field)
        return found

    def compile(self, format: TextFormat) -> Grammar:
        """Compiles a format, which is not cached. Raises UnusableConstraint."""
        from llguidance import LLMatcher, LLParserLimits

        field = field_of(format)
        source = grammar_source(format, self._specials)
        started = time.thread_time()
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():  # the first mask is the most expensive, and an unusable grammar often fails at it
            matcher.compute_bitmask()
            matcher.compute_ff_tokens()
        took = time.thread_time() - started
        if matcher.is_error():
            message = _short(matcher.get_error())
            raise UnusableConstraint(message if took > SECONDS else located(format, message, _fault), field)
        if took > COMPILE_SECONDS:
            raise UnusableConstraint(f"compiling took {took:.2g} s; at most {COMPILE_SECONDS} s are allowed", field)
        return Grammar(matcher, field, self._placeholder)


class _Wrapper:
    """A vocabulary with the interface that `llguidance.LLTokenizer` needs."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: ByteVocabulary, end: int, special: list[int]) -> None:
        self.eos_token_id, self.tokens, self.special_token_ids = end, vocabulary.tokens, special
        self._encode = lru_cache(MAX_TOKENIZED)(vocabulary.encode)

    def __call__(self, text: str) -> list[int]:
        """Called by the library in any thread, for texts that a grammar forces: the same ones in each answer."""
        return self._encode(text) if len(text) <= _MAX_TEXT else self._encode.__wrapped__(text)


def _cost(format: TextFormat) -> int:
    """An estimate of a matcher's bytes."""
    return 2**16 + 64 * len(format.source)


def _fault(schema: Any) -> str:
    """The message with which the library rejects a JSON schema; empty if the library accepts it."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        source = json_grammar(json.dumps(schema))
    except ValueError as error:
        return _short(str(error))
    return _short(LLMatcher.validate_grammar(source, limits=LLParserLimits(**LIMITS)))


def _short(message: str) -> str:
    lines = " ".join(message.partition("<non-verbose/>")[0].split())
    if lines == "NoExtensionBias":  # the library's name for a state in which no text is left
        return "there is no text that it allows"
    lines = lines.replace(_OVERLAP, "the alternatives of oneOf may overlap, which is not supported; use anyOf")
    return lines if len(lines) <= _MAX_MESSAGE else f"{lines[: _MAX_MESSAGE - 3]}..."
