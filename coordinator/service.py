"""What the gateway (HTTP) asks of the coordinator behind it. The gateway knows nothing of workers or states."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from twinpool.coordinator.tenants import ANYONE, Allowances, Tenant
from twinpool.errors import RequestError
from twinpool.request import FinishReason, SamplingParams, TokenLogprobs


class Submission(msgspec.Struct, frozen=True):
    """A validated, tokenized request.

    `received_at` is the coordinator clock's reading when the HTTP request came in, `validated_at` and `tokenized_at`
    those after parsing and after tokenizing. The answer must be complete by `deadline` (the same clock; None: no
    bound): waiting counts. Of one tenant's waiting requests the lowest `priority` goes first. It is one of
    `num_choices` that a client's request asks for: `num_after` of these, with up to `tokens_after` tokens of prompt and
    output, are submitted right after it, and if there is no quota for them there is none for it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    received_at: float
    validated_at: float
    tokenized_at: float
    cache_salt: str = ""
    tenant: Tenant = ANYONE
    priority: int = 0
    deadline: float | None = None
    num_choices: int = 1
    num_after: int = 0
    tokens_after: int = 0


class Output(NamedTuple):
    """The next output tokens of a request, in order, each once. The last one has `finish`; it may have no tokens.

    `error` is set when `finish` is CANCELLED, TIMEOUT or ERROR, and says why. `first_index` counts output tokens
    from 0. `logprobs[i]` is of `token_ids[i]`, if the request asks for them, else there are none. The first output with
    tokens has `prompt_logprobs`, if they are asked for: entry i is of prompt token i + 1.
    """

    token_ids: tuple[int, ...]
    first_index: int
    finish: FinishReason | None = None
    error: RequestError | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What became of a request so far, for its client. Seconds on the coordinator's clock.

    `num_cached_tokens` of the prompt were found in a prefix cache and `num_computed_tokens` were run, by the attempt
    that gave the first token: together they are the prompt, once that is there. `num_transferred_tokens` are those
    whose KV moved between workers, over all attempts; `num_resumed` counts attempts after the first.
    """

    num_cached_tokens: int
    num_computed_tokens: int
    num_transferred_tokens: int
    num_resumed: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float

    def as_json(self) -> dict[str, float]:
        """Under the names that clients and the record of requests have for them; times are milliseconds."""
        return {
            "queue_ms": milliseconds(self.queue_s),
            "prefill_ms": milliseconds(self.prefill_s),
            "transfer_ms": milliseconds(self.transfer_s),
            "decode_ms": milliseconds(self.decode_s),
            "computed_tokens": self.num_computed_tokens,
            "cached_tokens": self.num_cached_tokens,
            "transferred_tokens": self.num_transferred_tokens,
            "resumed": self.num_resumed,
        }


def milliseconds(seconds: float) -> float:
    """As they are told: to the microsecond."""
    return round(seconds * 1000, 3)


Take = Callable[[Output], bool]
"""Takes an output at once, or returns false: then it is the iterator's."""


class Service(Protocol):
    """One coordinator."""

    def now(self) -> float:
        """The coordinator clock, in seconds."""
        ...

    def knock(self, request_id: str, tenant: Tenant, priority: int) -> None:
        """Raises what `submit` would raise for any request of that tenant and priority now, whatever its prompt:
        NoWorker, QueueFull, QuotaExceeded. Asked before a prompt is tokenized, so that a refusal costs nothing."""
        ...

    def submit(self, submission: Submission, take: Take | None = None) -> AsyncIterator[Output]:
        """Admits the request, whose id no live one has, and yields its outputs; ends after the one with `finish`.

        Each output without `finish` that comes while none waits in the iterator is offered to `take` first, outside of
        any task: it must not wait. The iterator raises what `take` raises.

        Raises at once: ContextLengthExceeded, InvalidRequest, NoWorker, and the kinds of TryLater: QueueFull,
        QuotaExceeded, DeadlineUnmeetable.
        """
        ...

    def complete(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string ended the answer at its `num_output_tokens`-th token: the workers stop, the state is completed,
        tokens behind it are not the client's. The iterator of `submit` ends without another output. For a request
        that has ended already only its token count and finish reason are put right; unknown ids are ignored."""
        ...

    def abandon(self, request_id: str) -> None:
        """The client has left: everything of this request is released. Unknown or finished ids are ignored."""
        ...

    def cancel(self, request_id: str, tenant: Tenant) -> None:
        """`tenant` wants this request of its own to end: its stream gets CANCELLED (RequestCancelled) as its last
        output, and everything is released. Does nothing if the request has ended already. Raises UnknownRequest if
        `tenant` has no such request."""
        ...

    def cut(self, request_id: str, error: RequestError) -> None:
        """The client does not keep up: everything is released, and the request counts as failed for that reason.
        Nobody reads its outputs any more. Unknown or finished ids are ignored."""
        ...

    def delivered(self, request_id: str) -> None:
        """The first output has been handed to the HTTP connection (stamps TTFT on the server's clock)."""
        ...

    def allowances(self, tenant: Tenant) -> Allowances:
        """What is left of the tenant's quotas. Changes nothing."""
        ...

    def facts(self, request_id: str) -> RequestFacts:
        """What became of a running or recent request. Raises UnknownRequest."""
        ...

    def timeline(self, request_id: str) -> Mapping[str, Any]:
        """The stages of a running or recent request as JSON values. Raises UnknownRequest."""
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether every pool has a worker that can execute, and a sentence that says what is missing."""
        ...

    def health(self) -> tuple[bool, str]:
        """Whether work that waits makes progress (true with nothing to do), and a sentence: what stands still."""
        ...

    def metrics_text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        ...

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens, that every worker can hold (the smallest of the workers' bounds).

        Raises NoWorker before the first worker has registered."""
        ...
