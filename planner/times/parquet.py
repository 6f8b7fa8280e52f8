"""Columns of a parquet file. The one module that knows pyarrow, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinpool.errors import ConfigError


def read_columns(path: Path, columns: Sequence[str], where: Mapping[str, object]) -> dict[str, list[Any]]:
    """`columns` of the rows that have these values, as lists.

    Raises:
        ConfigError: pyarrow is not installed, or the file is not parquet or lacks a column.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise ConfigError(
            f"{path.name} is a parquet file, and pyarrow is not installed: pip install 'twinpool[parquet]'"
        ) from exc
    filters = [(name, "=", value) for name, value in where.items()]
    try:
        table = pyarrow.parquet.read_table(path, columns=list(columns), filters=filters or None)
    except (pyarrow.ArrowException, ValueError, OSError) as exc:
        raise ConfigError(f"{path} is no parquet file with the columns {', '.join(columns)}: {exc}") from exc
    found: dict[str, list[Any]] = table.to_pydict()
    return found
