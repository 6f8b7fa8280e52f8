"""Matrix tiles are used where processor, system and user allow it; code with them is loaded nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinpool.kernels.amx import USES_AMX, VARIABLE, uses_tiles

TILES = "+avx512f,+amx-bf16,-amx-fp16,+amx-tile"


@pytest.mark.parametrize(
    ("features", "setting", "is_granted", "expected"),
    [
        (TILES, None, True, True),
        (TILES, "1", True, True),
        (TILES, "0", True, False),
        (TILES, None, False, False),
        ("+avx512f,+amx-tile,-amx-bf16", None, True, False),
        ("", None, True, False),
    ],
)
def test_tiles_want_the_processor_the_user_and_the_system(
    features: str, setting: str | None, is_granted: bool, expected: bool
) -> None:
    assert uses_tiles(features, setting, lambda: is_granted) == expected


@pytest.mark.parametrize(("features", "setting"), [(TILES, "0"), ("+avx2", None)])
def test_the_system_is_not_asked_for_what_is_not_used(features: str, setting: str | None) -> None:
    def ask() -> bool:
        raise AssertionError

    assert not uses_tiles(features, setting, ask)


_PRINT_PLACE = "import twinpool.kernels.jit, numba; print(numba.config.CACHE_DIR)"


def _run(source: str, **variables: str) -> str:
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", source]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


@pytest.mark.skipif(not USES_AMX, reason="this process uses no matrix tiles; run it on a processor with AMX")
@pytest.mark.parametrize("named", [False, True])
def test_code_with_tiles_is_kept_apart_from_code_without(tmp_path: Path, named: bool) -> None:
    place = {"NUMBA_CACHE_DIR": str(tmp_path)} if named else {"XDG_CACHE_HOME": str(tmp_path)}
    places = {_run(_PRINT_PLACE, **place, **{VARIABLE: setting}) for setting in ("0", "1")}
    assert len(places) == 2
    assert all(Path(each).is_relative_to(tmp_path) for each in places)
