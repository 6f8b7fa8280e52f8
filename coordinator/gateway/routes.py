"""The HTTP gateway: an OpenAI-compatible API in front of a coordinator's `Service`.

`generation.py` tells the way of a generation request. Errors have the OpenAI shape, below `/v1/messages` Anthropic's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from twinpool import __version__
from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.admin import Admin
from twinpool.coordinator.gateway.admin_door import AdminDoor
from twinpool.coordinator.gateway.bodies import MAX_CHOICES, ChatBody, CompletionBody
from twinpool.coordinator.gateway.chat_shape import ChatShape
from twinpool.coordinator.gateway.completion_shape import CompletionShape
from twinpool.coordinator.gateway.docs import describe, generation_schema
from twinpool.coordinator.gateway.docs_page import docs
from twinpool.coordinator.gateway.error_answers import add_error_handlers
from twinpool.coordinator.gateway.front import TENANT, FrontDoor
from twinpool.coordinator.gateway.further_routes import mount_further_routes
from twinpool.coordinator.gateway.generation import Generator
from twinpool.coordinator.gateway.key_ring import KeyRing
from twinpool.coordinator.gateway.manners import Manners
from twinpool.coordinator.gateway.meter import GatewayMeter
from twinpool.coordinator.gateway.parsing import parse_chat, parse_completion
from twinpool.coordinator.gateway.request_ids import internal_id, numbered_id
from twinpool.coordinator.gateway.shapes import to_json
from twinpool.coordinator.pool_desk import PoolService
from twinpool.coordinator.service import Service
from twinpool.coordinator.tenants import Tenant
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import NoWorker, UnknownRequest

_ANSWER_ID = re.compile(r"(?:(?:chatcmpl|cmpl)-|(?:resp|msg)_)(?P<shown_id>.+)")


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
        self.generator = Generator(service, tokenizer, model_name, limits, meter)
        self._service = service
        self._meter = meter
        self._parse_chat = partial(parse_chat, answers=self.generator.answers)
        self._created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation, streamed or whole."""
        return await self.generator.generate(request, self._parse_chat, ChatShape)

    async def completions(self, request: Request) -> Response:
        """Continues texts or lists of token ids, streamed or whole."""
        return await self.generator.generate(request, parse_completion, CompletionShape)

    async def models(self) -> Response:
        """The served model, as a list of one."""
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        """The served model."""
        self.generator.check_model(name)
        return _json(self._model_card())

    async def timeline(self, request: Request, request_id: str) -> Response:
        """The stages of a running or recent request of one's own, by the id of its `X-Request-Id` header or its
        answer. Of one that asked for several answers: of each choice."""
        tenant: Tenant = request.scope[TENANT]
        for shown_id in _shown_ids(request_id):
            own_id = internal_id(tenant, shown_id)
            if (timeline := self._timeline(own_id)) is not None:
                return _json({**timeline, "request_id": shown_id})
            numbered = [
                (number, self._timeline(numbered_id(own_id, number))) for number in range(MAX_CHOICES)
            ]
            choices = [
                {**timeline, "request_id": shown_id, "choice": number}
                for number, timeline in numbered
                if timeline is not None
            ]
            if choices:
                return _json({"request_id": shown_id, "choices": choices})
        raise _unknown(request_id)

    async def cancel(self, request: Request, request_id: str) -> Response:
        """Ends a request of one's own, by the id of its `X-Request-Id` header or its answer: its client gets an error
        with the code `cancelled`. Does nothing to one that has ended."""
        tenant: Tenant = request.scope[TENANT]
        for shown_id in _shown_ids(request_id):
            if (claim := self.generator.ids.running(tenant, shown_id)) is not None:
                claim.is_cancelled = True
                shown_id = claim.shown_id
            own_id = internal_id(tenant, shown_id)
            numbered = [numbered_id(own_id, number) for number in range(MAX_CHOICES)]
            known = [
                self._cancel(id_, tenant) for id_ in (claim.strand_ids if claim else (own_id, *numbered))
            ]
            if claim is not None or any(known):
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

    def _timeline(self, internal: str) -> Mapping[str, Any] | None:
        try:
            return self._service.timeline(internal)
        except UnknownRequest:
            return None

    def _cancel(self, internal: str, tenant: Tenant) -> bool:
        """Whether there is such a request, which then ends."""
        try:
            self._service.cancel(internal, tenant)
        except UnknownRequest:
            return False
        return True

    def _model_card(self) -> dict[str, Any]:
        card = {
            "id": self.generator.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "twinpool",
        }
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
    pools: PoolService | None = None,
) -> FastAPI:
    """The ASGI application that serves `model_name` through `service`; without `keys` to anyone. Operators get at
    `pools`, if they are given."""
    limits, meter = limits or GatewayConfig(), meter or GatewayMeter()
    gateway = Gateway(service, tokenizer, model_name, limits, meter)
    app = FastAPI(
        title="Twinpool", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    app.add_api_route("/docs", docs, methods=["GET", "HEAD"], include_in_schema=False)
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
    mount_further_routes(app, service, tokenizer, gateway.generator)
    if pools is not None:
        Admin(pools, gateway.generator).mount(app)
    app.add_middleware(
        FrontDoor, keys=keys, admin=AdminDoor(limits.admin_key), meter=meter, metrics_open=limits.metrics_open
    )
    app.add_middleware(Manners, routes=app.routes, origins=limits.cors_origins, allowances=service.allowances)
    add_error_handlers(app)
    describe(app, needs_key=keys is not None, metrics_open=limits.metrics_open)
    return app


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _shown_ids(request_id: str) -> tuple[str, ...]:
    """What a client may mean by an id: a request's own, or its answer's."""
    found = _ANSWER_ID.fullmatch(request_id)
    return (request_id,) if found is None else (request_id, found["shown_id"])


def _unknown(request_id: str) -> UnknownRequest:
    return UnknownRequest(
        f"no request {request_id!r} of yours is known: it never came, was refused, or ended too long ago",
        param="request_id",
    )
