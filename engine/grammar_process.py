"""The process that compiles grammars before anybody relies on them, and that is lost to those that are too much.

It reads a line of JSON with what a `Compiler` takes, or the `file` with its tokenizer; then one for each grammar, and
writes a line for each: `Verdict`s.
A grammar that takes more than `CPU_LIMIT_S`, or that is nested so deeply that it overflows a small stack, ends it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import IO, Any, NamedTuple

import setproctitle

from twinpool.engine.grammars import Compiler, in_lark
from twinpool.errors import InvalidRequest, ModelError
from twinpool.request import Grammar, GrammarKind

CPU_LIMIT_S = 1.0
"""What one grammar may take of a core; a schema of a hundred fields takes some milliseconds."""
STACK_BYTES = 1 << 20
"""At most half of what a thread of a worker has: what overflows there has overflowed here. It holds about a hundred
levels of references."""
MEMORY_BYTES = 4 << 30
NICENESS = 5
"""It gives way to the steps of workers on the same cores."""


class Verdict(NamedTuple):
    """What became of a grammar: as workers take it, or why it cannot be used (a part of a sentence)."""

    kind: str
    source: str
    error: str


def judge(compiler: Compiler, grammar: Grammar) -> Verdict:
    """Compiles `grammar`."""
    try:
        plain = in_lark(grammar)
        compiler.compile(plain).try_token()
    except InvalidRequest as exc:
        return Verdict("", "", str(exc))
    return Verdict(plain.kind, plain.source, "")


def made_of(setup: dict[str, Any]) -> Compiler:
    """The compiler that the first line asks for.

    Raises:
        ModelError: this tokenizer cannot be used, or not read any more.
    """
    if (file := setup.pop("file", None)) is not None:
        try:
            written = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ModelError(f"{file} cannot be read any more: {exc}") from exc
        # Both would change what the grammar leaves no choice about.
        written |= {"truncation": None, "padding": None}
        setup["tokenizer"] = json.dumps(written, ensure_ascii=False)
    return Compiler(**setup)


def main() -> None:
    """Runs until nothing more comes."""
    setproctitle.setproctitle("twinpool grammars")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server, which then sends nothing more
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    lines, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        compiler = made_of(json.loads(lines.readline()))
    except ModelError as exc:
        _write(answers, Verdict("", "", str(exc)))
        return
    _write(answers, Verdict("", "", ""))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(compiler, lines, answers))
    thread.start()
    thread.join()


def _serve(compiler: Compiler, lines: IO[bytes], answers: IO[bytes]) -> None:
    for line in lines:
        asked: dict[str, Any] = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # SIGPROF ends the process, whatever it is doing
        verdict = judge(compiler, Grammar(GrammarKind(asked["kind"]), asked["source"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, verdict)


def _write(answers: IO[bytes], verdict: Verdict) -> None:
    answers.write(json.dumps(verdict._asdict()).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
