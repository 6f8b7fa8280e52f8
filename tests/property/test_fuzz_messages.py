"""Whatever bytes come, decoding gives a message within bounds, or says that they are none."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import junk

from twinpool.errors import ProtocolError
from twinpool.messages import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Dropped,
    Generate,
    Granted,
    Heartbeat,
    Manifest,
    Message,
    Peers,
    PromptLogprobs,
    Register,
    Seal,
    StepTokens,
    Welcome,
    decode,
    encode,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(junk.messages())
def test_every_message_within_bounds_arrives_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message


@settings(max_examples=600, deadline=None, derandomize=True)
@given(junk.damaged() | st.binary(max_size=200))
def test_damaged_messages_decode_or_are_refused(data: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(decode(data), Message)


def changed(message: dict[str, Any], path: str, value: object) -> bytes:
    """The message with the value at `path` (names and indices) set."""
    *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    inner: Any = message
    for step in way:
        inner = inner[step]
    inner[last] = value
    return msgspec.msgpack.encode(message)


KEY = ["r0", 1]
LAYOUT = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 16, "dtype": "float32"}
JOB = {
    "request_id": "r0", "attempt": 1, "token_ids": [1, 2], "eos_token_ids": [0],
    "sampling": {"max_tokens": 4, "seed": 1, "grammar": {"kind": "regex", "source": "[0-9]+"}},
}  # fmt: skip
WHOLE: dict[type[Message], dict[str, Any]] = {
    Cancel: {"key": KEY},
    Dropped: {"key": KEY, "reason": "refused"},
    Generate: {"job": JOB},
    Granted: {"key": KEY, "fence": 1, "block_ids": [1], "num_cached_blocks": 0, "wait_s": 0.0},
    Heartbeat: {"stats": dict.fromkeys(
        ("free_blocks", "owned_blocks", "cached_blocks", "quarantined_blocks", "leased_blocks", "waiting", "running",
         "waiting_tokens"), 0) | {"counters": {}}},
    Peers: {"peers": []},
    PromptLogprobs: {"key": KEY, "entries": [[-0.5, [[7, -0.5]]]]},
    Register: {
        "worker_id": "w", "incarnation": "1", "role": "decode", "pid": 1, "endpoint": "", "fingerprint": "m",
        "layout": LAYOUT, "num_blocks": 1, "max_model_len": 1, "max_num_seqs": 1,
    },
    Seal: {"manifest": {
        "key": KEY, "fence": 1, "fingerprint": "m", "layout": LAYOUT, "num_tokens": 1, "block_ids": [1],
        "digests": [1], "first_token": 1, "num_bytes": 1, "transfer_s": 0.0,
    }},
    StepTokens: {"tokens": [[KEY, 0, 5, None, [-0.5, [[7, -0.5]]]]]},
    Welcome: {"heartbeat_s": 1.0},
}  # fmt: skip


def whole(kind: type[Message]) -> dict[str, Any]:
    """A message that decodes, as plain values of its own."""
    copy: dict[str, Any] = msgspec.msgpack.decode(
        msgspec.msgpack.encode({"type": kind.__name__} | WHOLE[kind])
    )
    return copy


@pytest.mark.parametrize("kind", WHOLE)
def test_messages_that_are_changed_below_decode_as_they_are(kind: type[Message]) -> None:
    assert isinstance(decode(msgspec.msgpack.encode(whole(kind))), kind)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (Cancel, "key/0", "x" * 257),
        (Cancel, "key/0", ""),
        (Cancel, "key/1", -1),
        (Dropped, "detail", "x" * 20_000),
        (Generate, "job/token_ids", []),
        (Generate, "job/token_ids", [-1]),
        (Generate, "job/token_ids", [2**31]),
        (Generate, "job/num_emitted", 2),
        (Generate, "job/attempt", 2**31),
        (Generate, "job/cache_salt", "x" * 5000),
        (Generate, "job/sampling/max_tokens", 0),
        (Generate, "job/sampling/temperature", float("nan")),
        (Generate, "job/sampling/temperature", -0.5),
        (Generate, "job/sampling/top_p", 1.5),
        (Generate, "job/sampling/logprobs", 21),
        (Generate, "job/sampling/prompt_logprobs", -1),
        (Generate, "job/sampling/presence_penalty", -2.5),
        (Generate, "job/sampling/repetition_penalty", 0.0),
        (Generate, "job/sampling/logit_bias", [[1, 101.0]]),
        (Generate, "job/sampling/logit_bias", [[0, 1.0]] * 1025),
        (Generate, "job/sampling/bad_words", [[]]),
        (Generate, "job/sampling/bad_words", [[1] * 65]),
        (Generate, "job/sampling/bad_words", [[1]] * 2049),
        (Generate, "job/sampling/allowed_token_ids", [-1]),
        (Generate, "job/sampling/grammar/source", ""),
        (Generate, "job/sampling/grammar/source", "x" * 300_000),
        (Generate, "job/sampling/grammar/kind", "ebnf"),
        (Granted, "num_cached_blocks", 2),
        (Granted, "fence", -1),
        (Granted, "fence", 2**63),
        (Granted, "block_ids", [2**31]),
        (Granted, "wait_s", float("inf")),
        (Heartbeat, "stats/counters", {f"counter_{i}": 1.0 for i in range(257)}),
        (Heartbeat, "stats/counters", {"x": -1.0}),
        (Heartbeat, "stats/counters", {"x": float("nan")}),
        (Heartbeat, "stats/free_blocks", -1),
        (Peers, "peers", [{}] * 4097),
        (PromptLogprobs, "entries/0/0", 0.5),
        (PromptLogprobs, "entries/0/0", float("-inf")),
        (PromptLogprobs, "entries/0/1", [[7, -0.5]] * 21),
        (PromptLogprobs, "entries/0/1/0/0", -1),
        (Register, "worker_id", "w/1"),
        (Register, "worker_id", "w\n"),
        (Register, "worker_id", "x" * 65),
        (Register, "num_blocks", 0),
        (Register, "layout/head_dim", 2**31),
        (Register, "endpoint", "x" * 257),
        (Register, "unknown", 1),
        (Seal, "manifest/transfer_s", 1e6),
        (Seal, "manifest/digests", [-1]),
        (StepTokens, "tokens/0/2", -1),
        (StepTokens, "tokens/0/3", "because"),
        (StepTokens, "tokens/0/4/0", float("nan")),
        (StepTokens, "tokens/0/4/1", [[7, -10_000.0]]),
        (Welcome, "heartbeat_s", 0.0),
        (Welcome, "heartbeat_s", float("inf")),
        (Welcome, "type", "Unheard"),
    ],
)  # fmt: skip
def test_what_is_beyond_its_bounds_is_refused(kind: type[Message], path: str, value: object) -> None:
    with pytest.raises(ProtocolError, match="a message that this version does not read"):
        decode(changed(whole(kind), path, value))


def test_a_message_of_too_many_bytes_or_too_deep_is_refused() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))
    nested = changed(whole(Generate), "job/unknown", None).replace(
        b"\xa7unknown\xc0", b"\xa7unknown" + b"\x91" * 100_000 + b"\xc0"
    )
    with pytest.raises(ProtocolError, match="recursion"):
        decode(nested)


def test_a_length_that_is_announced_is_not_believed() -> None:
    for kind in (b"\xdd", b"\xdb", b"\xc6", b"\xdf"):
        with pytest.raises(ProtocolError):
            decode(b"\x82\xa4type\xa5Peers\xa5peers" + kind + b"\xff\xff\xff\xff")


def test_a_manifest_of_a_whole_pool_fits() -> None:
    ids = tuple(range(100_000))
    plain = WHOLE[Seal]["manifest"] | {"block_ids": ids, "digests": (2**64 - 1,) * len(ids)}
    manifest = msgspec.convert(plain, Manifest)
    assert decode(encode(Seal(manifest))) == Seal(manifest)
