"""Where tests find measurements that others published. Without them a test is skipped, and says where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twinpool.planner.times.public_data import SOURCES, VARIABLE

TRACES = {
    "traces/azure_2023_conversation.csv": "github.com/Azure/AzurePublicDataset",
    "traces/azure_2023_code.csv": "github.com/Azure/AzurePublicDataset",
    "traces/mooncake_conversation.jsonl": "github.com/kvcache-ai/Mooncake, FAST25-release/traces",
    "traces/mooncake_synthetic.jsonl": "github.com/kvcache-ai/Mooncake, FAST25-release/traces",
}
_BESIDE = Path(__file__).parents[2].parent / "shared" / "data"


def public_data() -> Path:
    """The folder: the environment's, else the one beside the checkout. It may not be there."""
    return Path(os.environ.get(VARIABLE) or _BESIDE)


def public_file(name: str) -> Path:
    """`name` in that folder; skips the test if it is not there."""
    path = public_data() / name
    if not path.is_file():
        source = {**SOURCES, **TRACES}[name]
        pytest.skip(
            f"{path} is not there; it is published at {source}. Set {VARIABLE} to the folder with {name}"
        )
    return path
