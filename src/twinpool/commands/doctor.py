"""`twinpool doctor`: what this machine can do, in plain words, and what to do about each lack."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from twinpool import __version__
from twinpool.commands.kv_size import binary
from twinpool.config import EngineConfig
from twinpool.layout import Dtype, KVLayout

if TYPE_CHECKING:
    from twinpool.commands.machine import Machine

_GIB = 1 << 30
_MIN_SHM_BYTES = _GIB
_PROGRAM_BYTES = _GIB // 2
"""What a worker takes before it loads weights: Python, torch, compiled kernels."""
_MIN_CONTEXT = 1024
_BLOCK_SIZE = EngineConfig(model_dir="").block_size
_DEFAULT_FRACTION = EngineConfig(model_dir="").kv_memory_fraction
_HARDWARE_TRANSPORTS = ("rc", "dc", "ud", "gga", "cuda_ipc")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` says what to do about a lack; None: nothing is lacking."""

    topic: str
    words: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published shape to hold against this machine. `num_params` counts tied embeddings once."""

    name: str
    num_params: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int

    def weight_bytes(self, dtype: Dtype) -> int:
        """Bytes of the weights."""
        return self.num_params * dtype.num_bytes

    def sequence_bytes(self, dtype: Dtype) -> int:
        """KV bytes of one sequence of the maximum length."""
        layout = KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, _BLOCK_SIZE, dtype)
        return layout.token_bytes * self.max_positions


KNOWN_MODELS = (
    KnownModel("SmolLM2-135M-Instruct", 134_515_008, 30, 3, 64, 8_192),
    KnownModel("Qwen3-0.6B", 596_049_920, 28, 8, 128, 40_960),
    KnownModel("Qwen3-4B", 4_022_468_096, 36, 8, 128, 40_960),
    KnownModel("Llama-3.1-8B", 8_030_261_248, 32, 8, 128, 131_072),
    KnownModel("Qwen3-14B", 14_768_307_200, 40, 8, 128, 40_960),
    KnownModel("Qwen3-32B", 32_762_123_264, 64, 8, 128, 40_960),
    KnownModel("Llama-3.1-70B", 70_553_706_496, 80, 8, 128, 131_072),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model fits. `worker_bytes` are the program, the weights and the KV of one sequence of the
    maximum length; `num_workers` is how many such workers this machine holds at once (a split takes 2).
    `context_tokens` is the longest sequence that a single worker can hold. `kv_memory_fraction` is the setting that
    gives two workers (or the one that fits) so much KV.
    """

    model: str
    dtype: str
    weight_bytes: int
    sequence_bytes: int
    worker_bytes: int
    num_workers: int
    context_tokens: int
    kv_memory_fraction: float


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine can do, and what it lacks",
        description="Looks at processor, memory, devices and transports, measures copy rates (in all a few "
        "seconds), and says which models fit and what to do about each lack.",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the report. 0 whatever it says: a lack is no failure of the doctor."""
    from twinpool.commands.copy_rates import measure
    from twinpool.commands.machine import look

    machine = look()
    rates = measure()
    findings = [*examine(machine), _copying(rates), _default_model()]
    fits = what_fits(machine)
    if args.json:
        print(json.dumps(_as_json(machine, rates, findings, fits), indent=2))
    else:
        print("\n".join(_as_text(findings, fits)))
    return 0


def examine(machine: Machine) -> list[Finding]:
    """What the facts about `machine` mean."""
    return [
        _python(machine),
        _processor(machine),
        _cpu_kernels(machine),
        _compiled_code(machine),
        _memory(machine),
        _shared_memory(machine),
        _devices(machine),
        _ucx(machine),
    ]


def what_fits(machine: Machine) -> list[Fit]:
    """How many workers of each known model fit, in bfloat16 and, without GPUs, in float32."""
    from twinpool.engine.kv_memory import MOST_OF_THE_REST

    rooms = [gpu.free_bytes for gpu in machine.gpus] or [machine.usable_memory_bytes]
    dtypes = (Dtype.BFLOAT16,) if machine.gpus else (Dtype.BFLOAT16, Dtype.FLOAT32)
    fits = []
    for model in KNOWN_MODELS:
        for dtype in dtypes:
            weights, sequence = model.weight_bytes(dtype), model.sequence_bytes(dtype)
            worker = _PROGRAM_BYTES + weights + sequence
            num_workers = sum(room // worker for room in rooms)
            rest = max(rooms) - weights
            kv_room = max(0, min(rest - _PROGRAM_BYTES, int(rest * MOST_OF_THE_REST)))
            num_blocks = kv_room // (sequence * _BLOCK_SIZE // model.max_positions)
            context = min(model.max_positions, num_blocks * _BLOCK_SIZE)
            wanted = 2 * sequence if num_workers > 1 else context * (sequence // model.max_positions)
            fraction = math.ceil(100 * wanted / max(rooms)) / 100
            fits.append(
                Fit(model.name, dtype.value, weights, sequence, worker, num_workers, context, fraction)
            )
    return fits


def _python(machine: Machine) -> Finding:
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    words = f"Twinpool {__version__}, Python {machine.python} on {machine.system}; {packages}"
    if "torch" not in machine.packages:
        return Finding(
            "software", words, "torch is missing: no model can run; install twinpool with its dependencies"
        )
    return Finding("software", words)


def _processor(machine: Machine) -> Finding:
    bf16 = "bfloat16 in hardware" if machine.native_bf16 else "no bfloat16 in hardware"
    words = f"{machine.cpu}, {machine.usable_cores} usable cores, {bf16}"
    if machine.gpus:
        return Finding("processor", words)
    if machine.usable_cores < 2:
        return Finding(
            "processor", words, "prefill and decode share one core here and disturb each other; give it 2"
        )
    if not machine.native_bf16:
        return Finding(
            "processor", words, "models run in float32 here: twice the memory, about half the speed"
        )
    return Finding("processor", words)


def _cpu_kernels(machine: Machine) -> Finding:
    kernels, topic = machine.kernels, "cpu kernels"
    if kernels is None:
        lacks = "torch" in machine.packages and not machine.gpus
        advice = "on the processor models run many times slower; install numba" if lacks else None
        return Finding(topic, "plain torch: nothing compiles them; --weights int8 is not possible", advice)
    int8 = "--weights int8 is possible" + (" with --device cpu" if machine.gpus else "")
    if kernels.uses_tiles:
        return Finding(topic, f"bfloat16 products in matrix tiles (AMX); {int8}")
    vectors = "AVX512-BF16's pair products" if kernels.has_pair_products else "float32 vectors"
    words = f"bfloat16 products in {vectors}, not in matrix tiles (AMX): {{}}; {int8}"
    if not kernels.has_tiles:
        return Finding(topic, words.format("the processor has none"))
    if kernels.tiles_setting == "0":
        return Finding(topic, words.format("TWINPOOL_AMX is 0"))
    advice = (
        "prompts take longer; Linux 5.16 or later grants them, unless a container filters the system call arch_prctl "
        "or NUMBA_CPU_FEATURES leaves them out"
    )
    words = words.format("the processor has them, but this process may not use them")
    return Finding(topic, words, None if machine.gpus else advice)


def _compiled_code(machine: Machine) -> Finding:
    kernels, topic = machine.kernels, "compiled code"
    if kernels is None:
        return Finding(topic, "none")
    if kernels.directory is None:
        advice = (
            "each start compiles for tens of seconds; set XDG_CACHE_HOME to a folder that can be written to"
        )
        return Finding(topic, "cannot be kept", None if machine.gpus else advice)
    if not kernels.num_stacks:
        advice = "`twinpool fetch` compiles (tens of seconds), as does the first `twinpool serve`"
        return Finding(
            topic, f"none yet of this version in {kernels.directory}", None if machine.gpus else advice
        )
    variants = f"{kernels.num_stacks} variant{'s' if kernels.num_stacks > 1 else ''}"
    return Finding(topic, f"the decoder of this version in {variants}, in {kernels.directory}")


def _memory(machine: Machine) -> Finding:
    words = f"{binary(machine.memory_bytes)}, of which {binary(machine.usable_memory_bytes)} can be used now"
    if machine.memory_limit_bytes is not None:
        words += f"; this process's control group is limited to {binary(machine.memory_limit_bytes)}"
    if machine.usable_memory_bytes < 2 * _GIB:
        return Finding(
            "memory", words, "two workers of even the default model want about 2 GiB; free some memory"
        )
    return Finding("memory", words)


def _shared_memory(machine: Machine) -> Finding:
    if machine.shm_free_bytes is None:
        return Finding(
            "shared memory", "none (/dev/shm)", "KV travels over ucx or tcp between processes here"
        )
    words = (
        f"{binary(machine.shm_free_bytes)} free in /dev/shm, where decode workers keep KV for transport shm"
    )
    if machine.shm_free_bytes < _MIN_SHM_BYTES:
        advice = "small: start the container with --shm-size=4g, set --num-blocks, or use --transport tcp"
        return Finding("shared memory", words, advice)
    return Finding("shared memory", words)


def _devices(machine: Machine) -> Finding:
    if machine.gpus:
        names = "; ".join(
            f"{gpu.name} ({binary(gpu.free_bytes)} of {binary(gpu.memory_bytes)} free, capability {gpu.capability})"
            for gpu in machine.gpus
        )
        return Finding("devices", names)
    if "+cpu" in machine.packages.get("torch", ""):
        advice = (
            "this torch is built for the processor only; if there is a GPU, install a CUDA build of torch"
        )
    else:
        advice = "torch sees no GPU; if there is one, check its driver (nvidia-smi)"
    return Finding("devices", "the processor only", advice)


def _ucx(machine: Machine) -> Finding:
    if machine.ucx_problem is not None:
        advice = "KV travels over shm and tcp; for RDMA and CUDA IPC: pip install ucxx-cu12 libucx-cu12"
        return Finding("ucx", machine.ucx_problem, advice)
    words = f"transports {', '.join(machine.ucx_transports)}"
    if not any(name.startswith(_HARDWARE_TRANSPORTS) for name in machine.ucx_transports):
        return Finding("ucx", words, "no RDMA and no CUDA IPC here: between hosts UCX will use tcp")
    return Finding("ucx", words)


def _copying(rates: dict[str, float | None]) -> Finding:
    words = ", ".join(
        f"{name.replace('_', ' ')} " + ("not possible" if rate is None else f"{rate:.1f} GB/s")
        for name, rate in rates.items()
    )
    lacking = [name.replace("_", " ") for name, rate in rates.items() if rate is None]
    return Finding("copying", words, f"{' and '.join(lacking)} cannot be used here" if lacking else None)


def _default_model() -> Finding:
    from twinpool.engine.default_model import CACHE_KEY, DEFAULT_MODEL
    from twinpool.engine.model_cache import entry_path

    entry = entry_path(CACHE_KEY)
    if entry.is_dir():
        return Finding("default model", f"{DEFAULT_MODEL} is ready in {entry}")
    advice = "`twinpool fetch` gets it (93 MB), as does the first `twinpool serve`"
    return Finding("default model", f"{DEFAULT_MODEL} is not fetched yet", advice)


def _as_text(findings: list[Finding], fits: list[Fit]) -> list[str]:
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.topic:<{width}}  {finding.words}")
        if finding.advice is not None:
            lines.append(f"{'':<{width}}  → {finding.advice}")
    program = f"{binary(_PROGRAM_BYTES)} of program"
    lines += [
        "",
        f"Which models fit (a worker: weights + KV of one sequence of the maximum length, and {program})",
    ]
    for fit in fits:
        sizes = f"{binary(fit.weight_bytes):>11} + {binary(fit.sequence_bytes):>9}"
        lines.append(f"  {fit.model:<22}{fit.dtype:<10}{sizes}   {_verdict(fit)}")
    return lines


def _verdict(fit: Fit) -> str:
    if fit.num_workers == 0 and fit.context_tokens < _MIN_CONTEXT:
        return "no"
    settings = [] if fit.num_workers > 1 else ["--colocated 1"]
    if fit.num_workers == 0:
        settings.append(f"--max-model-len {fit.context_tokens}")
    if fit.kv_memory_fraction > _DEFAULT_FRACTION:
        settings.append(f"--kv-memory-fraction {fit.kv_memory_fraction:.2f}")
    words = f"{fit.num_workers:,} workers, split or colocated" if fit.num_workers > 1 else "one worker"
    return ": ".join([words, " ".join(settings)]) if settings else words


def _as_json(
    machine: Machine, rates: dict[str, float | None], findings: list[Finding], fits: list[Fit]
) -> dict[str, Any]:
    return {
        "version": __version__,
        "machine": asdict(machine),
        "copy_gb_per_s": rates,
        "findings": [asdict(finding) for finding in findings],
        "models": [asdict(fit) for fit in fits],
    }
