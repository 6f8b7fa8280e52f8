"""Shapes from traces of real servers: JSON lines, CSV, and what our own clients recorded. Times count from the first
request."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec

from twinpool.bench.serving.datasets.files import json_lines, read, read_text
from twinpool.bench.serving.datasets.settings import MOONCAKE_BLOCK
from twinpool.bench.serving.datasets.shapes import Drawn, Shape, hashed, own
from twinpool.bench.serving.record import RequestRecord, Run, decode_run
from twinpool.errors import ConfigError


class _Head(msgspec.Struct, frozen=True):
    """What the first line of a record of ours (`twinpool serve --record`) says of all its lines."""

    block_size: int
    started_at: float


class _Line(msgspec.Struct):
    """A line of a JSON lines trace. `timestamp` is in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    twinpool: _Head | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """One request of any trace. `place` says where it stands, for errors."""

    place: str
    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    group: str = ""


def jsonl_trace(path: str, block_size: int | None) -> Drawn:
    """A trace in the format of Mooncake (FAST '25): a hash id stands for `block_size` tokens of the prompt, the last
    one for what is left; tokens behind the last full block may have none. Without `block_size` they are as many as the
    file says, or `MOONCAKE_BLOCK`.

    Raises:
        ConfigError: the file cannot be read, a line is no request, ids and length do not fit together, or there are
            lines of several starts of a server, whose times and ids have nothing to do with each other.
    """
    what = "a request with timestamp (ms), input_length, output_length and maybe hash_ids"
    lines = list(json_lines(path, _Line, what))
    heads = {line.twinpool for _, line in lines if line.twinpool is not None}
    if len(heads) > 1:
        raise ConfigError(f"{path} has the records of {len(heads)} starts of a server; replay each by itself")
    if block_size is None:
        block_size = next(iter(heads)).block_size if heads else MOONCAKE_BLOCK
    rows = (
        _Row(f"line {number}", line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids)
        for number, line in lines
    )
    return _trace(path, rows, block_size)


_TIME = ("timestamp", "time", "arrivaltime", "arrivaltimestamp", "arrivedat")
_INPUT = (
    "contexttokens", "requesttokens", "inputtokens", "inputlength", "inputlen", "prompttokens", "promptlength",
    "promptlen", "numprefilltokens",
)  # fmt: skip
_OUTPUT = (
    "generatedtokens", "responsetokens", "outputtokens", "outputlength", "outputlen", "completiontokens",
    "numdecodetokens",
)  # fmt: skip


def csv_trace(path: str) -> Drawn:
    """A CSV trace with a header, like those of Azure (TIMESTAMP, ContextTokens, GeneratedTokens) or BurstGPT.

    Columns are known by their names, whatever their case, spaces and underscores. Times are dates (ISO 8601, UTC unless
    they have a zone) or seconds; in a column whose name ends in `ms` they are milliseconds.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or a row lacks a number.
    """
    rows = csv.DictReader(read_text(path).splitlines(), restkey="", restval="")
    names = [name for name in rows.fieldnames or () if name]
    time = _column(path, names, "arrival time", (*_TIME, *(f"{name}ms" for name in _TIME)))
    columns = (
        time,
        _column(path, names, "input tokens", _INPUT),
        _column(path, names, "output tokens", _OUTPUT),
    )
    unit_s = 0.001 if _plain(time).endswith("ms") else 1.0
    return _trace(path, (_csv_row(path, rows.line_num, row, columns, unit_s) for row in rows))


def record_trace(path: str) -> Drawn:
    """The requests of a run of ours: the file that holds the run, or a record on each line. They come when they were
    meant to come and are as long as they were. What they said was not kept, so they share no prefixes.

    Raises:
        ConfigError: the file cannot be read, or holds neither.
    """
    trace = _trace(
        path,
        (
            _Row(
                f"record {record.index}",
                record.intended_at_s,
                record.input_tokens,
                record.wanted_output_tokens,
                group=record.group,
            )
            for record in _records(path)
        ),
    )
    note = "records keep no prompts: these are others of the same lengths, which share no prefixes"
    return replace(trace, notes=(*trace.notes, note))


def _records(path: str) -> Sequence[RequestRecord]:
    data = read(path)
    try:
        run: Run = decode_run(data)
    except msgspec.DecodeError as exc:
        if len(data.strip().splitlines()) == 1 and b'"requests"' in data:
            raise ConfigError(f"{path} is not a recorded run: {exc}") from exc
        return [record for _, record in json_lines(path, RequestRecord, "a request's record")]
    return run.requests


def _trace(path: str, rows: Iterable[_Row], block_size: int = 1) -> Drawn:
    shapes: list[Shape] = []
    left_out = 0
    for row in rows:
        if row.input_tokens < 0 or row.output_tokens < 0 or not math.isfinite(row.at_s):
            raise ConfigError(
                f"{row.place} of {path} has {row.input_tokens} input tokens, {row.output_tokens} output tokens and the "
                f"time {row.at_s:g} s; lengths are 0 or more, times finite"
            )
        if row.input_tokens == 0 or row.output_tokens == 0:
            left_out += 1
            continue
        shapes.append(_shape(path, row, len(shapes), block_size))
    if not shapes:
        raise ConfigError(f"{path} has no request with at least one token in and out")
    first_s = min(shape.at_s or 0.0 for shape in shapes)
    notes = (f"{left_out} requests without a token in or out were left out",) if left_out else ()
    return Drawn([replace(shape, at_s=(shape.at_s or 0.0) - first_s) for shape in shapes], notes)


def _shape(path: str, row: _Row, index: int, block_size: int) -> Shape:
    ids = row.hash_ids
    if not ids:
        return Shape((own(index, row.input_tokens),), row.output_tokens, row.at_s, row.group)
    full, rest = divmod(row.input_tokens, block_size)
    if len(ids) == full + (rest > 0):
        pieces = hashed(ids, row.input_tokens, block_size)
    elif len(ids) == full:
        pieces = (*hashed(ids, full * block_size, block_size), own(index, rest))
    else:
        raise ConfigError(
            f"{row.place} of {path} has {row.input_tokens} input tokens and {len(ids)} hash_ids, which does not go "
            f"with --trace-block-size {block_size}: {full + (rest > 0)} were expected"
        )
    return Shape(pieces, row.output_tokens, row.at_s, row.group, ids)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _column(path: str, names: Sequence[str], what: str, known: Sequence[str]) -> str:
    """The one column that has a known name."""
    found = [name for name in names if _plain(name) in known]
    if len(found) != 1:
        problem = (
            f"{len(found)} columns for the {what} ({', '.join(found)})"
            if found
            else f"no column for the {what}"
        )
        raise ConfigError(
            f"{path} has {problem}; its header is {', '.join(names) or 'empty'}. Name exactly one of them "
            f"{', '.join(known[:4])}, …"
        )
    return found[0]


def _csv_row(
    path: str, line: int, row: Mapping[str, str], columns: tuple[str, str, str], unit_s: float
) -> _Row:
    time, inputs, outputs = (row[column] for column in columns)
    try:
        return _Row(f"line {line}", _seconds(time, unit_s), _whole(inputs), _whole(outputs))
    except ValueError as exc:
        raise ConfigError(
            f"line {line} of {path} has no time and two token counts in {', '.join(columns)}, but {time!r}, "
            f"{inputs!r}, {outputs!r}"
        ) from exc


def _seconds(text: str, unit_s: float) -> float:
    """A number in `unit_s`, or a date. Raises ValueError."""
    try:
        return float(text) * unit_s
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _whole(text: str) -> int:
    """A whole number, also one written like 12.0. Raises ValueError."""
    value = float(text)
    if not value.is_integer():
        raise ValueError(text)
    return int(value)
