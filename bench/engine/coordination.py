"""What the coordinator's decisions cost per streamed token: its real core, and its codec, driven in memory."""

from __future__ import annotations

import itertools

from twinpool.bench.engine.measuring import Bench
from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.events import Arrived, FromWorker
from twinpool.coordinator.service import Submission
from twinpool.coordinator.state import CoordinatorCore
from twinpool.layout import KVLayout
from twinpool.messages import (
    Granted,
    HandoffReport,
    LinkReady,
    Message,
    PrefillReport,
    Register,
    StepTokens,
    Token,
    decode,
    encode,
)
from twinpool.request import RequestKey, SamplingParams

_STEPS = 200
_TOO_MANY_TOKENS = 1 << 20
"""No stream ends while it is measured."""
_PROMPT = 16


def coordinator(bench: Bench, layout: KVLayout, streams: int) -> None:
    """One message of a decode worker per step, with a token of each stream: read, decided on, and its outputs made."""
    core, keys = _decoding(layout, streams)
    indices = itertools.count(1)

    def run() -> None:
        for _ in range(_STEPS):
            index = next(indices)
            data = encode(StepTokens(tuple(Token(key, index, 7, None) for key in keys)))
            core.handle(FromWorker("D", "D-1", decode(data)), 1.0 + index * 1e-3)

    bench.alone("coordinator", f"{streams} streams", run, _STEPS * streams, "tokens")


def _decoding(layout: KVLayout, streams: int) -> tuple[CoordinatorCore, list[RequestKey]]:
    """A core whose streams all decode on D, having been prefilled on P."""
    core = CoordinatorCore(CoordinatorConfig(max_queue_requests=streams), (0,))

    def say(worker_id: str, message: Message) -> None:
        core.handle(FromWorker(worker_id, f"{worker_id}-1", message), 1.0)

    for worker_id, role in (("P", Role.PREFILL), ("D", Role.DECODE)):
        say(
            worker_id,
            Register(
                worker_id=worker_id,
                incarnation=f"{worker_id}-1",
                role=role,
                pid=1,
                endpoint="tcp://nowhere",
                fingerprint="model",
                layout=layout,
                num_blocks=2 * streams * _TOO_MANY_TOKENS // layout.block_size,
                max_model_len=2 * _TOO_MANY_TOKENS,
                max_num_seqs=streams,
            ),
        )
    say("P", LinkReady("D", "D-1", "shm", 10.0, 1 << 20))
    keys = []
    sampling = SamplingParams(max_tokens=_TOO_MANY_TOKENS, seed=0)
    for number in range(streams):
        name = f"stream-{number}"
        core.handle(Arrived(Submission(name, tuple(range(_PROMPT)), sampling, 1.0, 1.0, 1.0)), 1.0)
        key = RequestKey(name, 1)
        say("D", Granted(key, number + 1, (number,), 0, 0.0))
        say("P", PrefillReport(key, 0.1, 0.2, 0, _PROMPT, 1))
        say("P", StepTokens((Token(key, 0, 7, None),)))
        say("D", HandoffReport(key, "shm", layout.block_bytes, 0.001, 0.0, 1, 0))
        keys.append(key)
    return core, keys
