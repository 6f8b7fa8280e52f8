"""What the OpenAPI document says of each field of a request, in a sentence at most.

The structs say what is checked; this says what it is for. A test keeps the two complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOTHING = "Taken, and changes nothing."
_SAME_AS_STRUCTURED = "The same as `structured_outputs.{name}`, by {whose} name."
_MOST_TOKENS = "The most tokens of the answer; without it the rest of the context, for completions 16."
_GENERATION: Mapping[str, str] = {
    "model": "The served model's name; without it that model answers.",
    "stream": "Whether the answer comes as server-sent events while it is written.",
    "stream_options": "What a stream carries besides the answer.",
    "n": "Answers to each prompt.",
    "best_of": "Taken if it equals `n`; answers are not picked among more.",
    "max_tokens": _MOST_TOKENS,
    "max_completion_tokens": "The same as `max_tokens`; different values for both are refused.",
    "min_tokens": "The answer has at least so many tokens: before them nothing ends it.",
    "temperature": "How evenly tokens are drawn; 0: always the likeliest. Without it 1.",
    "top_p": "Draw among the likeliest tokens that have so much of the probability together.",
    "top_k": "Draw among so many of the likeliest tokens; 0 and -1: all.",
    "min_p": "Leave out tokens that are less likely than this share of the likeliest one's probability.",
    "seed": "With `--dtype float32` the same seed gives the same answer; answer i of `n` has `seed` + i.",
    "presence_penalty": "Taken from the logits of tokens that the answer has.",
    "frequency_penalty": "Taken from the logits of the answer's tokens once for each time that they occur.",
    "repetition_penalty": "Above 1, tokens that prompt or answer have become less likely; below 1, more.",
    "logit_bias": "Added to the logits of tokens, by token id: -100 to 100.",
    "ignore_eos": "Whether the answer goes on behind the token that ends it, up to `max_tokens`.",
    "stop": "Texts that end the answer, which does not have them.",
    "stop_token_ids": "Token ids that end the answer.",
    "allowed_token_ids": "The answer has no other tokens; those that end it must be among them, or else nothing does "
    "but its length.",
    "bad_words": "Texts that are not in the answer, as far as it would spell them in the tokens that they have alone, "
    "or after a space.",
    "include_stop_str_in_output": "Whether the text has the stop string that ended it.",
    "skip_special_tokens": "Whether special tokens are no part of the text; without it they are not.",
    "prompt_logprobs": "Log probabilities of the prompt's tokens, with so many of the likeliest at each place.",
    "return_token_ids": "Whether the token ids of prompt and answer come along.",
    "return_tokens_as_token_ids": "Whether tokens in `logprobs` are written as `token_id:N`.",
    "truncate_prompt_tokens": "Keep the last so many tokens of the prompt; -1: as many as fit.",
    "add_special_tokens": "Whether the tokenizer adds its special tokens; without it for completions alone.",
    "cache_salt": "Cached prompts are shared only between requests with the same salt.",
    "priority": "Of your own waiting requests the lowest goes first.",
    "timeout": "Seconds within which the answer must be complete, waiting included.",
    "twinpool": "Whether `usage` has a block on where the request's time went.",
    "response_format": "What the answer is to be: text, any JSON object, or JSON of a schema.",
    "structured_outputs": "What the answer must match: exactly one of a schema, an expression, choices or a grammar.",
    **{
        f"guided_{name}": _SAME_AS_STRUCTURED.format(name=name, whose="vLLM's older")
        for name in ("json", "regex", "choice", "grammar")
    },
    "regex": _SAME_AS_STRUCTURED.format(name="regex", whose="SGLang's"),
    "ebnf": _SAME_AS_STRUCTURED.format(name="grammar", whose="SGLang's"),
    "json_schema": _SAME_AS_STRUCTURED.format(name="json", whose="SGLang's"),
    **dict.fromkeys(
        (
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "request_id", "spaces_between_special_tokens",
        ),
        _NOTHING,
    ),
}  # fmt: skip
_CHAT_TEMPLATE_KWARGS = {"chat_template_kwargs": "Further values for the model's chat template."}

DESCRIPTIONS: Mapping[str, Mapping[str, str]] = {
    "CompletionBody": {
        **_GENERATION,
        "prompt": "What to continue: a text, token ids, or a list of either, each answered by itself.",
        "echo": "Whether the prompt comes before the answer; with `max_tokens` 0 it is only scored.",
        "logprobs": "Log probabilities of the answer's tokens, with so many of the likeliest at each place.",
    },
    "ChatBody": {
        **_GENERATION,
        **_CHAT_TEMPLATE_KWARGS,
        "messages": "The conversation so far, as the model's chat template writes it.",
        "logprobs": "Whether log probabilities of the answer's tokens come along.",
        "top_logprobs": "With `logprobs`: so many of the likeliest tokens at each place.",
        "add_generation_prompt": "Whether the template begins an answer; without it it does.",
        "continue_final_message": "Whether the answer goes on with the last message instead of a new one.",
        "documents": "Documents for a chat template that takes some.",
        "tools": "Functions that the model may call.",
        "tool_choice": "`none`, `auto` (the default), `required`, or the one function that must be called.",
        "parallel_tool_calls": "False: one call at most.",
        "reasoning_effort": "Goes to the model's chat template, which may not look at it.",
        "verbosity": _NOTHING,
    },
    "StreamOptions": {
        "include_usage": "Whether a last chunk has the usage.",
        "continuous_usage_stats": "With that, whether each chunk has the usage so far.",
    },
    "ChatMessage": {
        "role": "`system`, `developer`, `user`, `assistant` or `tool`.",
        "content": "What is said: a text, or parts of the types `text` and `refusal`.",
        "name": "Who says it, for templates that look at it.",
        "reasoning_content": "What the assistant thought before it said this.",
        "reasoning": "The same as `reasoning_content`.",
        "tool_calls": "The calls that the assistant made.",
        "tool_call_id": "Of a message with the role `tool`: the call of which it is the result.",
    },
    "ContentPart": {
        "type": "`text` or `refusal`; images, sound and files are refused.",
        "text": "What is said.",
        "refusal": "What the assistant said to refuse.",
    },
    "ResponseFormat": {
        "type": "Any text, any JSON object, or JSON of a schema.",
        "json_schema": "The schema, for the type `json_schema`.",
        "schema": "The schema, where it stands beside the type.",
    },
    "JsonSchema": {
        "name": _NOTHING,
        "description": _NOTHING,
        "schema": "The JSON schema that the answer is valid by.",
        "strict": "The schema is obeyed with and without it.",
    },
    "StructuredOutputs": {
        "json": "A JSON schema, or one as text.",
        "regex": "A regular expression that the whole answer matches.",
        "choice": "Texts of which the answer is one.",
        "grammar": "A grammar in GBNF or Lark.",
        "json_object": "True: any JSON object.",
        **dict.fromkeys(("structural_tag", "whitespace_pattern"), "Refused."),
        **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), "Refused if true."),
        "disable_fallback": _NOTHING,
    },
    "Tool": {"type": "`function`.", "function": "The function."},
    "FunctionDefinition": {
        "name": "1 to 64 letters, digits, - and _.",
        "description": "What it does, for the model.",
        "parameters": "The JSON schema of an object: its arguments.",
        "strict": "Whether a schema that cannot be enforced completely is refused.",
    },
    "NamedToolChoice": {"type": "`function`.", "function": "Which one."},
    "FunctionName": {"name": "One of the request's functions."},
    "ToolCall": {"id": "What its result refers to.", "type": "`function`.", "function": "What was called."},
    "FunctionCall": {"name": "The function.", "arguments": "JSON text, or the object itself."},
}
"""By the name of a struct, the fields of the two OpenAI bodies and of what they have in them."""
EXTENSIONS: Mapping[str, str] = {**_GENERATION, **_CHAT_TEMPLATE_KWARGS}
"""Of fields that other routes' bodies take as these do (`ExtensionFields`)."""


def describe_fields(component: dict[str, Any], texts: Mapping[str, str]) -> None:
    """Adds the texts to the properties of a struct's schema, where they have none."""
    for field, schema in component.get("properties", {}).items():
        if field in texts:
            schema.setdefault("description", texts[field])
