"""Whether the grammars that clients send can be followed, found out before any work: in a process that may be lost.

It is started when the first grammar comes, and again after one that ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import twinpool
from twinpool.coordinator.gateway.structured import Constraint
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import InvalidRequest, QueueFull, RequestFailed
from twinpool.request import Grammar, GrammarKind

MAX_WAITING = 256
"""Requests whose grammars are, or wait to be, compiled."""
WAIT_LIMIT_S = 30.0
MAX_REMEMBERED = 4096
ANSWER_LIMIT_S = 20.0
"""For an answer of the process, which ends itself after a second of CPU time."""
_PROCESS = "twinpool.engine.grammar_process"
_READ_BYTES = 1 << 16
_REASONS = {
    -signal.SIGSEGV: "it is nested too deeply; simplify it",
    -signal.SIGPROF: "compiling it takes too long; simplify it",
    -signal.SIGABRT: "compiling it takes too much memory; simplify it",
}
"""Of grammars over which the process ended with such a status."""


class GrammarChecks:
    """One model's. Closing it, or dropping it, ends its process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(1, "grammar-checks")
        self._num_waiting = 0
        self._remembered: OrderedDict[bytes, str] = OrderedDict()
        self._process: _Process | None = None
        self._refusal = ""

    async def checked(self, constraint: Constraint) -> Grammar:
        """The constraint's grammar as workers take it; at once if it has been checked before.

        Raises:
            InvalidRequest: it is wrong, has what is not supported, is too complex, or matches nothing.
            QueueFull: too many others are being checked.
            RequestFailed: the process that checks cannot run.
        """
        grammar, field = constraint
        if (error := self._remembered.get(_digest(grammar))) is None:
            if self._num_waiting >= MAX_WAITING:
                message = f"{self._num_waiting} grammars wait to be compiled; try again"
                raise QueueFull(message, retry_after_s=1.0)
            self._num_waiting += 1
            asked = asyncio.get_running_loop().run_in_executor(self._executor, self._check, grammar)
            asked.add_done_callback(self._forget_waiting)
            try:
                await asyncio.wait((asked,), timeout=WAIT_LIMIT_S)
            finally:
                is_late = not asked.done()
                asked.cancel()
            if is_late:
                raise QueueFull(
                    "too many grammars are compiled before this one; try again", retry_after_s=1.0
                )
            grammar, error = asked.result()
        if error:
            raise InvalidRequest(f"{field} cannot be used: {error}", param=field)
        return grammar

    def close(self) -> None:
        """Ends the process; nothing may be asked any more."""
        self._executor.shutdown(cancel_futures=True)
        if self._process is not None:
            self._process.end()

    def _forget_waiting(self, asked: asyncio.Future[tuple[Grammar, str]]) -> None:
        self._num_waiting -= 1
        if not asked.cancelled():
            asked.exception()  # of a client that is gone, nobody else asks

    def _check(self, grammar: Grammar) -> tuple[Grammar, str]:
        """On the executor's thread: one at a time."""
        digest = _digest(grammar)
        if (error := self._remembered.get(digest)) is not None:
            return grammar, error
        if self._refusal:
            return grammar, self._refusal
        is_new = self._process is None
        if self._process is None:
            self._process = _Process(self._tokenizer)
            self._refusal = self._process.refusal
            if self._refusal:
                return grammar, self._refusal
        try:
            checked, error = self._process.ask(grammar)
        except _Lost as exc:
            self._process = None
            if exc.status not in _REASONS:  # somebody else ended it, perhaps long ago
                return (grammar, str(exc)) if is_new else self._check(grammar)
            checked, error = grammar, str(exc)
        # What GBNF is in Lark would have to be remembered too.
        if error or grammar.kind is not GrammarKind.GBNF:
            self._remembered[digest] = error
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return checked, error


class _Lost(Exception):
    """The process ended over a grammar, with `status`; says why that cannot be used."""

    def __init__(self, status: int) -> None:
        super().__init__(_REASONS.get(status, "compiling it takes too much; simplify it"))
        self.status = status


class _Process:
    """One that runs until `end`; `refusal` says why it can do nothing for this model, or is empty. One thread uses
    it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Starts it. Raises RequestFailed if that does not work."""
        package_root = str(Path(twinpool.__file__).parents[1])
        paths = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", _PROCESS],
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what a library prints may quote what clients have written
                bufsize=0,
            )
        except OSError as exc:
            raise RequestFailed(f"the process that compiles grammars cannot be started: {exc}") from exc
        self.end = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        # To write it out takes as long as some tokens, in which no other thread runs.
        file = tokenizer.file
        setup = {
            **({"tokenizer": tokenizer.backend.to_str()} if file is None else {"file": str(file)}),
            "num_tokens": tokenizer.vocab_size,
            "eos_token_ids": tokenizer.eos_token_ids,
        }
        try:
            self.refusal = self._exchange(setup)["error"]
        except _Lost as exc:
            message = f"the process that compiles grammars does not run: it ended with {exc.status}"
            raise RequestFailed(message) from exc

    def ask(self, grammar: Grammar) -> tuple[Grammar, str]:
        """The grammar as workers take it, or the same one and why it cannot be used. Raises _Lost."""
        answer = self._exchange({"kind": grammar.kind, "source": grammar.source})
        if answer["error"]:
            return grammar, answer["error"]
        return Grammar(GrammarKind(answer["kind"]), answer["source"]), ""

    def _exchange(self, message: dict[str, Any]) -> dict[str, str]:
        with contextlib.suppress(BrokenPipeError):  # the end of its output says it, too
            self._stdin.write(json.dumps(message).encode() + b"\n")
        line = bytearray()
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            piece = os.read(self._stdout.fileno(), _READ_BYTES) if poll.poll(ANSWER_LIMIT_S * 1e3) else b""
            if not piece:
                self.end()
                raise _Lost(self._process.returncode)
            line += piece
        answer: dict[str, str] = json.loads(line)
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """It may have ended by itself, then its status stays what it is."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        process.wait(0.1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _digest(grammar: Grammar) -> bytes:
    return hashlib.blake2b(f"{grammar.kind} {grammar.source}".encode(), digest_size=16).digest()
