"""What a response object says, as JSON values: what was asked, the items of the output, the usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from twinpool.coordinator.gateway.blocks import Block, BlockKind
from twinpool.coordinator.gateway.responses.body import ResponsesBody
from twinpool.errors import RequestError, TryLater

_ID_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


@dataclass(frozen=True, slots=True)
class ResponseUsage:
    """Tokens of one response. `num_cached` of the input were found in a cache, `num_reasoning` of the output are
    reasoning. `facts` is our own block of the usage, if the client wants it."""

    num_input: int
    num_cached: int
    num_output: int
    num_reasoning: int
    facts: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """The usage as OpenAI has it. Nothing is written to a cache at a price of its own."""
        usage = {
            "input_tokens": self.num_input,
            "input_tokens_details": {"cached_tokens": self.num_cached, "cache_write_tokens": 0},
            "output_tokens": self.num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": self.num_input + self.num_output,
        }
        return usage if self.facts is None else {**usage, "twinpool": self.facts}


def echoed_fields(body: ResponsesBody) -> dict[str, Any]:
    """What the object says of its request: the fields as they hold, with their defaults."""
    tools = [msgspec.to_builtins(tool) for tool in body.tools or ()]
    choice = body.tool_choice
    reasoning = body.reasoning
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": _text(body),
        "tool_choice": "auto" if choice is None else _present(msgspec.to_builtins(choice)),
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def content_part(block: Block, text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    """The one part of a message's content or of reasoning."""
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def item_id(block: Block, request_id: str) -> str:
    """An item's id, which follows from its place in the answer and the request's id."""
    return f"{_ID_PREFIXES[block.kind]}_{request_id}_{block.index}"


def output_item(
    block: Block, request_id: str, content: Sequence[Any], *, is_open: bool, text: str = ""
) -> dict[str, Any]:
    """An item of the output. `content` are the parts of a message or of reasoning, `text` a call's arguments."""
    identity = {
        "id": item_id(block, request_id),
        "status": "in_progress" if is_open else "incomplete" if block.is_cut else "completed",
    }
    match block.kind:
        case BlockKind.TEXT:
            return {**identity, "type": "message", "role": "assistant", "content": content}
        case BlockKind.REASONING:
            return {**identity, "type": "reasoning", "summary": [], "content": content}
        case BlockKind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return {**identity, "type": "function_call", **call}


def response_error(failure: RequestError) -> dict[str, Any]:
    """Why a response failed, with one of OpenAI's codes."""
    match failure:
        case TryLater():
            code = "rate_limit_exceeded"
        case RequestError(status=status) if status >= 500:
            code = "server_error"
        case _:
            code = "invalid_prompt"
    return {"code": code, "message": failure.message}


def _text(body: ResponsesBody) -> dict[str, Any]:
    config = body.text
    wanted = msgspec.to_builtins(config.format) if config and config.format else {"type": "text"}
    verbosity = {"verbosity": config.verbosity} if config and config.verbosity else {}
    return {"format": _present(wanted), **verbosity}


def _present(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
