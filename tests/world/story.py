"""What happened in a run, told line by line."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from twinpool.coordinator.events import Arrived, Emit, FromWorker, Send
from twinpool.messages import Heartbeat, Message
from twinpool.request import Job
from twinpool.worker.core import FromCoordinator, FromPeer, SendCoordinator, SendPeer, StepDone, StepPlan

LAST_LINES = 120
MAX_OWN_LINES = 80


class Broken(AssertionError):
    """A promise that a run did not keep: `promise` names it, the message says how."""

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")
        self.promise = promise


class Story:
    """The lines of one run, if `is_told`; else it only counts. A run is exact, so it can be run again to be told."""

    def __init__(self, is_told: bool = False) -> None:
        self.is_told = is_told
        self.lines: list[str] = []
        self.num_events = 0

    def tell(self, now: float, who: str, what: object) -> None:
        """`what` happened to `who`."""
        self.num_events += 1
        if self.is_told:
            self.lines.append(f"{now:9.4f} {who:<14} {brief(what)}")

    @property
    def digest(self) -> str:
        """The same for equal stories only."""
        return blake2b("\n".join(self.lines).encode(), digest_size=16).hexdigest()

    def ending(self, request_id: str | None = None) -> Iterator[str]:
        """The last lines, after those about one request that are not among them."""
        last = self.lines[-LAST_LINES:]
        own = [line for line in self.lines[: -len(last)] if request_id and f"{request_id} " in f"{line} "]
        yield from own[-MAX_OWN_LINES:]
        if own:
            yield "… then, among all others:"
        yield from last


def brief(what: object) -> str:
    """An event or a command in one line, without what is always the same."""
    match what:
        case str():
            return what
        case FromWorker(worker_id, incarnation, message) | FromPeer(worker_id, incarnation, message):
            return f"◄ {worker_id}/{incarnation}: {brief(message)}"
        case FromCoordinator(message):
            return f"◄ coordinator: {brief(message)}"
        case Send(worker_id, incarnation, message) | SendPeer(worker_id, incarnation, message):
            return f"► {worker_id}/{incarnation}: {brief(message)}"
        case SendCoordinator(message):
            return f"► coordinator: {brief(message)}"
        case Arrived(submission):
            sampling = submission.sampling
            return f"Arrived {submission.request_id} prompt {submission.prompt_token_ids} {_fields(sampling)}"
        case Emit(request_id, output):
            return f"Emit {request_id} {output}"
        case StepDone(plan, output, following):
            then = f"; then {brief(following)}" if following else ""
            return f"StepDone {brief(plan)} = {list(output.token_ids.values())}{then}"
        case StepPlan(batch, pushes):
            slices = " ".join(
                f"{_key(s.key)}[{s.start}:{s.end}]@{tuple(s.block_table)}" for s in batch.slices
            )
            return f"step {slices} {list(pushes) or ''}"
        case Heartbeat(stats):
            names = ("free", "owned", "cached", "quarantined", "leased")
            counts = " ".join(f"{name} {getattr(stats, f'{name}_blocks')}" for name in names)
            return f"Heartbeat {counts} waiting {stats.waiting} running {stats.running}"
        case Job():
            return f"{_key(what.key)} of {len(what.token_ids)} tokens, {what.num_emitted} emitted"
        case Message():
            fields = msgspec.structs.asdict(what)
            return f"{type(what).__name__} " + " ".join(f"{name}={_value(v)}" for name, v in fields.items())
        case _:
            return repr(what)


def _key(key: tuple[str, int]) -> str:
    return f"{key[0]} #{key[1]}"


def _value(value: object) -> str:
    match value:
        case Job():
            return f"<{brief(value)}>"
        case (str(name), int(attempt)):
            return f"{name} #{attempt}"
        case _:
            return repr(value)


def _fields(sampling: object) -> str:
    return repr(sampling).removeprefix("SamplingParams")
