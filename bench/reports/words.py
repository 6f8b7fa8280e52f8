"""How figures are written, and the sentences that a report leads with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from twinpool.bench.reports.model import Comparison, Found, Interval, OutputCheck, Report, Unit, Verdict

_DIGITS = 3
NONE = "–"


class Tone(StrEnum):
    """How a headline is to be taken."""

    ALARM = "alarm"
    """Before it is dealt with, nothing below counts."""
    GAIN = "gain"
    LOSS = "loss"
    EVEN = "even"
    """No difference shown, or neither direction is the good one."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Headline:
    """One sentence, whose `subject` comes first; `comparison` is what it tells, if it tells one."""

    tone: Tone
    subject: str
    text: str
    comparison: Comparison | None = None

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" if self.subject else self.text


def headlines(report: Report) -> list[Headline]:
    """What the report says, in order of weight: what makes figures void, outputs that differ, warnings, verdicts,
    further findings."""
    found = [
        Headline(Tone.ALARM, "not a result", f"{arm.name}: {reason}")
        for arm in report.arms
        for reason in arm.not_a_result
    ]
    found += [_outputs(check) for check in report.output_checks if check.num_different]
    found += [
        Headline(Tone.ALARM, "warning", f"{arm.name}: {each}") for arm in report.arms for each in arm.warnings
    ]
    found += [Headline(Tone.ALARM, "warning", each) for each in report.warnings]
    found += [verdict(each) for each in report.comparisons]
    found += [_outputs(check) for check in report.output_checks if not check.num_different]
    return found + [Headline(Tone.NOTE, "", each) for each in report.findings]


def verdict(each: Comparison) -> Headline:
    """Like "p99 ITL: 1p1d 42 % lower than colocated [38, 45]" or "no difference shown"."""
    change = each.change
    if each.verdict is Verdict.NO_DIFFERENCE:
        between = f"no difference shown between {each.baseline} and {each.other}"
        interval = bracketed(change, signed_percent)
        why = f" {interval}" if interval else "; no interval: too few repetitions or too much noise"
        return Headline(Tone.EVEN, each.measure.name, between + why, each)
    # The direction is in words, so the ends are without signs, the one nearer to 0 first.
    low, high = change.low, change.high
    sizes = Interval(abs(change.estimate), low, high)
    if change.estimate < 0:
        sizes = Interval(abs(change.estimate), None if high is None else -high, None if low is None else -low)
    text = f"{each.other} {percent(sizes.estimate)} {each.verdict.value} than {each.baseline} {bracketed(sizes, _bare)}"
    tone = {True: Tone.GAIN, False: Tone.LOSS, None: Tone.EVEN}[each.is_gain]
    return Headline(tone, each.measure.name, text, each)


def _outputs(check: OutputCheck) -> Headline:
    if check.num_different:
        counts = f"{check.num_different} of {check.num_compared}"
        text = f"{counts} answers of {check.other} are not those of {check.baseline}"
        return Headline(Tone.ALARM, "outputs differ", text)
    if not check.num_compared:
        return Headline(Tone.NOTE, "outputs", f"none of {check.baseline} and {check.other} could be compared")
    text = f"all {check.num_compared} answers of {check.baseline} and {check.other} that were compared are the same"
    return Headline(Tone.NOTE, "outputs", text)


def amount(value: float, unit: Unit, like: float | None = None) -> str:
    """With its unit, to three digits, scaled as `like` would be: seconds below 1 as ms. Infinite or NaN: a dash."""
    if not math.isfinite(value):
        return NONE
    match unit:
        case Unit.SECONDS if abs(value if like is None else like) < 1:
            return f"{number(value * 1e3)} ms"
        case Unit.SECONDS:
            return f"{number(value)} s"
        case Unit.SHARE:
            return percent(value)
        case Unit.COUNT:
            return f"{value:,.0f}"
        case _:
            return f"{number(value)} {unit.value}"


def ends(interval: Interval, unit: Unit) -> str:
    """The interval's ends in brackets, without unit, scaled as the estimate; empty if none is known or both are one."""
    if interval.low == interval.high:
        return ""
    return bracketed(interval, lambda end: amount(end, unit, interval.estimate).split(" ")[0])


def bracketed(interval: Interval, write: Callable[[float], str]) -> str:
    """The interval's ends as `write` has them, like "[38, 45]" or, of an end that is not known, "[38, ∞)"; empty if
    neither is."""
    if interval.low is None and interval.high is None:
        return ""
    low = "(−∞" if interval.low is None else f"[{write(interval.low)}"
    high = "∞)" if interval.high is None else f"{write(interval.high)}]"
    return f"{low}, {high}"


def number(value: float) -> str:
    """To three digits, but whole numbers whole: 0.0123, 4.56, 78.9, 1,234."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NONE
    decimals = max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace("-", "−")


def rate_words(rate: Interval, found: Found) -> str:
    """A highest rate as far as it is known: "3.40", "≥ 3.40", "none", "< 5.45" or "?"."""
    match found:
        case Found.HOLDS:
            is_open = rate.low is not None and rate.high is None
            return f"≥ {number(rate.estimate)}" if is_open else number(rate.estimate)
        case Found.AT_NO_RATE:
            return "none"
        case _:
            return "?" if rate.high is None else f"< {number(rate.high)}"


def percent(share: float) -> str:
    """Like "42 %", below 10 with a decimal."""
    return f"{_bare(share)} %"


def signed_percent(share: float) -> str:
    """Like "+3.1 %" and "−42 %"."""
    sign = "−" if share < 0 else "+" if share > 0 else ""
    return f"{sign}{_bare(abs(share))} %"


def _bare(share: float) -> str:
    """In percent, without the sign: whole from 10 on, and up to 100 never rounded to what it is not."""
    value = share * 100
    if 99 < value < 100:
        return f"{math.floor(value * 100) / 100:g}"
    return f"{value:,.0f}" if abs(value) >= 9.95 or value == 0 else f"{value:.1f}"
