"""`/tokenize` and `/detokenize`, with vLLM's fields, and counting prompts: text and token ids without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from twinpool.coordinator.gateway.bodies import ChatMessage, Harmless, check_body, read_object
from twinpool.coordinator.gateway.conversations import Conversation
from twinpool.coordinator.gateway.docs import body_schema
from twinpool.coordinator.gateway.foreign_fields import FOREIGN_TO_DETOKENIZE, FOREIGN_TO_TOKENIZE, Advice
from twinpool.coordinator.gateway.generation import Generator, Parse
from twinpool.coordinator.gateway.ignored_fields import warning_headers, warnings_of
from twinpool.coordinator.gateway.parsing import chat_request
from twinpool.coordinator.gateway.requests import check_token_ids
from twinpool.coordinator.gateway.shapes import to_json
from twinpool.coordinator.gateway.tools import AnswerFormat, Tools
from twinpool.coordinator.service import Service
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import InvalidRequest

INLINE_TOKENS = 4096
"""Token ids up to here are made text on the event loop, in about a millisecond; more of them in a thread."""
_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)

Read = TypeVar("Read")


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/tokenize`: a `prompt`, or `messages` and what goes to the chat template with them."""

    not_supported: ClassVar[Harmless] = {"chat_template": (), "truncate_prompt_tokens": ()}
    foreign: ClassVar[Advice] = FOREIGN_TO_TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/detokenize`."""

    foreign: ClassVar[Advice] = FOREIGN_TO_DETOKENIZE

    model: str | None = None
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


class WantedTokens(NamedTuple):
    """A body of `/tokenize`, what is to be tokenized, and what the client is told of its fields."""

    body: TokenizeBody
    written: str | Conversation
    warnings: tuple[str, ...]


def read_tokenize(data: bytes, answers: AnswerFormat) -> WantedTokens:
    """Reads the body, to a model whose answers are `answers`. Raises InvalidRequest."""
    raw = read_object(data)
    body = check_body(raw, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        found = "neither of prompt and messages" if body.prompt is None else "both prompt and messages"
        raise InvalidRequest(f"the request has {found}; send one of them", param="prompt")
    warnings = warnings_of(raw, TokenizeBody)
    if body.prompt is not None:
        return WantedTokens(body, body.prompt, warnings)
    fields = {name: raw[name] for name in _CHAT_FIELDS if raw.get(name) is not None}
    (conversation,) = chat_request(fields, answers).prompts
    assert isinstance(conversation, Conversation), "a chat has a conversation"
    return WantedTokens(body, conversation, warnings)


def read_detokenize(data: bytes) -> tuple[DetokenizeBody, tuple[str, ...]]:
    """Reads the body; also gives what the client is told of its fields. Raises InvalidRequest."""
    raw = read_object(data)
    return check_body(raw, DetokenizeBody), warnings_of(raw, DetokenizeBody)


class Detokenizer:
    """Makes text of token ids, with one model's tokenizer: of many in a thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included. Raises InvalidRequest if one is no token of the model."""
        check_token_ids("tokens", token_ids, self._tokenizer.vocab_size)
        if len(token_ids) <= INLINE_TOKENS:
            return self._decode(token_ids)
        return await asyncio.to_thread(self._decode, token_ids)

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary has it."""
        return [self._tokenizer.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class Counted(NamedTuple):
    """The tokens of a prompt, and what the client is told of the body's fields."""

    num_tokens: int
    warnings: tuple[str, ...]


class PromptCounter:
    """Counts the tokens of prompts that are not to be answered."""

    def __init__(self, service: Service, generator: Generator) -> None:
        self._service = service
        self._generator = generator

    async def count(self, request: Request, parse: Parse) -> Counted:
        """How many tokens the prompt of this chat request has. Raises RequestError."""
        wanted = await read_request(self._generator, request, parse)
        self._generator.check_model(wanted.model)
        (written,) = wanted.prompts
        assert isinstance(written, Conversation), "a chat has a conversation"
        context, special = self._service.max_model_len, wanted.add_special_tokens
        token_ids = await self._generator.prompts.encode(written, context, add_special_tokens=special)
        return Counted(len(token_ids), wanted.warnings)


class Tokenizing:
    """The routes that tokenize and detokenize."""

    def __init__(self, service: Service, generator: Generator, tokenizer: Tokenizer) -> None:
        self._service = service
        self._generator = generator
        self._detokenizer = Detokenizer(tokenizer)

    def mount(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        for path, handler, body in (
            ("/tokenize", self.tokenize, TokenizeBody),
            ("/detokenize", self.detokenize, DetokenizeBody),
        ):
            app.add_api_route(path, handler, methods=["POST"], openapi_extra=body_schema(body))

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text, or of a conversation as the model's chat template writes it."""
        read = partial(read_tokenize, answers=self._generator.answers)
        body, written, warnings = await read_request(self._generator, request, read)
        self._generator.check_model(body.model)
        context = self._service.max_model_len
        adds = body.add_special_tokens
        special = isinstance(written, str) if adds is None else adds
        token_ids = await self._generator.prompts.encode(written, context, add_special_tokens=special)
        answer = {
            "count": len(token_ids),
            "max_model_len": context,
            "tokens": token_ids,
            "token_strs": self._detokenizer.token_strs(token_ids) if body.return_token_strs else None,
        }
        return Response(to_json(answer), media_type="application/json", headers=warning_headers(warnings))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body, warnings = await read_request(self._generator, request, read_detokenize)
        self._generator.check_model(body.model)
        text = await self._detokenizer.decode(body.tokens)
        headers = warning_headers(warnings)
        return Response(to_json({"prompt": text}), media_type="application/json", headers=headers)


async def read_request(generator: Generator, request: Request, read: Callable[[bytes], Read]) -> Read:
    """What `read` makes of the request's body. Raises RequestError."""
    with generator.bodies.reading() as body:
        return await body.parse(request, read)
