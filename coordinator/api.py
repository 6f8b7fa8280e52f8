"""The HTTP gateway: an OpenAI-compatible API in front of a coordinator's `Service`.

The life of a generation request here: read the body (bounded), check it (`api_requests`), tokenize it, submit
it and carry its outputs to the client (`reply`, `answer`, `api_shapes`). Every error has the OpenAI shape.

Without `max_tokens` a chat answer may take the rest of the context, and a completion 16 tokens, as in vLLM.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from twinpool import __version__
from twinpool.coordinator.answer import Answer
from twinpool.coordinator.api_bodies import ChatBody, CompletionBody, body_schema
from twinpool.coordinator.api_requests import (
    COMPLETION_MAX_TOKENS,
    Conversation,
    GenerationRequest,
    check_token_ids,
    parse_chat,
    parse_completion,
)
from twinpool.coordinator.api_shapes import ChatShape, CompletionShape, Shape, error_json, to_json
from twinpool.coordinator.reply import Reply, ReplyTiming, StreamedReply, WholeReply
from twinpool.coordinator.service import Service, Submission
from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    QueueFull,
    RequestError,
    RequestFailed,
    UnknownRequest,
)

MAX_BODY_BYTES = 16 << 20
INLINE_CHARS = 4096
"""Prompts up to here are tokenized on the event loop, in about a millisecond; longer ones in a thread."""
REMEMBERED_IDS = 16_384

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class RequestIds:
    """Gives every request an id of its own, the client's where that is possible.

    An id that another recent request has, running or not, gets a suffix: late news of one never meets
    another.
    """

    def __init__(self, remembered: int = REMEMBERED_IDS) -> None:
        self._remembered = remembered
        self._taken: OrderedDict[str, None] = OrderedDict()

    def take(self, wanted: str | None) -> str:
        """A fresh id: `wanted` itself if it is sane and not taken, with a suffix if it is taken."""
        if wanted is None or not _SANE_ID.fullmatch(wanted):
            return uuid.uuid4().hex
        request_id = wanted if wanted not in self._taken else f"{wanted}-{secrets.token_hex(4)}"
        self._taken[request_id] = None
        if len(self._taken) > self._remembered:
            self._taken.popitem(last=False)
        return request_id


class Gateway:
    """The routes of one served model. `create_app` mounts them."""

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        model_name: str,
        timing: ReplyTiming,
        max_body_bytes: int,
    ) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._timing = timing
        self._max_body_bytes = max_body_bytes
        self._ids = RequestIds()
        self._longest_token = tokenizer.longest_token
        self._created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation, streamed or whole."""
        return await self._generate(request, parse_chat, ChatShape, default_max_tokens=None)

    async def completions(self, request: Request) -> Response:
        """Continues a text or a list of token ids, streamed or whole."""
        return await self._generate(
            request, parse_completion, CompletionShape, default_max_tokens=COMPLETION_MAX_TOKENS
        )

    async def models(self) -> Response:
        """The served model, as a list of one."""
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        """The served model."""
        self._check_model(name)
        return _json(self._model_card())

    async def timeline(self, request_id: str) -> Response:
        """The stages of a running or recent request, by the id of its `X-Request-Id` header or its answer."""
        try:
            return _json(self._service.timeline(request_id))
        except UnknownRequest:
            prefix, _, rest = request_id.partition("-")
            if prefix not in (ChatShape.id_prefix, CompletionShape.id_prefix):
                raise
            return _json(self._service.timeline(rest))

    async def health(self) -> Response:
        """200 while the gateway runs."""
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        """200 when every pool has a worker that can execute, else 503 with the reason."""
        ready, reason = self._service.ready()
        return _json({"ready": ready, "reason": reason}, status=200 if ready else 503)

    async def metrics(self) -> Response:
        """All metrics in the Prometheus text format."""
        return Response(self._service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self) -> Response:
        """The server's version."""
        return _json({"version": __version__})

    async def _generate(
        self,
        request: Request,
        parse: Callable[[bytes], GenerationRequest],
        shape: type[Shape],
        default_max_tokens: int | None,
    ) -> Reply:
        service = self._service
        received_at = service.now()
        request_id = self._ids.take(request.headers.get("x-request-id"))
        request.scope["twinpool.request_id"] = request_id
        wanted = parse(await self._read_body(request))
        if wanted.model is not None:
            self._check_model(wanted.model)
        check_token_ids("stop_token_ids", wanted.stop_token_ids, self._tokenizer.vocab_size)
        validated_at = service.now()
        token_ids = await self._tokenize(wanted)
        tokenized_at = service.now()
        submission = Submission(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=wanted.sampling(
                len(token_ids), service.max_model_len, default_max_tokens=default_max_tokens
            ),
            received_at=received_at,
            validated_at=validated_at,
            tokenized_at=tokenized_at,
            cache_salt=wanted.cache_salt,
        )
        reply = StreamedReply if wanted.stream else WholeReply
        return reply(
            service,
            submission,
            Answer(IncrementalDetokenizer(self._tokenizer), wanted.stop, wanted.min_tokens),
            shape(
                request_id,
                self._model_name,
                int(time.time()),
                token_ids,
                include_usage=wanted.include_usage,
                return_token_ids=wanted.return_token_ids,
            ),
            self._timing,
            {"x-request-id": request_id},
        )

    async def _read_body(self, request: Request) -> bytes:
        limit = self._max_body_bytes
        declared = request.headers.get("content-length", "")
        too_large = BodyTooLarge(f"the body is longer than {limit} bytes; send a shorter prompt")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
        return b"".join(parts)

    async def _tokenize(self, wanted: GenerationRequest) -> tuple[int, ...]:
        prompt = wanted.prompt
        context = self._service.max_model_len
        if isinstance(prompt, tuple):
            check_token_ids("prompt", prompt, self._tokenizer.vocab_size)
            token_ids = prompt
        elif _num_chars(prompt) <= INLINE_CHARS:
            token_ids = self._encode(prompt, wanted.add_special_tokens, context)
        else:
            token_ids = await asyncio.to_thread(self._encode, prompt, wanted.add_special_tokens, context)
        if not token_ids:
            raise InvalidRequest("prompt is empty; send at least one token", param="prompt")
        return token_ids

    def _encode(self, prompt: str | Conversation, add_special_tokens: bool, context: int) -> tuple[int, ...]:
        param = "prompt"
        if isinstance(prompt, Conversation):
            param = "messages"
            prompt = self._tokenizer.apply_chat_template(prompt.messages, **prompt.template_arguments)
        # Tokenizing takes about a second per million characters: not for a text that cannot fit.
        if len(prompt) > context * self._longest_token:
            message = f"the prompt has {len(prompt)} characters; {context} tokens hold less, so shorten it"
            raise ContextLengthExceeded(message, param=param)
        return tuple(self._tokenizer.encode(prompt, add_special_tokens))

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ModelNotFound(
                f"the model {name!r} is not served here; use {self._model_name!r}", param="model"
            )

    def _model_card(self) -> dict[str, Any]:
        card = {"id": self._model_name, "object": "model", "created": self._created, "owned_by": "twinpool"}
        try:
            return {**card, "max_model_len": self._service.max_model_len}
        except NoWorker:  # not known before the first worker has joined
            return {**card, "max_model_len": None}


def create_app(
    service: Service,
    tokenizer: Tokenizer,
    model_name: str,
    *,
    timing: ReplyTiming | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The ASGI application that serves `model_name` through `service`."""
    gateway = Gateway(service, tokenizer, model_name, timing or ReplyTiming(), max_body_bytes)
    app = FastAPI(title="Twinpool", version=__version__, redirect_slashes=False)
    for path, handler in (
        ("/v1/models", gateway.models),
        ("/v1/models/{name:path}", gateway.model),
        ("/v1/requests/{request_id}/timeline", gateway.timeline),
        ("/health", gateway.health),
        ("/ready", gateway.ready),
        ("/metrics", gateway.metrics),
        ("/version", gateway.version),
    ):
        app.add_api_route(path, handler, methods=["GET"])
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
    app.add_api_route(
        "/v1/completions", gateway.completions, methods=["POST"], openapi_extra=body_schema(CompletionBody)
    )
    app.add_api_route(
        "/v1/chat/completions",
        gateway.chat_completions,
        methods=["POST"],
        openapi_extra=body_schema(ChatBody),
    )
    app.add_exception_handler(RequestError, _answer_request_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_bug)
    return app


def _num_chars(prompt: str | Conversation) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt.messages)


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


class _HttpError(RequestError):
    """A refusal of the HTTP layer itself: no such path, or not with that method."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _error_response(
    request: Request, error: RequestError, headers: Mapping[str, str] | None = None
) -> Response:
    response = Response(error_json(error), error.status, headers=headers, media_type="application/json")
    if request_id := request.scope.get("twinpool.request_id"):
        response.headers["x-request-id"] = request_id
    return response


async def _answer_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    return _error_response(request, error, headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    allowed = (error.headers or {}).get("Allow", "")
    match error.status_code:
        case 404:
            message = f"{where} is no route of this server; GET /docs lists them"
        case 405:
            message = f"{where} is not allowed; use {allowed}"
        case _:
            message = f"{where}: {error.detail}"
    return _error_response(request, _HttpError(message, error.status_code), error.headers)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # the client left while sending its body: nothing reads this


async def _answer_bug(request: Request, error: Exception) -> Response:
    message = f"the server failed with {type(error).__name__}; this is a bug in Twinpool, see its log"
    return _error_response(request, RequestFailed(message))
