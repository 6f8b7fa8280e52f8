"""Who plays in the exploration, and everything that makes up one of its states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from twinpool.config import SchedulerConfig
from twinpool.decode_pool.core import DecodeCore
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import Granted
from twinpool.prefill_pool.core import PrefillCore
from twinpool.request import Job, RequestKey, SamplingParams
from twinpool.worker.core import Event
from world.exploration_brain import Brain, Numbers, View

LEASE_S = 8.0
PREFILL_CLOCK_S = 1e6
"""How far prefill's clock is from decode's: a lease that is compared across them is over at once, or never."""
BLOCK_SIZE = 2
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype=Dtype.FLOAT32)
MODEL = "model"
CONFIG = SchedulerConfig(headroom_tokens=0, prefix_cache=False, transfer_timeout_s=LEASE_S)
P, D, C = "prefill", "decode", "coordinator"
CONNECTIONS = ((C, P), (C, D), (P, C), (D, C), (P, D), (D, P))


class Broken(AssertionError):
    """A rule fell."""


@dataclass(frozen=True, slots=True)
class Faults:
    """How often each may happen in one run."""

    cancels: int = 0
    kills: int = 0
    losses: int = 0
    expiries: int = 0
    freezes: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """The requests' prompts in tokens, each worker's blocks, and the tokens that an answer has."""

    prompts: tuple[int, ...] = (3, 3)
    num_blocks: int = 3
    num_new_tokens: int = 2

    def job(self, name: str) -> Job:
        """The order for the request of that name, which is its number."""
        sampling = SamplingParams(max_tokens=self.num_new_tokens, seed=0, temperature=0.0)
        return Job(name, 1, tuple(range(self.prompts[int(name)])), sampling, ())


class Cast:
    """Who plays: the two cores, as tables. Shared by all states of one exploration."""

    def __init__(
        self,
        size: Size,
        prefill: Callable[..., Any] = PrefillCore,
        decode: Callable[..., Any] = DecodeCore,
    ) -> None:
        self.size = size
        self.brains = {
            P: Brain(lambda _: prefill(size.num_blocks, LAYOUT, MODEL, CONFIG)),
            D: Brain(lambda life: decode(size.num_blocks, LAYOUT, MODEL, CONFIG, life)),
        }
        self.things = Numbers()


@dataclass(frozen=True, slots=True)
class Process:
    """One life of a worker: the state of its core, the step that runs, and what its transport will say, in any order.

    `ahead` is what follows that step, if it ends now. Of the steps in `ended`, each with the one that followed, the
    core has not heard yet. A step pushes over the link that there was when it began, to the life of decode that is
    `step_link`.
    """

    life: str
    now: float
    state: int
    step: int | None = None
    step_link: str = ""
    ahead: int | None = None
    ended: tuple[tuple[int, int | None], ...] = ()
    answers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """A request as the coordinator sees it. `legs` are the workers that may hold something of it."""

    legs: tuple[str, ...] = (P, D)
    num_tokens: int = 0
    ending: str = ""


@dataclass(slots=True)
class State:
    """One state of everything. Its values never change, so a copy is shallow; queues hold the numbers of things."""

    cast: Cast
    faults: Faults
    processes: dict[str, Process | None] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=lambda: {P: 0, D: 0})
    queues: dict[tuple[str, str], tuple[int, ...]] = field(
        default_factory=lambda: dict.fromkeys(CONNECTIONS, ())
    )
    clients: dict[str, Client] = field(default_factory=dict)
    unread: tuple[tuple[int, str, int, int], ...] = ()  # fence, request, source block, target block
    flying: tuple[tuple[int, str, int], ...] = ()  # fence, request, target block
    finishing: dict[int, int] = field(default_factory=dict)  # fence: number of blocks
    linked_life: str = ""  # decode's, as prefill's transport has it
    missing: dict[int, tuple[int, ...]] = field(default_factory=dict)  # fence: blocks that have not landed
    verifying: dict[int, int] = field(default_factory=dict)  # fence: manifest
    contents: tuple[str, ...] = ()  # of decode's blocks: whose KV was written last
    frozen: str = ""  # the life of prefill that counts as lost and is not dead
    frozen_fences: tuple[int, ...] = ()  # what it goes on copying, until it is
    is_frozen_known: bool = False  # to decode
    last_fence: int = 0
    is_disturbed: bool = False  # by more than cancels: time may be needed until everything is free

    def copy(self) -> Self:
        """The same state, to move on from."""
        twin = copy.copy(self)
        for name in ("processes", "lives", "queues", "clients", "finishing", "missing", "verifying"):
            setattr(twin, name, dict(getattr(self, name)))
        return twin

    def key(self) -> Hashable:
        """Equal for equal states: what may stand in any order is put in order."""
        processes = tuple(
            p and (p.life, p.now, p.state, p.step, p.step_link, p.ahead, p.ended, tuple(sorted(p.answers)))
            for p in map(self.processes.get, (P, D))
        )
        clients = tuple((c.legs, c.num_tokens, c.ending) for c in self.clients.values())
        faults = (
            self.faults.cancels,
            self.faults.kills,
            self.faults.losses,
            self.faults.expiries,
            self.faults.freezes,
        )
        return (
            processes, clients, faults, tuple(self.lives.values()), tuple(self.queues.values()),
            _by_fence(self.unread), _by_fence(self.flying), tuple(sorted(self.finishing.items())),
            self.linked_life, tuple(sorted(self.missing.items())), tuple(sorted(self.verifying.items())),
            self.contents, self.last_fence, self.is_disturbed, self.frozen, self.frozen_fences, self.is_frozen_known,
        )  # fmt: skip

    def _begin_life(self, name: str) -> None:
        self.lives[name] += 1
        life = self._life(name)
        state = self.cast.brains[name].born(life)
        self.processes[name] = Process(life, PREFILL_CLOCK_S if name == P else 0.0, state)

    def _life(self, name: str) -> str:
        return f"{name[0]}{self.lives[name]}"

    def _process(self, name: str) -> Process:
        process = self.processes[name]
        assert process is not None
        return process

    def _view(self, name: str) -> View:
        return self.cast.brains[name].view(self._process(name).state)

    def _post(self, sender: str, receiver: str, thing: Hashable) -> None:
        self.queues[sender, receiver] = (*self.queues[sender, receiver], self.cast.things.number(thing))

    def _answer_later(self, name: str, event: Event) -> None:
        if (process := self.processes[name]) is not None:
            answers = (*process.answers, self.cast.things.number(event))
            self.processes[name] = replace(process, answers=answers)

    # ── rules ─────────────────────────────────────────────────────────────────────────────────────────────

    def _look_at_reading(self, name: str, key: RequestKey, table: tuple[int, ...], start: int) -> None:
        """A step reads and writes the blocks of its plan until it ends: they are the job's as long."""
        held = self._view(name).tables.get(key, ())
        if not set(table) <= set(held):
            raise Broken(f"{name} ran {key.request_id} over {table}, of which its job has {held}")
        if name == D:
            num_written = -(-min(start, self.cast.size.prompts[int(key.request_id)]) // BLOCK_SIZE)
            if any(self.contents[block] != key.request_id for block in table[:num_written]):
                raise Broken(f"decode reads {self.contents} in {table} for request {key.request_id}")

    def _look_at_grant(self, grant: Granted) -> None:
        needed = -(-self.cast.size.prompts[int(grant.key.request_id)] // BLOCK_SIZE)
        if len(set(grant.block_ids)) != needed:
            raise Broken(f"I5: {grant.block_ids} were granted where {needed} blocks are needed")
        if grant.fence <= self.last_fence:
            raise Broken(f"I2: fence {grant.fence} comes after {self.last_fence}")
        self.last_fence = grant.fence

    def _who_holds(self) -> str:
        """What is not free yet, in words; empty if all is."""
        held = [
            f"{name} is {client}" for name, client in self.clients.items() if client.legs or not client.ending
        ]
        busy = {name: self._view(name).busy for name in (P, D) if self.processes[name]}
        held += [f"{name} has {what}" for name, what in busy.items() if what]
        return "; ".join(held)


def _by_fence(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(items, key=lambda item: item[0]))


def other(name: str) -> str:
    return D if name == P else P
