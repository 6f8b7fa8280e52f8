"""This machine's ceilings and a model's shape, from a run of `twinpool bench engine` in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.bench.engine.floors import Ceilings, Shape
from twinpool.errors import TwinpoolError

_LIMIT_S = 240.0


class LimitsUnknown(TwinpoolError):
    """`twinpool bench engine` failed, or the report has not what is wanted. The message says which."""


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What is read of a report.

    `num_cores` are those that may be used. `ratios` are medians by operation, like "decode: batch 1, context 512";
    `floors` say what each is a ratio to.
    """

    shape: Shape
    ceilings: dict[str, Ceilings]
    dtype: str
    num_cores: int
    ratios: dict[str, float]
    floors: dict[str, str]

    @classmethod
    def read(cls, text: str) -> EngineFigures:
        """Reads what `twinpool bench engine --json` wrote. Raises LimitsUnknown."""
        try:
            values = json.loads(text)
            settings = values["settings"]
            shape = dict(settings["shape"])
            rows = [row for row in values["measurements"] if row["ratio"] is not None]
            keys = [f"{row['group']}: {row['name']}" for row in rows]
            return cls(
                shape=Shape(**{**shape, "windows": tuple(shape["windows"])}),
                ceilings={name: Ceilings(**of) for name, of in values["ceilings"].items()},
                dtype=settings["dtype"],
                num_cores=len(settings["usable_cores"]),
                ratios={key: row["ratio"] for key, row in zip(keys, rows, strict=True)},
                floors={key: row["floor"] for key, row in zip(keys, rows, strict=True)},
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise LimitsUnknown(f"not a report of `twinpool bench engine --json`: {exc!r}") from exc

    def together(self, num_cores: int) -> Ceilings:
        """The ceilings of so many cores in the model's element type. Raises LimitsUnknown."""
        name = f"{num_cores} thread{'' if num_cores == 1 else 's'}, {self.dtype}"
        if name not in self.ceilings:
            raise LimitsUnknown(f"the report has ceilings for {', '.join(self.ceilings)}, and not for {name}")
        return self.ceilings[name]


async def engine_figures(groups: Sequence[str], model: str | None = None) -> EngineFigures:
    """Runs `twinpool bench engine --only GROUPS`; nothing else should run meanwhile. Raises LimitsUnknown."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "engine.json"
        command = [sys.executable, "-m", "twinpool", "bench", "engine", *([model] if model else ())]
        process = await asyncio.create_subprocess_exec(
            *command, "--only", ",".join(groups), "--json", str(report),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_LIMIT_S):
                _, said = await process.communicate()
        except TimeoutError as exc:
            raise LimitsUnknown(f"`twinpool bench engine` took over {_LIMIT_S:g} s") from exc
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise LimitsUnknown(f"`twinpool bench engine` fails:\n{said.decode(errors='replace')}")
        return EngineFigures.read(report.read_text(encoding="utf-8"))


def add_flag(parser: argparse.ArgumentParser) -> None:
    """`--limits FILE`: the limits need not be measured again."""
    parser.add_argument(
        "--limits",
        type=Path,
        metavar="FILE",
        help="what `twinpool bench engine --json` wrote (default: measure)",
    )


async def known_or_measured(known: Path | None) -> EngineFigures:
    """The figures of the report at `known`, or freshly measured ceilings. Raises LimitsUnknown."""
    if known is None:
        return await engine_figures(("ceilings",))
    try:
        return EngineFigures.read(await asyncio.to_thread(known.read_text, encoding="utf-8"))
    except OSError as exc:
        raise LimitsUnknown(f"--limits {known} cannot be read: {exc.strerror}") from exc
