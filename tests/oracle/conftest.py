"""The reference is loaded once, and judges each answer once, for all oracle tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.default_model import default_model_dir
from support.reference import Reference


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return default_model_dir()


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)
