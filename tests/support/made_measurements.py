"""A folder of measurements in the published formats, with figures made up here."""

from __future__ import annotations

import csv
import json
from pathlib import Path

SPLITWISE_COLUMNS = (
    "model", "hardware", "prompt_size", "batch_size", "token_size", "prompt_time", "token_time", "tensor_parallel",
)  # fmt: skip


def made_measurements(folder: Path) -> Path:
    """Splitwise's table and DistServe's coefficients below `folder`, which is returned."""
    (folder / "perf").mkdir(exist_ok=True)
    write_splitwise(folder, splitwise_rows())
    coefficients = {
        "decoding_large_small_bs_threshold": 95,
        "prefill": [18.0, 0.1, 7e-6],
        "decoding_smallbs": [20.0, 6e-4, 0.04],
        "decoding_largebs": [7.0, 5e-4, 0.16],
    }
    known = {
        "facebook/opt-13b": {"1": coefficients, "2": coefficients},
        "facebook/opt-66b": {"4": coefficients},
    }
    (folder / "perf" / "distserve_a100.json").write_text(json.dumps(known), encoding="utf-8")
    return folder


def splitwise_rows() -> list[tuple[object, ...]]:
    """Prompts of 128 to 8,192 tokens alone, and batches of 512 at TP 2, 4 and 8; of the largest at TP 2 the prompt
    was not computed. Rows of h100-80gb-pcap are 1.3 times those of h100-80gb."""
    rows: list[tuple[object, ...]] = []
    for hardware, prompt_factor in (("a100-80gb", 2.0), ("h100-80gb", 1.0), ("h100-80gb-pcap", 1.3)):
        for tp in (2, 4, 8):
            for size in (128, 256, 512, 1024, 2048, 4096, 8192):
                prompt_ms = prompt_factor * (20 + 0.3 * size / tp)
                rows += [("llama2-70b", hardware, size, 1, 128, prompt_ms * noise, 30 + size / 5_000, tp)
                         for noise in (0.98, 1.0, 1.1)]  # fmt: skip
            for batch in (2, 4, 8, 16, 32, 64):
                failed = tp == 2 and batch == 64
                prompt_ms = prompt_factor * (20 + 0.3 * 512 * batch / tp) / (10 if failed else 1)
                rows.append(("llama2-70b", hardware, 512, batch, 128, prompt_ms, 30 + batch / 4, tp))
    return rows


def write_splitwise(folder: Path, rows: list[tuple[object, ...]]) -> None:
    """The table with these rows."""
    with (folder / "perf" / "splitwise_a100_h100.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(SPLITWISE_COLUMNS)
        writer.writerows(rows)
