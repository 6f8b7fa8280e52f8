"""Every error that Twinpool raises on purpose.

    TwinpoolError
    ├── ConfigError              an operator's mistake: stops the start with one line
    ├── ModelError               a model that cannot be found, read or run
    ├── RequestError             a user's mistake or an unmet wish: becomes an HTTP answer
    │   ├── InvalidRequest           400
    │   │   └── ContextLengthExceeded    400, code context_length_exceeded
    │   ├── BodyTooLarge             413
    │   ├── ModelNotFound            404, code model_not_found
    │   ├── UnknownRequest           404
    │   ├── QueueFull                429, with Retry-After
    │   ├── NoWorker                 503
    │   └── RequestFailed            500: accepted, then lost (a worker died, a transfer broke)
    ├── ProtocolError            a message that does not decode, or comes at the wrong time
    ├── WorkerDenied             the coordinator does not let this worker in
    ├── NotAMember               the coordinator does not know this worker process any more
    ├── LayoutMismatch           two workers whose KV cannot be exchanged
    ├── TransferError            moving KV blocks failed
    │   ├── TransportUnavailable     this machine cannot use that transport
    │   ├── PeerLost                 the other side is gone
    │   └── DigestMismatch           bytes arrived that are not the bytes that were sent
    └── InvariantViolation       a bug in Twinpool: counted, logged, never hidden

Messages say what was wanted, what was found and what to do.
"""

from __future__ import annotations


class TwinpoolError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(TwinpoolError):
    """A setting is wrong. The message names the setting, its value and the allowed ones."""


class ModelError(TwinpoolError):
    """A model cannot be found, read or run."""


class RequestError(TwinpoolError):
    """A request that gets an error answer in the OpenAI shape.

    `param` names the offending field; `status` and `kind` become the HTTP status and `error.type`.
    """

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """A field has a wrong type or value."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output do not fit the model's context."""

    code = "context_length_exceeded"


class BodyTooLarge(RequestError):
    """The request's body is longer than the gateway reads."""

    status = 413
    code = "body_too_large"


class ModelNotFound(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class UnknownRequest(RequestError):
    """No request with this id is known (never seen, or forgotten since)."""

    status = 404
    code = "request_not_found"


class QueueFull(RequestError):
    """The bounded queue has no room. `retry_after_s` is the predicted wait in seconds."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorker(RequestError):
    """A pool has no worker that can execute."""

    status = 503
    kind = "service_unavailable_error"
    code = "no_worker"


class RequestFailed(RequestError):
    """An accepted request was lost and cannot be continued."""

    status = 500
    kind = "server_error"
    code = "request_failed"


class ProtocolError(TwinpoolError):
    """A message that does not decode, has another version, or comes at the wrong time."""


class WorkerDenied(TwinpoolError):
    """The coordinator does not let this worker in, and says why. Starting it again cannot help."""


class NotAMember(TwinpoolError):
    """The coordinator does not know this worker process (any more). A new process in its place may join."""


class LayoutMismatch(TwinpoolError):
    """Two workers whose KV blocks cannot be exchanged. The message names both sides' values."""


class TransferError(TwinpoolError):
    """Moving KV blocks failed."""


class TransportUnavailable(TransferError):
    """This machine cannot use the transport. The message says what would make it usable."""


class PeerLost(TransferError):
    """The worker at the other end is gone."""


class DigestMismatch(TransferError):
    """Bytes arrived that are not the bytes that were sent, in `num_blocks` blocks."""

    def __init__(self, message: str, *, num_blocks: int) -> None:
        super().__init__(message)
        self.num_blocks = num_blocks


class InvariantViolation(TwinpoolError):
    """A bug in Twinpool: an ownership or lifecycle rule was broken."""
