"""Grammars that answers must match, by llguidance: compiled, kept, and followed token by token.

The one module that knows llguidance. Where an answer is in its grammar follows from its tokens, so nothing of a
`Matcher` ever travels: whoever goes on with an answer makes one anew and has it accept the tokens that are there.

llguidance bounds most of what compiling takes, but not all: some grammars would take for ever, some overflow the stack.
So the gateway has each one compiled in a process that may be lost (`coordinator/gateway/grammar_checks.py`) before any
worker hears of it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from twinpool.engine import lark
from twinpool.engine.special_tokens import by_number, hide
from twinpool.errors import InvalidRequest, InvariantViolation, ModelError, RequestFailed
from twinpool.request import Grammar, GrammarKind, Job, RequestKey

Mask = np.ndarray[Any, np.dtype[np.int32]]
"""A bit for each token, the lowest of each word first: int32 [words]."""

MOST_READY = 256
MOST_READY_CHARS = 2 << 20
"""Prepared matchers that nobody has asked for yet, and what their grammars have together. llguidance does not tell how
many bytes a matcher takes: with 49,152 tokens some 70 kB, and 20 to 140 for each character of its grammar."""
LOAD_LIMIT_S = 60.0
MASK_LIMIT_S = 0.02
"""What a mask may take of a core: a hundred times of what it usually takes."""
_MOST_REASON_CHARS = 200
_DEAD_END = "no token of the model goes on with what the grammar asks for"
_TOO_COMPLEX = re.compile(r"too many|items; max is", re.IGNORECASE)
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""A state of the lexer takes 1 to 2 kB, and each sequence has its own. Errors never quote grammar or answer."""


class Matcher:
    """Where one answer is in its grammar. One thread at a time uses it.

    `error` says in a sentence why the answer cannot go on; it is empty while it can.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        """Takes over `matcher`."""
        self._matcher = matcher
        self.error = ""

    @property
    def is_stopped(self) -> bool:
        """Whether nothing but the answer's end may follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token, which the last mask allowed; the end is a token, too."""
        if self.error or self._matcher.consume_token(token_id):
            return
        reason = _reason(self._matcher.get_error())
        if _TOO_COMPLEX.search(reason):
            self.error = f"the grammar is too complex to go on with: {reason}"
        else:  # what llguidance says of it may quote the answer
            self.error = "the answer has a token that the grammar does not allow"

    def try_token(self) -> None:
        """Goes on with some token that is allowed: some grammars are only then too complex, and with some each mask
        takes so long that everybody's steps would (one that begins with 200,000 given letters: 0.1 s).

        Raises:
            InvalidRequest: this is one of them.
        """
        began = thread_time()
        mask = self.mask()
        if thread_time() - began > MASK_LIMIT_S:
            raise InvalidRequest("each token of the answer would take too long; shorten the texts in it")
        token_ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(token_ids):
            return
        self.accept(int(token_ids[len(token_ids) // 2]))
        if not self.is_stopped:
            self.mask()
        if self.error and self.error != _DEAD_END:
            raise InvalidRequest(self.error)

    def mask(self) -> Mask:
        """Which tokens may follow: where the grammar is complete, those that end an answer are among them, and nowhere
        else. Some 10 to 100 µs; it may find an error."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if not self.error and self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            is_dead_end = reason.startswith("NoExtension")
            self.error = _DEAD_END if is_dead_end else f"the grammar is too complex to go on with: {reason}"
        elif not self.error and not mask.any():
            self.error = _DEAD_END
        return mask


class Compiler:
    """Compiles grammars for one model's tokens. Any thread may use it."""

    def __init__(
        self,
        tokenizer: str,
        num_tokens: int,
        eos_token_ids: tuple[int, ...],
        *,
        is_to_be_finished: bool = False,
    ) -> None:
        """Takes the text of a tokenizer.json, the number of logits (at least that of the tokens) and the tokens that
        end an answer. Takes about 0.2 s for 49,152 tokens, and then `finish`, unless somebody else calls that.
        Python's other threads stand still in each.

        Raises:
            ModelError: this kind of tokenizer cannot be used.
        """
        if not eos_token_ids:
            raise ModelError(
                "the model has no token that ends an answer, so none can end where a grammar does"
            )
        try:
            hidden, self._special_token_ids = hide(tokenizer)
            self._tokenizer = LLTokenizer(
                hidden, n_vocab=num_tokens, eos_token=list(eos_token_ids), slices=[]
            )
            if not is_to_be_finished:
                self.finish()
        except Exception as exc:  # what it raises is not documented
            reason = _reason(str(exc))[:80]
            raise ModelError(f"no grammar can be followed with this model's tokenizer: {reason}") from exc

    def finish(self) -> None:
        """Prepares what makes masks several times as fast. Takes about 0.1 s for 49,152 tokens."""
        self._tokenizer = self._tokenizer.with_slices(LLTokenizer.general_slices())

    def compile(self, grammar: Grammar) -> Matcher:
        """A new matcher at the grammar's beginning, in 1 to 3 ms for a usual one. No two share anything: what
        llguidance calls a deep copy shares the lexer, so that how far an answer may go would depend on the others.

        Raises:
            InvalidRequest: it is wrong, has what is not supported, is too complex, or matches nothing. The message ends
                a sentence that begins with what it is for.
        """
        compiled = LLMatcher(self._tokenizer, self._text(grammar), log_level=0, limits=_LIMITS)
        if compiled.is_error():
            raise InvalidRequest(_reason(compiled.get_error()))
        matcher = Matcher(compiled)
        matcher.mask()
        if matcher.error:
            raise InvalidRequest(matcher.error)
        return matcher

    def _text(self, grammar: Grammar) -> str:
        """What an LLMatcher is made of."""
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                try:
                    schema = json.loads(grammar.source)
                except (ValueError, RecursionError) as exc:
                    raise InvalidRequest(f"the schema is no JSON, or nested too deeply: {exc}") from exc
                if not isinstance(schema, dict):
                    raise InvalidRequest("the schema is no JSON object")
                try:
                    return LLMatcher.grammar_from_json_schema(lark.bounded(schema))
                except ValueError as exc:  # of integers that 64 bits do not hold
                    raise InvalidRequest("the schema has a number that is out of range") from exc
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.source)
            case GrammarKind.LARK | GrammarKind.GBNF:
                source = by_number(in_lark(grammar).source, self._special_token_ids)
                return LLMatcher.grammar_from_lark(source)


Pieces = Iterator[Compiler | None]
"""Loads a compiler in pieces: None after each but the last, which gives it."""


class _Prepared(NamedTuple):
    grammar: Grammar
    matcher: Matcher


class Grammars:
    """The grammars of one worker. Any thread may use it.

    Whoever has a job's grammar prepared says so (`forget`) when the job leaves before anybody has asked for its
    matcher.
    """

    def __init__(self, load: Callable[[], Pieces]) -> None:
        """`load` is called when the first grammar comes, or at the first `get_ahead`."""
        self._load = load
        self._pieces: Pieces | None = None
        self._compiler: Compiler | None = None
        self._loading = Lock()
        self._lock = Lock()
        self._ready: OrderedDict[RequestKey, _Prepared] = OrderedDict()
        self._num_ready_chars = 0

    @classmethod
    def of_model(cls, directory: Path, num_logits: int) -> Grammars:
        """Those for the model in `directory`, which gives `num_logits` logits."""

        def load() -> Pieces:
            # Where no grammar comes, a worker does without the tokenizer's packages.
            from twinpool.engine.tokenizer import Tokenizer

            tokenizer = Tokenizer.from_dir(directory)
            yield None
            num_tokens, text = max(num_logits, tokenizer.vocab_size), tokenizer.backend.to_str()
            yield None
            compiler = Compiler(text, num_tokens, tokenizer.eos_token_ids, is_to_be_finished=True)
            yield None
            compiler.finish()
            yield compiler

        return cls(load)

    def get_ahead(self) -> bool:
        """Does a piece of what the first grammar would wait for, on the calling thread; returns whether all is done.
        Python's other threads stand still in it, for 0.2 s with 49,152 tokens: call it while nobody waits for them.

        Raises:
            ModelError: no grammar can be followed with this model.
        """
        if self._loading.acquire(blocking=False):
            try:
                if self._compiler is None:
                    self._compiler = self._next_piece()
            finally:
                self._loading.release()
        return self._compiler is not None

    def prepare(self, job: Job) -> None:
        """Compiles the job's grammar on the calling thread, for one who will ask for its matcher.

        Raises:
            InvalidRequest: it cannot be compiled.
            ModelError: no grammar can, with this model.
            RequestFailed: the tokenizer, which another thread loads, was not there within `LOAD_LIMIT_S`.
        """
        if (grammar := job.sampling.grammar) is None:
            return
        matcher = self._loaded().compile(grammar)
        with self._lock:
            self._drop(job.key)
            self._ready[job.key] = _Prepared(grammar, matcher)
            self._num_ready_chars += len(grammar.source)
            while len(self._ready) > MOST_READY or self._num_ready_chars > MOST_READY_CHARS:
                self._drop(next(iter(self._ready)))

    def forget(self, key: RequestKey) -> None:
        """Nobody will ask for that job's matcher any more."""
        with self._lock:
            self._drop(key)

    def matcher(self, job: Job) -> Matcher:
        """A new one at the beginning of the job's grammar, which it must have: one that was prepared, or else it is
        compiled now.

        Raises:
            InvalidRequest, ModelError, RequestFailed: as `prepare`.
        """
        grammar = job.sampling.grammar
        if grammar is None:
            raise InvariantViolation(f"{job.key} has no grammar")
        with self._lock:
            prepared = self._drop(job.key)
        if prepared is not None and prepared.grammar == grammar:
            return prepared.matcher
        return self._loaded().compile(grammar)

    def _drop(self, key: RequestKey) -> _Prepared | None:
        """Takes what is prepared for that job, if anything is, under the lock."""
        if (prepared := self._ready.pop(key, None)) is not None:
            self._num_ready_chars -= len(prepared.grammar.source)
        return prepared

    def _loaded(self) -> Compiler:
        if not self._loading.acquire(timeout=LOAD_LIMIT_S):
            raise RequestFailed(f"the tokenizer for grammars was not loaded within {LOAD_LIMIT_S:g} s")
        try:
            while self._compiler is None:
                self._compiler = self._next_piece()
            return self._compiler
        finally:
            self._loading.release()

    def _next_piece(self) -> Compiler | None:
        if self._pieces is None:
            self._pieces = self._load()
        try:
            return next(self._pieces)
        except BaseException:
            self._pieces = None  # whoever comes next begins anew
            raise


def in_lark(grammar: Grammar) -> Grammar:
    """The grammar as workers take it: GBNF becomes Lark, others stay what they are. Slow for long ones.

    Raises:
        InvalidRequest: it is no GBNF.
    """
    if grammar.kind is not GrammarKind.GBNF:
        return grammar
    try:
        return Grammar(GrammarKind.LARK, gbnf_to_lark(grammar.source))
    except (Exception, RecursionError) as exc:  # it raises plain Exceptions
        raise InvalidRequest(_reason(str(exc))) from exc


def _reason(error: str) -> str:
    """llguidance's error as a part of a sentence: without the lines of the grammar that it shows, and not too long."""
    lines = error.strip().splitlines() or ["for no reason that is known"]
    if "coerce_one_of" in lines[0]:  # an option that clients do not have
        return "oneOf is supported where its alternatives exclude each other, which these do not; use anyOf"
    told = next((line for line in lines if line.startswith("error: ")), lines[0])
    return told.removeprefix("error: ").strip()[:_MOST_REASON_CHARS]
