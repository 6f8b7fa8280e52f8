"""What a worker is made of: the blocks that the operator asked for are all for sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.join_token import TEST_TOKEN
from support.tiny_models import TINY, save_tiny_model

from twinpool.config import EngineConfig, LinkConfig, Role, SchedulerConfig, TransferConfig, WorkerConfig
from twinpool.errors import ConfigError
from twinpool.kv_transfer.connector import LocalEnd
from twinpool.kv_transfer.probe import PROBE_BYTES
from twinpool.prefill_pool.core import PrefillCore
from twinpool.worker.main import load_runner, require_graphs, require_kv_host, why_fixed, worker_parts
from twinpool.worker.process import arguments_anew

NUM_BLOCKS = 40
SCHEDULER = SchedulerConfig()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model(directory, LlamaConfig(**TINY))
    return directory


@pytest.mark.parametrize("role", Role)
def test_num_blocks_are_all_for_sequences_and_probes_have_their_own(model_dir: Path, role: Role) -> None:
    config = WorkerConfig(
        role=role,
        link=LinkConfig("tcp://127.0.0.1:1", "worker-0", TEST_TOKEN),
        engine=EngineConfig(str(model_dir), "float32", "cpu", num_blocks=NUM_BLOCKS),
        scheduler=SCHEDULER,
        transfer=TransferConfig(),
    )
    given: list[int] = []

    def make_core(num_blocks: int, *about: object) -> PrefillCore:
        given.append(num_blocks)
        return PrefillCore(num_blocks, about[0], "model", SCHEDULER)  # type: ignore[arg-type]

    runner = load_runner(config, lambda num_bytes: memoryview(bytearray(num_bytes)))
    parts = worker_parts(config, make_core, runner, LocalEnd("worker-0", "a1"), None)
    assert given == [NUM_BLOCKS]
    assert parts.register.num_blocks == NUM_BLOCKS
    num_probe = 0 if role is Role.COLOCATED else PROBE_BYTES // runner.layout.block_bytes
    assert parts.pool.probe_blocks == tuple(range(NUM_BLOCKS, NUM_BLOCKS + num_probe))
    assert parts.pool.region.num_blocks == NUM_BLOCKS + num_probe
    assert len(parts.pool.region.memory) == parts.pool.region.num_blocks * runner.layout.block_bytes


def test_a_host_that_no_socket_can_listen_on_is_refused_before_the_model_is_loaded() -> None:
    config = WorkerConfig(
        role=Role.DECODE,
        link=LinkConfig("tcp://127.0.0.1:1", "worker-0", TEST_TOKEN),
        engine=EngineConfig("/nowhere"),
        scheduler=SCHEDULER,
        transfer=TransferConfig(host="192.0.2.77"),
    )
    with pytest.raises(ConfigError, match=r"--kv-host is '192\.0\.2\.77'"):
        require_kv_host(config)
    require_kv_host(replace(config, transfer=TransferConfig(host="127.0.0.1")))


def test_a_model_that_can_have_no_graphs_is_refused_in_strict_mode_only() -> None:
    config = WorkerConfig(
        role=Role.DECODE,
        link=LinkConfig("tcp://127.0.0.1:1", "worker-0", TEST_TOKEN),
        engine=EngineConfig("/nowhere"),
        scheduler=SCHEDULER,
        transfer=TransferConfig(),
    )
    require_graphs(config, "this model runs through transformers")
    strict = replace(config, strict=True)
    require_graphs(strict, "")
    with pytest.raises(
        ConfigError, match="--strict: this model runs through transformers; with --enforce-eager"
    ):
        require_graphs(strict, "this model runs through transformers")


def test_a_worker_knows_why_it_cannot_take_another_role() -> None:
    config = WorkerConfig(
        role=Role.PREFILL,
        link=LinkConfig("tcp://10.0.0.1:7000", "worker-0", TEST_TOKEN),
        engine=EngineConfig("/nowhere"),
        scheduler=SCHEDULER,
        transfer=TransferConfig(),
    )
    assert "its --kv-host is 127.0.0.1" in why_fixed(config)
    assert why_fixed(replace(config, transfer=TransferConfig(host="10.0.0.2"))) == ""
    assert why_fixed(replace(config, link=LinkConfig("tcp://127.0.0.1:7", "worker-0", TEST_TOKEN))) == ""
    assert why_fixed(replace(config, role=Role.DECODE)) == ""
    assert "does both already" in why_fixed(replace(config, role=Role.COLOCATED))
    assert "--hybrid" in why_fixed(replace(config, role=Role.DECODE, scheduler=SchedulerConfig(hybrid=True)))


def test_a_process_that_starts_anew_has_the_role_that_it_had_last_and_its_name() -> None:
    first = ["-m", "twinpool", "worker", "--role=decode", "--threads", "2"]
    again = arguments_anew(first, "prefill", "w")
    assert again == [*first, "--role", "prefill", "--id", "w"]
    assert arguments_anew(again, "decode", "w") == [*first, "--role", "decode", "--id", "w"]
