"""The turns of a conversation as Anthropic's route has them, and the chat messages that they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import msgspec

from twinpool.coordinator.gateway.body_errors import shown
from twinpool.errors import InvalidRequest


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a turn: `text`, `thinking` and `tool_use` (the assistant's), `tool_result` (the user's);
    `redacted_thinking` is left out."""

    passed_over: ClassVar[Collection[str]] = ("cache_control", "citations", "signature", "data", "caller")

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn: what a `user` or the `assistant` says; `system` is taken too."""

    role: str
    content: str | list[ContentBlock]


def system_text(system: str | Sequence[ContentBlock]) -> str | list[dict[str, str]]:
    """The content of the system message. Raises InvalidRequest for a block that is no text."""
    return system if isinstance(system, str) else _texts("system", system)


def chat_messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns as messages of a chat request. Results of tools become messages of their own, before what else the
    user says in that turn.

    Raises:
        InvalidRequest: a role or a block is of a type that this server does not have, or lacks something.
    """
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if turn.role not in ("user", "assistant", "system"):
            raise InvalidRequest(
                f"{where}.role is {shown(turn.role)}; it must be user or assistant", param=f"{where}.role"
            )
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages.append(_assistant(f"{where}.content", turn.content))
        else:
            messages += _spoken(turn.role, f"{where}.content", turn.content)
    return messages


def _assistant(where: str, blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        match block.type:
            case "text":
                texts.append(_text(at, block))
            case "tool_use":
                if block.id is None or block.name is None:
                    missing = "id" if block.id is None else "name"
                    raise _missing(at, missing)
                arguments = _json(f"{at}.input", block.input or {})
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case _:
                raise _unknown(at, block, "text, tool_use, thinking")
    message: dict[str, Any] = {"role": "assistant", "content": texts or ("" if not calls else None)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _spoken(role: str, where: str, blocks: Sequence[ContentBlock]) -> list[dict[str, Any]]:
    texts, results = [], []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        match block.type:
            case "text":
                texts.append(_text(at, block))
            case "tool_result":
                if block.tool_use_id is None:
                    raise _missing(at, "tool_use_id")
                content = block.content or ""
                said = content if isinstance(content, str) else _texts(f"{at}.content", content)
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
            case _:
                raise _unknown(at, block, "text, tool_result")
    return [*results, {"role": role, "content": texts}] if texts or not results else results


def _texts(where: str, blocks: Sequence[ContentBlock]) -> list[dict[str, str]]:
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise _unknown(f"{where}[{index}]", block, "text")
    return [_text(f"{where}[{index}]", block) for index, block in enumerate(blocks)]


def _text(where: str, block: ContentBlock) -> dict[str, str]:
    if block.text is None:
        raise _missing(where, "text")
    return {"type": "text", "text": block.text}


def _json(where: str, value: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as exc:
        raise InvalidRequest(f"{where} is nested too deeply; send a flatter object", param=where) from exc


def _unknown(where: str, block: ContentBlock, known: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}.type is {shown(block.type)}; what is supported here: {known}", param=f"{where}.type"
    )


def _missing(where: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{where}.{field} is missing; the block needs it", param=f"{where}.{field}")
