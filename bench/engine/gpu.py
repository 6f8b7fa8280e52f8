"""What `bench/gpu.sh` measures: a CUDA device's limits and, in the same run, steps and kernels of models of two shapes.

The models are made on the spot, with random weights: speed does not depend on what weights say. A rehearsal measures a
tiny model on a CPU, so that every line has run before there is a GPU.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from twinpool.bench.engine import floors, operations, steps
from twinpool.bench.engine.ceilings import limits_of
from twinpool.bench.engine.floors import Ceilings, Piece
from twinpool.bench.engine.machine import describe
from twinpool.bench.engine.made_models import LLAMA_8B_4_LAYERS, SMOLLM2_135M, MadeShape, make_model
from twinpool.bench.engine.measuring import Bench
from twinpool.bench.engine.model_bed import BLOCK_SIZE, ModelBed
from twinpool.bench.engine.report import EngineReport, Measurement, cells, progress
from twinpool.bench.engine.timing import Timer, timer_for
from twinpool.engine.gpu.host_mirror import HostMirror
from twinpool.engine.model_runner import resolve_device
from twinpool.kernels.block_copy import block_runs, gather_blocks, scatter_blocks
from twinpool.layout import Dtype

_HEAD = ("operation", "median", "rate", "floor", "of", "ratio", "spread")


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """A made model and what is measured of it: prompts in tokens, decode steps as (batch, context), matrix products and
    other operations by rows, sampling by batch, copies to and from the host by blocks."""

    name: str
    shape: MadeShape
    prompts: Sequence[int]
    decode: Sequence[tuple[int, int]]
    rows: Sequence[int]
    batches: Sequence[int]
    blocks: Sequence[int]
    rounds: int = 7
    most_s: float = 1.0

    @property
    def most_seqs(self) -> int:
        """The largest decode batch."""
        return max(batch for batch, _ in self.decode)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the largest step holds, whole blocks."""
        return max(
            (max(self.blocks) + 1) * BLOCK_SIZE,
            *(batch * (context + BLOCK_SIZE) for batch, context in self.decode),
            *(length + BLOCK_SIZE for length in self.prompts),
        )

    def attention(self) -> list[tuple[str, list[Piece]]]:
        """Attention of the decode steps and of the prompts."""
        decodes = [
            (f"decode, batch {batch}, context {context}", [Piece(context - 1, 1)] * batch)
            for batch, context in self.decode
        ]
        return [*decodes, *((f"prefill, {length} tokens", [Piece(0, length)]) for length in self.prompts)]


_DECODE = ((1, 512), (1, 8000), (8, 2048), (32, 300), (64, 2048), (256, 1024))
PLANS = (
    GpuPlan("SmolLM2-135M", SMOLLM2_135M, (128, 512, 2048, 8000), _DECODE, (1, 32, 512), (1, 64), (1, 64, 512)),
    GpuPlan(
        "4 layers of an 8B Llama", LLAMA_8B_4_LAYERS, (512, 2048, 8000), _DECODE, (1, 64, 2048), (64,), (64, 512)
    ),
)  # fmt: skip
REHEARSAL_WORDS = "rehearsal: figures mean nothing"
REHEARSAL = (
    GpuPlan("a tiny model", MadeShape(), (32, 100), ((1, 64), (3, 100)), (2,), (2,), (1, 3), 2, 0.05),
)


def measure(
    plan: GpuPlan, directory: Path, device: torch.device, dtype: Dtype, publish: Callable[[Measurement], None]
) -> EngineReport:
    """Everything of one plan, for a model that lies in `directory`."""
    torch_dtype: torch.dtype = getattr(torch, dtype.value)
    bench = Bench(timer_for(device), limits_of(device, torch_dtype, 1), plan.rounds, plan.most_s, publish)
    bed = ModelBed(directory, dtype, str(device), 1, plan.pool_tokens, plan.most_seqs)
    steps.prefill(bench, bed, plan.prompts)
    steps.decode(bench, bed, plan.decode)
    _eager_decode(bench, bed, plan.decode)
    operations.attention(bench, bed, plan.attention())
    operations.kv(bench, bed, plan.rows)
    operations.linear(bench, bed, plan.rows)
    operations.elementwise(bench, bed, plan.rows)
    operations.sampling(bench, bed, plan.batches)
    _block_copies(bench, bed, plan.blocks)
    limits = Ceilings(
        statistics.median(each.bytes_per_s for each in bench.ceilings),
        statistics.median(each.flops_per_s for each in bench.ceilings),
    )
    return EngineReport(
        machine=describe(device),
        settings={"what": f"{plan.name} in {dtype} on {device}", "dtype": dtype.value, "shape": bed.shape},
        ceilings={f"{device}, {dtype}": limits},
        measurements=tuple(bench.measurements),
    )


def _eager_decode(bench: Bench, bed: ModelBed, sizes: Sequence[tuple[int, int]]) -> None:
    """The same steps launched kernel by kernel: what graphs save."""
    graphs, bed.runner.graphs = bed.runner.graphs, None
    for num_seqs, context in sizes:
        if bed.fits(pieces := [Piece(context - 1, 1)] * num_seqs):
            batch, work = bed.step(pieces), floors.step(bed.shape, pieces)
            name = f"batch {num_seqs}, context {context}"
            bench.operation(
                "decode without graphs", name, partial(bed.runner.run, batch), work, num_seqs, "tokens"
            )
    bed.runner.graphs = graphs


def _block_copies(bench: Bench, bed: ModelBed, counts: Sequence[int]) -> None:
    """Blocks gathered and scattered on the device; and to the host's mirror and back, beside one plain copy of as many
    bytes to and from pinned memory."""
    runner = bed.runner
    device, size = runner.device, runner.layout.block_bytes
    # Scattered blocks of a part of the pool: the whole would take long to pin.
    pool = runner.kv[: 2 * max(counts)]
    mirror = HostMirror(pool, memoryview(bytearray(len(pool) * size)))
    runs = block_runs(pool)
    for count in counts:
        ids = torch.randperm(len(pool))[:count]
        on_device, listed = ids.to(device), ids.tolist()
        staging = torch.empty(count, *runs.shape[1:], dtype=runs.dtype, device=device)
        pinned = torch.empty(staging.shape, dtype=staging.dtype, pin_memory=device.type == "cuda")
        work = floors.elementwise(count * size, count * size, 1)
        gather = partial(gather_blocks, runs, on_device, staging)
        scatter = partial(scatter_blocks, staging, runs, on_device)
        gigabytes = count * size / 1e9
        bench.operation("block copy", f"gather {count}", gather, work, gigabytes, "GB")
        bench.operation("block copy", f"scatter {count}", scatter, work, gigabytes, "GB")
        out = partial(_plain_s, bench.timer, pinned, staging)
        into = partial(_plain_s, bench.timer, staging, pinned)
        fetch = partial(mirror.fetch, listed, 0, runner.layout.num_layers)
        store = partial(mirror.store, listed)
        for name, run, plain_s in (("to the host", fetch, out), ("from the host", store, into)):
            whole = f"{count} blocks {name}"
            bench.against("mirror", whole, partial(_wall_s, run), "one copy", plain_s, gigabytes, "GB")


def _plain_s(timer: Timer, target: torch.Tensor, source: torch.Tensor) -> float:
    return timer.seconds(lambda: target.copy_(source, non_blocking=True))


def _wall_s(run: Callable[[], None]) -> float:
    """Seconds of what returns when it is done, on whatever stream that was."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def text_table(report: EngineReport) -> str:
    """The report in plain text: the machine, the ceilings, and a line for each operation. Of a CPU, only that."""
    rows = [_HEAD, *(tuple(cells(row)) for row in report.measurements)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in (0, 4) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    words = [REHEARSAL_WORDS] if report.machine["device"] == "cpu" else report.words()
    return "\n".join([f"{report.machine['device']}: {report.settings['what']}", *words, "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every plan and writes a table and JSON of each; exit status 0."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results are written")
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny model on the CPU, to exercise every line"
    )
    args = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    log = logging.getLogger("bench")
    args.out.mkdir(parents=True, exist_ok=True)
    device = resolve_device("cpu" if args.dry_run else "cuda")
    dtype = Dtype.FLOAT32 if args.dry_run else Dtype.BFLOAT16
    for number, plan in enumerate(REHEARSAL if args.dry_run else PLANS):
        with tempfile.TemporaryDirectory() as made:
            torch_dtype: torch.dtype = getattr(torch, dtype.value)
            model = make_model(Path(made), plan.shape, torch_dtype, str(device), scale=0.02)
            report = measure(plan, model, device, dtype, lambda row: log.info(progress(row)))
        (args.out / f"engine-{number}.json").write_text(report.to_json() + "\n", encoding="utf-8")
        (args.out / f"engine-{number}.txt").write_text(text_table(report) + "\n", encoding="utf-8")
        log.info("\n%s\n", text_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
