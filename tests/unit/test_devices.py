"""Which worker gets which GPU, and what it takes of it."""

from __future__ import annotations

import argparse

import pytest

from twinpool.cli import main
from twinpool.commands import cuda_here, serve, worker
from twinpool.config import EngineConfig, PoolPlan, Role
from twinpool.engine.kv_memory import pool_size
from twinpool.errors import ConfigError
from twinpool.layout import Dtype, KVLayout

GIB = 1 << 30
TWO_MIB = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=Dtype.BFLOAT16)


def specs(*flags: str) -> dict[str, tuple[str, ...]]:
    """The arguments of each worker that `serve` with these flags starts, two of each role."""
    parser = serve.add_parser(argparse.ArgumentParser().add_subparsers())
    plan = PoolPlan(prefill=2, decode=2)
    return {spec.worker_id: spec.arguments for spec in serve.worker_specs(parser.parse_args(flags), plan)}


def test_each_worker_gets_its_own_device_in_turn() -> None:
    started = specs("--devices=cuda:0,cuda:1,cuda:2")
    wanted = {"prefill-0": "cuda:0", "prefill-1": "cuda:1", "decode-0": "cuda:2", "decode-1": "cuda:0"}
    for name, device in wanted.items():
        assert [one for one in started[name] if one.startswith("--device=")] == [f"--device={device}"]
        sharing = 2 if device == "cuda:0" else 1
        assert f"--workers-on-device={sharing}" in started[name]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--devices", "cpu,cuda:0"), "--devices is 'cuda:0'; allowed: cpu here, for there is no GPU"),
        (("--device", "cuda"), "--device is 'cuda'; allowed: cpu here, for there is no GPU"),
        (("--kv-cache-dtype", "int8"), "--kv-cache-dtype is 'int8'; allowed: auto here, for there is no GPU"),
    ],
)
def test_serve_refuses_at_once_what_needs_a_gpu_where_there_can_be_none(
    flags: tuple[str, ...],
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cuda_here, "why_no_cuda", lambda: "there is no GPU")
    assert main(("serve", *flags)) == 2
    assert wanted in capsys.readouterr().err


def test_where_a_gpu_may_be_workers_look_for_it_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_here, "why_no_cuda", lambda: None)
    cuda_here.check_devices("--device", ["cuda:0"], "fp8")


def test_a_torch_without_cuda_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_here.importlib.metadata, "version", lambda _: "2.13.0+cpu")
    assert cuda_here.why_no_cuda() == "torch 2.13.0+cpu is built without CUDA"


def test_workers_with_one_device_for_all_share_it() -> None:
    for arguments in specs("--device=cuda:3").values():
        assert "--workers-on-device=4" in arguments
        assert arguments.count("--device=cuda:3") == 1


def test_a_worker_understands_what_serve_hands_it() -> None:
    arguments = specs("--devices=cpu,cuda:1", "--enforce-eager")["prefill-1"]
    parser = worker.add_parser(argparse.ArgumentParser().add_subparsers())
    known = ["--role=prefill", "--connect=tcp://127.0.0.1:1", "--model-dir=/m", *arguments]
    args = parser.parse_args(known)
    assert args.role is Role.PREFILL
    assert (getattr(args, "EngineConfig.device"), args.workers_on_device) == ("cuda:1", 2)
    assert args.enforce_eager


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--devices=cuda:0,gpu",), "--devices is 'cuda:0,gpu'; allowed: a list of"),
        (("--devices=cuda:0", "--device=cpu"), "--device is 'cpu'; allowed: auto beside --devices cuda:0"),
    ],
)
def test_devices_that_are_none_or_named_twice_are_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        specs(*flags)


def test_only_workers_of_one_gpu_share_it_and_a_mirror_fits_in_the_host() -> None:
    config = EngineConfig("model", kv_memory_fraction=0.5, workers_on_host=8)

    def blocks(num_sharing: int, mirror_bytes: int | None) -> int:
        size = pool_size(
            config, TWO_MIB, 4096, 80 * GIB, GIB, num_sharing=num_sharing, mirror_bytes=mirror_bytes
        )
        return size.num_blocks

    assert blocks(1, None) == 40 * 512
    assert blocks(2, None) == 20 * 512
    assert blocks(1, 800 * GIB) == 40 * 512
    assert blocks(1, 80 * GIB) == int(9.5 * 512)
    with pytest.raises(ConfigError, match=r"with a mirror in 4\.00 GiB of host memory"):
        blocks(1, 4 * GIB)
