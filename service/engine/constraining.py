"""Builds the constraints of requests, in a separate thread. The vocabulary is read and the library loaded when the
first request needs a constraint, so a server without such requests spends no time and memory on them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from decoder.constraints import Constraint
from decoder.token_constraints import AllOf, AllowedTokens, ReasoningBudget
from families import CheckpointError
from service.common.tenant_turns import TenantQueue
from service.common.types import ConstraintSpec
from service.engine.bad_words import BadWords, TokenText
from service.engine.grammars import Grammars
from service.engine.trials import STACK_BYTES, Trials
from service.engine.types import ConstraintFailed, UnusableConstraint
from service.model.token_bytes import ByteVocabulary

log = logging.getLogger(__name__)

_Given = tuple[ConstraintSpec, frozenset[int], frozenset[int], Sequence[int]]
"""Arguments of `Constraining._make`."""


class Constraining:
    """Builds constraints for one model. `begin` and `close` may be called from any thread."""

    def __init__(self, tokenizer: Path, vocab_size: int, ends: frozenset[int]) -> None:
        """`tokenizer`: path of `tokenizer.json`, which need not exist. `ends`: the model's end-of-sequence ids."""
        self._path, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._trials = Trials(tokenizer, vocab_size, ends)
        self._waiting = TenantQueue[tuple[Future[Constraint], _Given]]()
        """Constraints that have not been begun."""

    def begin(
        self,
        spec: ConstraintSpec,
        ends: frozenset[int],
        stops: frozenset[int],
        output_ids: Sequence[int],
        salt: bytes = b"",
    ) -> Future[Constraint]:
        """Starts to build a constraint for one sample that has accepted `output_ids`. `ends`: the request's
        end-of-sequence ids; `stops`: its other stop ids; `salt`: of its tenant. Tenants take turns, because a format
        may take seconds. The future's exception is an UnusableConstraint if the constraint cannot be served, or a
        ConstraintFailed."""
        future = Future[Constraint]()
        with self._lock:
            self._started_pool().submit(self._make_next)
            self._waiting.put(salt, (future, (spec, ends, stops, output_ids)))
        return future

    def close(self) -> None:
        """Cancels the constraints that it has not begun to build. Idempotent."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            waiting, self._waiting = self._waiting, TenantQueue()
        while waiting:
            waiting.get()[0].cancel()
        self._trials.close()

    def _started_pool(self) -> ThreadPoolExecutor:
        """A pool of one thread: a constraint takes about a millisecond, and the cores are needed for the engine."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="saccade-constraints")
            previous = threading.stack_size(STACK_BYTES)
            try:
                self._pool.submit(int)  # the thread starts with the first task
            finally:
                threading.stack_size(previous)
        return self._pool

    # -- in the pool's thread ------------------------------------------------------------------------------------------

    @cached_property
    def _vocabulary(self) -> ByteVocabulary:
        """Raises UnusableConstraint if the model has no vocabulary, or one that cannot be used."""
        field = "sampling.response_format"
        if not self._path.exists():
            raise UnusableConstraint("the model has no tokenizer, so the text of its tokens is not known", field)
        try:
            return ByteVocabulary(self._path, self._vocab_size)
        except CheckpointError as error:
            raise UnusableConstraint(str(error), field) from None

    @cached_property
    def _grammars(self) -> Grammars:
        self._trials.start()  # reads the vocabulary at the same time
        return Grammars(self._vocabulary, self._ends, self._trials.check)

    @cached_property
    def _text(self) -> TokenText:
        silent = self._vocabulary.special.keys() | self._ends
        return TokenText([b"" if i in silent else token for i, token in enumerate(self._vocabulary.tokens)])

    def _make_next(self) -> None:
        """Builds the next constraint of the tenant whose turn it is, unless it was cancelled."""
        with self._lock:
            if not self._waiting:  # closed
                return
            future, given = self._waiting.get()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._make(*given))
            except Exception as error:
                future.set_exception(error)

    def _make(
        self, spec: ConstraintSpec, ends: frozenset[int], stops: frozenset[int], output_ids: Sequence[int]
    ) -> Constraint:
        try:
            constraint = self._constraint(spec, ends, stops)
            if (valid := constraint.valid_prefix(output_ids)) < len(output_ids):
                raise UnusableConstraint(
                    f"only the first {valid} of the {len(output_ids)} ids satisfy the request's constraints",
                    "continued_token_ids",
                )
            for token in output_ids:
                constraint.accept(token)
            return constraint
        except ValueError:
            raise
        except Exception as error:
            log.exception("a constraint could not be made")
            raise ConstraintFailed(f"a constraint could not be made: {error}") from error

    def _constraint(self, spec: ConstraintSpec, ends: frozenset[int], stops: frozenset[int]) -> Constraint:
        # A stop id that stands for text is text to the grammar; if it is drawn, the answer ends there.
        ends_of_text = ends | self._textless(stops) if spec.format is not None else frozenset[int]()
        made = self._parts(spec, ends, ends_of_text)
        if spec.reasoning is None:
            assert made, "a constraint without a part"
            return made[0] if len(made) == 1 else AllOf(*made)
        reasoning, inner = spec.reasoning, AllOf(*made) if made else None
        return ReasoningBudget(
            (reasoning.close,), reasoning.limit, inner, opening=() if reasoning.open is None else (reasoning.open,),
            ends=ends_of_text - {reasoning.close},
        )  # fmt: skip

    def _textless(self, ids: frozenset[int]) -> frozenset[int]:
        vocabulary = self._vocabulary
        return frozenset(i for i in ids if i in vocabulary.special or not vocabulary.tokens[i])

    def _parts(self, spec: ConstraintSpec, ends: frozenset[int], ends_of_text: frozenset[int]) -> list[Constraint]:
        made: list[Constraint] = []
        if spec.format is not None:
            if not ends_of_text:
                raise UnusableConstraint(
                    "the model has no end-of-sequence id; stop_token_ids could give one", "sampling.response_format"
                )
            made.append(self._grammars.grammar(spec.format).start(ends_of_text))
        if spec.allowed_token_ids is not None:
            made.append(AllowedTokens(spec.allowed_token_ids | ends))
        if spec.bad_words:
            made.append(BadWords(self._text, spec.bad_words))
        return made
