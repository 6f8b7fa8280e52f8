"""What a measuring run leaves in a folder, so that predictions can be made, and made again, without the machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from twinpool.bench.serving.record import Run, decode_run, encode_run
from twinpool.errors import ConfigError
from twinpool.planner.profile.saved import Profile, load_profile, save_profile


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured, and what the loads were made with: they are a function of `seconds`, `seed` and
    `prompt_token_s` and `stream_token_s`, a first rough look at the machine (`loads.Yardstick`)."""

    model: str
    asked: str | None
    seconds: float
    seed: int
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
        """Raises ConfigError if there are none."""
        return msgspec.json.decode(self._read("facts.json"), type=Facts)

    def save_profile(self, profile: Profile) -> None:
        """One for each number of threads."""
        save_profile(profile, self._profile(profile.threads))

    def profile(self, threads: int) -> Profile:
        """Raises ConfigError if there is none."""
        return load_profile(self._profile(threads))

    def save_run(self, layout: str, load: str, repetition: int, run: Run) -> None:
        """Writes it."""
        (self.path / _name(layout, load, repetition)).write_bytes(encode_run(run))

    def runs(self, layout: str, load: str) -> list[Run]:
        """All repetitions that were measured, in order."""
        found: list[Run] = []
        while (self.path / (name := _name(layout, load, len(found)))).exists():
            found.append(decode_run(self._read(name)))
        return found

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
