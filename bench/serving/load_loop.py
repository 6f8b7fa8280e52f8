"""The event loop of one sender: sends each request at its time, whatever the server does, and follows the streams.

Nothing here waits for a server. A request is bytes that were made before the load began; sending one on a connection
that is open and idle is a single write. Connections are kept alive and used again, as the clients of API back ends do;
each request that finds none idle opens one. A connection that turns out to have been closed while it was idle is
replaced, once for each request.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from twinpool.bench.http1 import Address, Connection, connect
from twinpool.bench.serving.alarm import Alarm
from twinpool.bench.serving.answer import StreamedAnswer
from twinpool.bench.serving.bodies import body
from twinpool.bench.serving.record import NO_CONNECTION, Ending
from twinpool.bench.serving.sender_messages import Plan, Tick
from twinpool.bench.serving.settings import LoadSettings
from twinpool.bench.serving.workload import PlannedRequest

TICK_S = 0.5
HEARTBEAT_S = 0.005
STALL_S = 0.005
"""The loop was late by more than this: a stall."""
KEPT_STALLS = 20
_REFUSED_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


@dataclass(slots=True, eq=False)
class Ask:
    """One request on its way. Times are the monotonic clock's; `is_cut` is how the client ended it, if it did."""

    planned: PlannedRequest
    request_id: str
    data: bytes
    intended_at: float = 0.0
    sent_at: float | None = None
    ended_at: float | None = None
    answer: StreamedAnswer | None = None
    connection: Connection | None = None
    opening: asyncio.Task[None] | None = None
    limit: asyncio.TimerHandle | None = None
    is_cut: Ending | None = None
    error: str = ""
    was_renewed: bool = False
    ending: Ending = Ending.CANCELLED


class LoadLoop:
    """Sends a plan's requests. All methods are called on one event loop."""

    def __init__(self, plan: Plan, request_id_prefix: str, on_tick: Callable[[Tick], None]) -> None:
        """Raises ConfigError if a prompt does not fit the endpoint."""
        settings = plan.settings
        self.asks = made_ready(plan.requests, settings, request_id_prefix)
        self.send_lags_s: list[float] = []
        self.stalls_s: list[float] = []
        self.stalled_s = 0.0
        self.cpu_s = 0.0
        self._plan = plan
        self._on_tick = on_tick
        self._address = Address.parse("--base-url", settings.base_url)
        self._tls = self._address.tls_context(is_verified=settings.verify_tls)
        self._idle: list[Connection] = []
        self._waiting: deque[Ask] = deque()
        self._running: set[Ask] = set()
        self._next = 0
        self._num_sent = 0
        self._is_stopped = False
        self._endings: Counter[str] = Counter()
        self._ttfts_s: list[float] = []
        self._tpots_s: list[float] = []
        self._num_pieces = 0

    async def run(self, begins_at: float) -> None:
        """Returns when the last request has ended, or after `stop`."""
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        self._alarm = Alarm(self._due)
        await self._look_up()
        self._begins_at = begins_at
        await asyncio.sleep(max(0.0, begins_at - time.monotonic() - 0.01))
        cpu_before_s = time.process_time()
        heartbeat = asyncio.create_task(self._watch_itself())
        ticking = asyncio.create_task(self._tick())
        if self._plan.num_clients is None:
            for ask in self.asks:
                ask.intended_at = begins_at + (ask.planned.at_s or 0.0)
        self._alarm.set(begins_at)
        try:
            self._look_whether_over()
            await self._over
        finally:
            self._alarm.close()
            heartbeat.cancel()
            ticking.cancel()
            for connection in self._idle:
                connection.abort()
        self.cpu_s = time.process_time() - cpu_before_s
        self._on_tick(self._ticked())

    def stop(self) -> None:
        """Sends nothing more and leaves what runs. Those whose time has come but were not sent count as cancelled."""
        self._is_stopped = True
        now = time.monotonic()
        for ask in self._waiting:
            ask.error = "not sent: the run was stopped"
            ask.ended_at = now
        self._waiting.clear()
        for ask in list(self._running):
            self._cut(ask, Ending.CANCELLED, "the run was stopped")
        self._look_whether_over()

    @property
    def duration_s(self) -> float:
        """From the beginning to the end of the last request."""
        return max((ask.ended_at - self._begins_at for ask in self.asks if ask.ended_at), default=0.0)

    async def _look_up(self) -> None:
        """Finds the server's address once, with a connection that the first request will use."""
        try:
            connection = await connect(self._address, self._tls)
        except (OSError, TimeoutError):
            return  # each request will find out by itself
        if (found := connection.peer()) is not None and not self._address.is_tls:
            host, port = found
            self._address = replace(self._address, host=host, port=port)
        self._idle.append(connection)

    def _due(self) -> None:
        """The alarm rings: sends what is due. One at a time, so that other events are not kept waiting."""
        if self._is_stopped:
            return
        if self._plan.num_clients is not None:
            for _ in range(min(self._plan.num_clients, len(self.asks))):
                self._ask_again()
            return
        now = time.monotonic()
        if self._next < len(self.asks) and self.asks[self._next].intended_at <= now:
            ask = self.asks[self._next]
            self._next += 1
            limit = self._plan.max_concurrency
            if limit is not None and len(self._running) >= limit:
                self._waiting.append(ask)
            else:
                self._start(ask, ask.intended_at)
            if self._next < len(self.asks) and self.asks[self._next].intended_at <= now:
                asyncio.get_running_loop().call_soon(self._due)
                return
        if self._next < len(self.asks):
            self._alarm.set(self.asks[self._next].intended_at)

    def _ask_again(self) -> None:
        """A closed loop's client asks the next question, if there is one."""
        if self._next < len(self.asks) and not self._is_stopped:
            ask = self.asks[self._next]
            self._next += 1
            ask.intended_at = time.monotonic()
            self._start(ask, None)

    def _start(self, ask: Ask, due_at: float | None) -> None:
        if due_at is not None:
            self.send_lags_s.append(time.monotonic() - due_at)
        self._running.add(ask)
        self._num_sent += 1
        ask.limit = asyncio.get_running_loop().call_later(
            self._plan.settings.limit_s, self._cut, ask, Ending.TIMED_OUT, "the client's limit passed"
        )
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                self._send(ask, connection)
                return
        ask.opening = asyncio.create_task(self._open_and_send(ask))

    def _send(self, ask: Ask, connection: Connection) -> None:
        ask.connection = connection
        answer = _LoadAnswer(ask, self._answered)
        ask.answer = answer
        ask.sent_at = time.monotonic()
        connection.ask(ask.data, answer)

    async def _open_and_send(self, ask: Ask) -> None:
        try:
            connection = await connect(self._address, self._tls)
        except (OSError, TimeoutError) as exc:
            ask.error = f"{NO_CONNECTION}: {exc or 'not in time'}"
            ask.is_cut = ask.is_cut or Ending.FAILED
            self._ended(ask)
        else:
            if ask.is_cut is None:
                self._send(ask, connection)
            else:  # its limit passed at the very moment
                connection.abort()

    def _cut(self, ask: Ask, ending: Ending, why: str) -> None:
        ask.is_cut, ask.error = ending, why
        if ask.connection is not None:
            ask.connection.abort()  # which ends it
        else:
            if ask.opening is not None:
                ask.opening.cancel()
            self._ended(ask)

    def _answered(self, ask: Ask) -> None:
        """Its answer is over, whole or not."""
        answer, connection = ask.answer, ask.connection
        assert answer is not None, "it was sent"
        assert connection is not None, "it was sent"
        if connection.was_stale and ask.is_cut is None and not ask.was_renewed:
            ask.was_renewed, ask.connection = True, None
            ask.opening = asyncio.create_task(self._open_and_send(ask))
            return
        if connection.is_open:
            self._idle.append(connection)
        self._ended(ask)

    def _ended(self, ask: Ask) -> None:
        if ask not in self._running:
            return
        self._running.discard(ask)
        if ask.limit is not None:
            ask.limit.cancel()
        now = ask.ended_at = time.monotonic()
        ask.ending = self._judged(ask)
        self._endings[ask.ending] += 1
        self._note_latencies(ask)
        if self._plan.num_clients is not None:
            self._client_goes_on(ask)
        elif self._waiting and not self._is_stopped:
            waiting = self._waiting.popleft()
            self._start(waiting, max(now, waiting.intended_at))
        self._look_whether_over()

    @staticmethod
    def _judged(ask: Ask) -> Ending:
        if ask.is_cut is not None:
            return ask.is_cut
        assert ask.answer is not None, "what was not cut was answered"
        ending, ask.error = ask.answer.ending()
        return ending

    def _client_goes_on(self, ask: Ask) -> None:
        """At once, or after a pause if nothing was to be had: a closed loop must not hammer a server that refuses."""
        if ask.ending is not Ending.REJECTED and ask.sent_at is not None:
            self._ask_again()
            return
        wanted_s = None if ask.answer is None else ask.answer.retry_after_s
        pause_s = min(wanted_s or _REFUSED_PAUSE_S, _LONGEST_PAUSE_S)
        asyncio.get_running_loop().call_later(pause_s, self._pause_is_over)

    def _pause_is_over(self) -> None:
        self._ask_again()
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        is_all_sent = self._is_stopped or self._next == len(self.asks)
        if is_all_sent and not self._running and not self._waiting and not self._over.done():
            self._over.set_result(None)

    def _note_latencies(self, ask: Ask) -> None:
        answer = ask.answer
        if answer is None or not answer.times or ask.sent_at is None:
            return
        times = answer.times
        self._num_pieces += len(times)
        self._ttfts_s.append(times[0] - ask.sent_at)
        if len(times) > 1:
            num_tokens = len(answer.token_ids) or len(times)
            self._tpots_s.append((times[-1] - times[0]) / max(1, num_tokens - 1))

    async def _watch_itself(self) -> None:
        """Notes when this loop was late: then it saw and sent late too."""
        longest: list[float] = []
        self.stalls_s = longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            late_s = time.monotonic() - before - HEARTBEAT_S
            if late_s > STALL_S:
                self.stalled_s += late_s
            if len(longest) < KEPT_STALLS:
                heapq.heappush(longest, late_s)
            else:
                heapq.heappushpop(longest, late_s)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._on_tick(self._ticked())

    def _ticked(self) -> Tick:
        tick = Tick(
            num_sent=self._num_sent,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pieces=self._num_pieces
            + sum(len(a.answer.times) for a in self._running if a.answer is not None),
            endings=dict(self._endings),
            ttfts_s=tuple(self._ttfts_s),
            tpots_s=tuple(self._tpots_s),
        )
        self._ttfts_s.clear()
        self._tpots_s.clear()
        return tick


class _LoadAnswer(StreamedAnswer):
    """Says when it is over."""

    def __init__(self, ask: Ask, on_over: Callable[[Ask], None]) -> None:
        super().__init__()
        self._ask = ask
        self._on_over = on_over

    def over(self) -> None:
        self._on_over(self._ask)


def made_ready(requests: Sequence[PlannedRequest], settings: LoadSettings, id_prefix: str) -> list[Ask]:
    """The requests as bytes. Raises ConfigError if a prompt does not fit the endpoint."""
    address = Address.parse("--base-url", settings.base_url)
    headers = ["Content-Type: application/json", "Accept: text/event-stream", *settings.headers]
    if settings.api_key is not None:
        headers.append(f"Authorization: Bearer {settings.api_key}")
    asks: list[Ask] = []
    for planned in requests:
        request_id = f"{id_prefix}-{planned.index}"
        lines = [*headers, f"X-Request-Id: {request_id}"]
        data = address.request("POST", settings.request_path, lines, body(planned, settings))
        asks.append(Ask(planned, request_id, data))
    return asks
