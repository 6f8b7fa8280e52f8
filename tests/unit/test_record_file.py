"""The file of the record: moved aside at its size, whole lines only, and never a reason to stop serving."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinpool.commands.record_flags import add_record_flags, record_config
from twinpool.config import RecordConfig
from twinpool.coordinator.record_file import (
    KEPT_FILES,
    MOST_WAITING_TOKENS,
    LineWriter,
    RecordFile,
    RequestRecorder,
    start_recorder,
)
from twinpool.coordinator.request_record import EndedRequest
from twinpool.errors import ConfigError
from twinpool.request import RequestState


def _ended(name: str, num_prompt: int = 0) -> EndedRequest:
    return EndedRequest(name, "", 0.0, RequestState.COMPLETED, prompt_token_ids=(1,) * num_prompt)


def _line(ended: EndedRequest, is_first: bool) -> bytes:
    return f"{ended.request_id}{' first' if is_first else ''}\n".encode()


def _text(text: str, _is_first: bool) -> bytes:
    return f"{text}\n".encode()


def _append(file: RecordFile, text: str) -> None:
    line = text.encode() + b"\n"
    file.make_room(len(line))
    file.append(line)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    opened: list[Any] = []
    yield opened
    for each in opened:
        each.close()


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_moved_aside_at_its_size_and_the_oldest_goes(path: Path, closing: list[Any]) -> None:
    file = RecordFile(str(path), max_bytes=10)
    closing.append(file)
    for number in range(2 * (KEPT_FILES + 2)):
        _append(file, f"{number:04}")
    kept = [path, *(Path(f"{path}.{number}") for number in range(1, KEPT_FILES + 1))]
    assert [each.read_text() for each in kept] == [
        f"{2 * n:04}\n{2 * n + 1:04}\n" for n in range(KEPT_FILES + 1, 0, -1)
    ]
    assert {each.name for each in path.parent.iterdir()} == {each.name for each in kept}
    assert path.stat().st_mode & 0o077 == 0, "for its owner only"


def test_a_line_longer_than_the_bound_is_a_file_of_its_own(path: Path, closing: list[Any]) -> None:
    file = RecordFile(str(path), max_bytes=10)
    closing.append(file)
    for text in ("a", "b" * 30, "c"):
        _append(file, text)
    assert [Path(f"{path}{end}").read_text() for end in ("", ".1", ".2")] == ["c\n", "b" * 30 + "\n", "a\n"]


def test_the_file_of_an_earlier_start_is_moved_aside(path: Path, closing: list[Any]) -> None:
    path.write_text("of before\n")
    file = RecordFile(str(path), max_bytes=1000)
    closing.append(file)
    assert file.make_room(5)
    assert (path.read_text(), Path(f"{path}.1").read_text()) == ("", "of before\n")


def test_a_file_that_was_moved_or_deleted_is_begun_anew(path: Path, closing: list[Any]) -> None:
    file = RecordFile(str(path), max_bytes=1000)
    closing.append(file)
    _append(file, "a")
    path.rename(path.with_name("archive"))
    assert file.make_room(5)
    _append(file, "b")
    path.unlink()
    assert file.make_room(5)
    _append(file, "c")
    assert path.read_text() == "c\n"
    assert path.with_name("archive").read_text() == "a\n"


def test_a_file_that_cannot_be_written_is_named_at_the_start(path: Path, closing: list[Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"--record is '.*/nowhere/x', which cannot be written: No such file"
    ):
        RecordFile(str(path.parent / "nowhere" / "x"), 1000)
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordFile(str(path.parent), 1000)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordFile(str(path), 1000)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match="it is no regular file"):
        RecordFile(str(path), 1000)
    os.close(reading)
    path.unlink()
    closing.append(RecordFile(str(path), 1000))
    with pytest.raises(ConfigError, match="another server writes"):
        RecordFile(str(path), 1000)


def test_half_a_line_is_taken_back(path: Path, closing: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordFile(str(path), 1000)
    closing.append(file)
    _append(file, "whole")
    write = os.write

    def half(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", full)
        return write(fd, data[:3])

    def full(fd: int, data: bytes) -> int:  # noqa: ARG001  # os.write's
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        _append(file, "broken")
    monkeypatch.setattr(os, "write", write)
    _append(file, "again")
    assert path.read_text() == "whole\nagain\n"


# ── the thread ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_put_is_there_when_the_recorder_is_closed(path: Path) -> None:
    recorder = RequestRecorder(RecordFile(str(path), 12), _line)
    for name in "abcde":
        recorder.put(_ended(name))
    recorder.close()
    assert [Path(f"{path}{end}").read_text() for end in (".1", "")] == ["a first\nb\nc\n", "d first\ne\n"]
    assert (recorder.num_written, recorder.num_lost) == (5, 0)
    recorder.close()
    recorder.put(_ended("late"))
    assert recorder.num_lost == 1


def test_a_full_disk_costs_lines_and_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(RecordFile):
        is_full = True

        def append(self, line: bytes) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().append(line)
            written.set()

    file, written = Full(str(path), 1000), threading.Event()
    lost = threading.Semaphore(0)

    class Told(RequestRecorder):
        def _lose(self, why: str) -> None:
            super()._lose(why)
            lost.release()

    recorder = Told(file, _line)
    with caplog.at_level(logging.WARNING):
        for name in "abc":
            recorder.put(_ended(name))
        for _ in "abc":
            assert lost.acquire(timeout=10)
        file.is_full = False
        recorder.put(_ended("d"))
        assert written.wait(10)
        recorder.close()
    assert path.read_text() == "d first\n"
    assert (recorder.num_written, recorder.num_lost) == (1, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "--record: lines are lost: No space left on device; serving goes on",
        "--record: lines are written again; 3 are lost",
    ]


def test_a_disk_that_hangs_holds_up_nobody(path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Hanging(RecordFile):
        def append(self, line: bytes) -> None:
            begun.set()
            assert go_on.wait(10)
            super().append(line)

    recorder = RequestRecorder(Hanging(str(path), 1000), _line)
    recorder.put(_ended("first"))
    assert begun.wait(10)
    half = MOST_WAITING_TOKENS // 2
    for name in "abcd":
        recorder.put(_ended(name, half))
    assert recorder.num_lost == 2, "two of them are all that may wait"
    go_on.set()
    recorder.close()
    assert path.read_text() == "first first\na\nb\n"


def test_an_end_that_does_not_wait_for_the_disk_counts_what_is_left(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Hanging(RecordFile):
        def append(self, line: bytes) -> None:
            begun.set()
            assert go_on.wait(10)
            super().append(line)

    writer = LineWriter(Hanging(str(path), 1000, "--lines"), _text, cost_of=len, most_waiting=100)
    writer.put("first")
    assert begun.wait(10)
    writer.put("a")
    writer.put("b")
    writer.close(timeout_s=0.0)
    assert writer.num_lost == 2
    assert caplog.messages == ["--lines: 2 lines are lost: the disk is too slow"]
    go_on.set()
    writer.close()
    assert path.read_text() == "first\n", "what was under way is written when the disk goes on, and no more"
    assert (writer.num_written, writer.num_lost) == (1, 2)


def test_a_record_begins_with_the_servers_start(path: Path) -> None:
    recorder = start_recorder(RecordConfig(str(path)), now=5.0)
    recorder.put(EndedRequest("r", "", 5.25, RequestState.COMPLETED))
    recorder.close()
    assert path.read_text().startswith('{"timestamp":250,')


# ── flags ─────────────────────────────────────────────────────────────────────────────────────────────────


def _config(*argv: str) -> RecordConfig | None:
    parser = argparse.ArgumentParser()
    add_record_flags(parser)
    return record_config(parser.parse_args(argv))


def test_flags_say_what_is_recorded_where() -> None:
    assert _config() is None
    assert _config("--record", "x") == RecordConfig("x", 256, has_ids=False)
    wanted = ("--record", "x", "--record-max-mb", "3", "--record-ids")
    assert _config(*wanted) == RecordConfig("x", 3, has_ids=True)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--record", ""), "--record is ''"),
        (("--record", "x", "--record-max-mb", "0"), "--record-max-mb is 0"),
        (("--record-ids",), "--record-ids is for --record FILE"),
        (("--record-max-mb", "5"), "--record-max-mb is for --record FILE"),
    ],
)
def test_flags_that_make_no_record_are_refused(argv: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _config(*argv)
