"""The JSON schemas of what the two OpenAI routes answer: whole answers, the chunks of streams, and their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STRING, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def object_of(
    optional: Mapping[str, Any] | None = None, description: str = "", /, **required: Any
) -> dict[str, Any]:
    """An object that has at least the `required` fields, and perhaps the `optional` ones."""
    schema = {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }
    return {"description": description, **schema} if description else schema


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of such a value, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a list of such values."""
    return {"type": "array", "items": schema}


def schema_ref(name: str) -> dict[str, Any]:
    """Refers to a schema of the document by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def _said(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


def _reasons(*reasons: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(reasons)}


_STOP_REASON = _said(
    {"anyOf": [STRING, WHOLE]}, "The stop string or stop token that ended the answer, where one did."
)
_TOKEN_IDS = _said(list_of(WHOLE), "With `return_token_ids`: the answer's.")
_PROMPT_TOKEN_IDS = _said(list_of(WHOLE), "With `return_token_ids`: the prompt's.")
_PROMPT_LOGPROBS = _said(
    list_of(or_null({"type": "object", "additionalProperties": schema_ref("PromptTokenLogprob")})),
    "With `prompt_logprobs`: of each prompt token, by token id; null for the first.",
)
_CHOICE_EXTRAS = {"stop_reason": _STOP_REASON, "token_ids": _TOKEN_IDS}
_PROMPT_EXTRAS = {"prompt_token_ids": _PROMPT_TOKEN_IDS, "prompt_logprobs": _PROMPT_LOGPROBS}
_REASONING = _said(STRING, "What the model thought before it answered.")
_ARGUMENTS = _said(STRING, "JSON text.")
_CREATED = _said(WHOLE, "Seconds since 1970.")
_CHAT_FINISH = _reasons("stop", "length", "tool_calls")
_TEXT_FINISH = _reasons("stop", "length")
_TOKEN = {
    "token": STRING,
    "logprob": NUMBER,
    "bytes": _said(or_null(list_of(WHOLE)), "Of its text, in UTF-8."),
}
_INDEX = {"index": WHOLE}
_COUNTS = {"prompt_tokens": WHOLE, "completion_tokens": WHOLE, "total_tokens": WHOLE}
_USAGE_IN_CHUNK = {"usage": or_null(schema_ref("Usage"))}


def _answer(kind: str) -> dict[str, Any]:
    return {"id": STRING, "object": {"const": kind}, "created": _CREATED, "model": STRING}


ANSWER_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "ChatCompletion": object_of(
        _PROMPT_EXTRAS, "An answer of `/v1/chat/completions`.",
        **_answer("chat.completion"), choices=list_of(schema_ref("ChatChoice")), usage=schema_ref("Usage"),
    ),
    "ChatChoice": object_of(
        _CHOICE_EXTRAS,
        **_INDEX, message=schema_ref("AssistantMessage"), logprobs=or_null(schema_ref("ChatLogprobs")),
        finish_reason=_CHAT_FINISH,
    ),
    "AssistantMessage": object_of(
        {"reasoning_content": _REASONING, "tool_calls": list_of(schema_ref("CallOfTool"))},
        role={"const": "assistant"}, content=or_null(STRING), refusal={"type": "null"},
    ),
    "CallOfTool": object_of(
        id=STRING, type={"const": "function"}, function=object_of(name=STRING, arguments=_ARGUMENTS)
    ),
    "ChatCompletionChunk": object_of(
        {**_USAGE_IN_CHUNK, "prompt_token_ids": _PROMPT_TOKEN_IDS}, "One event of a stream of `/v1/chat/completions`.",
        **_answer("chat.completion.chunk"), choices=list_of(schema_ref("ChatChunkChoice")),
    ),
    "ChatChunkChoice": object_of(
        _CHOICE_EXTRAS,
        **_INDEX, delta=schema_ref("ChatDelta"), logprobs=or_null(schema_ref("ChatLogprobs")),
        finish_reason=or_null(_CHAT_FINISH),
    ),
    "ChatDelta": object_of(
        {
            "role": {"const": "assistant"}, "content": STRING, "reasoning_content": _REASONING,
            "tool_calls": list_of(schema_ref("CallDelta")),
        },
        "What an event adds to the message.",
    ),
    "CallDelta": object_of(
        {"id": STRING, "type": {"const": "function"}}, "What an event adds to the call with that index.",
        **_INDEX, function=object_of({"name": STRING}, arguments=_ARGUMENTS),
    ),
    "ChatLogprobs": object_of(content=list_of(schema_ref("TokenLogprob")), refusal={"type": "null"}),
    "TokenLogprob": object_of(**_TOKEN, top_logprobs=list_of(schema_ref("TopLogprob"))),
    "TopLogprob": object_of(**_TOKEN),
    "TextCompletion": object_of(
        None, "An answer of `/v1/completions`.",
        **_answer("text_completion"), choices=list_of(schema_ref("TextChoice")), usage=schema_ref("Usage"),
    ),
    "TextChoice": object_of(
        {**_CHOICE_EXTRAS, **_PROMPT_EXTRAS},
        **_INDEX, text=STRING, logprobs=or_null(schema_ref("TextLogprobs")), finish_reason=_TEXT_FINISH,
    ),
    "TextCompletionChunk": object_of(
        _USAGE_IN_CHUNK, "One event of a stream of `/v1/completions`.",
        **_answer("text_completion"), choices=list_of(schema_ref("TextChunkChoice")),
    ),
    "TextChunkChoice": object_of(
        {**_CHOICE_EXTRAS, "prompt_token_ids": _PROMPT_TOKEN_IDS},
        **_INDEX, text=STRING, logprobs=or_null(schema_ref("TextLogprobs")), finish_reason=or_null(_TEXT_FINISH),
    ),
    "TextLogprobs": object_of(
        tokens=list_of(STRING), token_logprobs=list_of(or_null(NUMBER)),
        top_logprobs=list_of(or_null({"type": "object", "additionalProperties": NUMBER})),
        text_offset=list_of(WHOLE),
    ),
    "PromptTokenLogprob": object_of(logprob=NUMBER, rank=or_null(WHOLE), decoded_token=STRING),
    "Usage": object_of(
        {
            "prompt_tokens_details": object_of(cached_tokens=WHOLE),
            "twinpool": _said({"type": "object"}, "With the request's field `twinpool`: where its time went."),
        },
        **_COUNTS,
    ),
}  # fmt: skip
"""By their names in the document."""
