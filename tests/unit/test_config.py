"""Settings that make no sense are refused at the edge, by name, with the value and what is allowed."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from support.join_token import TEST_TOKEN

from twinpool.cli import main
from twinpool.config import (
    CoordinatorConfig,
    EngineConfig,
    GatewayConfig,
    LinkConfig,
    PoolPlan,
    SchedulerConfig,
    TransferConfig,
)
from twinpool.errors import ConfigError

HUGE = 10**20


@pytest.mark.parametrize(
    ("config", "field", "flag", "values"),
    [
        (EngineConfig, "kv_cache_dtype", "--kv-cache-dtype", ("", "int4", "bfloat16")),
        (EngineConfig, "weights", "--weights", ("", "int4", "fp8")),
        (EngineConfig, "device", "--device", ("", "gpu", "cuda:", "cuda:-1", "cuda:x")),
        (EngineConfig, "num_blocks", "--num-blocks", (-1, 0, 1, HUGE)),
        (EngineConfig, "kv_memory_fraction", "--kv-memory-fraction", (-1.0, 0.0, 1.0, nan, inf)),
        (EngineConfig, "max_model_len", "--max-model-len", (-1, 0, HUGE)),
        (EngineConfig, "threads", "--threads", (-1, 0, HUGE)),
        (EngineConfig, "workers_on_host", "--workers-on-host", (-1, 0, HUGE)),
        (EngineConfig, "workers_on_device", "--workers-on-device", (-1, 0, HUGE)),
        (EngineConfig, "cpu_cores", "--cores", ((-1,), (0, -2), (HUGE,))),
        (TransferConfig, "deployment", "--deployment", ("", "../x", "x" * 65)),
        (TransferConfig, "host", "--kv-host", ("",)),
        (LinkConfig, "worker_id", "--id", ("", "a/b", "a b", "ä", "x" * 300)),
        (LinkConfig, "coordinator", "--connect", ("", "127.0.0.1:7000", "http://127.0.0.1:7000", "tcp://a")),
        (EngineConfig, "max_model_len", "--max-model-len", (-1, 0, 1, HUGE)),
        (
            CoordinatorConfig,
            "control",
            "--control",
            ("", "foo", "10.0.0.1:7000", "tcp://10.0.0.1", "tcp://a:port"),
        ),
        (SchedulerConfig, "token_budget", "--token-budget", (-1, 0, HUGE)),
        (SchedulerConfig, "max_num_seqs", "--max-num-seqs", (-1, 0, HUGE)),
        (SchedulerConfig, "headroom_tokens", "--headroom-tokens", (-1, HUGE)),
        (SchedulerConfig, "max_parked_blocks", "--max-parked-blocks", (-1, 0, HUGE)),
        (SchedulerConfig, "transfer_timeout_s", "--transfer-timeout", (-1.0, 0.0, nan, inf)),
        (CoordinatorConfig, "port", "--port", (-1, 65536)),
        (CoordinatorConfig, "max_wait_s", "--max-wait", (-1.0, 0.0, nan, inf)),
        (CoordinatorConfig, "drain_s", "--drain", (-1.0, nan, inf)),
        (CoordinatorConfig, "retry_budget", "--retry-budget", (-1,)),
        (CoordinatorConfig, "stall_s", "--stall", (-1.0, 0.0, nan, inf)),
        (GatewayConfig, "max_body_bytes", "--max-body-bytes", (-1, 0)),
        (GatewayConfig, "max_buffered_bytes", "--max-buffered-bytes", (-1, 0, 1023)),
        (GatewayConfig, "max_connections", "--max-connections", (-1, 0, HUGE)),
        (GatewayConfig, "client_stall_s", "--client-stall", (-1.0, 0.0, nan, inf)),
        (PoolPlan, "prefill", "--prefill", (-1, HUGE)),
        (PoolPlan, "decode", "--decode", (-1, HUGE)),
        (PoolPlan, "colocated", "--colocated", (-1, HUGE)),
    ],
)
def test_a_silly_value_is_named(config: Any, field: str, flag: str, values: tuple[Any, ...]) -> None:
    link = {"coordinator": "tcp://a:1", "worker_id": "a", "join_token": TEST_TOKEN}
    needed = {EngineConfig: {"model_dir": ""}, LinkConfig: link}
    for value in values:
        with pytest.raises(ConfigError) as refused:
            config(**{**needed.get(config, {}), field: value})
        assert str(refused.value).startswith(f"{flag} is {value!r}; allowed: ")


@pytest.mark.parametrize(
    "flag", ["--faults=fire=1", "--threads=0", "--device=tpu", "--max-model-len=1", "--control=foo"]
)
def test_serve_refuses_what_a_worker_would_before_it_starts_anything(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/nowhere", flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"twinpool: {flag.partition('=')[0]} ")
    assert error.count("\n") == 1
