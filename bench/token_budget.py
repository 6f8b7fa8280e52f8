"""How large a prefill chunk should be: the prompt rate and the stall of running streams, by token budget.

    python -m twinpool.bench.token_budget [--threads N] [--dtype NAME]

A colocated step carries one token of each running sequence and a chunk of a prompt, so the chunk's time is a gap in
every running stream. Small chunks keep the gap short; too small ones waste arithmetic, since every chunk reads all
weights. The knee is the smallest budget whose prompt rate is within 15 % of the best one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch

from twinpool.config import EngineConfig
from twinpool.engine.batch import SequenceSlice, StepBatch
from twinpool.engine.model_files import resolve
from twinpool.engine.model_runner import ModelRunner
from twinpool.request import RequestKey, SamplingParams

BUDGETS = (32, 64, 96, 128, 192, 256, 384, 512, 768)
PROMPT = 1536
RUNNING = 8
CONTEXT = 300
REPEATS = 3
WITHIN = 0.85


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table and the knee."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    config = EngineConfig(
        str(resolve(None).path), args.dtype, "cpu", num_blocks=1024, max_model_len=2048, threads=args.threads
    )
    runner = ModelRunner.load(config, lambda num_bytes: memoryview(bytearray(num_bytes)))
    runner.warm_up()
    print(
        f"{runner.dtype}, {args.threads} thread(s), prompt of {PROMPT}, {RUNNING} streams at context {CONTEXT}"
    )
    print(f"{'budget':>7} {'prompt tokens/s':>16} {'longest gap ms':>15} {'median gap ms':>14}")
    rates = {}
    for budget in BUDGETS:
        gaps = [prefill(runner, budget) for _ in range(REPEATS)]
        totals = [sum(steps) for steps in gaps]
        rates[budget] = PROMPT / statistics.median(totals)
        longest = statistics.median(max(steps) for steps in gaps)
        middle = statistics.median(statistics.median(steps) for steps in gaps)
        print(f"{budget:>7} {rates[budget]:>16.0f} {longest * 1e3:>15.0f} {middle * 1e3:>14.0f}")
    knee = min(budget for budget in BUDGETS if rates[budget] >= WITHIN * max(rates.values()))
    print(f"knee: {knee}")


def prefill(runner: ModelRunner, budget: int) -> list[float]:
    """Seconds of each step that computes the prompt in chunks, with `RUNNING` sequences decoding beside it."""
    per_sequence = runner.layout.num_blocks(CONTEXT + 1)
    tables = [range(i * per_sequence, (i + 1) * per_sequence) for i in range(RUNNING)]
    prompt_table = range(RUNNING * per_sequence, RUNNING * per_sequence + runner.layout.num_blocks(PROMPT))
    greedy = SamplingParams(max_tokens=1, seed=0, temperature=0)
    decoding = [
        SequenceSlice(RequestKey(f"running-{i}", 0), (1,), CONTEXT, tuple(table), greedy)
        for i, table in enumerate(tables)
    ]
    seconds, done = [], 0
    while done < PROMPT:
        end = min(PROMPT, done + budget - RUNNING)
        chunk = SequenceSlice(RequestKey("prompt", 0), range(done, end), done, tuple(prompt_table))
        seconds.append(runner.run(StepBatch((*decoding, chunk))).seconds)
        done = end
    return seconds


if __name__ == "__main__":
    main()
