"""The HTTP gateway: an OpenAI-compatible API in front of a coordinator's `Service`.

The life of a generation request here: read the body (bounded), check it (`requests`), tokenize it, submit
it and carry its outputs to the client (`reply`, `answer`, `shapes`). Every error has the OpenAI shape.

Without `max_tokens` a chat answer may take the rest of the context, and a completion 16 tokens, as in vLLM.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from fastapi import FastAPI, Request, Response

from twinpool import __version__
from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.answer import Answer
from twinpool.coordinator.gateway.bodies import ChatBody, CompletionBody, shown
from twinpool.coordinator.gateway.cache_salts import CacheSalts
from twinpool.coordinator.gateway.connection import CONNECTION
from twinpool.coordinator.gateway.docs import describe_keys, generation_schema
from twinpool.coordinator.gateway.error_answers import REQUEST_ID, add_error_handlers
from twinpool.coordinator.gateway.front import TENANT, FrontDoor
from twinpool.coordinator.gateway.key_ring import KeyRing
from twinpool.coordinator.gateway.meter import GatewayMeter
from twinpool.coordinator.gateway.reply import Reply, StreamedReply, WholeReply
from twinpool.coordinator.gateway.request_body import BodyReader
from twinpool.coordinator.gateway.request_ids import Claim, RequestIds, internal_id
from twinpool.coordinator.gateway.requests import (
    COMPLETION_MAX_TOKENS,
    Conversation,
    GenerationRequest,
    check_token_ids,
    parse_chat,
    parse_completion,
    parse_timeout_header,
)
from twinpool.coordinator.gateway.shapes import ChatShape, CompletionShape, Shape, to_json
from twinpool.coordinator.service import Service, Submission
from twinpool.coordinator.tenants import Tenant
from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    UnknownRequest,
)
from twinpool.metrics import GatewayMetric

INLINE_BYTES = 64 << 10
"""Bodies up to here are parsed on the event loop, in about a millisecond; longer ones in a thread."""
INLINE_CHARS = 4096
"""Prompts up to here are tokenized on the event loop, in about a millisecond; longer ones in a thread."""


class Gateway:
    """The routes of one served model. `create_app` mounts them."""

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        model_name: str,
        limits: GatewayConfig,
        meter: GatewayMeter,
    ) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._limits = limits
        self._meter = meter
        self._bodies = BodyReader(limits)
        self._ids = RequestIds()
        self._salts = CacheSalts()
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

    async def timeline(self, request: Request, request_id: str) -> Response:
        """The stages of a running or recent request of one's own, by the id of its `X-Request-Id` header or its
        answer."""
        tenant: Tenant = request.scope[TENANT]
        for shown_id in _shown_ids(request_id):
            try:
                timeline = self._service.timeline(internal_id(tenant, shown_id))
            except UnknownRequest:
                continue
            return _json({**timeline, "request_id": shown_id})
        raise _unknown(request_id)

    async def cancel(self, request: Request, request_id: str) -> Response:
        """Ends a request of one's own, by the id of its `X-Request-Id` header or its answer: its client gets an error
        with the code `cancelled`. Does nothing to one that has ended."""
        tenant: Tenant = request.scope[TENANT]
        for shown_id in _shown_ids(request_id):
            if (claim := self._ids.running(tenant, shown_id)) is not None:
                claim.is_cancelled = True
                shown_id = claim.shown_id
            try:
                self._service.cancel(internal_id(tenant, shown_id), tenant)
            except UnknownRequest:
                if claim is None:
                    continue
            return _json({"request_id": shown_id, "was_running": claim is not None})
        raise _unknown(request_id)

    async def health(self) -> Response:
        """200 while work that waits makes progress, or there is none; else 503 with what stands still."""
        is_healthy, reason = self._service.health()
        body = {"status": "ok" if is_healthy else "stuck", "reason": reason}
        return _json(body, status=200 if is_healthy else 503)

    async def ready(self) -> Response:
        """200 when every pool has a worker that can execute, else 503 with the reason."""
        ready, reason = self._service.ready()
        return _json({"ready": ready, "reason": reason}, status=200 if ready else 503)

    async def metrics(self) -> Response:
        """All metrics in the Prometheus text format."""
        text = self._service.metrics_text() + self._meter.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

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
        tenant: Tenant = request.scope[TENANT]
        with ExitStack() as held:
            claim = self._claim(request, tenant)
            held.callback(self._ids.release, claim)
            request.scope[REQUEST_ID] = claim.shown_id
            reply = await self._prepare(request, claim, parse, shape, default_max_tokens)
            reply.held = held.pop_all()
        return reply

    def _claim(self, request: Request, tenant: Tenant) -> Claim:
        headers = request.headers
        is_duplicate_fine = headers.get("x-allow-duplicate", "").lower() == "true"
        try:
            return self._ids.claim(
                tenant,
                headers.get("x-request-id"),
                request.scope[CONNECTION],
                is_duplicate_fine=is_duplicate_fine,
            )
        except DuplicateRequest:
            request.scope[REQUEST_ID] = headers["x-request-id"]
            self._meter.count(GatewayMetric.DUPLICATES)
            raise

    async def _prepare(
        self,
        request: Request,
        claim: Claim,
        parse: Callable[[bytes], GenerationRequest],
        shape: type[Shape],
        default_max_tokens: int | None,
    ) -> Reply:
        """Reads, checks and tokenizes the request; the reply submits it."""
        service = self._service
        received_at = service.now()
        header_timeout_s = parse_timeout_header(request.headers.get("x-request-timeout"))
        with self._bodies.reading() as body:
            raw = await body.read(request)
            wanted = parse(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(parse, raw)
            if wanted.model is not None:
                self._check_model(wanted.model)
            check_token_ids("stop_token_ids", wanted.stop_token_ids, self._tokenizer.vocab_size)
            validated_at = service.now()
            service.knock(claim.request_id, claim.tenant, wanted.priority)
            token_ids = await self._tokenize(wanted)
        tokenized_at = service.now()
        timeout_s = min(header_timeout_s, wanted.timeout_s)
        submission = Submission(
            request_id=claim.request_id,
            prompt_token_ids=token_ids,
            sampling=wanted.sampling(
                len(token_ids), service.max_model_len, default_max_tokens=default_max_tokens
            ),
            received_at=received_at,
            validated_at=validated_at,
            tokenized_at=tokenized_at,
            cache_salt=self._salts.salt(claim.tenant, wanted.cache_salt),
            tenant=claim.tenant,
            priority=wanted.priority,
            deadline=None if timeout_s == math.inf else received_at + timeout_s,
        )
        reply = StreamedReply if wanted.stream else WholeReply
        return reply(
            service,
            submission,
            Answer(IncrementalDetokenizer(self._tokenizer), wanted.stop, wanted.min_tokens),
            shape(
                claim.shown_id,
                self._model_name,
                int(time.time()),
                token_ids,
                include_usage=wanted.include_usage,
                return_token_ids=wanted.return_token_ids,
            ),
            self._limits,
            claim,
        )

    async def _tokenize(self, wanted: GenerationRequest) -> tuple[int, ...]:
        prompt = wanted.prompt
        context = self._service.max_model_len
        if isinstance(prompt, tuple):
            if len(prompt) > context:
                message = f"the prompt has {len(prompt)} tokens; the model's context is {context}: shorten it"
                raise ContextLengthExceeded(message, param="prompt")
            check_token_ids("prompt", prompt, self._tokenizer.vocab_size)
            token_ids = prompt
        elif isinstance(prompt, Conversation) and len(prompt.messages) > context:
            # A template is rendered in Python, about 100,000 messages in a second: not those that cannot fit.
            message = (
                f"there are {len(prompt.messages)} messages; {context} tokens hold fewer, so leave some out"
            )
            raise ContextLengthExceeded(message, param="messages")
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
                f"the model {shown(name)} is not served here; use {self._model_name!r}", param="model"
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
    limits: GatewayConfig | None = None,
    keys: KeyRing | None = None,
    meter: GatewayMeter | None = None,
) -> FastAPI:
    """The ASGI application that serves `model_name` through `service`; without `keys` to anyone."""
    limits, meter = limits or GatewayConfig(), meter or GatewayMeter()
    gateway = Gateway(service, tokenizer, model_name, limits, meter)
    app = FastAPI(title="Twinpool", version=__version__, redirect_slashes=False, redoc_url=None)
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
    for path, post, body in (
        ("/v1/completions", gateway.completions, CompletionBody),
        ("/v1/chat/completions", gateway.chat_completions, ChatBody),
    ):
        app.add_api_route(path, post, methods=["POST"], openapi_extra=generation_schema(body))
    app.add_api_route("/v1/requests/{request_id}/cancel", gateway.cancel, methods=["POST"])
    app.add_middleware(FrontDoor, keys=keys, meter=meter, metrics_open=limits.metrics_open)
    add_error_handlers(app)
    if keys is not None:
        describe_keys(app)
    return app


def _num_chars(prompt: str | Conversation) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(text) for message in prompt.messages for text in message.values())


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _shown_ids(request_id: str) -> tuple[str, ...]:
    """What a client may mean by an id: a request's own, or its answer's."""
    prefix, _, rest = request_id.partition("-")
    is_answers = prefix in (ChatShape.id_prefix, CompletionShape.id_prefix)
    return (request_id, rest) if is_answers else (request_id,)


def _unknown(request_id: str) -> UnknownRequest:
    return UnknownRequest(
        f"no request {request_id!r} of yours is known: it never came, was refused, or ended too long ago",
        param="request_id",
    )
