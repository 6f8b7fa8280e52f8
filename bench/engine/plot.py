"""The roofline plot: what each operation reaches, under the machine's two ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twinpool.bench.engine.floors import Ceilings
from twinpool.bench.engine.report import Measurement
from twinpool.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")
_GIGA = 1e9
_FLOPS_PER_BYTE = (0.1, 10_000.0)


def on_the_roofline(rows: Sequence[Measurement]) -> list[Measurement]:
    """Those that compute: what only moves bytes has no place on the plot."""
    return [row for row in rows if row.work is not None and row.work.flops > 0 and row.work.num_bytes > 0]


def draw(path: Path, title: str, name: str, ceilings: Ceilings, rows: Sequence[Measurement]) -> None:
    """Writes the plot to `path`, in the format of its ending. `name` says whose `ceilings` they are.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("--plot needs matplotlib: pip install 'twinpool[bench]'") from exc
    shown = on_the_roofline(rows)
    figure = Figure(figsize=(13, max(6.5, 0.21 * len(shown) + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    peak, bandwidth = ceilings.flops_per_s / _GIGA, ceilings.bytes_per_s / _GIGA
    low, high = _FLOPS_PER_BYTE
    ridge = peak / bandwidth
    axes.plot([low, ridge], [low * bandwidth, peak], color="black", label=f"memory, {bandwidth:.1f} GB/s")
    axes.plot([ridge, high], [peak, peak], color="black", ls="--", label=f"arithmetic, {peak:,.0f} GFLOP/s")
    groups = list(dict.fromkeys(row.group for row in shown))
    for number, row in enumerate(shown, 1):
        assert row.work is not None, "it computes"
        x, y = row.work.flops / row.work.num_bytes, row.work.flops / row.median_s / _GIGA
        ratio = "" if row.ratio is None else f"  {row.ratio:.2f} ×"
        color = f"C{groups.index(row.group)}"
        axes.plot(x, y, "o", color=color, label=f"{number}  {row.key}{ratio}")
        axes.annotate(
            str(number),
            (x, y),
            xytext=(5, 5 if number % 2 else -11),
            textcoords="offset points",
            color=color,
            fontsize=8,
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), title=title)
    axes.set(xlabel="FLOPs per byte that must move", ylabel="GFLOP/s")
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, title=f"{name}; × of its floor", frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--plot {path} cannot be written: {exc}") from exc
