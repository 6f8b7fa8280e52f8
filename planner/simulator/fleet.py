"""All workers of a simulation: made, joined and linked before the first request, and heard of regularly."""

from __future__ import annotations

from twinpool.config import Role
from twinpool.messages import Heartbeat, LinkReady, Register
from twinpool.planner.deployment import Deployment
from twinpool.planner.simulator.agenda import Agenda
from twinpool.planner.simulator.control import Control
from twinpool.planner.simulator.lockstep import LockstepWorker
from twinpool.planner.simulator.machine import Machine
from twinpool.planner.simulator.outcomes import WorkerUse
from twinpool.planner.simulator.prefixes import Prefixes
from twinpool.planner.simulator.worker import FINGERPRINT, SimulatedWorker
from twinpool.worker.core import PeerLinked, Tick

PROBE_BYTES = 1 << 26
"""Of each link, whose rate is told to the coordinator."""


class Fleet:
    """The workers of a deployment."""

    def __init__(
        self,
        deployment: Deployment,
        prefixes: Prefixes,
        agenda: Agenda,
        control: Control,
        *,
        is_step_by_step: bool,
    ) -> None:
        self._deployment = deployment
        self._agenda = agenda
        self._control = control
        self._is_step_by_step = is_step_by_step
        self.workers = _workers(deployment, prefixes, agenda, control, is_step_by_step=is_step_by_step)
        self._kv_shares = {worker.worker_id: _Shares() for worker in self.workers}
        control.employ(self.workers)

    def join(self) -> None:
        """All workers are there, and linked."""
        for worker in self.workers:
            self._control.hear(worker, _offer(worker, self._deployment))
            if worker.pool.scheduler.hybrid:
                worker.time_steps(self._deployment.max_model_len)
        for sender in self._of_role(Role.PREFILL):
            gb_per_s = PROBE_BYTES / max(1e-9, sender.pool.times.transfer_s(PROBE_BYTES)) / 1e9
            for receiver in self._of_role(Role.DECODE):
                sender.take(PeerLinked(receiver.worker_id, receiver.incarnation, "simulated"))
                receiver.take(PeerLinked(sender.worker_id, sender.incarnation, "simulated"))
                ready = LinkReady(
                    receiver.worker_id, receiver.incarnation, "simulated", gb_per_s, PROBE_BYTES
                )
                self._control.hear(sender, ready)
        self.beat()

    def tick(self) -> None:
        """Time passes at all workers: those that do not mind are not told."""
        now = self._agenda.now
        for worker in self.workers:
            if self._is_step_by_step or worker.core.minds_time(now):
                worker.take(Tick())

    def beat(self) -> None:
        """The coordinator hears how all workers do."""
        self._control.tell_of_all_steps()
        for worker in self.workers:
            stats = worker.core.stats()
            num_blocks = worker.pool.num_blocks
            held = num_blocks - stats.free_blocks - stats.cached_blocks
            self._kv_shares[worker.worker_id].add(held / num_blocks)
            self._control.hear(worker, Heartbeat(stats))

    def uses(self) -> tuple[WorkerUse, ...]:
        """What each worker has done."""
        return tuple(map(self._use, self.workers))

    def _use(self, worker: SimulatedWorker) -> WorkerUse:
        shares = self._kv_shares[worker.worker_id]
        return WorkerUse(
            worker_id=worker.worker_id,
            role=worker.pool.role,
            busy_s=worker.busy_s,
            num_steps=worker.num_steps,
            kv_share=shares.mean,
            most_kv_share=shares.most,
            counters={name: value for name, value in worker.core.stats().counters.items() if value},
        )

    def _of_role(self, role: Role) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.pool.role is role]


class _Shares:
    """The mean and the largest of some shares."""

    __slots__ = ("_num", "_sum", "most")

    def __init__(self) -> None:
        self._num, self._sum, self.most = 0, 0.0, 0.0

    def add(self, share: float) -> None:
        """One more."""
        self._num += 1
        self._sum += share
        self.most = max(self.most, share)

    @property
    def mean(self) -> float:
        """0 of none."""
        return self._sum / self._num if self._num else 0.0


def _workers(
    deployment: Deployment, prefixes: Prefixes, agenda: Agenda, control: Control, *, is_step_by_step: bool
) -> list[SimulatedWorker]:
    """All workers, those of decode first: each that joins is told to all of the other role, and prefill's are fewer."""
    machines = {pool.machine: Machine() for pool in deployment.pools if pool.machine is not None}
    chains = prefixes.chains()
    workers: list[SimulatedWorker] = []
    has_hybrids = any(pool.scheduler.hybrid for pool in deployment.pools)  # whose choices depend on the time
    for pool in sorted(deployment.pools, key=lambda pool: pool.role is not Role.DECODE):
        machine = None if pool.machine is None else machines[pool.machine]
        in_lockstep = pool.role is not Role.PREFILL and not has_hybrids and not is_step_by_step
        kind = LockstepWorker if in_lockstep else SimulatedWorker
        for number in range(pool.num_workers):
            workers.append(
                kind(
                    len(workers),
                    f"{pool.role}-{number}",
                    pool,
                    deployment.layout,
                    chains,
                    agenda,
                    control.tell,
                    machine,
                )
            )
    peers = {worker.worker_id: worker for worker in workers}
    for worker in workers:
        worker.peers = peers
    return workers


def _offer(worker: SimulatedWorker, deployment: Deployment) -> Register:
    pool = worker.pool
    return Register(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        role=pool.role,
        pid=worker.number,
        endpoint=f"memory://{worker.worker_id}",
        fingerprint=FINGERPRINT,
        layout=deployment.layout,
        num_blocks=pool.num_blocks,
        max_model_len=deployment.max_model_len,
        max_num_seqs=pool.scheduler.max_num_seqs,
        itl_budget_s=pool.scheduler.itl_budget_ms / 1e3 if pool.scheduler.hybrid else None,
    )
