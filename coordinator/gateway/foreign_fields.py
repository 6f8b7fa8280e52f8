"""Fields that would change the answer, and that another route or another server has: what to send here instead.

Where nobody said so, a request that was written for one route would get an answer from another, to half of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twinpool.errors import InvalidRequest

Advice = Mapping[str, str]
"""Fields that a route does not have, and what to do instead."""

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_NOTHING: tuple[object, ...] = (False, "", [], {})
"""Values, besides null, that ask for nothing."""
_ASK_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "add_generation_prompt": (True,),
    "truncation": ("disabled",),
    "enable_thinking": (),
}
"""The values of these fields that do."""


class ForeignField(InvalidRequest):
    """The body has a field of another route. Its message has the words of the route that the client used."""


def refuse_foreign(field: str, value: object, advice: str) -> None:
    """Raises ForeignField unless `value`, which is not null, asks for nothing."""
    harmless = _ASK_FOR_NOTHING.get(field, _NOTHING)
    if not is_one_of(harmless, value):
        raise ForeignField(f"{field} is not a field of this route; {advice}", param=field)


def is_one_of(values: Iterable[object], value: object) -> bool:
    """Whether it is one of them: true is not 1 here."""
    return any(type(value) is type(same) and value == same for same in values)


def _called(own: str, *fields: str) -> dict[str, str]:
    return dict.fromkeys(fields, f"here it is called {own}")


def _at(path: str, fields: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(fields, f"send it to {path}")


def _stored(turns: str) -> dict[str, str]:
    """Fields about what other servers keep."""
    advice = f"answers are not stored; send the turns so far as {turns}"
    return {"previous_response_id": advice, "conversation": advice, "background": "stream the answer instead"}


_TEMPLATE = "here it goes to the chat template, as an entry of chat_template_kwargs"
_ENABLE_THINKING = 'here it is chat_template_kwargs, with {"enable_thinking": true} or false'
_NO_TOOLS = "this server runs no tools of its own"
_SYSTEM = 'send it as a message with the role "system"'
_OF_ANTHROPIC = {"container": _NO_TOOLS, "mcp_servers": _NO_TOOLS}
_OF_OPENAI = {
    **_OF_ANTHROPIC,
    "enable_thinking": _TEMPLATE,
    **_called("max_tokens", "max_output_tokens", "max_new_tokens", "n_predict"),
    **_called("min_tokens", "min_new_tokens"),
    **_called("stop", "stop_sequences"),
    **_called("include_stop_str_in_output", "no_stop_trim"),
    **_called("response_format", "text", "output_format"),
    **_called("structured_outputs.grammar", "grammar"),
    **_called("truncate_prompt_tokens", "truncation"),
    **_called("logprobs", "include"),
}
FOREIGN_TO_CHAT: Advice = {
    **_OF_OPENAI,
    **_stored("messages"),
    **_called("messages", "input"),
    "prompt": f"send it to {_COMPLETIONS}, or as messages",
    "input_ids": f"send it to {_COMPLETIONS}, as prompt",
    "echo": f"send it to {_COMPLETIONS}",
    "instructions": _SYSTEM,
    "system": _SYSTEM,
    "thinking": _ENABLE_THINKING,
    **_called("reasoning_effort", "reasoning"),
    **_called("response_format and reasoning_effort", "output_config"),
}
FOREIGN_TO_COMPLETIONS: Advice = {
    **_OF_OPENAI,
    **_stored("prompt"),
    **_called("prompt", "input", "input_ids"),
    **_at(
        _CHAT,
        (
            "messages",
            "add_generation_prompt",
            "continue_final_message",
            "documents",
            "chat_template_kwargs",
            "enable_thinking",
            "top_logprobs",
            "tools",
            "tool_choice",
            "thinking",
            "reasoning",
            "reasoning_effort",
        ),
    ),
    **_called("response_format", "output_config"),
    "instructions": "begin the prompt with it",
    "system": "begin the prompt with it",
}
_ONLY_OPENAI = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "ebnf",
    "json_schema",
    "grammar",
    "n",
    "best_of",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "no_stop_trim",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
)
"""Fields of the two older routes that the newer ones do not have."""
_OF_NEWER = {
    "enable_thinking": _TEMPLATE,
    **_at(_CHAT, _ONLY_OPENAI),
    **_called("min_tokens", "min_new_tokens"),
    "echo": f"send it to {_COMPLETIONS}",
    "input_ids": f"send it to {_COMPLETIONS}, as prompt",
}
FOREIGN_TO_RESPONSES: Advice = {
    **_OF_NEWER,
    **_OF_ANTHROPIC,
    **_called("input", "messages"),
    **_called("instructions", "system"),
    **_called("max_output_tokens", "max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict"),
    **_called("text.format", "response_format", "output_format"),
    **_called("stop", "stop_sequences"),
    **_called("reasoning.effort", "reasoning_effort"),
    "logprobs": 'here it is include, with "message.output_text.logprobs"',
    "thinking": _ENABLE_THINKING,
    **_called("text.format and reasoning.effort", "output_config"),
}
FOREIGN_TO_MESSAGES: Advice = {
    **_OF_NEWER,
    **_stored("messages"),
    **_called("messages", "input", "prompt"),
    **_called("system", "instructions"),
    **_called("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict"),
    **_called("output_config.format", "response_format", "text"),
    **_called("stop_sequences", "stop"),
    **_called("output_config.effort", "reasoning_effort", "reasoning"),
    **_called("tool_choice.disable_parallel_tool_use", "parallel_tool_calls"),
    **_at(_CHAT, ("logprobs", "top_logprobs", "include")),
    "truncation": "leave out turns that the context does not hold",
}
FOREIGN_TO_TOKENIZE: Advice = {
    **_called("prompt", "input", "text"),
    "documents": _TEMPLATE,
    "tokens": "send it to /detokenize",
    "reasoning_effort": _TEMPLATE,
    "enable_thinking": _TEMPLATE,
    "system": _SYSTEM,
    "instructions": _SYSTEM,
}
FOREIGN_TO_DETOKENIZE: Advice = {
    **_called("tokens", "token_ids", "input_ids"),
    **_at("/tokenize", ("prompt", "messages", "input", "text")),
    "skip_special_tokens": "special tokens are part of the text here",
}
