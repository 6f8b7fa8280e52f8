"""The words of live tuning: traffic, what was predicted and measured, events and commands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec


class Split(NamedTuple):
    """So many prefill and decode workers."""

    prefill: int
    decode: int

    @property
    def size(self) -> int:
        """All workers."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


class Sizes(msgspec.Struct, frozen=True):
    """How many workers there may be, of both roles together, and the `room` that they are to have, as a share of the
    traffic."""

    fewest: int
    most: int
    room: float


class PastRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request as lengths: `at_s` counts from the first one's arrival, equal `prefix` beginnings are equal prompts'
    beginnings (`coordinator.routing.prefix_chain`), `own_tokens` follow them."""

    at_s: float
    prefix: tuple[int, ...]
    own_tokens: int
    output_tokens: int


class PastTraffic(msgspec.Struct, frozen=True):
    """What came lately, in the order in which it came, at `rate_per_s` on average."""

    requests: tuple[PastRequest, ...]
    rate_per_s: float
    mean_input: float
    mean_output: float
    """In tokens."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What clients of a layout see, predicted or measured; times in seconds, None of nothing. `attainment` is the share
    within the objectives of those that were let in or refused, `goodput_per_s` how many these are. `itl_p99_s` is the
    p99 of the requests' own p99 gaps."""

    attainment: float
    goodput_per_s: float
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. `capacity_per_s` is the highest rate of such traffic at which enough requests meet the objectives, 0
    if there is none, with the interval that its replications give (None: there is one only). `figures` are at the
    traffic's own rate."""

    prefill: int
    decode: int
    capacity_per_s: float
    low_per_s: float | None
    high_per_s: float | None
    figures: Figures

    @property
    def split(self) -> Split:
        """Its pools."""
        return Split(self.prefill, self.decode)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of the pools as they are, and of the best ones of as many workers (None: these are the best). `resize` are the
    best of more workers where as many have too little room, of one fewer where these have enough; None where neither is
    so, or may be."""

    stay: Forecast
    change: Forecast | None
    resize: Forecast | None = None


class Objective(StrEnum):
    """What a change would gain."""

    GOODPUT = "goodput"
    """The pools cannot serve the traffic within the objectives: more requests would meet them."""
    HEADROOM = "headroom"
    """They can: there would be room for more traffic."""
    COST = "cost"
    """They can, and fewer workers can."""


class Action(StrEnum):
    """What was done about a recommendation."""

    STAYED = "stayed"
    ADVISED = "advised"
    CHANGED = "changed"


class Recommendation(msgspec.Struct, frozen=True, kw_only=True, tag="recommendation", tag_field="kind"):
    """A line of the regret log. `gain` is what `change` has more of capacity than `stay`, as a share (None: `stay` has
    none, or nothing is to be changed); `own_error` is the median error of recent predictions (None: not known yet);
    `why` says why it was done, or not."""

    number: int
    num_requests: int
    rate_per_s: float
    mean_input: float
    mean_output: float
    objective: Objective
    stay: Forecast
    change: Forecast | None
    gain: float | None
    own_error: float | None
    action: Action
    why: str

    @property
    def in_force(self) -> Forecast:
        """What is to be held against what comes."""
        return self.change if self.change is not None and self.action is Action.CHANGED else self.stay


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured", tag_field="kind"):
    """A line of the regret log: what came after recommendation `number`, in the window after it. `figures` are None
    where nothing can be said; `why` says so. `errors` are |predicted ÷ measured − 1| by figure; of the attainment it is
    the difference. There are none where other traffic came than was predicted for."""

    number: int
    layout: str
    num_requests: int
    rate_per_s: float
    mean_input: float
    mean_output: float
    figures: Figures | None
    errors: dict[str, float]
    why: str = ""


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request came. `prefix` as in `PastRequest`."""

    request_id: str
    num_prompt_tokens: int
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """It is over, or was refused because of the load (then it may never have arrived: its prompt was not read). Times
    in seconds, None of what there is none of."""

    request_id: str
    num_output_tokens: int
    is_completed: bool
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_p99_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """It is over, and tells nothing of how well it was served: its client left, or it was refused for another reason
    than load. `num_output_tokens` None: it was no load either."""

    request_id: str
    num_output_tokens: int | None


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools at this moment. `unsettled` says who is on the way or missing, empty: nobody. So many of each may take
    the other role (`movable`)."""

    present: Split
    movable: Split
    unsettled: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    pools: Pools


@dataclass(frozen=True, slots=True)
class Predicted:
    """The answer to a Predict."""

    ticket: int
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Unpredicted:
    """There is no answer to a Predict, and why."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class NotChanged:
    """A ChangePools was refused, and why."""

    reason: str


Event = Arrived | Ended | Withdrawn | Tick | Predicted | Unpredicted | NotChanged

# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Predict:
    """Predict the present pools and the best ones for this traffic; Predicted or Unpredicted must follow."""

    ticket: int
    traffic: PastTraffic
    present: Split


@dataclass(frozen=True, slots=True)
class ChangePools:
    """Go for these; NotChanged follows if that is refused."""

    wanted: Split


@dataclass(frozen=True, slots=True)
class Write:
    """A line for the regret log."""

    line: Recommendation | Measured


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the server's log."""

    text: str
    is_fault: bool = False


Command = Predict | ChangePools | Write | Note
