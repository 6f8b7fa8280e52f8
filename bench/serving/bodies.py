"""A planned request as the JSON body that a server of some kind is sent."""

from __future__ import annotations

from typing import Any

import msgspec

from twinpool.bench.serving.settings import Endpoint, LoadSettings, ServerKind
from twinpool.bench.serving.workload import Chat, PlannedRequest
from twinpool.errors import ConfigError


def body(request: PlannedRequest, settings: LoadSettings) -> bytes:
    """The body of a streamed request. What a server does not know it is not sent; `extra_body` has the last word.

    Raises:
        ConfigError: the prompt does not fit the endpoint.
    """
    is_chat = settings.endpoint is Endpoint.CHAT
    stream_options: dict[str, Any] = {"include_usage": True}
    values: dict[str, Any] = {
        "model": settings.model,
        **_prompt(request, settings.endpoint),
        _max_tokens_field(is_chat, settings.kind): request.output_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": stream_options,
    }
    if settings.ignores_eos:
        values["ignore_eos"] = True
    if settings.kind in (ServerKind.TWINPOOL, ServerKind.VLLM):
        values["return_token_ids"] = True
    if settings.kind in (ServerKind.VLLM, ServerKind.SGLANG):
        stream_options["continuous_usage_stats"] = True
    return msgspec.json.encode(values | settings.extra_body)


def _max_tokens_field(is_chat: bool, kind: ServerKind) -> str:
    # OpenAI's chats take only the newer name, older llama.cpp servers only the older one.
    return "max_completion_tokens" if is_chat and kind is not ServerKind.LLAMACPP else "max_tokens"


def _prompt(request: PlannedRequest, endpoint: Endpoint) -> dict[str, Any]:
    match request.prompt, endpoint:
        case Chat(messages=messages), Endpoint.CHAT:
            return {"messages": messages}
        case str(text), Endpoint.CHAT:
            return {"messages": [{"role": "user", "content": text}]}
        case (str() | tuple()) as prompt, Endpoint.COMPLETIONS:
            return {"prompt": prompt}
        case Chat(), _:
            raise ConfigError(
                "the data has chats, and --endpoint is completions; use --endpoint-type openai-chat"
            )
        case _:
            raise ConfigError(
                "the data has token ids, which chats cannot be sent; use --endpoint-type openai"
            )
