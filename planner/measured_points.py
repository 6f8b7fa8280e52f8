"""Predicted TTFT and TPOT beside those measured of other engines, at low concurrency: the errors as they are.

    python -m twinpool.planner.measured_points --public-data DIR [--times roofline|operators] [--max-concurrency 8]

A closed loop keeps c requests of one length in flight. Predicted are

- TTFT alone: a step of one prompt of ISL tokens (in chunks of at most `CHUNK_TOKENS`): nobody else's prompt waits;
- TTFT together: (c + 1) / 2 of them, the mean where all c come at once and are computed one after the other. Streams of
  one length stay in step, so later prompts come together, too;
- TPOT: a step of c sequences at ISL + OSL / 2 tokens, and while a stream of OSL tokens runs one prompt of each of the
  c - 1 others: (c - 1) · prompt / OSL. Of disaggregated workers c is the batch of one decode worker, and no prompt
  disturbs its streams.

Engines' own times for HTTP, tokenizing and scheduling are not in it. One figure was fitted to a half of the points
(what layers with experts cost); the other half has rows of its own.
"""

from __future__ import annotations

import argparse
import csv
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from twinpool.bench.serving.distributions import percentile
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.planner.step_shape import StepShape, StepTime, chunks_of
from twinpool.planner.times.devices import Device, Precision, device_named
from twinpool.planner.times.floor import refuse_faster_times
from twinpool.planner.times.model_shapes import ModelShape, known_shape
from twinpool.planner.times.public_data import VARIABLE, file_of, folder
from twinpool.planner.times.registry import Conditions, roofline, service_times

POINTS = "perf/measured_serving_points.csv"
CHUNK_TOKENS = 8_192
MAX_CONCURRENCY = 8
_MOST_DEVICES = 8
"""Of a worker: larger ones go beyond a node, over links that this does not know."""
_PRECISIONS = {
    "fp8": Precision.FP8,
    "fp8_block": Precision.FP8,
    "nvfp4": Precision.FP4,
    "int4_wo": Precision.INT4,
    "bf16": Precision.BF16,
    "": Precision.BF16,
}
_ENGINES = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """One measurement: `concurrency` requests at a time, of `prompt_tokens` and `output_tokens` each, in seconds.

    Of disaggregated workers the concurrency is that of one decode worker, which has `tp` devices; `prefill_tp` is None
    of colocated ones.
    """

    name: str
    engine: str
    device: Device
    model: ModelShape
    precision: Precision
    tp: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    ttft_s: float
    tpot_s: float
    prefill_tp: int | None = None


class PredictedTimes(NamedTuple):
    """Of one point, in seconds, as the module defines them."""

    ttft_alone_s: float
    ttft_together_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class ComparedPoint:
    """A point beside its prediction, in seconds, and beside the data sheet's floor."""

    point: MeasuredPoint
    predicted: PredictedTimes
    floor: PredictedTimes

    @property
    def errors(self) -> tuple[float, float, float]:
        """Predicted / measured - 1 of TTFT alone, TTFT together, and TPOT."""
        point, said = self.point, self.predicted
        return (
            said.ttft_alone_s / point.ttft_s - 1,
            said.ttft_together_s / point.ttft_s - 1,
            said.tpot_s / point.tpot_s - 1,
        )


def read_points(path: Path, max_concurrency: int) -> tuple[list[MeasuredPoint], Counter[str]]:
    """The points that this can predict, and why the others were left out."""
    points: list[MeasuredPoint] = []
    left_out: Counter[str] = Counter()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found = _point(row, max_concurrency)
            if isinstance(found, MeasuredPoint):
                points.append(found)
            else:
                left_out[found] += 1
    return points, left_out


def _point(row: Mapping[str, str], max_concurrency: int) -> MeasuredPoint | str:
    """The row as a point, or why it is left out."""
    is_split = row["mode"] == "disagg"
    side = "decode_" if is_split else ""
    if not row[f"{side}batch_size"]:
        return "its batch is not told"
    concurrency = int(row[f"{side}batch_size"])
    if concurrency > max_concurrency:
        return f"concurrency (of a decode worker) above {max_concurrency}"
    model = known_shape(row["model_path"])
    if model is None:
        return f"no shape of {row['model_path'].rsplit('/', 1)[-1]}"
    for part in (side, "prefill_") if is_split else (side,):
        tp, copies = int(row[f"{part}tp_size"]), int(row[f"{part}attention_dp_size"] or 1)
        if copies > 1 or tp > _MOST_DEVICES:
            return f"data-parallel attention, or more than {_MOST_DEVICES} devices"
        spread = int(row[f"{part}moe_tp_size"] or 1) * int(row[f"{part}moe_ep_size"] or 1)
        if model.experts is not None and spread != tp:
            return "experts on other devices than attention"
    quantized = (row["moe_quant_mode"] if model.experts else row["gemm_quant_mode"]) or row["precision"]
    return MeasuredPoint(
        name=row["id"],
        engine=_ENGINES[row["backend"]],
        device=device_named(row["system"]),
        model=model,
        precision=_PRECISIONS[quantized],
        tp=int(row[f"{side}tp_size"]),
        prompt_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        concurrency=concurrency,
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
        prefill_tp=int(row["prefill_tp_size"]) if is_split else None,
    )


def predict(step_s: StepTime, point: MeasuredPoint, prefill_step_s: StepTime | None = None) -> PredictedTimes:
    """What steps of these times make of the point's load; `prefill_step_s` are those of prefill workers of its own."""
    prompt_s = sum(map(prefill_step_s or step_s, chunks_of(point.prompt_tokens, 0, CHUNK_TOKENS)))
    context = int(point.concurrency * (point.prompt_tokens + point.output_tokens / 2))
    decode_s = step_s(StepShape(num_sequences=point.concurrency, context_tokens=context))
    disturbed_s = 0.0 if prefill_step_s else (point.concurrency - 1) * prompt_s / point.output_tokens
    return PredictedTimes(prompt_s, (point.concurrency + 1) / 2 * prompt_s, decode_s + disturbed_s)


def compare(
    points: Iterable[MeasuredPoint], kind: str, public_data: Path | None
) -> tuple[list[ComparedPoint], Counter[str]]:
    """Each point beside what `kind` predicts of it, and why others could not be predicted."""
    compared: list[ComparedPoint] = []
    left_out: Counter[str] = Counter()
    for point in points:
        spec = f"{kind}:{point.device.name}"
        conditions = Conditions(tp=point.tp, precision=point.precision, public_data=public_data)
        prefill = None if point.prefill_tp is None else replace(conditions, tp=point.prefill_tp)
        try:
            times = service_times(spec, point.model, conditions)
            prefill_times = None if prefill is None else service_times(spec, point.model, prefill)
            floor = roofline(point.device.name, point.model, conditions)
            prefill_floor = None if prefill is None else roofline(point.device.name, point.model, prefill)
        except ConfigError as exc:
            left_out[str(exc)] += 1
            continue
        refuse_faster_times(times, floor)
        if prefill_times is not None and prefill_floor is not None:
            refuse_faster_times(prefill_times, prefill_floor)
        predicted = predict(times.step_s, point, None if prefill_times is None else prefill_times.step_s)
        least = predict(floor.floor_s, point, None if prefill_floor is None else prefill_floor.floor_s)
        compared.append(ComparedPoint(point, predicted, least))
    return compared, left_out


def is_held_out(point: MeasuredPoint) -> bool:
    """Whether nothing was fitted to it: a half of all, by a digest of their names."""
    return zlib.crc32(point.name.encode()) % 2 == 1


def table(compared: Sequence[ComparedPoint]) -> list[str]:
    """Rows of Markdown: the distribution of errors over all points, and by engine, device, model and concurrency."""
    held_out = [each for each in compared if is_held_out(each.point)]
    groups = [("all", list(compared)), ("the half that nothing was fitted to", held_out)]
    keys: Sequence[Callable[[ComparedPoint], str]] = (
        lambda each: "colocated" if each.point.prefill_tp is None else "disaggregated",
        lambda each: each.point.engine,
        lambda each: each.point.device.title,
        lambda each: each.point.model.name,
        lambda each: f"concurrency {each.point.concurrency}",
    )
    for key in keys:
        names = sorted({key(each) for each in compared})
        groups += [(name, [each for each in compared if key(each) == name]) for name in names]
    lines = ["| points | n | TTFT alone | TTFT together | TPOT |", "|---|---|---|---|---|"]
    for name, members in groups:
        cells = [_distribution(errors) for errors in zip(*(each.errors for each in members), strict=True)]
        lines.append(f"| {' | '.join([name, str(len(members)), *cells])} |")
    return lines


def _distribution(errors: Sequence[float]) -> str:
    """Median with its sign; median, 90th percentile and largest without."""
    sizes = [abs(error) for error in errors]
    spread = (f"{100 * percentile(sizes, percent):.0f}" for percent in (50, 90, 100))
    return f"{100 * percentile(errors, 50):+.0f} % ({', '.join(spread)})"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m twinpool.planner.measured_points", description=__doc__)
    parser.add_argument(
        "--public-data", metavar="DIR", help=f"the folder with {POINTS} (default: ${VARIABLE})"
    )
    parser.add_argument("--times", default="roofline", choices=("roofline", "operators"))
    parser.add_argument("--max-concurrency", type=int, default=MAX_CONCURRENCY, metavar="N")
    args = parser.parse_args(argv)
    try:
        root = folder(args.public_data, os.environ)
        points, left_out = read_points(file_of(root, POINTS), args.max_concurrency)
        compared, without_times = compare(points, args.times, root)
    except TwinpoolError as exc:
        parser.error(str(exc))
    for reason, count in (left_out + without_times).most_common():
        print(f"left out {count:5}: {reason}")
    below = sum(each.point.tpot_s < each.floor.tpot_s for each in compared)
    below_ttft = sum(each.point.ttft_s < each.floor.ttft_alone_s for each in compared)
    print(f"measured below the roofline: TTFT of {below_ttft}, TPOT of {below} of {len(compared)} points")
    print("errors: the median with its sign (the median, 90th percentile and largest of their sizes), in %\n")
    print("\n".join(table(compared)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
