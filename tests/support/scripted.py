"""A scripted server in a process of its own, and requests that carry their scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twinpool.bench.scripted_answer import MODEL, Piece, Script
from twinpool.bench.scripted_server import Sent, running, sent_by
from twinpool.bench.serving.settings import Endpoint, LoadSettings, ServerKind
from twinpool.bench.serving.workload import PlannedRequest

WAIT_S = 30.0


@dataclass
class Scripted:
    """A running server."""

    url: str

    def log(self) -> dict[str, Sent]:
        """What it sent so far, by request id."""
        return sent_by(self.url)

    def settings(self, kind: ServerKind = ServerKind.TWINPOOL, **others: object) -> LoadSettings:
        """For a load on it, without timelines, which it has not."""
        known: dict[str, object] = {
            "endpoint": Endpoint.COMPLETIONS,
            "with_timelines": False,
            "limit_s": WAIT_S,
        }
        return LoadSettings(base_url=self.url, model=MODEL, kind=kind, **{**known, **others})  # type: ignore[arg-type]


@contextmanager
def scripted_server(*arguments: str, scheme: str = "http") -> Iterator[Scripted]:
    """Starts one with these flags, and ends it."""
    with running(*arguments, scheme=scheme) as url:
        yield Scripted(url)


def asking_for(scripts: Sequence[Script], at_s: Sequence[float] | None = None) -> list[PlannedRequest]:
    """A request for each script; all at once unless they have times."""
    return [
        PlannedRequest(
            index=index,
            prompt=msgspec.json.encode(script).decode(),
            input_tokens=1,
            output_tokens=sum(piece.num_tokens for piece in script.pieces) or 1,
            at_s=0.0 if at_s is None else at_s[index],
        )
        for index, script in enumerate(scripts)
    ]


def steady(num_pieces: int, gap_s: float, first_s: float = 0.01, num_tokens: int = 1) -> tuple[Piece, ...]:
    """Pieces at even gaps."""
    return tuple(Piece(gap_s if number else first_s, num_tokens) for number in range(num_pieces))


def word_tokenizer(folder: Path) -> Path:
    """A tokenizer.json for which every letter is a token."""
    vocabulary = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    file = folder / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": vocabulary | {"?": len(vocabulary)}, "unk_token": "?"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    file.write_text(
        json.dumps({"version": "1.0", "model": model, "pre_tokenizer": split, "added_tokens": []})
    )
    return file
