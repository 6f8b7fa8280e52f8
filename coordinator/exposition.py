"""The coordinator's and the workers' numbers in the Prometheus text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from twinpool.config import Role
from twinpool.coordinator.record_file import RequestRecorder
from twinpool.coordinator.state import CoordinatorCore
from twinpool.coordinator.tally import Histogram
from twinpool.coordinator.tuning import Tuner
from twinpool.metrics import (
    COORDINATOR_METRIC_HELP,
    GAUGE_HELP,
    METRIC_HELP,
    RECORD_METRIC_HELP,
    TIMING_HELP,
    TUNER_ENDED,
    TUNER_ENDED_HELP,
    TUNER_ERROR,
    TUNER_ERROR_HELP,
    TUNER_METRIC_HELP,
    CoordinatorMetric,
    Gauge,
    RecordMetric,
    WorkerMetric,
)

PREFIX = "twinpool_"
COORDINATOR = "coordinator"

_LABEL_OF = {
    CoordinatorMetric.REQUESTS: "outcome",
    CoordinatorMetric.REFUSED: "reason",
    CoordinatorMetric.TENANT_TOKENS: "tenant",
    CoordinatorMetric.ATTEMPTS_LOST: "reason",
    CoordinatorMetric.HYBRID_CHOICES: "way",
    CoordinatorMetric.WORKERS_LOST: "role",
    CoordinatorMetric.ROLE_CHANGES: "role",
    CoordinatorMetric.WORKERS_DRAINED: "role",
}
_BLOCK_STATES = ("free", "owned", "cached", "quarantined", "leased")


class Exposition(Collector):
    """Reads the core at each scrape and keeps nothing.

    Counters of a worker are summed over its processes, so a restart makes none fall. `own_counts` are what
    the shell itself counts, under the workers' names with worker and role "coordinator"; `now` is its clock; `recorder`
    writes the record, if there is one; `tuner` tunes the pools, if something does.
    """

    def __init__(
        self, core: CoordinatorCore, own_counts: Counter[WorkerMetric], now: Callable[[], float]
    ) -> None:
        self._core = core
        self.recorder: RequestRecorder | None = None
        self.tuner: Tuner | None = None
        self._now = now
        self._own_counts = own_counts
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics now."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All metric families, for prometheus_client."""
        yield from self._coordinator_counters()
        yield from self._worker_counters()
        yield from self._record_counters()
        yield from self._gauges()
        if self.tuner is not None:
            yield from _of_tuner(self.tuner)
        for timing, histogram in self._core.tally.timings.items():
            yield _histogram(PREFIX + timing, TIMING_HELP[timing], histogram)

    def _coordinator_counters(self) -> Iterator[Metric]:
        for metric, help_text in COORDINATOR_METRIC_HELP.items():
            counts = self._core.tally.counts(metric)
            if (label := _LABEL_OF.get(metric)) is None:
                family = CounterMetricFamily(PREFIX + metric.removesuffix("_total"), help_text)
                family.add_metric([], counts.get("", 0))
            else:
                family = CounterMetricFamily(
                    PREFIX + metric.removesuffix("_total"), help_text, labels=[label]
                )
                for value, count in sorted(counts.items()):
                    family.add_metric([value], count)
            yield family

    def _worker_counters(self) -> Iterator[Metric]:
        totals: dict[tuple[str, Role], Counter[str]] = {
            worker: Counter(counts) for worker, counts in self._core.tally.gone_workers.items()
        }
        for worker in self._core.registry:
            counts = totals.setdefault((worker.worker_id, worker.role), Counter())
            if worker.stats is not None:
                counts.update(worker.stats.counters)
        for metric, help_text in METRIC_HELP.items():
            family = CounterMetricFamily(
                PREFIX + metric.removesuffix("_total"), help_text, labels=["worker", "role"]
            )
            for (worker_id, role), counts in totals.items():
                family.add_metric([worker_id, role], counts[metric.value])
            if metric in self._own_counts:
                family.add_metric([COORDINATOR, COORDINATOR], self._own_counts[metric])
            yield family

    def _record_counters(self) -> Iterator[Metric]:
        recorder = self.recorder
        values = {
            RecordMetric.RECORDED: 0 if recorder is None else recorder.num_written,
            RecordMetric.NOT_RECORDED: 0 if recorder is None else recorder.num_lost,
        }
        for metric, value in values.items():
            name = PREFIX + metric.removesuffix("_total")
            yield CounterMetricFamily(name, RECORD_METRIC_HELP[metric], value=value)

    def _gauges(self) -> Iterator[Metric]:
        core = self._core
        workers = list(core.registry)
        live = {state: float(n) for state, n in core.live_by_state().items()}
        is_healthy, _ = core.health(self._now())
        yield _gauge(Gauge.HEALTHY, [], {(): float(is_healthy)})
        yield _gauge(Gauge.LIVE, ["state"], {(state.value,): n for state, n in live.items()})
        yield _gauge(Gauge.QUEUE_REQUESTS, [], {(): len(core.queue)})
        yield _gauge(Gauge.QUEUE_TOKENS, [], {(): core.queue.num_tokens})
        yield _gauge(
            Gauge.QUEUE_OF_TENANT,
            ["tenant"],
            {(a.tenant.name,): core.queue.held_by(a).num_requests for a in core.accounts},
        )
        yield _gauge(Gauge.RETRY_BUDGET, [], {(): core.retries.left})
        by_role = Counter(worker.role for worker in workers)
        yield _gauge(Gauge.WORKERS, ["role"], {(role.value,): by_role[role] for role in Role})
        departing = Counter(worker.role for worker in workers if not worker.stays)
        yield _gauge(Gauge.DEPARTING, ["role"], {(role.value,): departing[role] for role in Role})
        names = ["worker", "role"]
        yield _gauge(Gauge.LEGS, names, {(w.worker_id, w.role): len(w.legs) for w in workers})
        yield _gauge(
            Gauge.CANCELLED_RUNNING, names, {(w.worker_id, w.role): len(w.cancelled) for w in workers}
        )
        heard = [(w, w.stats) for w in workers if w.stats is not None]
        yield _gauge(Gauge.RUNNING, names, {(w.worker_id, w.role): s.running for w, s in heard})
        yield _gauge(Gauge.WAITING, names, {(w.worker_id, w.role): s.waiting for w, s in heard})
        yield _gauge(Gauge.WAITING_TOKENS, names, {(w.worker_id, w.role): s.waiting_tokens for w, s in heard})
        yield _gauge(
            Gauge.BLOCKS,
            [*names, "state"],
            {
                (w.worker_id, w.role, state): getattr(s, f"{state}_blocks")
                for w, s in heard
                for state in _BLOCK_STATES
            },
        )
        yield _gauge(
            Gauge.LINK_RATE,
            ["prefill", "decode", "transport"],
            {
                (p.worker_id, d.worker_id, link.transport): link.gb_per_s
                for p, d, link in core.registry.links()
            },
        )


def _of_tuner(tuner: Tuner) -> Iterator[Metric]:
    for metric, value in tuner.counts().items():
        yield CounterMetricFamily(
            PREFIX + metric.removesuffix("_total"), TUNER_METRIC_HELP[metric], value=value
        )
    ended = GaugeMetricFamily(PREFIX + TUNER_ENDED, TUNER_ENDED_HELP, labels=["reason"])
    ended.add_metric([tuner.why_ended], bool(tuner.why_ended))
    yield ended
    family = GaugeMetricFamily(PREFIX + TUNER_ERROR, TUNER_ERROR_HELP, labels=["figure"])
    for figure, error in tuner.median_errors().items():
        family.add_metric([figure], error)
    yield family


def _gauge(gauge: Gauge, labels: list[str], values: dict[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(PREFIX + gauge, GAUGE_HELP[gauge], labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _histogram(name: str, help_text: str, histogram: Histogram) -> Metric:
    buckets: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip([*map(str, histogram.bounds_s), "+Inf"], histogram.counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=histogram.total_s)
