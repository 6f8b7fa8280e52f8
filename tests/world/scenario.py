"""What a seed stands for: a deployment, its clients, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random

from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.request import SamplingParams
from twinpool.step_pace import StepPace
from world.client import Ask, Parting
from world.model import VOCABULARY, ending_at, text


class FaultKind(StrEnum):
    """What can go wrong."""

    KILL = "kill"
    FREEZE = "freeze"
    FREEZE_WRITING = "freeze in a write"
    LEAVE = "leave"
    BREAK_LINK = "break link"
    CORRUPT = "corrupt"
    LOSE_BYTES = "lose bytes"
    SLOW_WIRE = "slow wire"
    LOSE_MESSAGES = "lose messages"
    CUT_OFF = "cut off"
    BREAK_CONTROL = "break control"
    NEW_COORDINATOR = "new coordinator"


class WishKind(StrEnum):
    """What an operator can want of the pools."""

    ROLE = "role"
    DRAIN = "drain"
    SET = "set"


@dataclass(frozen=True, slots=True)
class Wish:
    """An operator wants it at `at_s`: of the `which`-th worker, or as many of each pool as `which` says, all of whose
    work may end for `wait_s`."""

    at_s: float
    kind: WishKind
    which: int = 0
    wait_s: float = 0.0

    @property
    def numbers(self) -> tuple[int, int]:
        """Prefill and decode workers: 1 to 3 of each."""
        return 1 + self.which % 3, 1 + self.which // 3 % 3


@dataclass(frozen=True, slots=True)
class Fault:
    """It happens at `at_s`, to the `which`-th of those it can happen to, for `for_s` if it lasts."""

    at_s: float
    kind: FaultKind
    which: int = 0
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a run depends on besides its dice, which `seed` throws.

    Model steps take `step_s` (least, most), or about what `pace` says, as hybrids need; a worker's event loop hears of
    their end one of `hears_after_s` later. Messages take up to `jitter_s`, one in `slow_one_in` up to `slow_s` more;
    `peer_loss` of those between workers are lost, until all requests have come and all faults have struck. `is_ours`:
    workers were started by the server, which sees them end, and can end them. Others start themselves again.
    """

    seed: int
    pools: dict[Role, int]
    num_blocks: int = 24
    block_size: int = 4
    is_one_sided: bool = True
    is_ours: bool = True
    workers: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(token_budget=16, headroom_tokens=4, transfer_timeout_s=1.0)
    )
    coordinator: CoordinatorConfig = field(
        default_factory=lambda: CoordinatorConfig(heartbeat_s=0.2, lease_s=1.0)
    )
    asks: tuple[Ask, ...] = ()
    faults: tuple[Fault, ...] = ()
    wishes: tuple[Wish, ...] = ()
    step_s: tuple[float, float] = (0.004, 0.02)
    hears_after_s: tuple[float, ...] = (0.0, 0.001, 0.02)
    jitter_s: float = 0.002
    slow_one_in: int = 0
    slow_s: float = 0.0
    wire_slowness: float = 1.0
    peer_loss: float = 0.0
    pace: StepPace | None = None

    @property
    def faults_end_s(self) -> float:
        """When the last fault has begun and, if it lasts, ended, and the last wish was uttered."""
        ends = (fault.at_s + fault.for_s for fault in self.faults)
        return max((*ends, *(wish.at_s for wish in self.wishes)), default=0.0)


def draw(seed: int) -> Scenario:
    """The scenario of a seed. Settings hurt: pools that hardly hold two sequences, odd chunks, few slots."""
    dice = Random(seed)
    is_split = dice.random() < 0.75
    if is_split:
        pools = {Role.PREFILL: dice.choice((1, 1, 2)), Role.DECODE: dice.choice((1, 2, 2))}
    else:
        pools = {Role.COLOCATED: dice.choice((1, 2))}
    scenario = Scenario(
        seed,
        pools,
        num_blocks=dice.choice((14, 18, 24, 40)),
        block_size=dice.choice((4, 4, 5)),
        is_one_sided=dice.random() < 0.5,
        is_ours=dice.random() < 0.7,
        workers=SchedulerConfig(
            token_budget=dice.choice((3, 7, 16, 64)),
            max_num_seqs=dice.choice((1, 2, 4, 8)),
            headroom_tokens=dice.choice((0, 2, 6)),
            max_parked_blocks=dice.choice((None, None, 1, 6)),
            max_queue_age_s=dice.choice((0.1, 2.0)),
            transfer_timeout_s=1.0,
            prefix_cache=dice.random() < 0.7,
        ),
        coordinator=CoordinatorConfig(
            max_attempts=dice.choice((1, 2, 3, 3, 5)),
            max_queue_requests=dice.choice((3, 64)),
            max_wait_s=dice.choice((0.5, 3.0, 20.0)),
            max_in_flight=dice.choice((None, None, 2, 4)),
            heartbeat_s=0.2,
            lease_s=1.0,
        ),
        step_s=dice.choice(((0.002, 0.008), (0.005, 0.03), (0.001, 0.1))),
        jitter_s=dice.choice((0.001, 0.004, 0.03)),
        slow_one_in=dice.choice((0, 0, 25, 8)),
        slow_s=dice.choice((0.05, 0.3)),
        wire_slowness=dice.choice((1.0, 1.0, 6.0, 20.0)),
        peer_loss=dice.choice((0.0, 0.0, 0.0, 0.0, 0.3)) if is_split else 0.0,
    )
    scenario = _perhaps_hybrid(scenario, Random(f"hybrid {seed}"), is_split)
    asks = _curious(_asks(dice, scenario), Random(f"curious {seed}"))
    scenario = replace(scenario, asks=asks, faults=_faults(dice, is_split, asks[-1].at_s))
    return replace(scenario, wishes=_wishes(scenario, Random(f"pools {seed}")))


def _perhaps_hybrid(scenario: Scenario, dice: Random, is_split: bool) -> Scenario:
    if not is_split or dice.random() < 0.7:
        return scenario
    workers = replace(scenario.workers, hybrid=True, itl_budget_ms=dice.choice((60.0, 200.0)))
    paces = (StepPace(0.004, 0.0005, 0.001), StepPace(0.006, 0.001, 0.0003), StepPace(0.002, 0.008, 0.001))
    return replace(scenario, workers=workers, pace=dice.choice(paces))


def _asks(dice: Random, scenario: Scenario) -> tuple[Ask, ...]:
    tenants = (ANYONE,)
    if dice.random() < 0.3:
        tenants = (
            Tenant(
                "small", requests_per_minute=dice.choice((2, 20)), tokens_per_minute=dice.choice((60, 4000))
            ),
            Tenant("large", weight=4.0, shares_cache=True),
            Tenant("other"),
        )
    common = tuple(dice.randrange(1, VOCABULARY) for _ in range(dice.randrange(15)))
    most_tokens = scenario.num_blocks * scenario.block_size
    gap_s = dice.choice((0.0, 0.02, 0.15))
    is_storm = dice.random() < 0.08
    is_restless = is_storm or dice.random() < 0.5
    asks, at_s = [], 0.1
    for number in range(dice.randint(15, 30) if is_storm else dice.randint(2, 9)):
        at_s += dice.random() * gap_s
        own = tuple(dice.randrange(1, VOCABULARY) for _ in range(dice.choice((1, 3, 9, 20, 33))))
        prompt = (common + own if dice.random() < 0.5 else own)[: most_tokens - 2]
        ask = Ask(
            f"r{number}",
            at_s,
            prompt,
            SamplingParams(
                max_tokens=min(dice.choice((1, 2, 8, 20)), most_tokens - len(prompt)),
                seed=dice.randrange(1 << 30),
                temperature=dice.choice((0.0, 1.0)),
                min_tokens=dice.choice((0, 0, 3)),
                ignore_eos=dice.random() < 0.3,
                stop_token_ids=dice.choice(((), (), (1, 2, 3, 4, 5))),
            ),
            reads_every_s=dice.choice((0.001, 0.001, 0.02, 0.3)),
            tenant=dice.choice(tenants),
            priority=dice.choice((0, 0, 1, 5)),
            time_limit_s=dice.choice((None, None, None, 0.3, 5.0)),
        )
        if dice.random() < 0.25:
            whole, _ = ask.wanted()
            start = dice.randrange(len(whole))
            ask = replace(ask, stop="".join(map(text, whole[start : start + dice.choice((1, 2))])))
        elif is_restless and dice.random() < (0.9 if is_storm else 0.4):
            ask = replace(ask, parting=dice.choice(tuple(Parting)), parts_after_s=dice.random() ** 2 * 1.5)
        asks.append(ask)
    return tuple(asks)


def _curious(asks: tuple[Ask, ...], dice: Random) -> tuple[Ask, ...]:
    """Some ask for log probabilities, some have parameters that look back, and a few cannot be answered to the end."""
    if dice.random() < 0.4:
        return asks
    return tuple(
        replace(
            ask,
            sampling=replace(
                ask.sampling,
                logprobs=dice.choice((None, None, 0, 2)),
                prompt_logprobs=dice.choice((None, None, 0, 2)),
                repetition_penalty=dice.choice((1.0, 1.0, 1.2)),
                grammar=ending_at(dice.randrange(12)) if dice.random() < 0.06 else None,
            ),
        )
        for ask in asks
    )


_SPLIT_FAULTS = (
    (FaultKind.KILL, 4), (FaultKind.FREEZE, 3), (FaultKind.LEAVE, 1), (FaultKind.BREAK_LINK, 2), (FaultKind.CORRUPT, 2),
    (FaultKind.LOSE_BYTES, 2), (FaultKind.SLOW_WIRE, 2), (FaultKind.LOSE_MESSAGES, 2), (FaultKind.CUT_OFF, 1),
    (FaultKind.NEW_COORDINATOR, 1), (FaultKind.BREAK_CONTROL, 2), (FaultKind.FREEZE_WRITING, 3),
)  # fmt: skip
_COLOCATED_FAULTS = (
    (FaultKind.KILL, 4),
    (FaultKind.FREEZE, 3),
    (FaultKind.LEAVE, 2),
    (FaultKind.NEW_COORDINATOR, 1),
)


def _faults(dice: Random, is_split: bool, last_ask_s: float) -> tuple[Fault, ...]:
    if dice.random() < 0.3:
        return ()
    kinds, weights = zip(*(_SPLIT_FAULTS if is_split else _COLOCATED_FAULTS), strict=True)
    faults = [
        Fault(
            0.1 + dice.random() * (last_ask_s + 0.6),
            dice.choices(kinds, weights)[0],
            dice.randrange(12),
            dice.choice((0.05, 0.4, 1.3, 2.0)),
        )
        for _ in range(dice.choice((1, 1, 2, 3, 5)))
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _wishes(scenario: Scenario, dice: Random) -> tuple[Wish, ...]:
    """Some operators change the pools while requests run, hybrids only in number."""
    if dice.random() < 0.6 or Role.COLOCATED in scenario.pools:
        return ()
    kinds = (WishKind.ROLE, WishKind.ROLE, WishKind.SET, WishKind.DRAIN)
    wishes = [
        Wish(
            0.1 + dice.random() * (scenario.asks[-1].at_s + 0.6),
            dice.choice(kinds),
            dice.randrange(12),
            dice.choice((0.0, 0.0, 0.1, 0.5)),
        )
        for _ in range(dice.choice((1, 1, 2, 4)))
    ]
    return tuple(sorted(wishes, key=lambda wish: wish.at_s))
