"""What a measuring run leaves in a folder, so that predictions can be made, and made again, without the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from twinpool.bench.serving.record import Run, decode_run, encode_run
from twinpool.errors import ConfigError
from twinpool.planner.profile.saved import Profile, StepSample, load_profile, save_profile


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured, and what the loads are made with: they are a function of `seconds`, `seed` and `prompt_token_s`
    and `stream_token_s`, a first look at the machine (`loads.Yardstick`). Each is sent `repetitions` times, or as often
    as its layout wants for so many."""

    model: str
    asked: str | None
    seconds: float
    seed: int
    repetitions: int
    prompt_token_s: float
    stream_token_s: float
    num_cores: int
    cpu: str
    started_at: str
    command: str


class Folder:
    """Files of one measuring run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Raises ConfigError if it cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(
                f"--measure is {str(self.path)!r}, which cannot be made: {exc.strerror}"
            ) from exc

    def save_facts(self, facts: Facts) -> None:
        """Writes them."""
        (self.path / "facts.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts)))

    def facts(self) -> Facts:
        """Raises ConfigError if there are none, or they are of another version."""
        try:
            return msgspec.json.decode(self._read("facts.json"), type=Facts)
        except msgspec.MsgspecError as exc:
            raise ConfigError(
                f"{self.path / 'facts.json'} is not of this version ({exc}); measure anew"
            ) from exc

    @property
    def has_facts(self) -> bool:
        """Whether measuring has begun here."""
        return (self.path / "facts.json").exists()

    def save_profile(self, profile: Profile) -> None:
        """One for each number of threads."""
        save_profile(profile, self._profile(profile.threads))

    def profile(self, threads: int) -> Profile:
        """Raises ConfigError if there is none."""
        return load_profile(self._profile(threads))

    def save_run(
        self, layout: str, load: str, repetition: int, run: Run, steps: Sequence[StepSample]
    ) -> None:
        """Writes it, with the steps of the engine that were measured right before and right after it."""
        (self.path / _steps_name(layout, load, repetition)).write_bytes(msgspec.json.encode(steps))
        path = self.path / _name(layout, load, repetition)
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(encode_run(run))
        unfinished.replace(path)  # last and at once: where it is, the run is whole

    def has_run(self, layout: str, load: str, repetition: int) -> bool:
        """Whether that repetition was measured."""
        return (self.path / _name(layout, load, repetition)).exists()

    def runs(self, layout: str, load: str, repetitions: int) -> list[tuple[Run, list[StepSample]]]:
        """All repetitions that were measured, in order, each with the steps around it."""
        return [
            (
                decode_run(self._read(_name(layout, load, number))),
                msgspec.json.decode(self._read(_steps_name(layout, load, number)), type=list[StepSample]),
            )
            for number in range(repetitions)
            if self.has_run(layout, load, number)
        ]

    def _profile(self, threads: int) -> Path:
        return self.path / f"profile-{threads}-threads.json"

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as exc:
            raise ConfigError(
                f"--predict is {str(self.path)!r}, whose {name} cannot be read ({exc.strerror}); make it with --measure"
            ) from exc


def _name(layout: str, load: str, repetition: int) -> str:
    return f"run {layout}, {load}, {repetition + 1}.json".replace(" ", "-").replace(",", "")


def _steps_name(layout: str, load: str, repetition: int) -> str:
    return f"steps-around-{_name(layout, load, repetition)}"
