"""Every metric's name, once. Workers count under these names; the coordinator shows them on `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum


class WorkerMetric(StrEnum):
    """What a worker counts. All only grow; the value is the Prometheus name after ``twinpool_``."""

    STEPS = "steps_total"
    STEP_SECONDS = "step_seconds_total"
    STEP_CPU_SECONDS = "step_cpu_seconds_total"
    MISSED_GRAPHS = "decode_steps_without_graph_total"
    PROMPT_TOKENS_COMPUTED = "prompt_tokens_computed_total"
    PROMPT_TOKENS_CACHED = "prompt_tokens_cached_total"
    DECODE_POOL_PROMPT_TOKENS = "decode_pool_prompt_tokens_total"
    HYBRID_PROMPT_TOKENS = "hybrid_prompt_tokens_total"
    OUTPUT_TOKENS = "output_tokens_total"
    HYBRID_OUTPUT_TOKENS = "hybrid_output_tokens_total"
    BLOCKS_SENT = "kv_blocks_sent_total"
    BLOCKS_RECEIVED = "kv_blocks_received_total"
    BLOCKS_SKIPPED = "kv_blocks_not_sent_cached_total"
    BYTES_SENT = "kv_bytes_sent_total"
    BYTES_RECEIVED = "kv_bytes_received_total"
    TRANSFER_SECONDS = "kv_transfer_seconds_total"
    TRANSFER_FAILURES = "kv_transfer_failures_total"
    DIGEST_MISMATCHES = "kv_digest_mismatches_total"
    STALE_FENCES = "kv_stale_fences_total"
    PREEMPTIONS = "preemptions_total"
    NO_ROOM = "no_room_total"
    CANCELLED = "cancelled_total"
    REFUSED = "refused_total"
    EXPIRED = "reservations_expired_total"
    JUNK_MESSAGES = "junk_messages_total"
    STRANGERS = "refused_connections_total"
    INVARIANT_VIOLATIONS = "invariant_violations_total"


METRIC_HELP: dict[WorkerMetric, str] = {
    WorkerMetric.STEPS: "Model steps run.",
    WorkerMetric.STEP_SECONDS: "Seconds spent in model steps.",
    WorkerMetric.STEP_CPU_SECONDS: "Processor time of the thread that runs model steps in them. On a CPU "
    "what is missing to their seconds went to others on its core; on a GPU it is what launching takes.",
    WorkerMetric.MISSED_GRAPHS: "Decode steps on a GPU that ran kernel by kernel where CUDA graphs were wanted: 0.",
    WorkerMetric.PROMPT_TOKENS_COMPUTED: "Prompt tokens run through the model.",
    WorkerMetric.PROMPT_TOKENS_CACHED: "Prompt tokens taken from the prefix cache.",
    WorkerMetric.DECODE_POOL_PROMPT_TOKENS: "Prompt tokens of handed-off jobs that decode ran again: 0.",
    WorkerMetric.HYBRID_PROMPT_TOKENS: "Prompt tokens of whole jobs that a hybrid prefill or decode worker computed.",
    WorkerMetric.OUTPUT_TOKENS: "Tokens sampled.",
    WorkerMetric.HYBRID_OUTPUT_TOKENS: "Tokens behind the first that a hybrid prefill worker sampled.",
    WorkerMetric.BLOCKS_SENT: "KV blocks pushed to a decode worker.",
    WorkerMetric.BLOCKS_RECEIVED: "KV blocks received and verified.",
    WorkerMetric.BLOCKS_SKIPPED: "KV blocks not sent because decode already had them.",
    WorkerMetric.BYTES_SENT: "KV bytes pushed.",
    WorkerMetric.BYTES_RECEIVED: "KV bytes received and verified.",
    WorkerMetric.TRANSFER_SECONDS: "Seconds spent pushing KV.",
    WorkerMetric.TRANSFER_FAILURES: "Hand-offs that failed (peer lost, digest, timeout).",
    WorkerMetric.DIGEST_MISMATCHES: "Blocks whose bytes were not the bytes that were sent.",
    WorkerMetric.STALE_FENCES: "Writes or messages dropped because their fence was old.",
    WorkerMetric.PREEMPTIONS: "Sequences sent back because others needed their room.",
    WorkerMetric.NO_ROOM: "Jobs sent back because no room came free for them in time, or too many waited already.",
    WorkerMetric.CANCELLED: "Attempts cancelled here.",
    WorkerMetric.REFUSED: "Jobs refused here.",
    WorkerMetric.EXPIRED: "Reservations that ran out before their KV came.",
    WorkerMetric.JUNK_MESSAGES: "Messages that did not decode or made no sense.",
    WorkerMetric.STRANGERS: "Connections without the join token.",
    WorkerMetric.INVARIANT_VIOLATIONS: "Broken ownership invariants. Anything but 0 is a bug in Twinpool.",
}


class CoordinatorMetric(StrEnum):
    """What the coordinator counts. All only grow, over restarts of workers too."""

    REQUESTS = "requests_total"
    REFUSED = "admission_refused_total"
    DEADLINES_MISSED = "deadlines_missed_total"
    RETRIES_REFUSED = "retries_refused_total"
    TENANT_TOKENS = "tenant_tokens_served_total"
    PROMPT_TOKENS = "admitted_prompt_tokens_total"
    HYBRID_CHOICES = "hybrid_choices_total"
    TOKENS_DELIVERED = "delivered_tokens_total"
    TOKENS_BEHIND_STOP = "delivered_tokens_behind_stop_total"
    ATTEMPTS_LOST = "attempts_lost_total"
    WORKERS_LOST = "workers_lost_total"
    WORKERS_DENIED = "workers_denied_total"
    ROLE_CHANGES = "role_changes_total"
    WORKERS_DRAINED = "workers_drained_total"
    SLOW_LINKS = "slow_links_total"
    STALE_MESSAGES = "stale_messages_total"
    DUPLICATE_TOKENS = "duplicate_tokens_total"
    PROTOCOL_FAULTS = "protocol_faults_total"


COORDINATOR_METRIC_HELP: dict[CoordinatorMetric, str] = {
    CoordinatorMetric.REQUESTS: "Requests that reached their end, by outcome.",
    CoordinatorMetric.REFUSED: "Requests that were refused at once, by reason.",
    CoordinatorMetric.DEADLINES_MISSED: "Admitted requests whose deadline came before their answer was complete.",
    CoordinatorMetric.RETRIES_REFUSED: "Lost requests that were not started again: the retry budget was used up.",
    CoordinatorMetric.TENANT_TOKENS: "Prompt tokens sent to workers and output tokens delivered, each once, by tenant.",
    CoordinatorMetric.PROMPT_TOKENS: "Prompt tokens of admitted requests.",
    CoordinatorMetric.HYBRID_CHOICES: "Attempts started where a worker is a hybrid: split, or whole on which side.",
    CoordinatorMetric.TOKENS_DELIVERED: "Output tokens handed to the gateway, each once.",
    CoordinatorMetric.TOKENS_BEHIND_STOP: "Of these, tokens behind a stop string: no client got them.",
    CoordinatorMetric.ATTEMPTS_LOST: "Attempts that were lost, by reason.",
    CoordinatorMetric.WORKERS_LOST: "Worker processes that left or were lost, by role.",
    CoordinatorMetric.WORKERS_DENIED: "Workers that were not let in.",
    CoordinatorMetric.ROLE_CHANGES: "Workers that have taken another role, by the new one.",
    CoordinatorMetric.WORKERS_DRAINED: "Workers that ended because an operator wanted it, by role.",
    CoordinatorMetric.SLOW_LINKS: "Links between workers that were measured below --min-link.",
    CoordinatorMetric.STALE_MESSAGES: "Messages of what was over already; normal after cancels.",
    CoordinatorMetric.DUPLICATE_TOKENS: "Tokens that came twice. Anything but 0 is a bug in Twinpool.",
    CoordinatorMetric.PROTOCOL_FAULTS: "Messages that a worker must not send then. Anything but 0 is a bug.",
}


class Gauge(StrEnum):
    """What the coordinator shows of the present moment."""

    HEALTHY = "healthy"
    LIVE = "requests_live"
    QUEUE_REQUESTS = "queue_requests"
    QUEUE_TOKENS = "queue_prompt_tokens"
    QUEUE_OF_TENANT = "tenant_queue_requests"
    RETRY_BUDGET = "retry_budget_left"
    CANCELLED_RUNNING = "cancelled_attempts_held"
    WORKERS = "workers"
    DEPARTING = "workers_departing"
    LEGS = "worker_attempts_held"
    RUNNING = "worker_sequences_running"
    WAITING = "worker_sequences_waiting"
    WAITING_TOKENS = "worker_prompt_tokens_waiting"
    BLOCKS = "kv_blocks"
    LINK_RATE = "link_gb_per_s"


GAUGE_HELP: dict[Gauge, str] = {
    Gauge.HEALTHY: "1 while work makes progress or there is none, else 0.",
    Gauge.LIVE: "Requests by state.",
    Gauge.QUEUE_REQUESTS: "Requests that wait for a worker.",
    Gauge.QUEUE_TOKENS: "Prompt tokens that wait for a worker.",
    Gauge.QUEUE_OF_TENANT: "Requests that wait for a worker, by tenant.",
    Gauge.RETRY_BUDGET: "Lost requests that may still be started again.",
    Gauge.CANCELLED_RUNNING: "Attempts that a worker was told to cancel and has not let go of yet.",
    Gauge.WORKERS: "Live workers by role.",
    Gauge.DEPARTING: "Of these, workers that get nothing new: they are drained, or about to take another role.",
    Gauge.LEGS: "Attempts for which the worker holds something.",
    Gauge.RUNNING: "Sequences that the worker runs.",
    Gauge.WAITING: "Sequences that wait at the worker.",
    Gauge.WAITING_TOKENS: "Prompt tokens that wait at the worker to be computed (prefill) or received (decode).",
    Gauge.BLOCKS: "KV blocks: free + owned + cached + quarantined are all; leased ones are counted there too.",
    Gauge.LINK_RATE: "Measured rate of the link between two workers, in 1e9 bytes per second.",
}


class RecordMetric(StrEnum):
    """What the record of requests counts. All only grow."""

    RECORDED = "requests_recorded_total"
    NOT_RECORDED = "requests_not_recorded_total"


RECORD_METRIC_HELP: dict[RecordMetric, str] = {
    RecordMetric.RECORDED: "Requests written to the record (--record).",
    RecordMetric.NOT_RECORDED: "Requests that should have been, and were not: the disk was full or too slow.",
}


class TunerMetric(StrEnum):
    """What live tuning of the pools counts. All only grow."""

    RECOMMENDATIONS = "autotune_recommendations_total"
    MEASURED = "autotune_recommendations_measured_total"
    CHANGES = "autotune_changes_total"
    UNPREDICTED = "autotune_unpredicted_total"
    NOT_LOGGED = "autotune_lines_not_logged_total"


TUNER_METRIC_HELP: dict[TunerMetric, str] = {
    TunerMetric.RECOMMENDATIONS: "Recommendations that live tuning has made, to stay or to change (--autotune).",
    TunerMetric.MEASURED: "Of these, those whose prediction was held against what came.",
    TunerMetric.CHANGES: "Changes of the pools that it has begun.",
    TunerMetric.UNPREDICTED: "Predictions that failed or took too long.",
    TunerMetric.NOT_LOGGED: "Lines of its log that were not written: the disk was full or too slow.",
}
TUNER_ENDED = "autotune_ended"
TUNER_ENDED_HELP = "1 if live tuning has ended by a bug, which `reason` names; 0 while it runs."
TUNER_ERROR = "autotune_median_error"
TUNER_ERROR_HELP = (
    "Median of |predicted / measured - 1| by figure; of the attainment of |predicted - measured|."
)


class GatewayMetric(StrEnum):
    """What the gateway counts. All only grow."""

    SLOW_CLIENTS = "slow_clients_cut_total"
    UNAUTHORIZED = "http_unauthorized_total"
    DUPLICATES = "http_duplicate_requests_total"
    HEADS_REFUSED = "http_heads_refused_total"
    CONNECTIONS_REFUSED = "http_connections_refused_total"


GATEWAY_METRIC_HELP: dict[GatewayMetric, str] = {
    GatewayMetric.SLOW_CLIENTS: "Clients that were cut because they did not take what they were sent.",
    GatewayMetric.UNAUTHORIZED: "Requests refused because their API key was missing or unknown.",
    GatewayMetric.DUPLICATES: "Requests refused because one with their id was running.",
    GatewayMetric.HEADS_REFUSED: "Requests whose head was no HTTP, too large or too slow.",
    GatewayMetric.CONNECTIONS_REFUSED: "Connections refused because too many were open.",
}


class GatewayGauge(StrEnum):
    """What the gateway shows of the present moment."""

    CONNECTIONS = "http_connections"
    BUFFERED = "client_buffered_bytes"


GATEWAY_GAUGE_HELP: dict[GatewayGauge, str] = {
    GatewayGauge.CONNECTIONS: "Open HTTP connections.",
    GatewayGauge.BUFFERED: "Bytes of answers that wait in this process for their clients to take them.",
}


class Timing(StrEnum):
    """Durations that the coordinator collects into histograms, in seconds (DESIGN.md, vocabulary)."""

    TTFT = "ttft_seconds"
    ITL = "itl_seconds"
    E2E = "e2e_seconds"
    QUEUE = "queue_seconds"
    PREDICTION_ERROR = "hybrid_prediction_error_seconds"


TIMING_HELP: dict[Timing, str] = {
    Timing.TTFT: "From receiving a request to handing its first output (a whole answer: all) to the connection.",
    Timing.ITL: "Gaps between consecutive output tokens at the coordinator.",
    Timing.E2E: "From receiving a request to its last output, answered ones only.",
    Timing.QUEUE: "From the tokenized request to its first dispatch to a worker.",
    Timing.PREDICTION_ERROR: "How far from its prediction an attempt's first token came, where a worker is a hybrid.",
}


class Counters:
    """A worker's counters. Adding a negative amount is a bug and raises ValueError."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, metric: WorkerMetric, amount: float = 1) -> None:
        """Adds `amount` (0 or more)."""
        if amount < 0:
            raise ValueError(f"{metric} cannot fall by {-amount}")
        try:
            self._values[metric] += amount  # a name is equal to its value, which is the key
        except KeyError:
            self._values[metric.value] = amount

    def add_each(self, metric: WorkerMetric, amounts: Iterable[float]) -> None:
        """Adds one after the other: as floats, their sum at once may differ in its last digits."""
        self.add(metric, 0.0)
        total = self._values[metric]
        for amount in amounts:
            total += amount
        self._values[metric] = total

    def __getitem__(self, metric: WorkerMetric) -> float:
        return self._values.get(metric, 0)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return iter(self._values.items())

    def snapshot(self) -> dict[str, float]:
        """All values so far, by name."""
        return dict(self._values)
