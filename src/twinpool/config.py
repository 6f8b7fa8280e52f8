"""Settings: frozen values, checked once at the edge.

The CLI builds these from flags and environment; nothing else reads either. "auto" values are resolved into new
objects by whoever can know (the worker for dtype and pool size, the connector for the transport).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.answer_formats import ReasoningFormat, ToolCallFormat
from twinpool.errors import ConfigError
from twinpool.join_token import JoinToken

MOST_WORKERS = 256
MOST_THREADS = 1024
MOST_CORES = 1 << 16
MOST_SEQUENCES = 65_536
BLOCK_SIZES = (8, 16, 32, 64, 128)
"""Tokens of a KV block."""
MOST_TOKENS = 2**31 - 1
"""Token and block counts that fit what workers tell each other and what kernels index with."""
MOST_SECONDS = 1e6
RECORD_MB = 256
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME_ALLOWED = "1 to 64 letters, digits, - and _"
_LOOPBACK = re.compile(r"127(\.\d{1,3}){3}|localhost|\[?::1\]?|lo")
_ZMQ_ADDRESS = re.compile(r"tcp://.+:(\d{1,5}|\*)|ipc://.+")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s@]+")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class TransportName(StrEnum):
    """How KV blocks travel."""

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"
    UCX = "ucx"
    LOOPBACK = "loopback"


class Encryption(StrEnum):
    """Whether KV is encrypted on its way from one worker to another."""

    AUTO = "auto"
    """Between hosts."""
    ON = "on"
    """Wherever it goes through a socket."""
    OFF = "off"
    """Never: the operator trusts the network."""

    def seals(self, same_host: bool) -> bool:
        """Whether KV must not go through a socket unencrypted between two workers on the same host, or on two."""
        return self is Encryption.ON or (self is Encryption.AUTO and not same_host)


def _is_count(value: int | None, most: int, least: int = 1) -> bool:
    return value is None or least <= value <= most


def is_name(text: str) -> bool:
    """Whether `text` can name something in files, ids and labels: 1 to 64 letters, digits, - and _."""
    return _NAME.fullmatch(text) is not None


def is_device(text: str) -> bool:
    """Whether `text` names a device: auto, cpu, cuda or cuda:N."""
    return _DEVICE.fullmatch(text) is not None


def is_loopback(address: str) -> bool:
    """Whether only this host can reach what listens on `address`: a host, or a ZeroMQ address."""
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0] if address.startswith("tcp://") else address
    return _LOOPBACK.fullmatch(host) is not None


def require_zmq_address(setting: str, address: str) -> None:
    """Raises ConfigError unless `address` looks like one that ZeroMQ connects to or listens on."""
    require(setting, address, _ZMQ_ADDRESS.fullmatch(address) is not None,
            "an address like tcp://10.0.0.1:7000")  # fmt: skip


def require(setting: str, value: object, ok: bool, allowed: str) -> None:
    """Raises ConfigError naming the setting, its value and what is allowed, unless `ok`."""
    if not ok:
        raise ConfigError(f"{setting} is {value!r}; allowed: {allowed}")


def _require_time(setting: str, seconds: float) -> None:
    require(setting, seconds, 0 < seconds <= MOST_SECONDS, f"above 0, at most {MOST_SECONDS:.0f}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One worker's engine.

    `model_dir` holds config.json, safetensors and tokenizer (what `engine.model_files.resolve` returns). `dtype` is
    "auto" or a type to compute in, `kv_cache_dtype` "auto" (the same) or one of `KV_CACHE_DTYPES`. `weights`
    are held in `dtype` ("auto"), or the layers' matrices in "int8". `num_blocks` fixes
    the KV pool's size; None takes `kv_memory_fraction` of the memory that is free on the device when the worker starts,
    shared by `workers_on_host` workers, on a GPU by the `workers_on_device` of them that use the same one.
    `max_model_len` None is the model's own context. `threads` bounds the CPU threads of the model, `cpu_cores` are the
    cores to pin them to (empty: not pinned). A step that runs for `step_timeout_s` is taken for stuck, and the worker
    ends itself.
    On a GPU decode steps are captured as CUDA graphs, unless `enforce_eager`.
    """

    model_dir: str
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_fraction: float = 0.25
    workers_on_host: int = 1
    workers_on_device: int = 1
    max_model_len: int | None = None
    threads: int = 1
    cpu_cores: tuple[int, ...] = ()
    step_timeout_s: float = 60.0
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"
    weights: str = "auto"

    def __post_init__(self) -> None:
        require("--dtype", self.dtype, self.dtype in ("auto", "float32", "bfloat16", "float16"),
                "auto, float32, bfloat16, float16")  # fmt: skip
        require("--kv-cache-dtype", self.kv_cache_dtype, self.kv_cache_dtype in ("auto", "fp8", "int8"),
                "auto, fp8, int8")  # fmt: skip
        require("--weights", self.weights, self.weights in ("auto", "int8"), "auto, int8")
        require(
            "--block-size", self.block_size, self.block_size in BLOCK_SIZES, ", ".join(map(str, BLOCK_SIZES))
        )
        require("--device", self.device, is_device(self.device), "auto, cpu, cuda, cuda:N")
        require(
            "--num-blocks", self.num_blocks, _is_count(self.num_blocks, MOST_TOKENS, 2), f"2 to {MOST_TOKENS}"
        )
        require("--kv-memory-fraction", self.kv_memory_fraction, 0 < self.kv_memory_fraction <= 0.95,
                "above 0, at most 0.95")  # fmt: skip
        require("--workers-on-host", self.workers_on_host, _is_count(self.workers_on_host, MOST_WORKERS),
                f"1 to {MOST_WORKERS}")  # fmt: skip
        require("--workers-on-device", self.workers_on_device, _is_count(self.workers_on_device, MOST_WORKERS),
                f"1 to {MOST_WORKERS}")  # fmt: skip
        require("--max-model-len", self.max_model_len, _is_count(self.max_model_len, MOST_TOKENS, 2),
                "2 (a token of prompt and one of output) up to the model's own context")  # fmt: skip
        require("--threads", self.threads, _is_count(self.threads, MOST_THREADS), f"1 to {MOST_THREADS}")
        require("--cores", self.cpu_cores, all(_is_count(core, MOST_CORES, 0) for core in self.cpu_cores),
                "core numbers, from 0")  # fmt: skip
        _require_time("--step-timeout", self.step_timeout_s)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How one worker forms its steps.

    `token_budget` bounds the tokens of one step (the chunk); None is the role's own. `max_num_seqs` bounds the
    sequences that decode together. `headroom_tokens` is the growth room that a sequence must have before decode
    admits it, as KV slots beyond its prompt (less when its `max_tokens` is less). `max_queue_age_s` is the age at
    which a prompt goes before shorter ones, in up to half of each step. `max_parked_blocks` bounds the blocks on
    prefill whose prompts wait for a grant of decode (None: half the pool). `transfer_timeout_s` bounds the wait for a
    granted transfer beyond what its bytes take at the measured rate. `grant_timeout_s` bounds the wait of a job for
    room on decode; then it is sent back, to be started again where there is room. A `hybrid` prefill or decode worker
    also takes whole jobs, and its steps keep every stream's gaps within `itl_budget_ms`.
    """

    token_budget: int | None = None
    max_num_seqs: int = 64
    headroom_tokens: int = 64
    max_queue_age_s: float = 2.0
    max_parked_blocks: int | None = None
    transfer_timeout_s: float = 10.0
    grant_timeout_s: float = 30.0
    prefix_cache: bool = True
    hybrid: bool = False
    itl_budget_ms: float = 100.0

    def __post_init__(self) -> None:
        require("--token-budget", self.token_budget,
                self.token_budget is None or _is_count(self.token_budget, MOST_TOKENS),
                f"1 to {MOST_TOKENS}")  # fmt: skip
        require("--max-num-seqs", self.max_num_seqs, _is_count(self.max_num_seqs, MOST_SEQUENCES),
                f"1 to {MOST_SEQUENCES}")  # fmt: skip
        require("--headroom-tokens", self.headroom_tokens, _is_count(self.headroom_tokens, MOST_TOKENS, 0),
                f"0 to {MOST_TOKENS}")  # fmt: skip
        require("--max-parked-blocks", self.max_parked_blocks, _is_count(self.max_parked_blocks, MOST_TOKENS),
                f"1 to {MOST_TOKENS}")  # fmt: skip
        require(
            "--itl-budget", self.itl_budget_ms, 1 <= self.itl_budget_ms <= 60_000, "1 to 60000 milliseconds"
        )
        _require_time("--grant-timeout", self.grant_timeout_s)
        _require_time("--transfer-timeout", self.transfer_timeout_s)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How KV blocks travel. `deployment` names this server's shared-memory files, so two servers never meet. `host` is
    the address that KV sockets listen on, `encryption` says when what goes through them is encrypted."""

    transport: TransportName = TransportName.AUTO
    deployment: str = "local"
    host: str = "127.0.0.1"
    faults: str = ""
    encryption: Encryption = Encryption.AUTO

    def __post_init__(self) -> None:
        require("--deployment", self.deployment, is_name(self.deployment), _NAME_ALLOWED)
        require("--kv-host", self.host, bool(self.host), "an address of this machine, like 10.0.0.2")


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """How a worker reaches its coordinator, under which name, and the secret that lets it in.

    `lifeline_fd` is the pipe that ties it to the process that started it (None: it was started by hand).
    """

    coordinator: str
    worker_id: str
    join_token: JoinToken
    lifeline_fd: int | None = None

    def __post_init__(self) -> None:
        require("--id", self.worker_id, is_name(self.worker_id), _NAME_ALLOWED)
        require_zmq_address("--connect", self.coordinator)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything one worker process needs."""

    role: Role
    link: LinkConfig
    engine: EngineConfig
    scheduler: SchedulerConfig
    transfer: TransferConfig
    strict: bool = False


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """The record of requests: a file that is moved aside once it would have more than `max_mb` (1e6 bytes). Its lines
    have the requests' ids if it `has_ids`."""

    path: str
    max_mb: int = RECORD_MB
    has_ids: bool = False

    def __post_init__(self) -> None:
        require("--record", self.path, bool(self.path), "the name of a file")
        require("--record-max-mb", self.max_mb, _is_count(self.max_mb, 1 << 20), f"1 to {1 << 20}")


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The coordinator's bounds, and the token that lets workers join: a fresh one, unless given.

    The queue is bounded in requests, in prompt tokens and in time. `max_in_flight` bounds the requests that are on
    workers (None: what the decode workers report they can run, and an eighth more). `max_attempts` bounds how often one
    request is started; those that ended for lack of room do not count (`coordinator/state.py` says what bounds them).
    All requests together may draw `retry_budget` such starts again, which every admitted request refills a little.
    Workers heartbeat every `heartbeat_s` (the Welcome tells them); one that is not heard of for `lease_s` is lost.
    Health is bad when nothing has moved for `stall_s` although there is work. A link between workers that was measured
    below `min_link_gb_per_s` (1e9 bytes per second; about a Gbit network) is used, and reported as an error.
    Where it is `strict` no hybrid worker joins. With a `record` what becomes of requests is written down; one that
    `is_tuned` tells it to a tuner.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    control: str = "tcp://127.0.0.1:*"
    served_model_name: str = ""
    max_queue_requests: int = 256
    max_queue_tokens: int = 1_000_000
    max_wait_s: float = 60.0
    max_in_flight: int | None = None
    max_attempts: int = 3
    retry_budget: int = 1024
    stall_s: float = 10.0
    min_link_gb_per_s: float = 0.1
    drain_s: float = 30.0
    heartbeat_s: float = 0.5
    lease_s: float = 5.0
    start_timeout_s: float = 120.0
    finished_timelines: int = 1000
    strict: bool = False
    record: RecordConfig | None = None
    is_tuned: bool = False
    join_token: JoinToken = field(default_factory=JoinToken.fresh, compare=False)

    def __post_init__(self) -> None:
        require_zmq_address("--control", self.control)
        require("--max-queue-requests", self.max_queue_requests, self.max_queue_requests >= 1, "1 or more")
        require("--max-queue-tokens", self.max_queue_tokens, self.max_queue_tokens >= 1, "1 or more")
        require("--port", self.port, 0 <= self.port <= 65535, "0 to 65535 (0 takes any free one)")
        _require_time("--max-wait", self.max_wait_s)
        require("--min-link", self.min_link_gb_per_s, 0 <= self.min_link_gb_per_s <= 1000, "0 to 1000")
        require("--drain", self.drain_s, 0 <= self.drain_s <= MOST_SECONDS, f"0 to {MOST_SECONDS:.0f}")
        require("--max-attempts", self.max_attempts, self.max_attempts >= 1, "1 or more")
        require("--retry-budget", self.retry_budget, self.retry_budget >= 0, "0 or more")
        _require_time("--stall", self.stall_s)
        for name in ("heartbeat_s", "lease_s", "start_timeout_s"):
            _require_time(name, getattr(self, name))
        require(
            "lease_s",
            self.lease_s,
            self.lease_s > self.heartbeat_s,
            f"above heartbeat_s ({self.heartbeat_s:g})",
        )
        require("max_in_flight", self.max_in_flight, _is_count(self.max_in_flight, MOST_TOKENS), "1 or more")
        require("finished_timelines", self.finished_timelines, self.finished_timelines >= 0, "0 or more")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """What the HTTP side grants its clients.

    `api_keys_file` ("": none) and `api_keys` (``tenant:key,…``) say who may send requests; without either, anyone.
    `metrics_open`: `/metrics` needs no key. Whoever has the `admin_key` ("": nobody) may change the pools. Scripts of
    web pages from `cors_origins` may use the server ("*": of all; none: as browsers have it without). A body longer
    than `max_body_bytes` is refused. A stream may hold back `max_buffered_bytes` for a client that is behind, and a
    client that takes nothing for `client_stall_s` is cut. The head of a request must be complete within
    `head_timeout_s`, its body within `body_timeout_s` and the time that it takes at 64 KiB per second. A stream that
    is silent for `keep_alive_s` carries a comment, so that proxies leave it open. A request that gets no output for
    `max_silence_s` ends. Answers are read for calls of tools and for reasoning in the formats `tool_calls` and
    `reasoning`.
    """

    api_keys_file: str = ""
    api_keys: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    metrics_open: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_buffered_bytes: int = 256 << 10
    client_stall_s: float = 30.0
    max_connections: int | None = None
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    keep_alive_s: float = 10.0
    max_silence_s: float = 600.0
    tool_calls: ToolCallFormat = ToolCallFormat.AUTO
    reasoning: ReasoningFormat = ReasoningFormat.AUTO

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            require("--cors-origin", origin, _ORIGIN.fullmatch(origin) is not None,
                    "an origin like https://app.example.com (scheme, host and port, without a path), or *")  # fmt: skip
        require("--max-body-bytes", self.max_body_bytes, self.max_body_bytes >= 1, "1 or more")
        require(
            "--max-buffered-bytes", self.max_buffered_bytes, self.max_buffered_bytes >= 1024, "1024 or more"
        )
        require(
            "--max-connections",
            self.max_connections,
            _is_count(self.max_connections, 1 << 20),
            f"1 to {1 << 20}",
        )
        for name in ("head_timeout_s", "body_timeout_s", "keep_alive_s", "max_silence_s"):
            _require_time(name, getattr(self, name))
        _require_time("--client-stall", self.client_stall_s)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How many workers of each role to start: x prefill and y decode, or k colocated."""

    prefill: int = 1
    decode: int = 1
    colocated: int = 0

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "colocated"):
            count = getattr(self, name)
            require(f"--{name}", count, _is_count(count, MOST_WORKERS, 0), f"0 to {MOST_WORKERS}")
        split, mixed = self.prefill + self.decode, self.colocated
        require(
            "--colocated", self.colocated, not (split and mixed), "0 together with --prefill and --decode"
        )
        for name in ("prefill", "decode"):
            count = getattr(self, name)
            require(f"--{name}", count, mixed > 0 or count > 0, "1 or more, or --colocated K instead of both")

    def roles(self) -> Sequence[tuple[str, Role]]:
        """The workers to start: (worker id, role)."""
        counts = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode), (Role.COLOCATED, self.colocated))
        return [(f"{role}-{i}", role) for role, count in counts for i in range(count)]
