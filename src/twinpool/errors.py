"""Every error that Twinpool raises on purpose.

    TwinpoolError
    ├── ConfigError              an operator's mistake: stops the start with one line
    ├── ModelError               a model that cannot be found, read or run
    ├── RequestError             a user's mistake or an unmet wish: becomes an HTTP answer
    │   ├── InvalidRequest           400
    │   │   └── ContextLengthExceeded    400, code context_length_exceeded
    │   ├── Unauthorized             401: no key, or not one of this server's
    │   ├── Forbidden                403: this key may not do that
    │   ├── BodyTooLarge             413
    │   ├── NotServed                400: a route that other servers have
    │   ├── NotStored                404: an answer that is asked for again
    │   ├── ModelNotFound            404, code model_not_found
    │   ├── UnknownRequest           404
    │   ├── UnknownWorker            404: an operator names a worker that is not there
    │   ├── DuplicateRequest         409: a request with this id runs already
    │   ├── PoolRefused              409: an operator wants of the pools what they cannot do
    │   ├── TryLater                 429, with Retry-After
    │   │   ├── QueueFull                the bounded queue has no room
    │   │   ├── QuotaExceeded            the tenant has used up what it may per minute
    │   │   └── DeadlineUnmeetable       it would not be served in time
    │   ├── NoWorker                 503
    │   ├── RequestCancelled         499: ended by `POST /v1/requests/{id}/cancel`, or its client left
    │   ├── DeadlineExceeded         504: accepted, and its time has run out
    │   ├── ClientTooSlow            408: its client does not take what it is sent
    │   └── RequestFailed            500: accepted, then lost (a worker died, a transfer broke)
    ├── ProtocolError            a message that does not decode, or comes at the wrong time
    │   └── StrangerRefused          a connection without the join token
    ├── WorkerDenied             the coordinator does not let this worker in
    ├── NotAMember               the coordinator does not know this worker process any more
    ├── StepStuck                a model step does not end
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
    """Prompt plus requested output do not fit the model's context. Its message has the words "this model's maximum
    context length is": clients look for them, to try another model or to leave something out."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """The request bears no API key, or one that this server does not know."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The API key is right, and its tenant may not do this."""

    status = 403
    kind = "permission_error"
    code = "forbidden"


class BodyTooLarge(RequestError):
    """The request's body is longer than the gateway reads."""

    status = 413
    code = "body_too_large"


class NotServed(RequestError):
    """The route is one that other servers have: what it gives is not served here."""

    code = "not_supported"


class NotStored(RequestError):
    """The request asks for an answer that was given before, and none is kept."""

    status = 404
    code = "not_stored"


class ModelNotFound(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class UnknownRequest(RequestError):
    """No request with this id is known (never seen, or forgotten since)."""

    status = 404
    code = "request_not_found"


class UnknownWorker(RequestError):
    """No worker of this name has joined."""

    status = 404
    code = "worker_not_found"


class PoolRefused(RequestError):
    """A change of the pools that would leave one empty, or that a worker or the server cannot make."""

    status = 409
    code = "pool_refused"


class DuplicateRequest(RequestError):
    """A request of the same client with this id is running."""

    status = 409
    code = "duplicate_request"


class TryLater(RequestError):
    """Not now: the same request may be served in `retry_after_s` seconds."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(TryLater):
    """The bounded queue has no room. `retry_after_s` is when there should be."""

    code = "queue_full"


class QuotaExceeded(TryLater):
    """The tenant has used up its requests or tokens per minute. `retry_after_s` is when it has enough again."""

    code = "quota_exceeded"


class DeadlineUnmeetable(TryLater):
    """The request would not be served by its deadline. `retry_after_s` is when it would be."""

    code = "deadline_unmeetable"


class NoWorker(RequestError):
    """A pool has no worker that can execute."""

    status = 503
    kind = "service_unavailable_error"
    code = "no_worker"


class RequestCancelled(RequestError):
    """The request was cancelled: its client asked for it, or left."""

    status = 499
    kind = "cancelled"
    code = "cancelled"


class DeadlineExceeded(RequestError):
    """An accepted request whose time ran out before its answer was complete."""

    status = 504
    kind = "timeout"
    code = "deadline_exceeded"


class ClientTooSlow(RequestError):
    """The client does not take what it is sent; its request is given up."""

    status = 408
    kind = "timeout"
    code = "client_too_slow"


class RequestFailed(RequestError):
    """An accepted request was lost and cannot be continued."""

    status = 500
    kind = "server_error"
    code = "request_failed"


class ProtocolError(TwinpoolError):
    """A message that does not decode, has another version, or comes at the wrong time."""


class StrangerRefused(ProtocolError):
    """A connection without the join token, or of something that does not speak the protocol at all. Nothing of it got
    in."""


class WorkerDenied(TwinpoolError):
    """The coordinator does not let this worker in, and says why. Starting it again cannot help."""


class NotAMember(TwinpoolError):
    """The coordinator does not know this worker process (any more). A new process in its place may join."""


class StepStuck(TwinpoolError):
    """A model step has run for so long that it will not end. Nothing in the process can be waited for any more."""


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
    """A bug in Twinpool: an ownership or lifecycle rule was broken. `request_id` is the request that it was broken for,
    None if that is not known."""

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
