"""What this machine is: processor, memory, devices, packages. Only facts; `doctor` says what they mean."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from twinpool.coordinator.launch import usable_cores
from twinpool.engine.kv_memory import free_host_memory
from twinpool.engine.processor import Processor, processor

_CHILD_TIMEOUT_S = 30.0
_PACKAGES = ("torch", "transformers", "tokenizers", "numba", "triton", "ucxx-cu12", "ucxx-cu13", "ucxx")
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device that torch can use. Memory in bytes."""

    name: str
    memory_bytes: int
    free_bytes: int
    capability: str


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """What kernels are compiled to on this processor, and where that is kept.

    `has_tiles` and `has_pair_products`: the processor has AMX for bfloat16, and AVX512-BF16. `uses_tiles`: this process
    may use the former; `tiles_setting` is what TWINPOOL_AMX says, if anything. `directory` is None if compiled code
    cannot be kept; `num_stacks` is in how many variants (element types, formats of weights) the decoder of this version
    is there.
    """

    has_tiles: bool
    has_pair_products: bool
    uses_tiles: bool
    tiles_setting: str | None
    directory: str | None
    num_stacks: int


@dataclass(frozen=True, slots=True)
class Machine:
    """One look at this machine. Sizes in bytes; None where the system does not tell.

    `usable_memory_bytes` is what this process can still get: free memory, bounded by its control group.
    `packages` has the versions of those that are installed. `ucx_transports` are UCX's own names.
    `kernels` is None without torch or numba.
    """

    system: str
    python: str
    packages: dict[str, str]
    cpu: str
    usable_cores: int
    native_bf16: bool
    memory_bytes: int
    usable_memory_bytes: int
    memory_limit_bytes: int | None
    shm_free_bytes: int | None
    gpus: tuple[Gpu, ...]
    ucx_transports: tuple[str, ...]
    ucx_problem: str | None
    kernels: CpuKernels | None


def look() -> Machine:
    """Looks at this machine; takes some seconds, because torch and UCX are asked too."""
    cpu = processor()
    ucx_transports, ucx_problem = _ucx()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name)) is not None},
        cpu=cpu.name,
        usable_cores=len(usable_cores()),
        native_bf16=cpu.has_bfloat16,
        memory_bytes=psutil.virtual_memory().total,
        usable_memory_bytes=free_host_memory(),
        memory_limit_bytes=_memory_limit(),
        shm_free_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else None,
        gpus=_gpus(),
        ucx_transports=ucx_transports,
        ucx_problem=ucx_problem,
        kernels=_kernels(cpu),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels(cpu: Processor) -> CpuKernels | None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "numba", "llvmlite")):
        return None
    from twinpool.engine.models.stack import run_layers
    from twinpool.kernels import amx, compiler, jit

    settings: Any = compiler.numba.config
    directory = str(settings.CACHE_DIR) if jit.KEEPS_COMPILED_CODE else None
    entries = f"{run_layers.__module__.rpartition('.')[2]}.{run_layers.__name__}-*.nbc"
    return CpuKernels(
        has_tiles=cpu.features >= {"amx_tile", "amx_bf16"},
        has_pair_products="avx512_bf16" in cpu.features,
        uses_tiles=amx.USES_AMX,
        tiles_setting=os.environ.get(amx.VARIABLE),
        directory=directory,
        num_stacks=0 if directory is None else len(list(Path(directory).glob(f"*/{entries}"))),
    )


def _memory_limit_file() -> Path | None:
    """Where the limit of this process's control group stands, under either version of control groups."""
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ():
        _, controllers, group = line.split(":", 2)
        root, name = Path("/sys/fs/cgroup"), "memory.max"
        if "memory" in controllers.split(","):
            root, name = root / "memory", "memory.limit_in_bytes"
        elif controllers:
            continue
        # Inside a container the group's path is the host's and its files lie at the root.
        for file in (root / group.lstrip("/") / name, root / name):
            if file.is_file():
                return file
    return None


def _memory_limit() -> int | None:
    file = _memory_limit_file()
    text = "max" if file is None else file.read_text(encoding="ascii").strip()
    limit = None if text == "max" else int(text)
    # Version 1 writes a huge number for "no limit".
    return None if limit is None or limit >= psutil.virtual_memory().total else limit


def _gpus() -> tuple[Gpu, ...]:
    if importlib.util.find_spec("torch") is None:
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append(Gpu(properties.name, total_bytes, free_bytes, capability))
    return tuple(found)


def _ucx() -> tuple[tuple[str, ...], str | None]:
    """UCX's transports here, or why there are none. In a child: UCX changes signal handlers."""
    if importlib.util.find_spec("ucxx") is None:
        return (), "the package ucxx is not installed"
    question = "import json, ucxx; print(json.dumps(sorted(ucxx.get_active_transports())))"
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", question],
            capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return (), f"UCX did not answer within {_CHILD_TIMEOUT_S:.0f} s"
    if child.returncode:
        return (), (child.stderr.strip().splitlines() or ["ucxx ended without a word"])[-1]
    return tuple(json.loads(child.stdout.splitlines()[-1])), None
