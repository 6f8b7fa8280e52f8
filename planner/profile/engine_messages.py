"""What is said to a worker's engine that runs apart, and what it answers: one JSON line each."""

from __future__ import annotations

from typing import Any

import msgspec

from twinpool.bench.engine.floors import Piece


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a process loads, and where. `cores` empty: not pinned. `is_pool_shared`: KV lies in shared memory, as on a
    decode worker whose links are `shm`."""

    directory: str
    dtype: str
    weights: str
    device: str
    threads: int
    cores: tuple[int, ...]
    pool_tokens: int
    most_decodes: int
    is_pool_shared: bool


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run this step so many `times` in a row; answered by `Ran`."""

    pieces: tuple[Piece, ...]
    times: int


class Loop(msgspec.Struct, frozen=True, tag=True):
    """Run this step again and again until the next command; answered by `Done` before the first."""

    pieces: tuple[Piece, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End a loop; answered by `Done` once it has ended."""


class Facts(msgspec.Struct, frozen=True, tag=True):
    """What a worker says of itself once it has loaded. `machine` in JSON values, as in a profile."""

    dtype: str
    block_size: int
    kv_token_bytes: int
    max_model_len: int
    machine: dict[str, Any]


class Ran(msgspec.Struct, frozen=True, tag=True):
    """The steps that were run, in order."""

    seconds: tuple[float, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is done, and there is nothing to say of it."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model could not be loaded: why."""

    error: str


Command = Run | Loop | Stop
Answer = Facts | Ran | Done | Failed
