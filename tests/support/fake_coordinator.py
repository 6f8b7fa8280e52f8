"""A coordinator reduced to its protocol: starts requests, forwards grants, resumes what was lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from twinpool.messages import (
    Cancel,
    Dropped,
    Generate,
    Granted,
    HandoffReport,
    Message,
    Prefill,
    PrefillReport,
    PushTo,
    Reserve,
    StepTokens,
    Token,
)
from twinpool.request import FinishReason, Job, RequestKey

MAX_ATTEMPTS = 200

Identity = tuple[str, str]
"""A worker's id and incarnation."""


@dataclass(slots=True)
class Client:
    """One request as its client sees it. `legs` are the workers that still hold something of an attempt."""

    job: Job
    attempt: int = 0
    output: list[int] = field(default_factory=list)
    early: dict[int, Token] = field(default_factory=dict)
    finish: FinishReason | None = None
    refusal: str = ""
    pair: tuple[Identity, ...] = ()
    reports: list[PrefillReport | HandoffReport] = field(default_factory=list)
    drops: list[Dropped] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self.finish is not None or bool(self.refusal)

    @property
    def key(self) -> RequestKey:
        """The present attempt."""
        return RequestKey(self.job.request_id, self.attempt)


class FakeCoordinator:
    """Sends through `send(worker, message)`; `choose()` names the workers of an attempt: one, or prefill and
    decode, or none for now. At most `max_in_flight` requests are with the workers at a time; others wait in order."""

    def __init__(
        self,
        send: Callable[[Identity, Message], None],
        choose: Callable[[], tuple[Identity, ...]],
        max_in_flight: int,
    ) -> None:
        self._send = send
        self._choose = choose
        self._max_in_flight = max_in_flight
        self._backlog: deque[Client] = deque()
        self.clients: dict[str, Client] = {}
        self.open_legs: set[tuple[Identity, RequestKey]] = set()

    def submit(self, job: Job) -> Client:
        """Takes the job on."""
        client = self.clients[job.request_id] = Client(job)
        self._backlog.append(client)
        self.start_waiting()
        return client

    def cancel(self, client: Client) -> None:
        """The client leaves."""
        if not client.has_ended:
            self._end(client, FinishReason.CANCELLED)

    def worker_gone(self, worker: Identity) -> None:
        """A worker is lost, with all it held; what it did is started again."""
        lost = sorted(key for at, key in self.open_legs if at == worker)
        self.open_legs = {leg for leg in self.open_legs if leg[0] != worker}
        for key in lost:
            if client := self._current(key):
                self._resume(client)
        self.start_waiting()

    def receive(self, worker: Identity, message: Message) -> None:
        """A worker's message."""
        match message:
            case StepTokens(tokens):
                for token in tokens:
                    self._take(worker, token)
            case Granted() if client := self._current(message.key):
                grant = (message.fence, message.block_ids, message.num_cached_blocks)
                self._send(client.pair[0], PushTo(message.key, *worker, *grant))
            case PrefillReport(key) | HandoffReport(key) if client := self._current(key):
                client.reports.append(message)
                if isinstance(message, HandoffReport):
                    self.open_legs.discard((client.pair[0], key))
            case Dropped():
                self._dropped(worker, message)
        self.start_waiting()

    def _resume(self, client: Client) -> None:
        self._cancel_legs(client)
        client.attempt += 1
        assert client.attempt < MAX_ATTEMPTS, client
        client.early.clear()
        self._backlog.appendleft(client)

    def start_waiting(self) -> None:
        """Starts those that wait, as far as the bound and the links between workers allow."""
        while self._backlog and len({key for _, key in self.open_legs}) < self._max_in_flight:
            if not (pair := self._choose()):
                return
            client = self._backlog.popleft()
            if not client.has_ended:
                self._start(client, pair)

    def _start(self, client: Client, pair: tuple[Identity, ...]) -> None:
        client.pair = pair
        job = replace(
            client.job,
            attempt=client.attempt,
            token_ids=(*client.job.token_ids, *client.output),
            num_emitted=len(client.output),
        )
        self.open_legs |= {(worker, job.key) for worker in pair}
        if len(pair) == 1:
            self._send(pair[0], Generate(job))
            return
        prefill, decode = pair
        self._send(prefill, Prefill(job, decode[0]))
        if job.num_emitted + 1 < job.sampling.max_tokens:
            self._send(decode, Reserve(job, *prefill))
        else:
            self.open_legs.discard((decode, job.key))

    def _end(self, client: Client, finish: FinishReason) -> None:
        client.finish = finish
        self._cancel_legs(client)

    def _cancel_legs(self, client: Client) -> None:
        for worker, key in sorted(self.open_legs):
            if key == client.key:
                self._send(worker, Cancel(key))

    def _current(self, key: RequestKey) -> Client | None:
        client = self.clients[key.request_id]
        return None if client.has_ended or client.key != key else client

    def _take(self, worker: Identity, token: Token) -> None:
        if token.finish:
            self.open_legs.discard((worker, token.key))
        if (client := self._current(token.key)) is None:
            return
        assert token.index >= len(client.output), f"came twice: {token}"
        assert token.index not in client.early, f"came twice: {token}"
        client.early[token.index] = token
        while (due := client.early.pop(len(client.output), None)) is not None:
            client.output.append(due.token_id)
            if due.finish:
                assert not client.early, f"tokens after the last: {client}"
                self._end(client, due.finish)
                return

    def _dropped(self, worker: Identity, dropped: Dropped) -> None:
        self.open_legs.discard((worker, dropped.key))
        self.clients[dropped.key.request_id].drops.append(dropped)
        client = self._current(dropped.key)
        if client is None:
            return
        if dropped.reason == "refused":
            client.refusal = dropped.detail
            self._cancel_legs(client)
        else:
            assert dropped.reason != "cancelled", f"cancelled without having been asked: {dropped}"
            self._resume(client)
