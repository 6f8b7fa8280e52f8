"""What the two OpenAI routes share: choices in chunks, usage, `[DONE]`.

A stream's chunks differ only in a few places, so where just text is asked for everything around it is encoded once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.logprobs import LogprobsWriter
from twinpool.coordinator.gateway.prompts import total_tokens
from twinpool.coordinator.gateway.shapes import ChoiceShape, Heading, Shape, to_json
from twinpool.coordinator.gateway.usage import Usage

DONE = b"data: [DONE]\n\n"


class OpenAIShape(Shape):
    """One answer. With `include_usage` a stream ends with a chunk that has the token counts; with `return_token_ids`
    the answer has the token ids of prompt and output, where vLLM puts them."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, heading: Heading) -> None:
        self.heading = heading
        self.wanted = wanted = heading.wanted
        self.writer = LogprobsWriter(heading.texts, as_ids=wanted.names_tokens_by_id)
        self._num_prompt = total_tokens(heading.prompts)
        self._num_output = [0] * (wanted.n * len(heading.prompts))
        self._head = b"data: " + to_json(self._identity(self.chunk_object))[:-1]
        # With include_usage every chunk but the last says that it has none, as OpenAI's do.
        self._tail = b',"usage":null}\n\n' if wanted.include_usage else b"}\n\n"

    def chunk(self, choice: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> bytes:
        """The event with one choice; `extra` are further fields of the event."""
        more = b"," + to_json(extra)[1:-1] if extra else b""
        return b"".join((self._head, b',"choices":[', to_json(choice), b"]", more, self._tail_now()))

    def count(self, index: int, num_output: int) -> None:
        """Choice `index` has so many tokens by now."""
        self._num_output[index] = num_output

    def closing(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and `[DONE]`."""
        if not self.wanted.include_usage:
            return DONE
        counts = to_json(usage.as_json(with_facts=self.wanted.wants_facts))
        return b"".join((self._head, b',"choices":[],"usage":', counts, b"}\n\n", DONE))

    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        """One JSON object with every choice."""
        body = {
            **self._identity(self.whole_object),
            "choices": [self._whole_choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage.as_json(with_facts=self.wanted.wants_facts),
            **self._whole_extra(answers),
        }
        return to_json(body)

    def prompt_ids(self, index: int) -> dict[str, Any]:
        """The field `prompt_token_ids` of the prompt that choice `index` answers, if it was asked for."""
        if not self.wanted.return_token_ids:
            return {}
        return {"prompt_token_ids": self.heading.prompt_of(index).token_ids}

    def prompt_logprobs(self, index: int, answer: Piece) -> dict[str, Any]:
        """The field `prompt_logprobs` of the prompt that choice `index` answers, if it was asked for."""
        num_top = self.wanted.num_prompt_logprobs
        if num_top is None or answer.prompt_logprobs is None:
            return {}
        token_ids = self.heading.prompt_of(index).token_ids
        return {"prompt_logprobs": self.writer.prompt(token_ids, answer.prompt_logprobs, num_top)}

    def _identity(self, kind: str) -> dict[str, Any]:
        heading = self.heading
        return {
            "id": f"{self.id_prefix}-{heading.request_id}",
            "object": kind,
            "created": heading.created,
            "model": heading.model,
        }

    def _tail_now(self) -> bytes:
        if not self.wanted.usage_in_each_chunk:
            return self._tail
        return b',"usage":' + to_json(Usage(self._num_prompt, sum(self._num_output)).as_json()) + b"}\n\n"

    @abstractmethod
    def _whole_choice(self, index: int, answer: Piece) -> dict[str, Any]: ...

    def _whole_extra(self, answers: Sequence[Piece]) -> dict[str, Any]:  # noqa: ARG002  # a chat's
        return {}


class OpenAIChoice(ChoiceShape):
    """One choice of a stream. `has_only_text`: chunks are nothing but text between bytes that stay."""

    def __init__(self, shape: OpenAIShape, index: int, *, has_only_text: bool) -> None:
        wanted = shape.wanted
        self._index = index
        self._shape = shape
        self._has_logprobs = wanted.num_logprobs is not None and not wanted.is_prompt_only
        self._has_ids = wanted.return_token_ids
        self._has_only_text = has_only_text and not (
            self._has_logprobs or self._has_ids or wanted.usage_in_each_chunk
        )
        self._before_text = self._after_text = b""
        if self._has_only_text:
            sample = shape.chunk(self._choice("\0"))
            self._before_text, self._after_text = sample.split(b'"\\u0000"')

    def delta(self, piece: Piece) -> bytes:
        """The chunk with what the piece says, and what else was asked for."""
        if self._has_only_text:
            return self._before_text + to_json(piece.text) + self._after_text if piece.text else b""
        self._shape.count(self._index, piece.num_tokens)
        choice = self._said(piece)
        if choice is None:
            if not (piece.token_ids and (self._has_logprobs or self._has_ids)):
                return b""
            choice = self._choice("")
        if self._has_logprobs:
            choice["logprobs"] = self._logprobs(piece)
        if self._has_ids:
            choice["token_ids"] = piece.token_ids
        return self._shape.chunk(choice)

    def _said(self, piece: Piece) -> dict[str, Any] | None:
        """The choice with what the piece's text says; None if that is nothing."""
        return self._choice(piece.text) if piece.text else None

    @abstractmethod
    def _choice(self, text: str) -> dict[str, Any]:
        """The choice with this text."""

    @abstractmethod
    def _logprobs(self, piece: Piece) -> dict[str, Any]: ...


def stop_reason(piece: Piece) -> dict[str, Any]:
    """vLLM's `stop_reason`: the stop string or stop token that ended the answer, where one did."""
    return {} if piece.stop_reason is None else {"stop_reason": piece.stop_reason}
