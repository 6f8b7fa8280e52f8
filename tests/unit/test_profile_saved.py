"""Profiles as files: they come back exactly, and what is none is told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.made_profiles import TRUE_FIT, made_profile

from twinpool.errors import ConfigError
from twinpool.planner.profile.fitted_times import FittedTimes, doubts, load_times
from twinpool.planner.profile.saved import from_json, load_profile, save_profile, to_json
from twinpool.planner.step_shape import of_chunk, of_sequences


def changed(**fields: Any) -> bytes:
    """A profile's JSON with some fields of other values."""
    return json.dumps(json.loads(to_json(made_profile())) | fields).encode()


def test_a_file_gives_back_the_same_profile_to_the_last_bit(tmp_path: Path) -> None:
    profile, path = made_profile(), tmp_path / "profile.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert load_times(path) == FittedTimes(profile)
    assert load_times(path).step_s(of_sequences([321] * 7)) == FittedTimes(profile).step_s(
        of_sequences([321] * 7)
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no JSON", "not a profile"),
        (b"[1]", "not a profile"),
        (b"{}", "not a profile"),
        (b'{"format": 99}', "format 99"),
        (changed(threads="two"), "threads"),
        (changed(surprise=1), "surprise"),
        (changed(threads=-2), "threads is -2; wanted: 1 or more"),
        (changed(num_cores=0), "num_cores is 0"),
        (changed(block_size=0), "block_size is 0; wanted: 8, 16"),
        (changed(dtype="float99"), "dtype is 'float99'; wanted: float32"),
        (changed(kv_token_bytes=0), "kv_token_bytes is 0"),
        (changed(unsteadiness={"decode": [], "prompt": [1.0]}), "unsteadiness.decode is ()"),
        (
            changed(unsteadiness={"decode": [1.0], "prompt": [-1.0, 3.0]}),
            "unsteadiness.prompt is (-1.0, 3.0)",
        ),
        (changed(overheads={"output_s": 1e300}), "overheads.output_s is 1e+300; wanted: seconds"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_reason(data: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match="some") as caught:
        from_json(data, "some.json")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows_s", [0.02, 0.01]),
        ("row_knots", [2, 5]),
        ("row_knots", [1]),
        ("sequence_s", -1e-6),
        ("context_token_s", 1e400),
        ("rows_s", [0.01, 1e300]),
    ],
)
def test_a_model_that_could_fall_is_refused(field: str, value: Any) -> None:
    steps = msgspec.to_builtins(TRUE_FIT) | {"row_knots": [1, 2], "rows_s": [0.01, 0.02]} | {field: value}
    with pytest.raises(ConfigError, match="some"):
        from_json(changed(steps=steps), "some.json")


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="twinpool profile"):
        load_profile(tmp_path / "none.json")


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--output"):
        save_profile(made_profile(), tmp_path)


def test_a_profile_that_was_there_outlives_one_that_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    save_profile(made_profile(), path)
    before = path.read_bytes()

    def full(self: Path, _: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match="No space left"):
        save_profile(msgspec.structs.replace(made_profile(), threads=2), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_profile_of_another_machine_may_be_used_and_is_doubted() -> None:
    words = doubts(made_profile())
    assert words[0] == "it is made up"
    assert "A processor" in words[1]


def test_a_transport_that_was_not_measured_is_refused_and_none_is_an_error_when_asked_for() -> None:
    profile = made_profile()
    assert FittedTimes(profile).transfer_s(1000) == 2e-4 + 1000 * 1.1e-10
    assert FittedTimes(profile, "tcp").transfer_s(0) == 5e-4
    with pytest.raises(ConfigError, match="shm, tcp"):
        FittedTimes(profile, "ucx")
    alone = FittedTimes(msgspec.structs.replace(profile, transfers=()))
    with pytest.raises(ConfigError, match="--threads"):
        alone.transfer_s(1)


def test_times_name_model_threads_machine_and_day() -> None:
    times = FittedTimes(made_profile())
    for words in ("made-up", "bfloat16", "1 thread ", "A processor", "2026-01-02"):
        assert words in times.name


def test_more_workers_than_cores_take_turns() -> None:
    """Two of one thread have cores of their own on two; four compute at half the rate of two."""
    shape = of_sequences([100] * 4)
    cores = FittedTimes(msgspec.structs.replace(made_profile(), num_cores=2))
    unknown = FittedTimes(msgspec.structs.replace(made_profile(), num_cores=None))
    assert [cores.step_s(shape, others) for others in (0, 1)] == [
        unknown.step_s(shape, others) for others in (0, 1)
    ]
    assert cores.step_s(shape, 2) == pytest.approx(1.5 * cores.step_s(shape, 1))
    assert cores.step_s(shape, 3) == pytest.approx(2 * cores.step_s(shape, 1))
    whole = FittedTimes(msgspec.structs.replace(made_profile(), num_cores=2, threads=2, slow_down=None))
    assert whole.step_s(shape, 1) == pytest.approx(2 * whole.step_s(shape))


def test_a_server_adds_to_the_engine_by_step_by_sequence_by_chunk_and_beside_others() -> None:
    profile = made_profile()
    engine = FittedTimes(msgspec.structs.replace(profile, served=type(profile.served)()))
    served, shape = FittedTimes(profile), of_sequences([200] * 8)
    assert served.step_s(shape) - engine.step_s(shape) == pytest.approx(1e-4 + 8 * 2e-5)
    assert served.step_s(shape, 1) - engine.step_s(shape, 1) == pytest.approx(1.4e-4 + 8 * 5e-5)
    for num_busy in (0, 1):
        added_s = served.step_s(of_chunk(64), num_busy) - engine.step_s(of_chunk(64), num_busy)
        assert added_s == pytest.approx(1e-4 + 2e-3 + num_busy * 5e-4)
