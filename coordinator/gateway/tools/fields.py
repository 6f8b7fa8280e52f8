"""The fields of a request that are about tools, as OpenAI names them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar

import msgspec

MAX_TOOLS = 1024
MAX_CALLS = 1024
"""Calls in one message of a conversation."""


class FunctionDefinition(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema of an object; without it there are none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may use: of the type "function", there is no other here."""

    type: str
    function: FunctionDefinition | None = None


class FunctionName(msgspec.Struct, frozen=True):
    """The name of one of the request's functions."""

    name: str


class NamedToolChoice(msgspec.Struct, frozen=True):
    """The one function that the answer must call."""

    type: str
    function: FunctionName | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """What was called. `arguments` is JSON text; some clients send the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call in an assistant's message. A message with the role "tool" has its result, and refers to `id`."""

    passed_over: ClassVar[Collection[str]] = ("index",)

    function: FunctionCall
    id: str | None = None
    type: str = "function"


Tools = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]
ToolChoice = str | NamedToolChoice
ToolCalls = Annotated[list[ToolCall], msgspec.Meta(max_length=MAX_CALLS)]
