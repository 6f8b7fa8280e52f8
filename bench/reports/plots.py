"""The report's charts as files, for papers and slides: drawn by matplotlib, from the values that the page draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.bench.reports.axes import LEVELS, ecdf, normal_quantile, steps
from twinpool.bench.reports.charts import MARKED, tick
from twinpool.bench.reports.heat_map import depth, panels, words_of
from twinpool.bench.reports.measured import Measured, measured
from twinpool.bench.reports.model import MapCell, RateCurve, Report, WinLoseMap, Winner
from twinpool.bench.serving.distributions import percentile
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_COLORS = ("#c4561b", "#1d6fb8", "#1b8a63", "#8a4fbf", "#b03a6a", "#7d6b12")
"""Of the arms, as on the page."""
_STYLES = ("-", "--", ":", "-.", (0, (4, 4)), (0, (12, 4)))
_DPI = 160


def write_plots(prefix: Path, suffix: str, report: Report) -> list[Path]:
    """Writes `prefix`-ttft, -itl, -goodput and -map (numbered from the second on), whichever there are values for, in
    the format of `suffix`; returns their paths.

    Raises:
        ConfigError: matplotlib is missing, or a file cannot be written.
    """
    arms = measured(report.arms)
    places = {arm.name: number for number, arm in enumerate(report.arms)}
    drawn: list[tuple[str, Figure]] = []
    for name, title in (("ttft", "TTFT"), ("itl", "ITL")):
        values = [each.ttft_s if name == "ttft" else each.itl_s for each in arms]
        if any(value > 0 for own in values for value in own):
            drawn.append((name, _distributions(title, arms, values)))
    for number, workload in enumerate(dict.fromkeys(curve.workload for curve in report.curves)):
        curves = [curve for curve in report.curves if curve.workload == workload]
        drawn.append((_numbered("goodput", number), _rates(workload, curves, places)))
    for number, found in enumerate(report.maps):
        if found.cells:
            drawn.append((_numbered("map", number), _map(found)))
    return [_save(prefix.with_name(f"{prefix.name}-{name}{suffix}"), figure) for name, figure in drawn]


def _numbered(name: str, number: int) -> str:
    return f"{name}-{number + 1}" if number else name


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("--plots needs matplotlib: pip install 'twinpool[bench]'") from exc
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(path: Path, figure: Figure) -> Path:
    try:
        figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be written: {exc}") from exc
    return path


def _distributions(title: str, arms: Sequence[Measured], values: Sequence[Sequence[float]]) -> Figure:
    figure = _figure(6.4, 4.2)
    axes = figure.add_subplot()
    count = max(len(own) for own in values)
    for arm, own in zip(arms, values, strict=True):
        points = [(value, share) for value, share in steps(ecdf(own)) if value > 0]
        if not points:
            continue
        color = _COLORS[arm.number % len(_COLORS)]
        shares = [normal_quantile(min(max(share, 0.5 / count), 1 - 0.5 / count)) for _, share in points]
        style = _STYLES[arm.number % len(_STYLES)]
        axes.plot([value for value, _ in points], shares, color=color, ls=style, label=_plain(arm.arm.name))
        marks = [(percentile(own, level), normal_quantile(level / 100)) for level in MARKED]
        shown = [(value, share) for value, share in marks if value > 0]
        axes.plot([value for value, _ in shown], [share for _, share in shown], "o", color=color, ms=4.5)
    levels = [level for level in LEVELS if 0.5 / count < level < 1 - 0.5 / count]
    axes.set_yticks([normal_quantile(level) for level in levels], [f"{level * 100:g} %" for level in levels])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: tick(value))
    axes.xaxis.set_minor_formatter(lambda value, _: tick(value) if _is_two_or_five(value) else "")
    axes.tick_params(axis="x", which="minor", labelsize=7)
    axes.set(xlabel=f"{title} (log scale)", ylabel="share of values up to it (normal quantiles)")
    _finish(axes)
    return figure


def _is_two_or_five(value: float) -> bool:
    return f"{value:e}"[:8] in ("2.000000", "5.000000")


def _rates(workload: str, curves: Sequence[RateCurve], places: dict[str, int]) -> Figure:
    figure = _figure(6.4, 4.2)
    axes = figure.add_subplot()
    most = max((point.rate for curve in curves for point in curve.points), default=1.0)
    axes.plot([0, most], [0, most], ls=":", color="0.55", lw=1)
    for number, curve in enumerate(curves):
        place = places.get(curve.arm, number)
        color = _COLORS[place % len(_COLORS)]
        rates, goodput = [p.rate for p in curve.points], [p.goodput.estimate for p in curve.points]
        axes.plot(rates, goodput, color=color, ls=_STYLES[place % len(_STYLES)], label=_plain(curve.arm))
        for point in curve.points:
            at, fill = point.goodput, {True: color, False: "white", None: "0.7"}[point.holds]
            if at.low is not None and at.high is not None:
                axes.plot([point.rate] * 2, [at.low, at.high], color=color, lw=1.2)
            axes.plot(point.rate, at.estimate, "o", color=color, mfc=fill, ms=5)
        if (highest := curve.highest_rate) is not None:
            axes.axvline(highest.estimate, color=color, lw=0.8)
            if highest.low is not None and highest.high is not None:
                axes.axvspan(highest.low, highest.high, color=color, alpha=0.12, lw=0)
    axes.set(xlabel="requests/s offered", ylabel="goodput (requests/s)", title=_plain(workload))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _finish(axes)
    return figure


def _finish(axes: Axes) -> None:
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _map(found: WinLoseMap) -> Figure:
    grouped = panels(found.cells)
    columns = min(2, len(grouped))
    rows = -(-len(grouped) // columns)
    width = max(len({cell.input_tokens for cell in found.cells}), 2)
    height = max(len({cell.output_tokens for cell in found.cells}), 2)
    figure = _figure(columns * (1.2 + 1.25 * width), 0.8 + rows * (1.2 + 0.62 * height))
    for number, (title, cells) in enumerate(grouped.items(), 1):
        _panel(figure.add_subplot(rows, columns, number), title, cells)
    figure.suptitle(
        _plain(f"highest rate at which every SLO holds: {found.other} (blue) over {found.baseline} (orange)"),
        fontsize=10,
    )
    return figure


def _panel(axes: Axes, title: str, cells: Sequence[MapCell]) -> None:
    inputs = sorted({cell.input_tokens for cell in cells})
    outputs = sorted({cell.output_tokens for cell in cells})
    for cell in cells:
        x, y = inputs.index(cell.input_tokens), outputs.index(cell.output_tokens)
        large, small = words_of(cell)
        axes.add_patch(_patch(x, y, cell))
        axes.text(x, y - 0.12, large, ha="center", va="center", fontsize=10, weight="bold")
        axes.text(x, y + 0.24, small, ha="center", va="center", fontsize=7, color="0.25")
    axes.set_xticks(range(len(inputs)), [f"{tokens:,}" for tokens in inputs])
    axes.set_yticks(range(len(outputs)), [f"{tokens:,}" for tokens in outputs])
    axes.set(xlim=(-0.5, len(inputs) - 0.5), ylim=(len(outputs) - 0.5, -0.5))
    axes.set_title(_plain(title), fontsize=10)
    axes.set_xlabel("input tokens", fontsize=8)
    axes.set_ylabel("output tokens", fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _patch(x: int, y: int, cell: MapCell) -> Any:
    from matplotlib.patches import Rectangle

    color = {Winner.OTHER: _COLORS[1], Winner.BASELINE: _COLORS[0]}.get(cell.winner, "0.5")
    is_won = cell.winner in (Winner.OTHER, Winner.BASELINE)
    alpha = 0.14 + 0.48 * depth(cell) if is_won else 0.08
    hatch = {Winner.NOBODY_HOLDS: "///", Winner.NOT_KNOWN: ".."}.get(cell.winner)
    return Rectangle(
        (x - 0.48, y - 0.46), 0.96, 0.92, facecolor=color, edgecolor="0.75", lw=0, alpha=alpha, hatch=hatch
    )


def _plain(text: str) -> str:
    """Without what matplotlib takes for mathematics."""
    return text.replace("$", r"\$")
