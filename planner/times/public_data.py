"""Where measurements that others published lie on this machine; none of them comes with Twinpool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from twinpool.errors import ConfigError

VARIABLE = "TWINPOOL_PUBLIC_DATA"
SOURCES = {
    "perf/splitwise_a100_h100.csv": "github.com/Mutinifni/splitwise-sim, data/perf_model.csv",
    "perf/distserve_a100.json": "github.com/LLMServe/DistServe, simdistserve/estimators/profile_data",
    "perf/measured_serving_points.csv": "github.com/ai-dynamo/aiconfigurator, silicon_sample.csv",
    "perf/dynamo_h200_prefill.npz": "github.com/ai-dynamo/dynamo, the planner's profiling results for an H200",
    "perf/dynamo_h200_decode.npz": "github.com/ai-dynamo/dynamo, the planner's profiling results for an H200",
    "perf/h100_vllm_gemm.parquet": "github.com/ai-dynamo/aiconfigurator, systems/data/h100_sxm/vllm",
    "perf/h100_vllm_context_attention.parquet": "github.com/ai-dynamo/aiconfigurator, systems/data/h100_sxm/vllm",
    "perf/h100_vllm_generation_attention.parquet": "github.com/ai-dynamo/aiconfigurator, systems/data/h100_sxm/vllm",
    "perf/vidur_h100_all_reduce.csv": "github.com/microsoft/vidur, data/profiling/network/h100_dgx/all_reduce.csv",
}
"""Public source of each file."""


def folder(given: str | Path | None, environment: Mapping[str, str]) -> Path | None:
    """The folder that a flag or the environment names; None if neither does."""
    named = given or environment.get(VARIABLE)
    return None if not named else Path(named)


def file_of(root: Path | None, name: str) -> Path:
    """`name` below `root`.

    Raises:
        ConfigError: it is not there. Says where it is published.
    """
    where = f"it is published at {SOURCES[name]}"
    if root is None:
        raise ConfigError(
            f"{name} is needed, and no folder is named; {where}: set --public-data or {VARIABLE}"
        )
    path = root / name
    if not path.is_file():
        raise ConfigError(f"{path} is not there (--public-data or {VARIABLE} is {str(root)!r}); {where}")
    return path
