"""Rewrites a model's files with transformers, in a process of its own, so that no server process imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import twinpool
from twinpool.errors import ModelError

_PROCESS = "twinpool.engine.convert_process"
CONVERTER_VERSION = 1
"""Part of every cache key: a new number makes every model be converted again."""


def run(kind: str, source: Path, target: Path) -> None:
    """Converts `source` (kind "gguf": a file; "tokenizer": a directory) into the existing directory `target`.

    Raises:
        ModelError: transformers cannot read `source`; with its reason.
    """
    package_root = str(Path(twinpool.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-P", "-W", "ignore", "-m", _PROCESS, kind, str(source), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the converter ended with status {done.returncode}"]
        raise ModelError(f"{source} cannot be converted: {lines[-1]}")
