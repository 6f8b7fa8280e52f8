"""The win-or-lose map: for each workload of a grid, the highest rate at which each arm holds each objective.

Every run at a rate says something of all objectives at once: tight or loose TTFT with tight or loose ITL are four
questions to the same requests. So a cell of the grid costs one search for each arm, not four.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tokenizers

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.measures import Seen, seen
from twinpool.bench.comparison.noise import Noise
from twinpool.bench.comparison.rate_search import Bracket, Probe, Search, wilson
from twinpool.bench.comparison.stand import Stand
from twinpool.bench.comparison.workloads import bounds
from twinpool.bench.comparison.yardstick import NUM_STREAMS, Yardstick
from twinpool.bench.reports.model import Found, Interval, MapCell, RateCurve, RatePoint, WinLoseMap, Winner
from twinpool.bench.reports.words import number, rate_words
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.datasets import (
    DatasetName,
    DatasetSettings,
    PrefixRepetition,
    PromptAs,
    RandomLengths,
    make_requests,
)
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.workload import PlannedRequest

FEWEST_REQUESTS = 32
"""Of a run: so many good ones, all of them, are what it takes to be sure of nine in ten."""
RUN_TTFTS = 4.0
"""A run's arrivals go on for so many times the longest TTFT that is allowed: at 1.25 times what a server can do, its
queue is that long in the end."""
TIGHT_TTFT, LOOSE_TTFT = 2.0, 8.0
TIGHT_ITL, LOOSE_ITL = 1.5, 4.0
"""An objective is so many times what is undisturbed."""
NUM_PREFIXES = 4
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload of the grid: lengths in tokens, and the share of all prompt tokens that other prompts have too."""

    input_tokens: int
    output_tokens: int
    reuse: float

    @property
    def name(self) -> str:
        """Like "512 in, 64 out, 50 % shared"."""
        shared = f", {self.reuse:.0%} shared" if self.reuse else ""
        return f"{self.input_tokens} in, {self.output_tokens} out{shared}"

    @property
    def slug(self) -> str:
        """Like "512-64-0.5", for request ids."""
        return f"{self.input_tokens}-{self.output_tokens}-{self.reuse:g}"

    def requests(
        self, tokenizer: tokenizers.Tokenizer, rate_per_s: float, seconds: float, seed: int
    ) -> list[PlannedRequest]:
        """Poisson arrivals for so long, and so many that their share of good ones says something."""
        count = max(FEWEST_REQUESTS, round(rate_per_s * seconds))
        if self.reuse:
            settings = DatasetSettings(
                name=DatasetName.PREFIX_REPETITION,
                prompt_as=PromptAs.IDS,
                prefix_repetition=PrefixRepetition(
                    prefix_len=self.input_tokens - 1,
                    suffix_len=1,
                    num_prefixes=NUM_PREFIXES,
                    output_len=self.output_tokens,
                    reuse_share=self.reuse,
                ),
            )
        else:
            lengths = RandomLengths(input_len=self.input_tokens, output_len=self.output_tokens)
            settings = DatasetSettings(prompt_as=PromptAs.IDS, random=lengths)
        made = make_requests(settings, tokenizer, count, seed)
        return schedule(made, Pacing(Process.POISSON, rate_per_s), seed)


@dataclass(frozen=True, slots=True)
class Objective:
    """One corner: a name like "tight TTFT, loose ITL" and its bounds."""

    name: str
    slo: Slo

    @property
    def short(self) -> str:
        """Like "tight/loose": of TTFT and of ITL."""
        return self.name.replace(" TTFT, ", "/").removesuffix(" ITL")


@dataclass(slots=True)
class Searched:
    """One arm on one cell: what was tried, and the objectives' brackets."""

    arm: Arm
    cell: Cell
    objectives: Sequence[Objective]
    search: Search
    probes: list[Probe] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    noises: list[Noise] = field(default_factory=list)

    def bracket(self, objective: Objective) -> Bracket:
        """Where its highest rate lies."""
        return self.search.bracket(self.probes, objective.name)

    def found(self, objective: Objective) -> Found:
        """What its search came to."""
        return self.search.found(self.probes, objective.name)

    @property
    def open_objectives(self) -> list[Objective]:
        """Those whose search has not come to an end."""
        return [each for each in self.objectives if self.search.is_open(self.probes, each.name)]

    @property
    def next_rate(self) -> float | None:
        """The rate to try next; None if none need be."""
        return self.search.next_rate(self.probes, [each.name for each in self.objectives])


def corners(cell: Cell, yardstick: Yardstick) -> list[Objective]:
    """The four of tight and loose TTFT and ITL, as multiples of what the cell's requests take undisturbed."""
    first_s = cell.input_tokens * yardstick.prompt_token_s + yardstick.itl_s
    ttfts = {"tight": TIGHT_TTFT * first_s, "loose": LOOSE_TTFT * first_s}
    gaps = {"tight": TIGHT_ITL * yardstick.itl_s, "loose": LOOSE_ITL * yardstick.itl_s}
    return [
        Objective(f"{how_first} TTFT, {how_gap} ITL", bounds(ttfts[how_first], gaps[how_gap]))
        for how_first, how_gap in itertools.product(ttfts, gaps)
    ]


def start_rate(cell: Cell, yardstick: Yardstick) -> float:
    """Half of what one prefill and one decode worker could do without a rest, by the yardstick."""
    prefill_per_s = 1 / (cell.input_tokens * yardstick.prompt_token_s)
    decode_per_s = NUM_STREAMS / (cell.output_tokens * yardstick.itl_s)
    return 0.5 * min(prefill_per_s, decode_per_s)


def run_seconds(at_least_s: float, objectives: Sequence[Objective]) -> float:
    """How long arrivals go on: a queue that grows must have the time to break the longest TTFT that is allowed."""
    return max([at_least_s, *(RUN_TTFTS * (each.slo.ttft_s or 0.0) for each in objectives)])


def sweep_cell(
    searches: Sequence[Searched],
    stand: Stand,
    tokenizer: tokenizers.Tokenizer,
    *,
    seconds: float,
    seed: int,
    until: float,
    say: Say,
) -> None:
    """Searches on every arm, a run of one and then of the next, until all is known or another run would end after
    `until` (monotonic); each arm's first run is done in any case. What is tried is added to `searches`, which are of
    one cell; it is there even if this raises.

    Equal rates have equal requests on all arms.

    Raises:
        ServerFault, NoServer: a server does not start or answer.
        KeyboardInterrupt: Ctrl-C.
    """
    is_open = True
    while is_open:
        is_open = False
        for each in searches:
            if (rate := each.next_rate) is None:
                continue
            tries = sum(probe.rate == rate for probe in each.probes)
            arrive_s = run_seconds(seconds, each.objectives)
            requests = each.cell.requests(tokenizer, rate, arrive_s, seed + tries)
            arrivals_s = max(request.at_s or 0.0 for request in requests)
            if each.probes and time.monotonic() + arrivals_s > until:
                continue
            is_open = True
            trial = stand.load(each.arm, requests, f"{each.cell.slug}-{rate:.4f}-{tries}")
            probe = probe_of(rate, {o.name: seen(trial.run, o.slo) for o in each.objectives})
            each.probes.append(probe)
            each.durations_s.append(trial.run.duration_s)
            each.noises.append(trial.noise)
            good = ", ".join(f"{o.short} {probe.num_good[o.name]}" for o in each.objectives)
            say(f"  {each.arm.name}: {rate:.3g}/s: of {len(requests)} requests good: {good}")
    if left := [searched for searched in searches if searched.open_objectives]:
        say(f"{left[0].cell.name}: the time is up; not finished: {unfinished(left)}")


def unfinished(searches: Sequence[Searched]) -> str:
    """Which searches have not come to an end, in words: arms with the objectives of each."""
    return "; ".join(
        f"{each.arm.name} ({', '.join(objective.short for objective in each.open_objectives)})"
        for each in searches
        if each.open_objectives
    )


def probe_of(rate: float, judged: dict[str, list[Seen]]) -> Probe:
    """A run's requests, judged by each objective."""
    (first, *_) = judged.values()
    good = {name: sum(each.is_good for each in requests) for name, requests in judged.items()}
    return Probe(rate, len(first), good)


def curve(searched: Searched, objective: Objective) -> RateCurve:
    """Goodput by rate; runs at one rate are taken together."""
    points = []
    search = searched.search
    for rate in sorted({probe.rate for probe in searched.probes}):
        pairs = zip(searched.probes, searched.durations_s, strict=True)
        runs = [(probe, duration) for probe, duration in pairs if probe.rate == rate]
        count = sum(probe.num_requests for probe, _ in runs)
        good = sum(probe.num_good[objective.name] for probe, _ in runs)
        seconds = sum(duration for _, duration in runs)
        low, high = wilson(good, count, search.confidence)
        points.append(
            RatePoint(
                rate=rate,
                goodput=Interval(good / seconds, low * count / seconds, high * count / seconds),
                attainment=good / count,
                holds=_holds(searched.bracket(objective), rate),
            )
        )
    return RateCurve(
        arm=searched.arm.name,
        points=tuple(points),
        highest_rate=_interval(searched.bracket(objective))
        if searched.found(objective) in (Found.HOLDS, Found.AT_NO_RATE)
        else None,
        workload=f"{searched.cell.name}; {objective.name}",
    )


def _holds(bracket: Bracket, rate: float) -> bool | None:
    """None between what holds and what fails."""
    return None if bracket.low < rate < bracket.high else rate <= bracket.low


def win_lose_map(found: Sequence[tuple[Searched, Searched]]) -> WinLoseMap:
    """Of pairs of searches, the baseline's first, on the same cell with the same objectives."""
    baseline, other = found[0]
    cells = [
        _map_cell(before, after, objective)
        for before, after in found
        for objective in before.objectives
        if before.probes and after.probes
    ]
    slos: dict[str, list[str]] = {}
    for before, _ in found:
        for objective in before.objectives:
            words = f"{before.cell.input_tokens:,} in: {objective.slo}"
            if words not in slos.setdefault(objective.name, []):
                slos[objective.name].append(words)
    return WinLoseMap(
        baseline=baseline.arm.name,
        other=other.arm.name,
        cells=tuple(cells),
        slos={name: "; ".join(words) for name, words in slos.items()},
    )


def _map_cell(before: Searched, after: Searched, objective: Objective) -> MapCell:
    baseline, other = before.bracket(objective), after.bracket(objective)
    gain = None
    if baseline.low > 0:
        low = other.low / baseline.high if math.isfinite(baseline.high) else None
        high = other.high / baseline.low if math.isfinite(other.high) else None
        gain = Interval(_middle(other) / _middle(baseline), low, high)
    return MapCell(
        input_tokens=before.cell.input_tokens,
        output_tokens=before.cell.output_tokens,
        reuse=before.cell.reuse,
        slo=objective.name,
        baseline_rate=_interval(baseline),
        other_rate=_interval(other),
        baseline_found=before.found(objective),
        other_found=after.found(objective),
        gain=gain,
    )


def _middle(bracket: Bracket) -> float:
    """The rate to tell: 0 if it holds at none that was tried."""
    return math.sqrt(bracket.low * bracket.high) if math.isfinite(bracket.high) else bracket.low


def _interval(bracket: Bracket) -> Interval:
    return Interval(_middle(bracket), bracket.low, bracket.high if math.isfinite(bracket.high) else None)


def findings(known: WinLoseMap) -> list[str]:
    """In words where the other arm loses, where it wins, and where neither is shown, holds, or is known."""
    words = {
        Winner.BASELINE: f"{known.other} loses to {known.baseline}",
        Winner.OTHER: f"{known.other} wins over {known.baseline}",
        Winner.NOBODY_SHOWN: f"no difference shown between {known.other} and {known.baseline}",
        Winner.NOBODY_HOLDS: f"neither {known.other} nor {known.baseline} holds at any rate that was tried",
        Winner.NOT_KNOWN: f"not known which of {known.other} and {known.baseline} holds more",
    }
    return [
        f"{text} with {cell.input_tokens:,} tokens in, {cell.output_tokens:,} out, {cell.reuse:.0%} shared, "
        f"{cell.slo}: {' against '.join(rate_words(*each) for each in cell.rates)} requests/s"
        for winner, text in words.items()
        for cell in known.cells
        if cell.winner is winner
    ]


def doubts(found: Sequence[Sequence[Searched]], minutes: float) -> list[str]:
    """Warnings of what was searched, cell by cell: that the time was up, and runs that contradict each other."""
    searches = [searched for cell in found for searched in cell]
    told = []
    if num_open := sum(len(each.open_objectives) for each in searches):
        num_all = sum(len(each.objectives) for each in searches)
        told.append(
            f"the time was up ({minutes:g} minutes) before {num_open} of {num_all} searches came to an end: what they "
            "lack is “not known” or a wide interval; give more --minutes, or fewer lengths"
        )
    for each in searches:
        for objective in each.objectives:
            for odd in each.search.at_odds(each.probes, objective.name):
                rates = f"{number(odd.rates[0])} and {number(odd.rates[-1])}"
                told.append(
                    f"{each.arm.name}, {each.cell.name}, {objective.name}: runs between {rates} requests/s contradict "
                    "each other: fewer requests were good at a lower rate than at a higher one; none is believed"
                )
    return told
