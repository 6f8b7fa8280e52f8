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


_TESTS = str(Path(__file__).resolve().parents[1])
_PRINT_PLACE = "import twinpool.kernels.jit, numba; print(numba.config.CACHE_DIR)"


def _run(source: str, **variables: str) -> str:
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join((_TESTS, *filter(None, sys.path)))}
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


_CHECK_ROWS = """
import torch
from twinpool.kernels.amx import USES_AMX
from unit.test_linear import check_rows, check_rows_of_integers
assert not USES_AMX
check_rows(torch.bfloat16)
check_rows_of_integers(torch.bfloat16)
"""
_REFUSE = """
import ctypes, struct
program = [
    (0x20, 0, 0, 0),            # the system call's number
    (0x15, 0, 3, 158),          # not arch_prctl: allow
    (0x20, 0, 0, 16),           # its first argument
    (0x15, 0, 1, 0x1023),       # not a request for state: allow
    (0x06, 0, 0, 0x50001),      # fail with EPERM
    (0x06, 0, 0, 0x7FFF0000),   # allow
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
filters = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(filters)) == 0
"""


@pytest.mark.skipif(not USES_AMX, reason="this process uses no matrix tiles; run it on a processor with AMX")
def test_products_without_tiles_are_as_right_where_the_user_or_the_system_refuses_them() -> None:
    """The filter of system calls is a real one."""
    _run(_CHECK_ROWS, **{VARIABLE: "0"})
    _run(_REFUSE + _CHECK_ROWS)
