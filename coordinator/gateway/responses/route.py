"""`/v1/responses` and what lies below it."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from twinpool.coordinator.gateway.bodies import read_object
from twinpool.coordinator.gateway.docs import body_schema, generation_schema
from twinpool.coordinator.gateway.field_names import FieldNames
from twinpool.coordinator.gateway.generation import Generator
from twinpool.coordinator.gateway.ignored_fields import warning_headers, warnings_of
from twinpool.coordinator.gateway.parsing import chat_request
from twinpool.coordinator.gateway.requests import GenerationRequest
from twinpool.coordinator.gateway.responses.body import ResponsesBody, as_chat, check_responses
from twinpool.coordinator.gateway.responses.shape import ResponsesShape
from twinpool.coordinator.gateway.shapes import Heading, Shape, to_json
from twinpool.coordinator.gateway.tokenizing import PromptCounter
from twinpool.coordinator.gateway.tools import AnswerFormat
from twinpool.errors import NotStored

PATH = "/v1/responses"
COUNT = "input_tokens"
NAMES = FieldNames(
    fields={"messages": "input"},
    parts={
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        ".function.": ".",
    },
)


class Responses:
    """The routes of `/v1/responses`."""

    def __init__(self, generator: Generator, counter: PromptCounter) -> None:
        self._generator = generator
        self._counter = counter

    def mount(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        create = generation_schema(ResponsesBody)
        app.add_api_route(PATH, self.create, methods=["POST"], openapi_extra=create)
        count = body_schema(ResponsesBody)
        app.add_api_route(f"{PATH}/{COUNT}", self.input_tokens, methods=["POST"], openapi_extra=count)
        stored = f"{PATH}/{{rest:path}}"
        app.add_api_route(
            stored, self.stored, methods=["GET", "HEAD", "POST", "DELETE"], include_in_schema=False
        )

    async def create(self, request: Request) -> Response:
        """Answers turns that are sent as input, streamed or whole; in OpenAI's newer form."""
        exchange = _Exchange(self._generator.answers)
        with NAMES.in_errors():
            return await self._generator.generate(request, exchange.parse, exchange.shape)

    async def input_tokens(self, request: Request) -> Response:
        """Counts the tokens of such a request's input."""
        with NAMES.in_errors():
            counted = await self._counter.count(request, _Exchange(self._generator.answers).parse)
        body = to_json({"object": "response.input_tokens", "input_tokens": counted.num_tokens})
        return Response(body, media_type="application/json", headers=warning_headers(counted.warnings))

    async def stored(self, request: Request) -> Response:
        """Says that nothing is kept."""
        if request.path_params["rest"] == COUNT:
            raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED)
        raise NotStored(
            f"{request.method} {request.url.path}: answers are not stored; keep what you get, and send it as input to "
            "go on"
        )


def parse_responses(data: bytes, answers: AnswerFormat) -> tuple[ResponsesBody, GenerationRequest]:
    """Reads the body of `/v1/responses`, to a model whose answers are `answers`. Raises InvalidRequest."""
    raw = read_object(data)
    body = check_responses(raw)
    wanted = chat_request(as_chat(body), answers)
    return body, replace(
        wanted, warnings=(*warnings_of(raw, ResponsesBody), *map(NAMES.said, wanted.warnings))
    )


class _Exchange:
    """One request, from its body to the writer of its answer."""

    _body: ResponsesBody

    def __init__(self, answers: AnswerFormat) -> None:
        self._answers = answers

    def parse(self, data: bytes) -> GenerationRequest:
        self._body, wanted = parse_responses(data, self._answers)
        return wanted

    def shape(self, heading: Heading) -> Shape:
        return ResponsesShape(self._body, heading)
