"""What a run ran on: processor, cores, versions, commit; and the class of machines whose ratios are comparable."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("twinpool", "torch", "numpy", "numba", "llvmlite", "triton", "ucxx-cu12", "libucx-cu12")
_TELLING = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
"""Features that decide which kernels run."""
_LIMIT_S = 5.0


def describe(device: torch.device, cores: tuple[int, ...]) -> dict[str, Any]:
    """JSON values for the report."""
    return {
        "cpu": _cpu_model(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "class": machine_class(device),
        "usable_cores": sorted(os.sched_getaffinity(0) | set(cores)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "commit": _commit(),
    }


def machine_class(device: torch.device) -> str:
    """Machines of one class have about the same ratios: a GPU's name, or a CPU's architecture, features and cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    flags = [flag for flag in _TELLING if flag in _cpu_flags()]
    return " ".join([platform.machine(), *flags, f"{os.cpu_count()} cores"])


def _cpu_lines() -> list[str]:
    info = Path("/proc/cpuinfo")
    return info.read_text(encoding="utf-8").splitlines() if info.is_file() else []


def _cpu_flags() -> set[str]:
    lines = [line.partition(":") for line in _cpu_lines()]
    return {
        flag for name, _, value in lines if name.strip() in ("flags", "Features") for flag in value.split()
    }


def _cpu_model() -> str:
    lines = [line.partition(":") for line in _cpu_lines()]
    models = [value.strip() for name, _, value in lines if name.strip() == "model name"]
    return models[0] if models else platform.processor() or platform.machine()


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
