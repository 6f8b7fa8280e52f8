"""What the gateway counts and shows on `/metrics`, beside the coordinator's own numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from twinpool.coordinator.gateway.connection import Connection
from twinpool.metrics import GATEWAY_GAUGE_HELP, GATEWAY_METRIC_HELP, GatewayGauge, GatewayMetric

PREFIX = "twinpool_"


class GatewayMeter(Collector):
    """Counts, and reads the open connections at each scrape."""

    def __init__(self) -> None:
        self._counts: Counter[GatewayMetric] = Counter()
        self._connections: Collection[Connection] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count(self, metric: GatewayMetric) -> None:
        """Counts one more of `metric`."""
        self._counts[metric] += 1

    def watch(self, connections: Collection[Connection]) -> None:
        """Takes the collection of open connections, to which the caller goes on adding and from which it removes."""
        self._connections = connections

    def text(self) -> bytes:
        """All metrics as they are now, in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All metric families, for prometheus_client."""
        for metric, help_text in GATEWAY_METRIC_HELP.items():
            yield CounterMetricFamily(
                PREFIX + metric.removesuffix("_total"), help_text, value=self._counts[metric]
            )
        values = {
            GatewayGauge.CONNECTIONS: len(self._connections),
            GatewayGauge.BUFFERED: sum(c.buffered_bytes + c.backlog_bytes for c in self._connections),
        }
        for gauge, value in values.items():
            yield GaugeMetricFamily(PREFIX + gauge, GATEWAY_GAUGE_HELP[gauge], value=value)
