"""From a JSON body to a checked request, and to sampling parameters once the prompt's length is known.

Defaults are OpenAI's: temperature 1, nothing cut off. A model's generation_config does not change them.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

from twinpool.coordinator.gateway.bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    read_body,
    shown,
)
from twinpool.errors import ContextLengthExceeded, InvalidRequest
from twinpool.request import SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool")
COMPLETION_MAX_TOKENS = 16
"""Output tokens of `/v1/completions` when the request does not say, as OpenAI and vLLM have it."""
MIN_TEMPERATURE = 1e-3
"""Below it, 0 apart, logits divided by the temperature leave float32's range."""
SEED_BITS = 63
TEMPLATE_ARGUMENTS_OF_OURS = frozenset({"self", "messages", "add_generation_prompt", "tools", "documents"})
LARGEST_TOP_K = 2**31 - 1
"""More tokens than any vocabulary has: a larger `top_k` means the same, and would not fit a message."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a chat template takes them (role and content, both text), and its further arguments."""

    messages: tuple[dict[str, str], ...]
    template_arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request that is not tokenized yet.

    `prompt` is text, token ids, or a conversation. `max_tokens` None means the rest of the context. `timeout_s` is how
    long after it came in the answer must be complete; it may be infinite.
    """

    prompt: str | tuple[int, ...] | Conversation
    model: str | None
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    add_special_tokens: bool
    cache_salt: str
    return_token_ids: bool
    priority: int
    timeout_s: float

    def sampling(
        self, num_prompt_tokens: int, max_model_len: int, *, default_max_tokens: int | None
    ) -> SamplingParams:
        """The sampling parameters for a prompt of `num_prompt_tokens` tokens in a context of `max_model_len`.

        Without `max_tokens` the answer may take `default_max_tokens`, at most (None: exactly) what the
        context leaves. A missing seed is drawn here.

        Raises:
            ContextLengthExceeded: prompt and output do not fit the context.
            InvalidRequest: `min_tokens` is more than the output may have.
        """
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens and the context holds {max_model_len}, "
                "which leaves no room for an answer; shorten the prompt",
                param="messages" if isinstance(self.prompt, Conversation) else "prompt",
            )
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens asks for {self.max_tokens} more, "
                f"but the context holds {max_model_len}; shorten the prompt or ask for at most {room}",
                param="max_tokens",
            )
        max_tokens = self.max_tokens or min(room, default_max_tokens or room)
        if self.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens} but the answer has at most {max_tokens} tokens; "
                "lower min_tokens or raise max_tokens",
                param="min_tokens",
            )
        seed = secrets.randbits(SEED_BITS) if self.seed is None else self.seed & ((1 << SEED_BITS) - 1)
        return SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )


def parse_completion(data: bytes) -> GenerationRequest:
    """Reads the body of `/v1/completions`.

    Raises:
        InvalidRequest: bad JSON, a wrong type or value, or a field that is not supported.
    """
    body = read_body(data, CompletionBody)
    return _common(body, _completion_prompt(body.prompt), body.add_special_tokens is not False)


def parse_chat(data: bytes) -> GenerationRequest:
    """Reads the body of `/v1/chat/completions`.

    Raises:
        InvalidRequest: bad JSON, a wrong type or value, or a field that is not supported.
    """
    body = read_body(data, ChatBody)
    arguments = body.chat_template_kwargs or {}
    if reserved := TEMPLATE_ARGUMENTS_OF_OURS & arguments.keys():
        message = f"chat_template_kwargs has {min(reserved)}, which the server sets; leave it out"
        raise InvalidRequest(message, param="chat_template_kwargs")
    conversation = Conversation(tuple(_message(i, m) for i, m in enumerate(body.messages)), arguments)
    return _common(body, conversation, add_special_tokens=False)


def check_token_ids(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises InvalidRequest if one of `token_ids` is none of the model's `vocab_size` tokens."""
    if token_ids and (largest := max(token_ids)) >= vocab_size:
        raise InvalidRequest(
            f"{field} has the token id {largest}; the model's ids end at {vocab_size - 1}", param=field
        )


def parse_timeout_header(text: str | None) -> float:
    """The seconds of an `X-Request-Timeout` header; infinite without one. Raises InvalidRequest."""
    if text is None:
        return math.inf
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        message = f"X-Request-Timeout is {text[:80]!r}; it must be a number of seconds above 0"
        raise InvalidRequest(message, param="X-Request-Timeout")
    return timeout_s


def _common(
    body: GenerationBody, prompt: str | tuple[int, ...] | Conversation, add_special_tokens: bool
) -> GenerationRequest:
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        message = "stream_options is for streams only; set stream to true or leave it out"
        raise InvalidRequest(message, param="stream_options")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; "
            "they mean the same, so send one of them",
            param="max_completion_tokens",
        )
    temperature = 1.0 if body.temperature is None else body.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"temperature is {temperature}; it must be 0 (greedy) or at least {MIN_TEMPERATURE}",
            param="temperature",
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise InvalidRequest(
            "stop has an empty string, which would end every answer; leave it out", param="stop"
        )
    return GenerationRequest(
        prompt=prompt,
        model=body.model,
        stream=stream,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        stop=stop,
        max_tokens=next(iter(limits), None),
        min_tokens=body.min_tokens or 0,
        temperature=temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=min(max(body.top_k or 0, 0), LARGEST_TOP_K),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        add_special_tokens=add_special_tokens,
        cache_salt=body.cache_salt or "",
        return_token_ids=bool(body.return_token_ids),
        priority=body.priority or 0,
        timeout_s=math.inf if body.timeout is None else body.timeout,
    )


def _completion_prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if prompt and all(isinstance(item, int) for item in prompt):
        return tuple(prompt)
    if not prompt:
        raise InvalidRequest("prompt is an empty list; send a text or a list of token ids", param="prompt")
    if len(prompt) > 1:
        raise InvalidRequest(
            f"prompt is a list of {len(prompt)} prompts; send one request for each, with a text or token ids",
            param="prompt",
        )
    only = prompt[0]
    return only if isinstance(only, str) else tuple(only)


def _message(index: int, message: ChatMessage) -> dict[str, str]:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        problem = f"{where}.role is {shown(message.role)}; it must be one of {', '.join(ROLES)}"
        raise InvalidRequest(problem, param=f"{where}.role")
    if message.tool_calls:
        raise InvalidRequest(
            f"{where}.tool_calls is not supported yet; leave it out", param=f"{where}.tool_calls"
        )
    if not isinstance(message.content, list):
        return {"role": message.role, "content": message.content or ""}
    texts = []
    for number, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"{where}.content[{number}] has the type {shown(part.type)}; only parts of the type "
                '"text", with their text, are supported',
                param=f"{where}.content[{number}]",
            )
        texts.append(part.text)
    return {"role": message.role, "content": "\n".join(texts)}
