"""The JSON bodies of the OpenAI routes: their fields, and reading them.

`null` means absent, unknown fields are ignored, and a field that would change the answer but is not supported
is refused by name. Every refusal is one sentence that says the field, its value and what to change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from twinpool.errors import InvalidRequest

MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_TEMPERATURE = 1e6
"""Far beyond where all tokens are equally likely; what workers are told ends there."""
MAX_PRIORITY = 1000

# Fields that would change the answer if they were obeyed: the values, besides null, that ask for nothing.
NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}

PRIVATE_FIELDS = frozenset(
    {
        "prompt",
        "messages",
        "input",
        "instructions",
        "system",
        "text",
        "suffix",
        "prediction",
        "documents",
        "tools",
        "functions",
        "chat_template",
        "prompt_embeds",
    }
)
"""Fields that carry what only client and model are to know."""

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _AtLeastOne | None = None
    max_completion_tokens: _AtLeastOne | None = None
    min_tokens: _NotNegative | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[_NotNegative], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """The body of `/v1/completions`. A list around one prompt is taken for the prompt."""

    prompt: str | list[str | _NotNegative | list[_NotNegative]]
    add_special_tokens: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]")
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
}


def read_body(data: bytes, kind: type[Body]) -> Body:
    """Decodes and checks one body.

    Raises:
        InvalidRequest: bad JSON, a wrong type or value, or a field that is not supported.
    """
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {exc}") from exc
    except RecursionError as exc:
        raise InvalidRequest("the body is nested too deeply; send a flat JSON object") from exc
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body is {_kind(raw)}; it must be a JSON object")
    for field, harmless in NOT_SUPPORTED.items():
        value = raw.get(field)
        if value is not None and not any(type(value) is type(same) and value == same for same in harmless):
            allowed = f" or set it to {' or '.join(map(shown, harmless))}" if harmless else ""
            message = (
                f"{field} is {_shown_of(field, value)}, which is not supported yet; leave it out{allowed}"
            )
            raise InvalidRequest(message, param=field)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as exc:
        raise _sentence(str(exc), raw) from exc


def shown(value: object) -> str:
    """A value of the body as an error message quotes it: JSON, at most 80 characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shown_of(field: str, value: object) -> str:
    """The value of `field` as an error message may quote it: messages get logged, and prompts must not be."""
    root = _STEP.split(f".{field}", maxsplit=1)[1]
    return _kind(value) if root in PRIVATE_FIELDS else shown(value)


def _kind(value: object) -> str:
    """What a value is, without what it says; numbers, true, false and null as they are."""
    match value:
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "an object"
        case _:
            return shown(value)


def _sentence(error: str, raw: dict[str, Any]) -> InvalidRequest:
    """msgspec's "Expected `int | null`, got `str` - at `$.seed`", in plain words and with the value."""
    found = _WRONG.fullmatch(error)
    what, path = (found["what"], found["path"] or "") if found else (error, "")
    if what.startswith("Object missing required field"):
        field = f"{path}.{what.split('`')[1]}".lstrip(".")
        return InvalidRequest(f"{field} is missing; the request needs it", param=field)
    value: Any = raw
    for step in _STEP.finditer(path):
        value = value[int(step["index"])] if step["index"] else value[step["key"]]
    field = path.lstrip(".")
    expected = (
        what.removeprefix("Expected ").split(", got ")[0].replace("Number out of range", "a smaller number")
    )
    for types in re.findall(r"`([^`]*)`", expected):
        names = [_TYPE_NAMES.get(name, name) for name in types.split(" | ") if name != "null"]
        expected = expected.replace(f"`{types}`", " or ".join(names))
    return InvalidRequest(f"{field} is {_shown_of(field, value)}; it must be {expected}", param=field)
