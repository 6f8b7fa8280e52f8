"""What no layout can do is refused before anything is simulated, with what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.slo import Slo
from twinpool.errors import ConfigError
from twinpool.planner.plan.bounds import itl_floors_s, quantile_s, share_within, ttft_floors_s
from twinpool.planner.plan.layouts import LayoutSpace, accelerators
from twinpool.planner.plan.traffic import new_tokens
from twinpool.planner.times.service_times import Overheads

_SAMPLES = 200
_ALLOWANCE = 1.05
"""What an error proposes over the floor: at the floor itself no request could ever wait."""
T = TypeVar("T", int, tuple[int, int])


@dataclass(slots=True)
class Floors:
    """The least that requests take each alone on an idle worker whose prefix cache holds all that it could, by TP
    degree: by its service times, and by its data sheet."""

    space: LayoutSpace
    prompts: list[tuple[int, int]]
    contexts: list[int]
    _ttft: dict[tuple[int, bool], list[float]] = field(default_factory=dict)
    _itl: dict[tuple[int, bool], list[float]] = field(default_factory=dict)

    def ttft_s(self, degree: int, by_data_sheet: bool = False) -> list[float]:
        """Of some requests, evenly chosen, ascending; empty if the data sheet is not known."""
        key = (degree, by_data_sheet)
        if key not in self._ttft:
            kind, space = self.space.kinds[degree], self.space
            if not by_data_sheet:
                budget = max([space.prefill.token_budget or 1, *space.token_budgets])
                step_s, extra = kind.times.step_s, kind.times.overheads
                self._ttft[key] = ttft_floors_s(step_s, extra, budget, self.prompts)
            elif kind.floor is None:
                self._ttft[key] = []
            else:
                whole = space.max_model_len
                self._ttft[key] = ttft_floors_s(kind.floor.floor_s, Overheads(), whole, self.prompts)
        return self._ttft[key]

    def itl_s(self, degree: int, by_data_sheet: bool = False) -> list[float]:
        """Likewise."""
        key = (degree, by_data_sheet)
        if key not in self._itl:
            kind = self.space.kinds[degree]
            if not by_data_sheet:
                self._itl[key] = itl_floors_s(kind.times.step_s, self.contexts)
            else:
                self._itl[key] = [] if kind.floor is None else itl_floors_s(kind.floor.floor_s, self.contexts)
        return self._itl[key]

    def allows(self, degree: int, slo: Slo, attainment: float) -> bool:
        """Whether enough requests meet the TTFT objective alone on an idle worker of that degree."""
        return share_within(self.ttft_s(degree), slo.ttft_s) >= attainment


def floors_of(space: LayoutSpace, shapes: Sequence[Shape]) -> Floors:
    """Of some of the requests."""
    new = [int(count) for count in new_tokens(shapes)]
    prompts = [(count, shape.input_tokens - count) for count, shape in zip(new, shapes, strict=True)]
    contexts = [shape.input_tokens + shape.output_tokens // 2 for shape in shapes if shape.output_tokens > 1]
    return Floors(space, _some(prompts), _some(contexts))


def refuse_impossible(floors: Floors, slo: Slo, attainment: float, budget: int) -> None:
    """Raises ConfigError if the budget holds no worker, or if too many requests miss an objective even alone on an
    idle worker of the best TP degree that the budget holds."""
    degrees = [degree for degree in sorted(floors.space.kinds) if degree <= budget]
    if not degrees:
        fewest = min(floors.space.kinds)
        raise ConfigError(
            f"--budget is {budget}, and one worker takes {accelerators(fewest)} (its TP degree); say --budget "
            f"{fewest} or more"
        )
    for name, bound_s, floors_s in (
        ("ttft", slo.ttft_s, floors.ttft_s),
        ("itl", slo.itl_p99_s, floors.itl_s),
        ("tpot", slo.tpot_s, floors.itl_s),
    ):
        for by_data_sheet in (True, False) if bound_s is not None else ():
            known = [(degree, found) for degree in degrees if (found := floors_s(degree, by_data_sheet))]
            least = min(((quantile_s(found, attainment), degree) for degree, found in known), default=None)
            if least is None or bound_s is None or least[0] <= bound_s:
                continue
            seconds, degree = least
            times = floors.space.kinds[degree].times.name
            by = "its data sheet's roofline" if by_data_sheet else f"its service times ({times})"
            raise ConfigError(
                f"--slo {name}={1e3 * bound_s:g}ms is below the floor: {attainment:.0%} of the requests take up to "
                f"{1e3 * seconds:.4g} ms, each alone on an idle worker of {accelerators(degree)}, by {by}; "
                f"allow {_ALLOWANCE * 1e3 * seconds:.3g} ms, or take a faster --gpu, more --tp or less --attainment"
            )


def _some(values: Sequence[T]) -> list[T]:
    """At most `_SAMPLES`, evenly chosen by rank."""
    ordered = sorted(values)
    count = min(len(ordered), _SAMPLES)
    return [ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count)]
