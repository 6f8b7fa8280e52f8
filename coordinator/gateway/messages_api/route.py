"""`/v1/messages` and what lies below it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request, Response

from twinpool.coordinator.gateway.bodies import read_object
from twinpool.coordinator.gateway.docs import body_schema, generation_schema
from twinpool.coordinator.gateway.field_names import FieldNames
from twinpool.coordinator.gateway.generation import Generator
from twinpool.coordinator.gateway.ignored_fields import warning_headers, warnings_of
from twinpool.coordinator.gateway.messages_api.body import MessagesBody, as_chat, check_messages
from twinpool.coordinator.gateway.messages_api.errors import PATH
from twinpool.coordinator.gateway.messages_api.shape import MessagesShape
from twinpool.coordinator.gateway.parsing import chat_request
from twinpool.coordinator.gateway.requests import GenerationRequest
from twinpool.coordinator.gateway.shapes import to_json
from twinpool.coordinator.gateway.tokenizing import PromptCounter
from twinpool.coordinator.gateway.tools import AnswerFormat

NAMES = FieldNames(
    fields={"stop": "stop_sequences"},
    parts={
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        ".function.parameters": ".input_schema",
        ".function.": ".",
    },
)


class Messages:
    """The routes of `/v1/messages`."""

    def __init__(self, generator: Generator, counter: PromptCounter) -> None:
        self._generator = generator
        self._parse = partial(parse_messages, answers=generator.answers)
        self._counter = counter

    def mount(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        create, count = generation_schema(MessagesBody), body_schema(MessagesBody)
        app.add_api_route(PATH, self.create, methods=["POST"], openapi_extra=create)
        app.add_api_route(f"{PATH}/count_tokens", self.count_tokens, methods=["POST"], openapi_extra=count)

    async def create(self, request: Request) -> Response:
        """Answers a conversation, streamed or whole; in Anthropic's form."""
        with NAMES.in_errors():
            return await self._generator.generate(request, self._parse, MessagesShape)

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of such a request's prompt."""
        with NAMES.in_errors():
            counted = await self._counter.count(request, partial(self._parse, for_answer=False))
        body = to_json({"input_tokens": counted.num_tokens})
        return Response(body, media_type="application/json", headers=warning_headers(counted.warnings))


def parse_messages(data: bytes, answers: AnswerFormat, *, for_answer: bool = True) -> GenerationRequest:
    """Reads the body of `/v1/messages`, to a model whose answers are `answers`. `for_answer`: it must say how long the
    answer may be. Raises InvalidRequest."""
    raw = read_object(data)
    body = check_messages(raw, for_answer=for_answer)
    wanted = chat_request(as_chat(body), answers)
    ignored = warnings_of(raw, MessagesBody, body.without_effect)
    return replace(wanted, warnings=(*ignored, *map(NAMES.said, wanted.warnings)))
