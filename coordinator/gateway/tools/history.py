"""Calls and results in the messages of a conversation, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from twinpool.coordinator.gateway.body_errors import shown
from twinpool.coordinator.gateway.tools.fields import FunctionCall, ToolCall
from twinpool.coordinator.gateway.tools.formats import AnswerFormat
from twinpool.errors import InvalidRequest


def tool_fields(
    where: str,
    role: str,
    answers: AnswerFormat,
    *,
    tool_calls: Sequence[ToolCall] | None = None,
    tool_call_id: str | None = None,
) -> dict[str, Any]:
    """What a message has for its template beyond role and content, as far as tools go: only what is there.

    `where` names the message, like ``messages[2]``. An empty list of calls is none: there are templates that count
    them.

    Raises:
        InvalidRequest: a message that is not the assistant's has calls, or one is of something else than a function.
    """
    fields: dict[str, Any] = {}
    if tool_calls:
        if role != "assistant":
            message = f'{where}.tool_calls is for messages with the role "assistant"; leave it out'
            raise InvalidRequest(message, param=f"{where}.tool_calls")
        fields["tool_calls"] = [
            _call(f"{where}.tool_calls[{i}]", call, answers) for i, call in enumerate(tool_calls)
        ]
    if tool_call_id is not None:
        fields["tool_call_id"] = _id(tool_call_id, answers)
    return fields


def name_results(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The messages, as a template takes them, with the function's name in each result of a call: templates want it, and
    clients send the id of the call alone."""
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
        if "id" in call
    }

    def named(message: Mapping[str, Any]) -> dict[str, Any]:
        name = names.get(message.get("tool_call_id"))
        is_result = message["role"] == "tool" and name is not None
        return {"name": name, **message} if is_result else dict(message)

    return tuple(map(named, messages))


def _call(where: str, call: ToolCall, answers: AnswerFormat) -> dict[str, Any]:
    if call.type != "function":
        message = f'{where}.type is {shown(call.type)}; only calls of the type "function" are supported'
        raise InvalidRequest(message, param=f"{where}.type")
    function = {"name": call.function.name, "arguments": _arguments(call.function)}
    id_ = {} if call.id is None else {"id": _id(call.id, answers)}
    return {**id_, "type": "function", "function": function}


def _id(call_id: str, answers: AnswerFormat) -> str:
    return call_id if answers.tools is None else answers.tools.id_for_template(call_id)


def _arguments(call: FunctionCall) -> dict[str, Any] | str:
    """The arguments as the object that templates want.

    What is no object's text stays text. It may be a call of ours that was cut off: the client sends it back with every
    turn, and a refusal would end the conversation.
    """
    arguments = call.arguments
    if isinstance(arguments, dict):
        return arguments
    text = (arguments or "").strip()
    if text in ("", "null"):
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
