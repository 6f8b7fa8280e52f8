"""A plan as a value: everything that the table, the JSON and the page say."""

from __future__ import annotations

import msgspec

from twinpool.bench.reports.model import Interval

FORMAT = 3
"""Of the JSON; another number means other fields."""


class TrafficFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan is for. `rate_per_s` None: nobody said; then cases are told at a share of the capacity."""

    name: str
    num_requests: int
    rate_per_s: float | None
    input_tokens: float
    output_tokens: float
    """Means."""
    reused_share: float
    """Of the prompt tokens, by a prefix cache without bounds."""
    longest: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """KV beside the weights of one worker of `tp` devices, GiB of each."""

    tp: int
    usable_gib: float
    weights_gib: float
    kv_gib: float
    num_blocks: int
    num_tokens: int
    typical_tokens: int
    """The median request with its answer."""
    typical_sequences: int
    longest_tokens: int
    longest_sequences: int


class Tried(msgspec.Struct, frozen=True):
    """A rate that was simulated, and the share of requests within the objectives, of `num_replications` together."""

    rate_per_s: float
    attainment: float
    num_replications: int


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. `rate_per_s` is the highest at which enough requests meet the objectives: with ends from
    replications, without from one rough search. None: it was not searched for, `pruned` says why; it is below
    `bound_per_s` and, where that is known, `below_per_s`. `goodput_per_accelerator` counts the requests that meet
    them."""

    name: str
    prefill: int
    decode: int
    colocated: int
    prefill_tp: int
    decode_tp: int
    token_budget: int
    num_accelerators: int
    bound_per_s: float
    bound_by: str
    below_per_s: float | None = None
    pruned: str = ""
    rate_per_s: Interval | None = None
    goodput_per_accelerator: Interval | None = None
    num_replications: int = 0
    tried: tuple[Tried, ...] = ()
    """Ascending."""

    @property
    def known_rate_per_s(self) -> float:
        """0 if it was not simulated."""
        return 0.0 if self.rate_per_s is None else self.rate_per_s.estimate


class EffectRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one change does to the recommended layout's highest rate, relatively."""

    change: str
    layout: str
    capacity: Interval | None
    is_shown: bool
    note: str = ""
    """Why it was not tried."""


class Size(msgspec.Struct, frozen=True):
    """What the search found of so many accelerators, where a rate was said."""

    num_accelerators: int
    verdict: str


class PoolUse(msgspec.Struct, frozen=True):
    """Of a pool's workers: the mean share of the time in which they computed, the mean and the largest share of their
    KV blocks that requests held."""

    busy_share: float
    kv_share: float
    most_kv_share: float


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """How the recommended layout serves at a rate; None: nothing is served, `note` says why. An infinite time is None,
    too."""

    name: str
    rate_per_s: float
    attainment: float | None = None
    least_attainment: float | None = None
    """Of one replication."""
    holds: bool = False
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None
    uses: dict[str, PoolUse] = {}
    """By role."""
    note: str = ""


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """In the unit of the price, at some rate, at which the accelerators' capacity is used for the share `use`."""

    name: str
    rate_per_s: float
    use: float
    per_request: float
    per_thousand_requests: float
    per_million_input: float
    per_million_output: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `findings` are sentences, the weightiest first; `warnings` are those that shake all of them."""

    model: str
    times: tuple[str, ...]
    slo: str
    attainment: float
    budget: int
    confidence: float
    seed: int
    traffic: TrafficFacts
    memory: tuple[Memory, ...]
    layouts: tuple[Planned, ...]
    sizes: tuple[Size, ...] = ()
    """Ascending; those that are missing hold no worker, or were not needed."""
    recommended: str | None = None
    serves: bool | None = None
    """Whether it serves the traffic's rate; None: nobody said a rate."""
    headroom: Interval | None = None
    """Capacity over the traffic's rate, − 1."""
    split_over_colocated: Interval | None = None
    binding_pool: str = ""
    binding_reason: str = ""
    effects: tuple[EffectRow, ...] = ()
    cases: tuple[Case, ...] = ()
    price_per_hour: float | None = None
    costs: tuple[CostRow, ...] = ()
    warnings: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    num_simulations: int = 0
    num_simulated_requests: int = 0
    requests_per_simulation: int = 0
    was_interrupted: bool = False
    format: int = FORMAT

    def planned(self, name: str | None) -> Planned | None:
        """The layout of that name."""
        return next((layout for layout in self.layouts if layout.name == name), None)


def encode_plan(plan: Plan) -> bytes:
    """As JSON, for people to read, too."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def decode_plan(data: bytes) -> Plan:
    """From JSON. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return msgspec.json.decode(data, type=Plan)
