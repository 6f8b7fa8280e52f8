"""The body of `/v1/responses`, and the chat request that it means.

Nothing is kept between requests: who wants to go on with a conversation sends its turns as input.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from twinpool.bounds import NumLogprobs
from twinpool.coordinator.gateway.bodies import NOT_SUPPORTED, Harmless, check_body
from twinpool.coordinator.gateway.body_errors import shown
from twinpool.coordinator.gateway.extensions import ExtensionFields
from twinpool.coordinator.gateway.foreign_fields import FOREIGN_TO_RESPONSES, Advice
from twinpool.coordinator.gateway.responses.items import InputItem, chat_messages
from twinpool.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"
"""What `include` has when the answer is to have the log probabilities of its tokens."""
OTHER_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""What else `include` may have: of things that an answer of ours never has, so nothing comes of it."""


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of the answer must be: `text`, `json_object`, or `json_schema` with a schema."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer's text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much the model is to think first."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the answer may call. Tools of other types are refused."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool by its name."""

    type: str
    name: str | None = None


class ResponsesToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools the answer must call (`function`) or may call (`allowed_tools`)."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[NamedTool] | None = None


class ResponsesBody(ExtensionFields, frozen=True, kw_only=True):
    """The body of `/v1/responses`."""

    not_supported: ClassVar[Harmless] = NOT_SUPPORTED
    foreign: ClassVar[Advice] = FOREIGN_TO_RESPONSES

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=1)] | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text comes with the log probabilities of its tokens."""
        return LOGPROBS in (self.include or ())


def check_responses(raw: dict[str, Any]) -> ResponsesBody:
    """Checks the fields of a body.

    Raises:
        InvalidRequest: a wrong type or value, or something that this server does not do.
    """
    body = check_body(raw, ResponsesBody)
    refused = {
        "previous_response_id": "answers are not stored; send the turns so far, earlier output too, as input",
        "conversation": "conversations are not stored; send the turns so far as input",
        "prompt": "prompts are not stored; send its text as instructions or input",
    }
    for field, advice in refused.items():
        if getattr(body, field) is not None:
            raise InvalidRequest(f"{field} is set, but {advice}", param=field)
    if body.background:
        message = "background is true, but answers are not stored; leave it out and stream the answer instead"
        raise InvalidRequest(message, param="background")
    if body.truncation not in (None, "disabled"):
        raise InvalidRequest(
            f'truncation is {shown(body.truncation)}, which is not supported; set it to "disabled" and leave out '
            "turns that the context does not hold",
            param="truncation",
        )
    if body.top_logprobs and not body.wants_logprobs:
        raise InvalidRequest(
            f'top_logprobs is {body.top_logprobs}, but include lacks "{LOGPROBS}"; add it',
            param="top_logprobs",
        )
    for index, name in enumerate(body.include or ()):
        if name != LOGPROBS and name not in OTHER_INCLUDES:
            known = ", ".join(sorted({LOGPROBS, *OTHER_INCLUDES}))
            raise InvalidRequest(
                f"include[{index}] is {shown(name)}; it must be one of {known}", param="include"
            )
    return body


def as_chat(body: ResponsesBody) -> dict[str, Any]:
    """The chat request, as JSON values, whose answer is the answer to this one.

    Raises:
        InvalidRequest: an item, a part, a tool or a format is of a type that this server does not have.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += chat_messages(body.input)
    if not messages:
        raise InvalidRequest("input is an empty list; send a text or at least one item", param="input")
    tools, choice = _tools(body)
    wanted = {
        "model": body.model,
        "messages": messages,
        "stream": body.stream,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop,
        "logprobs": True if body.wants_logprobs else None,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "response_format": _response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    return {name: value for name, value in wanted.items() if value is not None} | body.extensions()


def _response_format(wanted: TextFormat | None) -> dict[str, Any] | None:
    match wanted.type if wanted is not None else "text":
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            assert wanted is not None, "a format has a type"
            if wanted.schema is None:
                message = "text.format.schema is missing; a format of the type json_schema needs it"
                raise InvalidRequest(message, param="text.format.schema")
            schema = {
                "name": wanted.name or "answer",
                "description": wanted.description,
                "schema": wanted.schema,
                "strict": wanted.strict,
            }
            present = {name: value for name, value in schema.items() if value is not None}
            return {"type": "json_schema", "json_schema": present}
        case other:
            raise InvalidRequest(
                f"text.format.type is {shown(other)}; it must be one of text, json_object, json_schema",
                param="text.format.type",
            )


def _tools(body: ResponsesBody) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The chat request's tools, and which it must or may call."""
    tools = [_tool(index, tool) for index, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return tools, choice
    match choice.type:
        case "function":
            return tools, {"type": "function", "function": {"name": choice.name or ""}}
        case "allowed_tools":
            allowed = {tool.name for tool in choice.tools or ()}
            known = {tool["function"]["name"] for tool in tools}
            if unknown := sorted(name or "" for name in allowed - known):
                raise InvalidRequest(
                    f"tool_choice.tools has {shown(unknown[0])}, which is none of the tools; name some of tools",
                    param="tool_choice.tools",
                )
            return [tool for tool in tools if tool["function"]["name"] in allowed], choice.mode or "auto"
        case other:
            raise InvalidRequest(
                f"tool_choice.type is {shown(other)}; it must be function or allowed_tools: this server runs no tools "
                "of its own",
                param="tool_choice.type",
            )


def _tool(index: int, tool: FunctionTool) -> dict[str, Any]:
    where = f"tools[{index}]"
    if tool.type != "function":
        raise InvalidRequest(
            f"{where}.type is {shown(tool.type)}; it must be function: this server runs no tools of its own",
            param=f"{where}.type",
        )
    if tool.name is None:
        raise InvalidRequest(f"{where}.name is missing; a function needs one", param=f"{where}.name")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }
