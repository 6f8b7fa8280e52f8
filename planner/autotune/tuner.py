"""The shell of live tuning: it hears of the server's requests, feeds the core, and carries out what that says."""

from __future__ import annotations

import asyncio
import logging
import traceback
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinpool.bench.serving.distributions import percentile
from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.coordinator.pool_desk import WAIT_S
from twinpool.coordinator.pool_status import WorkerState
from twinpool.coordinator.request_record import EndedRequest
from twinpool.coordinator.service import Submission
from twinpool.coordinator.tuning import TunedServer
from twinpool.errors import QueueFull, RequestError
from twinpool.metrics import TunerMetric
from twinpool.planner.autotune import words
from twinpool.planner.autotune.asking import ask
from twinpool.planner.autotune.core import AutotuneCore
from twinpool.planner.autotune.questions import Answer, LiveQuestion
from twinpool.planner.autotune.regret_log import RegretLog
from twinpool.planner.autotune.settings import AutotuneSettings
from twinpool.planner.autotune.words import Event, Pools, Sizes, Split
from twinpool.planner.profile.fitted_times import doubts
from twinpool.planner.profile.saved import Profile
from twinpool.request import RequestState

TICK_S = 1.0
LEAST_PREDICTION_S = 60.0
MOST_GAPS = 8192
"""Of one answer, that are kept for its p99: the first."""
MOST_RUNNING = 16_384
BY_LOAD = frozenset({QueueFull.code, "deadline_unmeetable", "no_worker"})
"""Codes of refusals that better pools would have spared the client."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """When a request's first and latest output came, and the gaps between its tokens."""

    first_at: float = 0.0
    last_at: float = 0.0
    gaps_s: array[float] = field(default_factory=lambda: array("f"))


class PoolTuner:
    """A `coordinator.tuning.Tuner`. `profile` says how long workers take, whose KV travels by `transport` (None: as the
    profile has it first); `scheduler` and `config` are the server's. It takes `regret_log` over."""

    def __init__(
        self,
        settings: AutotuneSettings,
        profile: Profile,
        transport: str | None,
        scheduler: SchedulerConfig,
        config: CoordinatorConfig,
        regret_log: RegretLog | None,
    ) -> None:
        self._settings = settings
        self._profile = profile
        self._transport = transport
        self._scheduler = scheduler
        self._config = config
        self._log = regret_log
        self._core: AutotuneCore | None = None
        self._server: TunedServer | None = None
        self._running: dict[str, _Progress] = {}
        self._predicting: asyncio.Task[None] | None = None
        self._why_ended = ""
        self._is_tuning = False

    # ── what the coordinator tells ──────────────────────────────────────────────────────────────────────────

    def arrived(self, submission: Submission, prefix: Sequence[int], now: float) -> None:
        """As `Tuner.arrived`."""
        if not self._is_tuning:
            return
        with self._until_a_bug():
            if len(self._running) < MOST_RUNNING:
                self._running[submission.request_id] = _Progress()
            num_tokens = len(submission.prompt_token_ids)
            self._feed(words.Arrived(submission.request_id, num_tokens, tuple(prefix)), now)

    def emitted(self, request_id: str, num_tokens: int, now: float) -> None:
        """As `Tuner.emitted`."""
        if (progress := self._running.get(request_id)) is None:
            return
        gaps = progress.gaps_s
        if not progress.first_at:
            progress.first_at = now
        elif len(gaps) < MOST_GAPS:
            gaps.append(now - progress.last_at)
        if num_tokens > 1 and len(gaps) < MOST_GAPS:
            gaps.extend([0.0] * (num_tokens - 1))
        progress.last_at = now

    def ended(self, ended: EndedRequest, now: float) -> None:
        """As `Tuner.ended`."""
        progress = self._running.pop(ended.request_id, None)
        if self._is_tuning:
            with self._until_a_bug():
                self._feed(event_of(ended, progress), now)

    # ── what it tells ───────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> Mapping[str, Any]:
        """As `Tuner.status`."""
        core, server, mode = self._core, self._server, self._settings.mode.value
        if not self._why_ended:
            if core is None or server is None:
                return {"mode": mode, "why_nothing": "it has not begun"}
            with self._until_a_bug():
                return core.status(server.now())
        told = f"it has ended by a bug in Twinpool ({self._why_ended}; the server's log has more); serving goes on"
        return {"mode": mode, "ended": self._why_ended, "why_nothing": told}

    def counts(self) -> Mapping[TunerMetric, float]:
        """As `Tuner.counts`."""
        core = self._core
        return {
            TunerMetric.RECOMMENDATIONS: 0 if core is None else core.num_recommendations,
            TunerMetric.MEASURED: 0 if core is None else core.num_measured,
            TunerMetric.CHANGES: 0 if core is None else core.num_changes,
            TunerMetric.UNPREDICTED: 0 if core is None else core.num_unpredicted,
            TunerMetric.NOT_LOGGED: 0 if self._log is None else self._log.num_lost,
        }

    def median_errors(self) -> Mapping[str, float]:
        """As `Tuner.median_errors`."""
        return {} if self._core is None else self._core.medians()

    @property
    def why_ended(self) -> str:
        """As `Tuner.why_ended`: the exception and its place, without words that may be a client's."""
        return self._why_ended

    # ── tuning ──────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, server: TunedServer) -> None:
        """As `Tuner.run`."""
        self._server = server
        try:
            with self._until_a_bug():
                self._core = AutotuneCore(self._settings, server.now())
                self._is_tuning = True
                log.info("autotune: %s, for %s", self._settings.mode, self._settings.slo)
                for doubt in doubts(self._profile):
                    log.warning("autotune: %s", doubt)
                while self._is_tuning:
                    await asyncio.sleep(TICK_S)
                    self._feed(words.Tick(pools_of(server.pool_desk.pools())), server.now())
        finally:
            self._is_tuning = False
            if self._predicting is not None:
                self._predicting.cancel()
                await asyncio.wait({self._predicting})
            if self._log is not None:
                # Streams that still run must not wait for a disk that hangs.
                await asyncio.to_thread(self._log.close)

    @contextmanager
    def _until_a_bug(self) -> Iterator[None]:
        """What is raised within ends the tuning, and nothing else."""
        try:
            yield
        except Exception as exc:
            place = traceback.extract_tb(exc.__traceback__)[-1]
            self._is_tuning = False
            self._why_ended = f"{type(exc).__name__} at {Path(place.filename).name}:{place.lineno}"
            log.exception("a bug in Twinpool: the pools are not tuned any more; serving goes on")

    def _feed(self, event: Event, now: float) -> None:
        server = self._server
        if self._core is None or server is None or not self._is_tuning:
            return
        for command in self._core.handle(event, now):
            match command:
                case words.Predict():
                    self._predicting = asyncio.create_task(self._predict(server, command))
                case words.ChangePools(wanted):
                    self._change(server, wanted, now)
                case words.Write(line):
                    if self._log is not None:
                        self._log.put(line)
                case words.Note(text, is_fault):
                    log.log(logging.WARNING if is_fault else logging.INFO, "%s", text)

    def _change(self, server: TunedServer, wanted: Split, now: float) -> None:
        try:
            server.pool_desk.set_pools(wanted.prefill, wanted.decode, WAIT_S)
        except RequestError as error:
            self._feed(words.NotChanged(error.message), now)

    async def _predict(self, server: TunedServer, command: words.Predict) -> None:
        with self._until_a_bug():
            answer = await self._answer(server, command)
            if answer.prediction is None:
                self._feed(words.Unpredicted(command.ticket, answer.reason), server.now())
            else:
                self._feed(words.Predicted(command.ticket, answer.prediction), server.now())

    def _sizes(self) -> Sizes | None:
        bounds = self._settings.workers
        return None if bounds is None else Sizes(*bounds, room=self._settings.hysteresis)

    async def _answer(self, server: TunedServer, command: words.Predict) -> Answer:
        if (terms := server.worker_terms()) is None:
            return Answer(None, "no worker has joined")
        question = LiveQuestion(
            profile=self._profile,
            transport=self._transport,
            kv=terms.layout,
            num_blocks=terms.num_blocks,
            max_model_len=terms.max_model_len,
            scheduler=self._scheduler,
            max_queue_requests=self._config.max_queue_requests,
            max_queue_tokens=self._config.max_queue_tokens,
            max_wait_s=self._config.max_wait_s,
            slo=self._settings.slo,
            attainment=self._settings.attainment,
            traffic=command.traffic,
            prefill=command.present.prefill,
            decode=command.present.decode,
            sizes=self._sizes(),
            seconds=max(LEAST_PREDICTION_S, 2 * self._settings.window_s),
        )
        try:
            return await ask(question)
        except OSError as exc:
            return Answer(None, f"no process can be started to predict: {exc.strerror or exc}")


def event_of(ended: EndedRequest, progress: _Progress | None) -> words.Ended | words.Withdrawn:
    """What the core hears of a request's end. Times are those at which the coordinator had its tokens."""
    name, count = ended.request_id, ended.num_output_tokens
    if ended.outcome is RequestState.CANCELLED or ended.error_code == "client_too_slow":
        return words.Withdrawn(name, count)
    if ended.outcome is RequestState.REJECTED:
        is_by_load = ended.error_code in BY_LOAD
        return words.Ended(name, 0, is_completed=False) if is_by_load else words.Withdrawn(name, None)
    if ended.outcome is not RequestState.COMPLETED or progress is None or not progress.first_at:
        return words.Ended(name, count, is_completed=False)
    first_at, last_at = progress.first_at, progress.last_at
    return words.Ended(
        name,
        count,
        is_completed=True,
        ttft_s=first_at - ended.received_at,
        tpot_s=(last_at - first_at) / (count - 1) if count > 1 else None,
        itl_p99_s=percentile(progress.gaps_s, 99) if progress.gaps_s else None,
        e2e_s=last_at - ended.received_at,
    )


def pools_of(status: Mapping[str, Any]) -> Pools:
    """The pools in what an operator is shown."""
    workers = status["workers"]
    serving = [worker for worker in workers if worker["state"] == WorkerState.SERVES]
    others = [
        f"{worker['worker']} {worker['state']}" for worker in workers if worker["state"] != WorkerState.SERVES
    ]
    unsettled = ", ".join(others) or ("" if status["ready"] else status["reason"])

    def count(role: Role, *, movable: bool = False) -> int:
        return sum(
            worker["role"] == role and not (movable and worker.get("fixed_role")) for worker in serving
        )

    return Pools(
        present=Split(count(Role.PREFILL), count(Role.DECODE)),
        movable=Split(count(Role.PREFILL, movable=True), count(Role.DECODE, movable=True)),
        unsettled=unsettled,
    )
