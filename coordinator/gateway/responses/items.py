"""The items of a response's input, and the messages of a conversation that they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import msgspec

from twinpool.coordinator.gateway.body_errors import shown
from twinpool.errors import InvalidRequest

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


class InputPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of an item's content: `input_text`, `output_text`, or `refusal`."""

    passed_over: ClassVar[Collection[str]] = ("annotations", "logprobs")

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item: a `message`, a `function_call`, a `function_call_output`, or `reasoning`.

    An item with a role and without a type is a message.
    """

    passed_over: ClassVar[Collection[str]] = ("id", "status", "phase", "summary", "encrypted_content")

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


def chat_messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The items as messages of a chat request. Reasoning, a message of the assistant's and the calls behind it are one
    turn, and so one message.

    Raises:
        InvalidRequest: an item or a part is of a type that this server does not have, or lacks something.
    """
    messages: list[dict[str, Any]] = []
    reasoning: dict[str, str] = {}
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.type or ("message" if item.role is not None else None):
            case "message":
                if item.role is None:
                    raise _missing(where, "role")
                if item.role not in ROLES:
                    raise InvalidRequest(
                        f"{where}.role is {shown(item.role)}; it must be one of {', '.join(ROLES)}",
                        param=f"{where}.role",
                    )
                message = {"role": item.role, "content": _content(f"{where}.content", item.content)}
                messages.append(message | reasoning if item.role == "assistant" else message)
                reasoning = {}
            case "function_call":
                if not (messages and messages[-1]["role"] == "assistant" and not reasoning):
                    messages.append({"role": "assistant", "content": None, **reasoning})
                messages[-1].setdefault("tool_calls", []).append(_call(where, item))
                reasoning = {}
            case "function_call_output":
                if item.call_id is None:
                    raise _missing(where, "call_id")
                content = _content(f"{where}.output", item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
                reasoning = {}
            case "reasoning":
                thought = "".join(part.text or "" for part in item.content or () if not isinstance(part, str))
                reasoning = {"reasoning_content": thought} if thought else {}
            case "item_reference":
                raise InvalidRequest(
                    f"{where} is an item_reference, but items are not stored; send the item itself",
                    param=f"{where}.type",
                )
            case None:
                raise _missing(where, "type")
            case other:
                raise InvalidRequest(
                    f"{where}.type is {shown(other)}; it must be one of message, function_call, function_call_output, "
                    "reasoning",
                    param=f"{where}.type",
                )
    return messages


def _call(where: str, item: InputItem) -> dict[str, Any]:
    if item.call_id is None:
        raise _missing(where, "call_id")
    if item.name is None:
        raise _missing(where, "name")
    arguments = item.arguments or "{}"
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError) as exc:
        field = f"{where}.arguments"
        raise InvalidRequest(f"{field} is no JSON: {exc}; send the text of an object", param=field) from exc
    function = {"name": item.name, "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _content(where: str, content: str | list[InputPart] | None) -> str | list[dict[str, str]]:
    if content is None:
        raise InvalidRequest(f"{where} is missing; send a text or a list of parts", param=where)
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        text = part.text if part.type in TEXT_PARTS else part.refusal if part.type == "refusal" else None
        if text is None:
            raise InvalidRequest(
                f"{where}[{index}] has the type {shown(part.type)}; only parts of the types input_text and "
                "output_text, with their text, are supported",
                param=f"{where}[{index}]",
            )
        parts.append({"type": "text", "text": text})
    return parts


def _missing(where: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{where}.{field} is missing; the item needs it", param=f"{where}.{field}")
