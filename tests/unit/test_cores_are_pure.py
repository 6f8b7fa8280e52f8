"""The cores, the block pool and the ledger load no tensor, socket or server library, not even through others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import twinpool.colocated_pool.core, twinpool.decode_pool.core, twinpool.prefill_pool.core
import twinpool.coordinator.state
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "zmq", "asyncio", "fastapi"}))
"""


def test_cores_import_neither_torch_nor_a_network() -> None:
    source = str(Path(__file__).resolve().parents[2] / "src")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[]\n"
