"""One simulated worker: its role's core, and in place of a shell what carries its commands out in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.colocated_pool.hybrid import HybridDecodeCore, HybridPrefillCore
from twinpool.config import Role
from twinpool.decode_pool.core import DecodeCore
from twinpool.engine.batch import SequenceSlice, StepOutput
from twinpool.engine.prefix_chain import Chains
from twinpool.errors import InvariantViolation
from twinpool.layout import KVLayout
from twinpool.messages import Message
from twinpool.planner.deployment import Pool
from twinpool.planner.simulator.agenda import LATER, STEP_MESSAGES, Agenda
from twinpool.planner.simulator.machine import Delivered, Machine, Nic
from twinpool.planner.step_shape import StepShape, of_chunk, of_sequences
from twinpool.prefill_pool.core import PrefillCore
from twinpool.request import RequestKey
from twinpool.worker.core import (
    BlockPush,
    CancelReceive,
    Command,
    Event,
    FinishPush,
    FromCoordinator,
    FromPeer,
    PlanAhead,
    PostReceive,
    Push,
    PushFinished,
    PushStopped,
    ReceiveCancelled,
    RoleCore,
    SendCoordinator,
    SendPeer,
    StepDone,
    StepPlan,
    StepTimed,
    StopPush,
    Verified,
    Verify,
)
from twinpool.worker.timed_steps import sizes_that_fit

FINGERPRINT = "simulated"
TOKEN_ID = 0
"""What every step samples. Nothing depends on it: answers end at their length, and prefixes have names."""

ToCoordinator = Callable[["SimulatedWorker", Message, int], None]
"""Takes a message of a worker, of a rank."""


class SimulatedWorker:
    """A worker process in virtual time.

    Steps follow each other as on the step thread: what the core has planned ahead begins when a step ends, and the core
    hears of both. What a core does takes no time. Messages take `Overheads.control_s` each.

    A prompt's KV leaves layer by layer: the first layer is there after its part of the step, and what a step has
    pushed is with the receiver when both ends of the link are through with it (`Nic`), at the earliest when its last
    layer, which is there at the step's end, has gone over. Whatever else a transfer takes (`Overheads.handoff_s`) lies
    between its last byte and the sequence's joining the batch.
    """

    def __init__(
        self,
        number: int,
        worker_id: str,
        pool: Pool,
        layout: KVLayout,
        chains: Chains,
        agenda: Agenda,
        to_coordinator: ToCoordinator,
        machine: Machine | None,
    ) -> None:
        self.number = number
        self.worker_id = worker_id
        self.incarnation = f"{worker_id}-life"
        self.pool = pool
        self.core = _core(pool, layout, chains, self.incarnation)
        self.nic = Nic()
        self.peers: Mapping[str, SimulatedWorker] = {}
        self.busy_s = 0.0
        self.num_steps = 0
        self._layout = layout
        self._times = pool.times
        overheads = pool.times.overheads
        self.control_s = overheads.control_s
        self.late_s = max(0.0, overheads.output_s - overheads.control_s)
        """From the coordinator's hearing of its tokens until clients have them."""
        self._handoff_s = overheads.handoff_s
        self._wake_s, self._busy_wake_s = overheads.wake_s, overheads.busy_wake_s
        self._delivery_s, self._delivery_token_s = overheads.delivery_s, overheads.delivery_token_s
        self._agenda = agenda
        self._to_coordinator = to_coordinator
        self._machine = machine
        if machine is not None:
            machine.employ(self)
        # A step of one that generates is about as long as its neighbours': `step_s` counts what these deliver.
        self._is_delayed = machine is not None and pool.role is Role.PREFILL
        self._generates = _generates(self.core)
        self._rank = LATER
        self._is_stepping = False
        self._plan: StepPlan | None = None
        self._ahead: PlanAhead | None = None
        self._shape = StepShape()
        self._began_at = 0.0
        self._ended_at = -1.0
        self._num_tokens = self._num_last_tokens = 0
        """Of all steps that have ended, and of the last one."""
        self._has_slept = False
        self._version = 0
        self._moved_at = 0.0
        self._whole_s = 0.0
        self._share_done = 0.0
        self._delivered = Delivered(0, 0)
        """What others have, as far as it has delayed the step that runs."""
        self._delayed_until = self._delay_left_s = 0.0
        self._pushed: dict[int, _Pushed] = {}
        self._carry_out: dict[type[Any], Callable[[Any], None]] = {
            SendCoordinator: self._send_coordinator,
            SendPeer: self._send_peer,
            Push: self._push,
            FinishPush: self._finish_push,
            StopPush: self._stop_push,
            PostReceive: _ignore,
            CancelReceive: self._cancel_receive,
            Verify: self._verify,
        }

    # ── the core ────────────────────────────────────────────────────────────────────────────────────────────

    def time_steps(self, max_model_len: int) -> None:
        """A hybrid's core learns how long some steps take, as at the start of a server's."""
        pool, block_size = self.pool, self._layout.block_size
        sizes = sizes_that_fit(pool.num_blocks, block_size, max_model_len, pool.scheduler.max_num_seqs)
        for num_sequences, num_tokens, context in sizes:
            shape = of_chunk(num_tokens) if num_tokens else of_sequences([context] * num_sequences)
            self.core.handle(StepTimed(num_sequences, num_tokens, self._times.step_s(shape)), 0.0)

    def take(self, event: Event) -> None:
        """The core hears of `event` now."""
        self._do(self.core.handle(event, self._agenda.now))
        self._go_on_working()

    def from_coordinator(self, message: Message) -> None:
        """A message has come."""
        self.take(FromCoordinator(message))

    def disband(self) -> None:
        """Gives up all that it has: workers refer to each other in circles. It is worth nothing afterwards."""
        vars(self).clear()

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._carry_out[type(command)](command)

    def _soon(self, event: Event, when: float) -> None:
        self._agenda.at(when, LATER, self.take, event)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def _go_on_working(self) -> None:
        """Begins a step if none runs, and plans the next one."""
        if not self._is_stepping:
            if (plan := self.core.next_step(self._agenda.now)) is not None:
                self._begin(plan)
            self._do(self.core.flush())
        if self._is_stepping:
            self._ahead = self.core.plan_ahead()

    def _begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._start(self._shape_of(plan.batch.slices))

    def _start(self, shape: StepShape) -> None:
        """A step of that shape begins now."""
        self._is_stepping = True
        self._shape = shape
        self._began_at = self._moved_at = self._agenda.now
        self._has_slept = self._began_at > self._ended_at
        self._share_done = self._whole_s = self._delayed_until = 0.0
        if self._machine is None:
            self.go_on(0)
            return
        if self._is_delayed:
            self._delivered = self._machine.delivered_beside(self, self._began_at)
        self._machine.begin(self)

    def go_on(self, num_busy: int) -> None:
        """From now on the step takes its course beside `num_busy` others (`Machine`)."""
        self._version += 1
        self._agenda.at(self._end_beside(num_busy), self.number, self._end_step, self._version)

    def _end_beside(self, num_busy: int) -> float:
        """When the step that runs ends, if so many others compute from now on."""
        now = self._agenda.now
        if self._delayed_until:
            return self._delayed_until  # it has computed all
        if self._whole_s:
            self._share_done += (now - self._moved_at) / self._whole_s
        self._moved_at = now
        self._whole_s = self._step_s(num_busy)
        return now + max(0.0, 1.0 - self._share_done) * self._whole_s

    def _step_s(self, num_busy: int) -> float:
        """Of the step that runs, beside so many others, from its beginning to its end."""
        seconds = self._times.step_s(self._shape, num_busy)
        return seconds + self._wake_s + num_busy * self._busy_wake_s if self._has_slept else seconds

    def _end_step(self, version: int) -> None:
        if version != self._version:
            return  # it has become longer or shorter since
        if self._is_delayed and (delay_s := self._delay_s()):
            self._delayed_until = self._agenda.now + delay_s
            self._agenda.at(self._delayed_until, self.number, self._end_step, version)
            return
        self._ended_at = self._agenda.now
        seconds = self._ended_at - self._began_at
        self.busy_s += seconds
        self._count_ended(1, self._shape.num_sequences + self._shape.num_chunks)
        self._is_stepping = False
        self._rank = STEP_MESSAGES + self.number
        self._step_ended(seconds)
        self._rank = LATER
        if self._machine is not None and not self._is_stepping:
            self._machine.rest(self)

    def _count_ended(self, num_steps: int, num_tokens_each: int) -> None:
        self.num_steps += num_steps
        self._num_tokens += num_steps * num_tokens_each
        self._num_last_tokens = num_tokens_each

    def delivered_before(self, now: float) -> Delivered:
        """See `Computing`."""
        if self._ended_at < now:
            return Delivered(self.num_steps, self._num_tokens)
        return Delivered(self.num_steps - 1, self._num_tokens - self._num_last_tokens)

    def _delay_s(self) -> float:
        """By which what others have delivered since it was asked last delays the step that runs; all in all by no more
        than its computing took, as of two that want a core each gets half."""
        assert self._machine is not None
        now = self._agenda.now
        if not self._delayed_until:
            self._delay_left_s = now - self._began_at
        before, self._delivered = self._delivered, self._machine.delivered_beside(self, now)
        num_steps = self._delivered.num_steps - before.num_steps
        num_tokens = self._delivered.num_tokens - before.num_tokens
        wanted_s = num_steps * self._delivery_s + num_tokens * self._delivery_token_s
        delay_s = min(wanted_s, self._delay_left_s)
        self._delay_left_s -= delay_s
        return delay_s

    def _step_ended(self, seconds: float) -> None:
        """What was planned ahead begins, and the core hears of both."""
        plan, ahead = self._plan, self._ahead
        if plan is None:
            raise InvariantViolation(f"a step of {self.worker_id} ended that was not begun")
        output = StepOutput({s.key: TOKEN_ID for s in plan.batch.slices if s.sampling is not None}, seconds)
        following = ahead.resolve(plan, output) if ahead is not None else None
        for push in plan.pushes:
            first_layer_at = self._began_at + seconds / self._layout.num_layers
            self._send_blocks(push, first_layer_at, self._layout.num_layers)
        self._plan = self._ahead = None
        if following is not None:
            self._begin(following)
        self.take(StepDone(plan, output, following))

    def _shape_of(self, slices: Sequence[SequenceSlice]) -> StepShape:
        num_sequences = context = num_chunks = tokens = pairs = prompt_context = 0
        generates = self._generates
        for piece in slices:
            start = piece.start
            if generates is None or generates(piece.key):
                num_sequences += 1
                context += start + 1
            else:
                num_new = len(piece.token_ids)
                num_chunks += 1
                tokens += num_new
                pairs += num_new * start + num_new * (num_new + 1) // 2
                prompt_context += start + num_new
        return StepShape(num_sequences, context, num_chunks, tokens, pairs, prompt_context)

    # ── messages and transfers ──────────────────────────────────────────────────────────────────────────────

    def _send_coordinator(self, command: SendCoordinator) -> None:
        self._to_coordinator(self, command.message, self._rank)

    def _send_peer(self, command: SendPeer) -> None:
        event = FromPeer(self.worker_id, self.incarnation, command.message)
        self.peers[command.worker_id]._soon(event, self._agenda.now + self.control_s)

    def _push(self, command: Push) -> None:
        self._send_blocks(command.push, self._agenda.now, 1)

    def _send_blocks(self, push: BlockPush, ready_at: float, num_parts: int) -> None:
        """Blocks of which the first of `num_parts` equal parts is ready at `ready_at`, and the last one now."""
        num_bytes = len(push.source_blocks) * self._layout.block_bytes
        to = self.peers[push.worker_id]
        seconds = self._times.transfer_s(num_bytes)
        theirs_s = seconds if to._times is self._times else to._times.transfer_s(num_bytes)
        last_s = seconds if num_parts == 1 else self._times.transfer_s(num_bytes // num_parts)
        sent = self._pushed.get(push.fence)
        if sent is None:
            sent = self._pushed[push.fence] = _Pushed()
        sent.arrives_at = max(
            sent.arrives_at,
            self.nic.take(ready_at, seconds),
            to.nic.take(ready_at, theirs_s),
            self._agenda.now + last_s,
        )
        sent.num_bytes += num_bytes
        sent.seconds += max(seconds, theirs_s)

    def _finish_push(self, command: FinishPush) -> None:
        sent = self._pushed.pop(command.fence)
        digests = (0,) * len(command.source_blocks)
        done = PushFinished(command.fence, digests, sent.num_bytes, sent.seconds)
        self._soon(done, max(self._agenda.now, sent.arrives_at))

    def _stop_push(self, command: StopPush) -> None:
        self._pushed.pop(command.fence, None)
        self._soon(PushStopped(command.fence), self._agenda.now)

    def _cancel_receive(self, command: CancelReceive) -> None:
        self._soon(ReceiveCancelled(command.fence), self._agenda.now)

    def _verify(self, command: Verify) -> None:
        self._soon(Verified(command.manifest.fence, self._handoff_s), self._agenda.now + self._handoff_s)


class _Pushed:
    """What has gone under one fence, when its last byte arrives, and how long it would take alone."""

    __slots__ = ("arrives_at", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.arrives_at = 0.0
        self.num_bytes = 0
        self.seconds = 0.0


def _ignore(_command: PostReceive) -> None:
    """Nothing has to be made ready for bytes that are not there."""


def _core(pool: Pool, layout: KVLayout, chains: Chains, incarnation: str) -> RoleCore:
    num_blocks, config = pool.num_blocks, pool.scheduler
    match pool.role:
        case Role.PREFILL if config.hybrid:
            return HybridPrefillCore(num_blocks, layout, FINGERPRINT, config, chains=chains)
        case Role.DECODE if config.hybrid:
            return HybridDecodeCore(num_blocks, layout, FINGERPRINT, config, incarnation, chains=chains)
        case Role.PREFILL:
            return PrefillCore(num_blocks, layout, FINGERPRINT, config, chains=chains)
        case Role.DECODE:
            return DecodeCore(num_blocks, layout, FINGERPRINT, config, incarnation, chains=chains)
        case Role.COLOCATED:
            return ColocatedCore(num_blocks, layout, config, chains=chains)


def _generates(core: RoleCore) -> Callable[[RequestKey], bool] | None:
    """Tells sequences that generate from prompts that are computed; None if all slices of a core's steps are
    sequences."""
    match core:
        case DecodeCore():
            return None
        case ColocatedCore():
            return core.generates
        case HybridPrefillCore():
            return core.guest.generates
        case HybridDecodeCore():
            return core.role.__contains__
    return lambda _: False
