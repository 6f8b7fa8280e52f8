"""Requests whose prompts are in the data: ShareGPT conversations, and JSON lines with prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import tokenizers

from twinpool.bench.serving.datasets.files import json_lines, whole_json
from twinpool.bench.serving.datasets.settings import DatasetSettings, TooLong
from twinpool.bench.serving.workload import Chat, Message
from twinpool.errors import ConfigError

_FEWEST_TOKENS = 4
"""Of a ShareGPT prompt and of its answer, as in `vllm bench serve`."""
_DEFAULT_OUTPUT = 256
"""Of a custom prompt that does not say, as in `vllm bench serve`."""
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Prompted:
    """One request with its own prompt. `input_tokens` counts the special tokens that a text gets, of a chat the
    contents alone."""

    prompt: str | Chat
    input_tokens: int
    output_tokens: int
    group: str = ""


class _Turn(msgspec.Struct):
    value: str
    sender: str = msgspec.field(default="", name="from")


class _Conversation(msgspec.Struct):
    conversations: tuple[_Turn, ...] = ()


class _Entry(msgspec.Struct):
    """A line of a custom file: a prompt or messages; the output's length under any of the names that are in use."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    output_tokens: int | None = None
    output_len: int | None = None
    max_tokens: int | None = None
    group: str = ""

    @property
    def content(self) -> str | Chat | None:
        """What is to be sent; None if there is neither or both."""
        if (self.prompt is None) == (self.messages is None):
            return None
        return self.prompt if self.messages is None else Chat(self.messages)

    @property
    def wanted(self) -> int | None:
        """The output's length, if the line says it."""
        given = (self.output_tokens, self.output_len, self.max_tokens)
        return next((length for length in given if length is not None), None)


def sharegpt(settings: DatasetSettings, tokenizer: tokenizers.Tokenizer, seed: int) -> Iterator[Prompted]:
    """The first two messages of each conversation: the prompt, and an answer whose length is the output's. Pairs with
    fewer than 4 tokens on a side are passed over.

    Raises:
        ConfigError: the file cannot be read, or is no list of conversations.
    """
    path = settings.path or ""
    file = whole_json(
        path, tuple[_Conversation, ...], "a list of objects with conversations (ShareGPT's format)"
    )
    pairs = [entry.conversations[:2] for entry in file if len(entry.conversations) >= 2]
    for batch in _batched(_ordered(pairs, settings.shuffle, seed)):
        prompts = _lengths(tokenizer, [prompt.value for prompt, _ in batch])
        answers = _lengths(tokenizer, [answer.value for _, answer in batch], special=False)
        for (prompt, _), input_tokens, answered in zip(batch, prompts, answers, strict=True):
            if input_tokens >= _FEWEST_TOKENS and (settings.output_len or answered >= _FEWEST_TOKENS):
                yield Prompted(prompt.value, input_tokens, settings.output_len or answered)


def custom(settings: DatasetSettings, tokenizer: tokenizers.Tokenizer, seed: int) -> Iterator[Prompted]:
    """Lines like ``{"prompt": "…", "output_tokens": 64}`` or ``{"messages": [{"role": "user", "content": "…"}]}``.
    `output_len` of the settings goes before what a line says, and 256 is what one gets that says nothing.

    Raises:
        ConfigError: the file cannot be read, or a line is something else.
    """
    path = settings.path or ""
    entries: list[tuple[str | Chat, _Entry]] = []
    for number, entry in json_lines(path, _Entry, "an object with a prompt or messages"):
        content = entry.content
        if not content or (entry.wanted is not None and entry.wanted < 1):
            raise ConfigError(
                f"line {number} of {path} needs either a prompt or messages that are not empty, and an output of at "
                "least 1 token if it says one"
            )
        entries.append((content, entry))
    for content, entry in _ordered(entries, settings.shuffle, seed):
        if isinstance(content, Chat):
            texts = [message.content for message in content.messages]
            input_tokens = sum(_lengths(tokenizer, texts, special=False))
        else:
            (input_tokens,) = _lengths(tokenizer, [content])
        output_tokens = settings.output_len or entry.wanted or _DEFAULT_OUTPUT
        yield Prompted(content, input_tokens, output_tokens, entry.group)


@dataclass(frozen=True, slots=True)
class FittedPrompts:
    """Requests that the model can hold, and in words what was done to those that it could not."""

    requests: list[Prompted]
    notes: tuple[str, ...] = ()


def fit_prompts(
    requests: Iterable[Prompted],
    settings: DatasetSettings,
    tokenizer: tokenizers.Tokenizer,
    num_prompts: int | None,
) -> FittedPrompts:
    """The first `num_prompts` (None: all) that fit into the context; what is too long is treated as the settings say.

    Raises:
        ConfigError: one does not fit and is to be refused, lengths are to be scaled, or none is left.
    """
    if settings.too_long is TooLong.SCALE or settings.length_scale != 1:
        raise ConfigError(
            f"prompts of dataset {settings.name} are as they are, and --too-long scale and --length-scale are for made "
            "ones; say --too-long clip or drop"
        )
    kept: list[Prompted] = []
    counts = {"clipped": 0, "dropped": 0}
    context = settings.max_model_len
    for request in requests:
        if len(kept) == num_prompts:
            break
        length = request.input_tokens + request.output_tokens
        if context is None or length <= context:
            kept.append(request)
        elif settings.too_long is TooLong.REFUSE:
            raise ConfigError(
                f"a prompt of dataset {settings.name} has {length} tokens with its output, and the context is "
                f"{context}; say --too-long clip or drop"
            )
        elif settings.too_long is TooLong.CLIP and isinstance(request.prompt, str):
            kept.append(_clipped(request, request.prompt, context, tokenizer))
            counts["clipped"] += 1
        else:
            counts["dropped"] += 1
    if not kept:
        raise ConfigError(f"{settings.path} has no usable request for dataset {settings.name}")
    notes = tuple(
        f"{count} requests were {done}: they are longer than the context of {context} tokens"
        for done, count in counts.items()
        if count
    )
    return FittedPrompts(kept, notes)


def _clipped(request: Prompted, text: str, context: int, tokenizer: tokenizers.Tokenizer) -> Prompted:
    """Cut behind a token, and further if what is left tokenizes to more."""
    output_tokens = min(request.output_tokens, context // 2)
    allowed = context - output_tokens
    ends = [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]
    kept = allowed
    while kept > 0:
        cut = text[: ends[kept - 1]] if kept <= len(ends) else text
        (length,) = _lengths(tokenizer, [cut])
        if length <= allowed:
            return replace(request, prompt=cut, input_tokens=length, output_tokens=output_tokens)
        kept -= 1
    raise ConfigError(f"nothing of a prompt fits into a context of {context} tokens; give it more room")


def _ordered(entries: Sequence[Any], shuffle: bool, seed: int) -> Iterator[Any]:
    if not shuffle:
        return iter(entries)
    return (entries[number] for number in np.random.default_rng(seed).permutation(len(entries)).tolist())


def _batched(entries: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(entries, _BATCH)):
        yield batch


def _lengths(tokenizer: tokenizers.Tokenizer, texts: list[str], special: bool = True) -> list[int]:
    return [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=special)]
