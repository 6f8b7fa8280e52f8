"""Compiles every Triton kernel for sm_80 and sm_90, without a GPU: ``python -m twinpool.kernels.gpu.compile``.

Each module of this folder lists its kernels' representative specialisations in `VARIANTS`; a kernel that is launched
and not listed is an error. The table has what a GPU would refuse or be slowed by: shared memory beyond the
architecture's, and registers that do not suffice, so that some are kept in memory (*spills*).
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import KernelInterface

from twinpool.kernels.gpu.variant import Variant

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory that one program may have, by compute capability (CUDA C++ Programming Guide, table of
technical specifications)."""
MOST_SPILLED = 0
"""Bytes per thread that a kernel may keep in memory for lack of registers."""
_PACKAGE = "twinpool.kernels.gpu"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of one variant for one compute capability; `shared` and `stack` (spills are there) in bytes."""

    kernel: str
    label: str
    capability: int
    ptx_version: str
    registers: int
    stack: int
    shared: int

    def faults(self) -> Iterator[str]:
        """Why this cannot be accepted, each in words."""
        limit = SHARED_LIMIT[self.capability]
        if self.shared > limit:
            yield f"{self._name} needs {self.shared} bytes of shared memory; the limit is {limit}: take smaller tiles"
        if self.stack > MOST_SPILLED:
            yield (
                f"{self._name} keeps {self.stack} bytes per thread in memory; the limit is {MOST_SPILLED}: take "
                "smaller tiles, or more warps"
            )

    @property
    def _name(self) -> str:
        return f"{self.kernel} ({self.label}) for sm_{self.capability}"


def module_names() -> list[str]:
    """This folder's modules that have functions of Triton's."""
    here = Path(__file__).parent
    return sorted(
        path.stem for path in here.glob("*.py") if "\n@triton.jit" in path.read_text(encoding="utf-8")
    )


def variants(module_name: str) -> Sequence[Variant]:
    """What a module lists; nothing if it has no kernels, but only what kernels call.

    Raises:
        ValueError: it launches a kernel that it does not list.
    """
    module = importlib.import_module(f"{_PACKAGE}.{module_name}")
    listed: Sequence[Variant] = getattr(module, "VARIANTS", ())
    launched = set(re.findall(r"\b(\w+)\[[^\n]*\]\(", inspect.getsource(module)))
    kernels = {name for name in launched if isinstance(getattr(module, name, None), KernelInterface)}
    if missing := kernels - {variant.kernel.__name__ for variant in listed}:
        raise ValueError(
            f"kernels/gpu/{module_name}.py launches {sorted(missing)} and does not list it in VARIANTS"
        )
    return listed


def compile_variant(module_name: str, variant: Variant, capability: int) -> Compiled:
    """Compiles one variant of a module down to machine code.

    Raises:
        TypeError: the variant does not name each argument of the kernel once.
    """
    name = f"{module_name}.{variant.kernel.__name__}"
    arguments = variant.kernel.arg_names
    named = {**variant.types, **dict.fromkeys(variant.constants, "constexpr")}
    if sorted(arguments) != sorted([*variant.types, *variant.constants]):
        differing = set(arguments) ^ set(named) or set(variant.types) & set(variant.constants)
        raise TypeError(
            f"the variant {variant.label!r} of {name} does not name {sorted(differing)} once each"
        )
    aligned = {*variant.divisible, *(key for key, type_ in variant.types.items() if type_.startswith("*"))}
    source = ASTSource(
        variant.kernel,
        {argument: named[argument] for argument in arguments},
        dict(variant.constants),
        {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in aligned},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    version = re.search(r"\.version (\S+)", compiled.asm["ptx"])
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        kernel=name,
        label=variant.label,
        capability=capability,
        ptx_version=version[1] if version else "",
        registers=usage["REG"],
        stack=usage["STACK"],
        shared=int(compiled.metadata.shared),
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers per thread (REG), bytes of stack (STACK) and so on, as read by the cuobjdump that Triton brings."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", text)}


def compile_all(names: Sequence[str], processes: int) -> list[Compiled]:
    """All variants of the named modules for each of the architectures, in processes of their own, nothing cached."""
    jobs = [(name, index) for name in names for index in range(len(variants(name)))]
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(processes, initializer=_use_cache, initargs=(cache,)) as pool,
    ):
        return [compiled for of_job in pool.map(_compile_job, jobs) for compiled in of_job]


def _use_cache(directory: str) -> None:
    triton.knobs.cache.dir = directory


def _compile_job(job: tuple[str, int]) -> list[Compiled]:
    name, index = job
    return [compile_variant(name, variants(name)[index], capability) for capability in SHARED_LIMIT]


def table(found: Sequence[Compiled]) -> str:
    """One line per variant and architecture."""
    head = ("kernel", "variant", "for", "PTX version", "registers/thread", "spilled B/thread", "shared B")
    rows = [
        (
            c.kernel,
            c.label,
            f"sm_{c.capability}",
            c.ptx_version,
            str(c.registers),
            str(c.stack),
            f"{c.shared:,}",
        )
        for c in found
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows))


def verdict(found: Sequence[Compiled]) -> str:
    """One line: what was compiled, and whether all of it can be accepted."""
    kernels = len({compiled.kernel for compiled in found})
    variants_of_each = {(compiled.kernel, compiled.label) for compiled in found}
    amount = f"kernels: {kernels}, in {len(variants_of_each)} variants × {len(SHARED_LIMIT)} architectures, compiled"
    if wrong := sum(any(compiled.faults()) for compiled in found):
        return f"{amount}, {wrong} of {len(found)} cannot be accepted"
    return f"{amount}, no spills, all fit"


def main() -> int:
    """Prints the table, what is wrong, and the verdict; 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m twinpool.kernels.gpu.compile", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="like paged_attention (default: all)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    args = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    if unknown := set(args.modules) - set(module_names()):
        parser.error(f"no such module: {', '.join(sorted(unknown))}; allowed: {', '.join(module_names())}")
    found = compile_all(args.modules or module_names(), args.processes)
    print(table(found))
    faults = [fault for compiled in found for fault in compiled.faults()]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print(verdict(found))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
