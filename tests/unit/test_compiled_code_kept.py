"""Compiled code that is kept is that of exactly these sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.kernels.jit import sources_digest


@pytest.mark.parametrize("changed", ["kernels/tiles.py", "engine/models/packed_weights.py"])
def test_a_change_beside_a_compiled_function_gives_its_code_another_place(
    tmp_path: Path, changed: str
) -> None:
    for folder in ("kernels", "engine/models"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "compiled.py").write_text("# calls its neighbours")
    (tmp_path / changed).write_text("DOWN = 10")
    before = sources_digest(tmp_path)
    assert sources_digest(tmp_path) == before
    (tmp_path / changed).write_text("DOWN = 11")
    assert sources_digest(tmp_path) != before
