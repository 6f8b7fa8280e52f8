"""The record of requests, in the field's trace format: what is told of a request that has ended, as a line of JSON.

A line has no text and nothing that text can be found from. It has ids of the prompt's blocks, small numbers in the
order in which blocks were first seen; blocks are known again by a keyed hash, whose key is drawn at each start and kept
nowhere. Everything here is a pure function of its arguments and of what came before.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from twinpool.coordinator.service import RequestFacts, milliseconds
from twinpool.request import FinishReason, RequestState

BLOCK_TOKENS = 16
"""Tokens that a hash id stands for: those of a KV block unless `--block-size` says otherwise, so that a replay finds as
much in a prefix cache as was found. Mooncake's traces have 512."""
REMEMBERED_BLOCKS = 1 << 18
"""Blocks whose ids are remembered, those seen last: about 4 million tokens of different prompts, in some 60 MB."""
KEY_BYTES = 32
_DIGEST_BYTES = 16
_TENANT_BYTES = 4
_NO_FACTS = dict.fromkeys(RequestFacts(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0).as_json())
"""Their names, with nothing known."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What became of one request, or of one of the `num_choices` that a client's request asked for.

    Times are seconds; `received_at` is the coordinator clock's. `outcome` is a terminal state. `facts` and `ttft_s` are
    None for what was refused, `ttft_s` for what got no output too. A request that was refused before its prompt was
    tokenized has none here.
    """

    request_id: str
    tenant: str
    received_at: float
    outcome: RequestState
    finish: FinishReason | None = None
    error_code: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    max_tokens: int | None = None
    num_output_tokens: int = 0
    num_choices: int = 1
    ttft_s: float | None = None
    e2e_s: float = 0.0
    facts: RequestFacts | None = None


class Head(msgspec.Struct, frozen=True):
    """What the first line of a file says of all its lines. `started_at` is the server's start, in Unix seconds."""

    block_size: int
    started_at: float
    server: str


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. The first four fields are Mooncake's; `timestamp` is milliseconds from the server's start to the
    request's arrival. Lines come in the order in which requests ended."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    outcome: str
    finish_reason: str | None
    queue_ms: float | None
    prefill_ms: float | None
    transfer_ms: float | None
    decode_ms: float | None
    ttft_ms: float | None
    e2e_ms: float
    cached_tokens: int | None
    computed_tokens: int | None
    transferred_tokens: int | None
    resumed: int | None
    max_tokens: int | None
    choices: int
    error: str | None = None
    tenant: str | None = None
    request_id: str | None = None
    twinpool: Head | None = None


class PrefixIds:
    """Numbers for the blocks that prompts begin with: equal beginnings get equal numbers, others others.

    Prompts with different salts have nothing in common: no prefix cache would find one's blocks for the other. Of the
    blocks seen longest ago, beyond `most`, the numbers are forgotten, and never given out again.
    """

    def __init__(self, key: bytes, most: int = REMEMBERED_BLOCKS) -> None:
        self._key = key
        self._most = most
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0

    def of(self, token_ids: tuple[int, ...], salt: str) -> tuple[int, ...]:
        """The numbers of the prompt's full blocks, in order."""
        tokens = memoryview(array("I", token_ids)).cast("B")
        step = BLOCK_TOKENS * array("I").itemsize
        before = self._digest(salt.encode("utf-8", "surrogatepass"))
        ids = []
        for start in range(0, len(tokens) - step + 1, step):
            before = self._digest(before + tokens[start : start + step])
            ids.append(self._id(before))
        return tuple(ids)

    def _id(self, digest: bytes) -> int:
        known = self._ids.get(digest)
        if known is not None:
            self._ids.move_to_end(digest)
            return known
        id_ = self._ids[digest] = self._next
        self._next += 1
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)
        return id_

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=_DIGEST_BYTES).digest()


class LineMaker:
    """Makes the lines of one server's record. The server started when the coordinator's clock was `started_at`, in Unix
    seconds `started_on`."""

    def __init__(
        self, key: bytes, started_at: float, started_on: float, server: str, *, has_ids: bool
    ) -> None:
        self._key = key
        self._started_at = started_at
        self._has_ids = has_ids
        self._head = Head(BLOCK_TOKENS, round(started_on, 3), server)
        self._prefixes = PrefixIds(key)
        self._to_json = msgspec.json.Encoder().encode

    def line(self, ended: EndedRequest, is_first: bool) -> bytes:
        """The request's line, with the `Head` if it is a file's first."""
        facts: Mapping[str, Any] = _NO_FACTS if ended.facts is None else ended.facts.as_json()
        line = Line(
            timestamp=round((ended.received_at - self._started_at) * 1000),
            input_length=len(ended.prompt_token_ids),
            output_length=ended.num_output_tokens,
            hash_ids=self._prefixes.of(ended.prompt_token_ids, ended.cache_salt),
            outcome=ended.outcome.value,
            finish_reason=None if ended.finish is None else ended.finish.value,
            ttft_ms=None if ended.ttft_s is None else milliseconds(ended.ttft_s),
            e2e_ms=milliseconds(ended.e2e_s),
            max_tokens=ended.max_tokens,
            choices=ended.num_choices,
            error=ended.error_code or None,
            tenant=self._hidden(ended.tenant) if ended.tenant else None,
            request_id=ended.request_id if self._has_ids else None,
            twinpool=self._head if is_first else None,
            **facts,
        )
        return self._to_json(line) + b"\n"

    def _hidden(self, tenant: str) -> str:
        """Tells tenants apart, and not who they are."""
        name = b"tenant " + tenant.encode()
        return hashlib.blake2b(name, key=self._key, digest_size=_TENANT_BYTES).hexdigest()
