"""Charts as SVG, coloured by the page's variables, so they follow its light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.bench.reports.axes import Axis, ecdf, linear_axis, log_axis, probability_axis, steps
from twinpool.bench.reports.markup import Child, Markup, tag
from twinpool.bench.reports.model import Interval, RateCurve, Unit
from twinpool.bench.reports.words import amount, number, percent
from twinpool.bench.serving.distributions import percentile

MARKED = (50, 90, 99)
"""Percentiles that have a dot on each curve."""
WIDTH, HEIGHT = 520, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 14, 46
NUM_COLORS = 6
_DOTS = {True: None, False: "hollow", None: "unsure"}
"""Their class, by whether the SLOs hold."""
_DASHES = (None, "7 3", "2 3", "9 3 2 3", "4 4", "12 4")


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one arm, in seconds; `number` is the arm's place, which decides its colour and dashes."""

    name: str
    number: int
    values: Sequence[float]


def tick(seconds: float) -> str:
    """Of an axis of durations: like "20 ms" and "1 s"."""
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def arm_class(number: int) -> str:
    """The class that gives an arm's marks their colour."""
    return f"arm arm-{number % NUM_COLORS}"


def dashes(number: int) -> str | None:
    """How an arm's line is dashed: colours need not be told apart."""
    return _DASHES[number % len(_DASHES)]


def distribution_chart(title: str, series: Sequence[Series]) -> Markup | None:
    """The share of the values up to each duration, a line for each arm; None without a value above 0."""
    above = [value for each in series for value in each.values if value > 0]
    if not above:
        return None
    x = log_axis(min(above), max(above), tick)
    y = probability_axis(max(len(each.values) for each in series))
    marks: list[Child] = []
    for each in series:
        points = [(value, share) for value, share in steps(ecdf(each.values)) if value > 0]
        line = " ".join(f"{_x(x, value):.1f},{_y(y, share):.1f}" for value, share in points)
        drawn: list[Child] = [tag("polyline", points=line, stroke_dasharray=dashes(each.number))]
        for percent_ in MARKED:
            value = percentile(each.values, percent_)
            if value > 0:
                says = f"{each.name}: p{percent_} {amount(value, Unit.SECONDS)}"
                drawn.append(_dot(_x(x, value), _y(y, percent_ / 100), says))
        marks.append(tag("g", *drawn, class_=arm_class(each.number)))
    return _frame(title, x, y, f"{title} (log scale)", "share of values up to it", marks)


def rate_chart(curves: Sequence[tuple[int, RateCurve]]) -> Markup | None:
    """Goodput against the rate that was offered, with the place of each curve's arm; None without points. A dot is
    filled where the SLOs hold, pale where that is not known; the line that a server would follow that keeps every SLO
    is dotted."""
    points = [point for _, curve in curves for point in curve.points]
    if not points:
        return None
    most = max(point.rate for point in points)
    x = linear_axis(most, "{:g}".format, num_ticks=6)
    y = linear_axis(max(most, *(point.goodput.estimate for point in points)), "{:g}".format)
    end = min(x.ticks[-1][0], y.ticks[-1][0])
    marks: list[Child] = [tag("line", x1=_x(x, 0), y1=_y(y, 0), x2=_x(x, end), y2=_y(y, end), class_="ideal")]
    for place, curve in curves:
        drawn: list[Child] = []
        if curve.highest_rate is not None:
            drawn += _highest(x, y, curve.arm, curve.highest_rate)
        line = " ".join(f"{_x(x, p.rate):.1f},{_y(y, p.goodput.estimate):.1f}" for p in curve.points)
        drawn.append(tag("polyline", points=line, stroke_dasharray=dashes(place)))
        for point in curve.points:
            at_x, at_y = _x(x, point.rate), _y(y, point.goodput.estimate)
            if point.goodput.low is not None and point.goodput.high is not None:
                low, high = _y(y, point.goodput.low), _y(y, point.goodput.high)
                drawn.append(tag("line", x1=at_x, x2=at_x, y1=low, y2=high, class_="whisker"))
            says = (
                f"{curve.arm} at {number(point.rate)} requests/s: goodput {number(point.goodput.estimate)}, "
                f"{percent(point.attainment)} within every SLO"
            )
            drawn.append(_dot(at_x, at_y, says, _DOTS[point.holds]))
        marks.append(tag("g", *drawn, class_=arm_class(place)))
    return _frame("goodput against request rate", x, y, "requests/s offered", "goodput (requests/s)", marks)


def forest(change: Interval, widest: float, tone: str) -> Markup:
    """An interval of a relative change beside 0, on a scale of ±`widest`; an unknown end is at the scale's."""
    width, height = 180, 18

    def at(value: float) -> float:
        return width / 2 + max(-1.0, min(1.0, value / widest)) * (width / 2 - 4)

    marks: list[Child] = [tag("line", x1=at(0), x2=at(0), y1=0, y2=height, class_="zero")]
    if change.low is not None or change.high is not None:
        low = -widest if change.low is None else change.low
        high = widest if change.high is None else change.high
        marks.append(tag("line", x1=at(low), x2=at(high), y1=height / 2, y2=height / 2, class_="span"))
    marks.append(tag("circle", cx=at(change.estimate), cy=height / 2, r=4))
    return tag(
        "svg",
        *marks,
        viewBox=f"0 0 {width} {height}",
        class_=f"forest {tone}",
        role="img",
        aria_label="interval",
    )


def _highest(x: Axis, y: Axis, arm: str, rate: Interval) -> list[Child]:
    low = rate.estimate if rate.low is None else rate.low
    high = rate.estimate if rate.high is None else rate.high
    says = tag("title", f"{arm}: the SLOs hold up to {number(rate.estimate)} requests/s")
    left, right, bottom, top = _x(x, low), _x(x, high), _y(y, 0), float(_TOP)
    return [
        tag("rect", says, x=left, y=top, width=max(0.0, right - left), height=bottom - top, class_="band"),
        tag("line", x1=_x(x, rate.estimate), x2=_x(x, rate.estimate), y1=top, y2=bottom, class_="knee"),
    ]


def _dot(x: float, y: float, says: str, class_: str | None = None) -> Markup:
    return tag("circle", tag("title", says), cx=x, cy=y, r=4, class_=class_)


def _frame(title: str, x: Axis, y: Axis, x_label: str, y_label: str, marks: Sequence[Child]) -> Markup:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    grid: list[Child] = []
    for value, text in y.ticks:
        at = _y(y, value)
        grid.append(tag("line", x1=_LEFT, x2=right, y1=at, y2=at))
        grid.append(tag("text", text, x=_LEFT - 7, y=at + 4, text_anchor="end"))
    for value, text in x.ticks:
        at = _x(x, value)
        grid.append(tag("line", x1=at, x2=at, y1=_TOP, y2=bottom))
        grid.append(tag("text", text, x=at, y=bottom + 17, text_anchor="middle"))
    middle = (_TOP + bottom) / 2
    names = (
        tag("text", x_label, x=(_LEFT + right) / 2, y=HEIGHT - 8, text_anchor="middle"),
        tag("text", y_label, x=12, y=middle, text_anchor="middle", transform=f"rotate(-90 12 {middle:g})"),
    )
    return tag(
        "svg",
        tag("g", *grid, class_="grid"),
        tag("g", *names, class_="names"),
        tag("g", *marks, class_="marks"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="chart",
        role="img",
        aria_label=title,
    )


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.place(value) * (HEIGHT - _TOP - _BOTTOM)
