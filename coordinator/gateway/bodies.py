"""The JSON bodies of the OpenAI routes: their fields, and reading them.

`null` means absent. A field that would change the answer but is not supported is refused by name; one that nobody has
heard of is ignored, and told of. Every refusal is one sentence that says the field, its value and what to change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from twinpool.bounds import (
    MOST_ALLOWED_IDS,
    MOST_BAD_WORDS,
    MOST_BIASES,
    Factor,
    Fraction,
    NumLogprobs,
    Penalty,
    Temperature,
)
from twinpool.coordinator.gateway.body_errors import kind_of, sentence, shown, shown_of
from twinpool.coordinator.gateway.foreign_fields import (
    FOREIGN_TO_CHAT,
    FOREIGN_TO_COMPLETIONS,
    Advice,
    is_one_of,
    refuse_foreign,
)
from twinpool.coordinator.gateway.structured import StructuredBody
from twinpool.coordinator.gateway.tools import ToolCalls, ToolChoice, Tools
from twinpool.errors import InvalidRequest

MAX_CHOICES = 128
"""Answers that one request may ask for: `n` of each prompt."""
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_PRIORITY = 1000

Harmless = Mapping[str, tuple[object, ...]]
"""Fields that would change the answer if they were obeyed, and the values, besides null, that ask for nothing."""

NOT_SUPPORTED: Harmless = {
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "stop_regex": ("", []),
    "typical_p": (1, 1.0),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "lora_path": (),
    "return_hidden_states": (False,),
}

_NotNegative = Annotated[int, msgspec.Meta(ge=0)]
_MaxTokens = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0})]
"""Whether it may be 0 depends on other fields."""
_AllowedTokenIds = Annotated[list[_NotNegative], msgspec.Meta(min_length=1, max_length=MOST_ALLOWED_IDS)]
_Choices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides the answer: the usage in a last chunk, and with that so far in each."""

    passed_over: ClassVar[Collection[str]] = ("include_obfuscation",)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(StructuredBody, frozen=True, kw_only=True):
    """The fields that both routes share. From `user` on they are taken and change nothing."""

    not_supported: ClassVar[Harmless] = NOT_SUPPORTED

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: _Choices | None = None
    best_of: _Choices | None = None
    max_tokens: _MaxTokens | None = None
    max_completion_tokens: _MaxTokens | None = None
    min_tokens: _NotNegative | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Fraction | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Factor | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MOST_BIASES)] | None = None
    ignore_eos: bool | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[_NotNegative], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    allowed_token_ids: _AllowedTokenIds | None = None
    bad_words: Annotated[list[str], msgspec.Meta(max_length=MOST_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    twinpool: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    spaces_between_special_tokens: bool | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """The body of `/v1/completions`."""

    foreign: ClassVar[Advice] = FOREIGN_TO_COMPLETIONS

    prompt: str | list[str | _NotNegative | list[_NotNegative]]
    echo: bool | None = None
    logprobs: NumLogprobs | bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    passed_over: ClassVar[Collection[str]] = ("cache_control",)

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation. An answer that is sent back as the next turn may have more than a turn needs."""

    passed_over: ClassVar[Collection[str]] = ("annotations", "cache_control")

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """The body of `/v1/chat/completions`."""

    foreign: ClassVar[Advice] = FOREIGN_TO_CHAT

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def read_object(data: bytes) -> dict[str, Any]:
    """Decodes one body's JSON object. Raises InvalidRequest if it is none."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {exc}") from exc
    except RecursionError as exc:
        raise InvalidRequest("the body is nested too deeply; send a flat JSON object") from exc
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body is {kind_of(raw)}; it must be a JSON object")
    return raw


def check_body(raw: dict[str, Any], kind: type[Body]) -> Body:
    """Checks the fields of a body. Raises InvalidRequest."""
    not_supported: Harmless = getattr(kind, "not_supported", {})
    foreign: Advice = getattr(kind, "foreign", {})
    for field, value in raw.items():
        if value is None:
            continue
        if field in foreign:
            refuse_foreign(field, value, foreign[field])
        elif field in not_supported and not is_one_of(not_supported[field], value):
            harmless = not_supported[field]
            allowed = f" or set it to {' or '.join(map(shown, harmless))}" if harmless else ""
            message = (
                f"{field} is {shown_of(field, value)}, which is not supported here; leave it out{allowed}"
            )
            raise InvalidRequest(message, param=field)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as exc:
        raise sentence(str(exc), raw) from exc
