"""The body of `/v1/messages`, and the chat request that it means."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar

import msgspec

from twinpool.coordinator.gateway.bodies import MAX_STOP_STRINGS, NOT_SUPPORTED, Harmless, check_body
from twinpool.coordinator.gateway.body_errors import shown
from twinpool.coordinator.gateway.extensions import ExtensionFields
from twinpool.coordinator.gateway.foreign_fields import FOREIGN_TO_MESSAGES, Advice
from twinpool.coordinator.gateway.messages_api.turns import ContentBlock, Turn, chat_messages, system_text
from twinpool.errors import InvalidRequest

THINKING = ("enabled", "adaptive", "between_tools", "disabled")


class MessagesTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the answer may use. Anthropic's own tools, which have another type than `custom`, are refused."""

    passed_over: ClassVar[Collection[str]] = ("cache_control", "eager_input_streaming")

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the answer may (`auto`), must (`any`), must not (`none`) use a tool, or must use that one (`tool`)."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model is to think first: not if it is `disabled`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of the answer must be."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer is to be."""

    format: OutputFormat | None = None
    effort: str | None = None


class MessagesBody(ExtensionFields, frozen=True, kw_only=True):
    """The body of `/v1/messages`; of `/v1/messages/count_tokens` too, where `max_tokens` may be missing."""

    not_supported: ClassVar[Harmless] = NOT_SUPPORTED
    foreign: ClassVar[Advice] = FOREIGN_TO_MESSAGES

    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    system: str | list[ContentBlock] | None = None
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Fields that are set, and whose wish is not met: how long to think, what to leave out of the turns."""
        has_budget = self.thinking is not None and self.thinking.budget_tokens is not None
        has_edits = bool(self.context_management and self.context_management.get("edits"))
        return ("thinking.budget_tokens",) * has_budget + ("context_management.edits",) * has_edits

    @property
    def continues_turn(self) -> bool:
        """Whether the last turn is the assistant's, so that the answer goes on with it."""
        return self.messages[-1].role == "assistant"


def check_messages(raw: dict[str, Any], *, for_answer: bool) -> MessagesBody:
    """Checks the fields of a body. `for_answer`: it must say how long the answer may be.

    Raises:
        InvalidRequest: a wrong type or value, or something that this server does not do.
    """
    body = check_body(raw, MessagesBody)
    if for_answer and body.max_tokens is None:
        raise InvalidRequest("max_tokens is missing; the request needs it", param="max_tokens")
    if "" in (body.stop_sequences or ()):
        message = "stop_sequences has an empty string, which would end every answer; leave it out"
        raise InvalidRequest(message, param="stop_sequences")
    for field in ("container", "mcp_servers"):
        if getattr(body, field):
            message = f"{field} is set, but this server runs no tools of its own; leave it out"
            raise InvalidRequest(message, param=field)
    if body.thinking is not None and body.thinking.type not in THINKING:
        raise InvalidRequest(
            f"thinking.type is {shown(body.thinking.type)}; it must be one of {', '.join(THINKING)}",
            param="thinking.type",
        )
    return body


def as_chat(body: MessagesBody) -> dict[str, Any]:
    """The chat request, as JSON values, whose answer is the answer to this one.

    Raises:
        InvalidRequest: a block, a tool or a format is of a type that this server does not have.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": system_text(body.system)})
    messages += chat_messages(body.messages)
    choice, is_parallel = _tool_choice(body.tool_choice)
    wanted = {
        "model": body.model,
        "messages": messages,
        "stream": body.stream,
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences or None,
        "response_format": _response_format(body),
        "reasoning_effort": body.output_config.effort if body.output_config else None,
        "tools": [_tool(index, tool) for index, tool in enumerate(body.tools or ())] or None,
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
    }
    if body.continues_turn:
        if messages[-1].get("tool_calls"):
            message = "the last turn uses a tool; send the tool's result as the next turn"
            raise InvalidRequest(message, param=f"messages[{len(body.messages) - 1}]")
        wanted |= {"continue_final_message": True, "add_generation_prompt": False}
    extensions = body.extensions()
    if body.thinking is not None:
        # The name that the templates of models that can do both have for it; others do not look at it.
        arguments = {"enable_thinking": body.thinking.type != "disabled"}
        extensions["chat_template_kwargs"] = arguments | (body.chat_template_kwargs or {})
    return {name: value for name, value in wanted.items() if value is not None} | extensions


def _response_format(body: MessagesBody) -> dict[str, Any] | None:
    config = body.output_config
    where, wanted = "output_config.format", config.format if config is not None else None
    if wanted is None:
        where, wanted = "output_format", body.output_format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        raise InvalidRequest(
            f"{where}.type is {shown(wanted.type)}; it must be json_schema", param=f"{where}.type"
        )
    if wanted.schema is None:
        raise InvalidRequest(f"{where}.schema is missing; the format needs it", param=f"{where}.schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema}}


def _tool_choice(choice: MessagesToolChoice | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """The chat request's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    is_parallel = False if choice.disable_parallel_tool_use else None
    match choice.type:
        case "auto" | "none":
            return choice.type, is_parallel
        case "any":
            return "required", is_parallel
        case "tool":
            if choice.name is None:
                message = "tool_choice.name is missing; a choice of the type tool needs it"
                raise InvalidRequest(message, param="tool_choice.name")
            return {"type": "function", "function": {"name": choice.name}}, is_parallel
        case other:
            raise InvalidRequest(
                f"tool_choice.type is {shown(other)}; it must be one of auto, any, tool, none",
                param="tool_choice.type",
            )


def _tool(index: int, tool: MessagesTool) -> dict[str, Any]:
    where = f"tools[{index}]"
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where}.type is {shown(tool.type)}; it must be custom, or left out: this server runs no tools of its own",
            param=f"{where}.type",
        )
    if tool.input_schema is None:
        message = f"{where}.input_schema is missing; a tool needs it"
        raise InvalidRequest(message, param=f"{where}.input_schema")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }
