"""Clients of other makers, which run in environments of their own (scripts/install_clients makes them)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.server import Server

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "clients" / "programs"
_HOME = ROOT / ".clients"
PROGRAM_LIMIT_S = 90.0
MODEL = "SmolLM2-135M-Instruct"
ANSWER = "The capital of France is Paris."
"""What the built-in model says in float32, asked for that."""
NO_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""What keeps these clients from asking anybody but the server."""


def needs(client: str) -> pytest.MarkDecorator:
    """Skips tests where `client` is not installed, before anything is started for them."""
    how = f"{client} is not installed; `scripts/install_clients {client}` makes this run"
    return pytest.mark.skipif(not (_HOME / client / ".installed").exists(), reason=how)


def environment_of(client: str) -> Path:
    """Where `client` is installed, by a test that `needs` it."""
    return _HOME / client


def command(client: str, name: str) -> str:
    """The executable `name` of a client in Python."""
    return str(environment_of(client) / "bin" / name)


def node(client: str) -> str:
    """The Node.js that `client` in JavaScript runs on."""
    own = environment_of(client) / "bin" / "node"
    found = str(own) if own.exists() else shutil.which("node")
    assert found, "scripts/install_clients brings Node.js along where there is none"
    return found


def run(
    arguments: Sequence[str],
    folder: Path,
    limit_s: float,
    variables: Mapping[str, str] | None = None,
) -> str:
    """What the program said on standard output. Its files, and those of its libraries, go to `folder`.

    The test fails with all that it said, if it ends with another status or not within `limit_s`.
    """
    home = {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HOME": str(folder / "huggingface"),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            arguments, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False,
            env=environment | NO_NETWORK | home | dict(variables or {}),
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        said = b"\n".join(part if isinstance(part, bytes) else b"" for part in (exc.stdout, exc.stderr))
        pytest.fail(
            f"{arguments[0]} did not end within {limit_s:g} s:\n{said.decode(errors='replace')[-6000:]}"
        )
    assert done.returncode == 0, (
        f"{' '.join(arguments[:3])} … ended with {done.returncode}:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def findings(
    runner: str, program: str, server: Server, folder: Path, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What one of `PROGRAMS`, run by `runner`, found at `server`: the JSON object in the last line that it printed."""
    where = {"TWINPOOL_URL": server.url, "TWINPOOL_MODEL": MODEL}
    output = run([runner, str(PROGRAMS / program)], folder, PROGRAM_LIMIT_S, where | dict(variables or {}))
    found: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    return found
