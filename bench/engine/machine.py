"""What a run ran on: processor, cores, versions, commit; and the class of machines whose ratios are comparable."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from twinpool.engine.processor import processor

_PACKAGES = ("twinpool", "torch", "numpy", "numba", "llvmlite", "triton", "ucxx-cu12", "libucx-cu12")
_TELLING = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
"""Features that decide which kernels run."""
_LIMIT_S = 5.0
BUSY_LOAD = 0.5
"""The load average per core beyond which figures are doubted."""


def describe(device: torch.device) -> dict[str, Any]:
    """JSON values for the report."""
    return {
        "cpu": processor().name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "class": machine_class(device),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "commit": _commit(),
    }


def machine_class(device: torch.device) -> str:
    """Machines of one class have about the same ratios: a GPU's name, or a CPU's architecture, features and cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    features = processor().features
    flags = [flag for flag in _TELLING if flag in features]
    return " ".join([platform.machine(), *flags, f"{os.cpu_count()} cores"])


def load_warning() -> str | None:
    """A line if more runs on this machine than a measurement stands; None if not, or if the system does not tell."""
    num_cores = os.cpu_count() or 1
    if not hasattr(os, "getloadavg") or (load := os.getloadavg()[0]) <= num_cores * BUSY_LOAD:
        return None
    return f"busy machine: its load average is {load:.1f} on {num_cores} cores; end what else runs, measure again"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the checkout that runs, "+" if it has changes; None if it is installed or git is missing."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
