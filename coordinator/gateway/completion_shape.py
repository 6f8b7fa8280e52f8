"""`/v1/completions`: text, then the finish reason in a chunk of its own. With `echo` the prompt comes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.openai_shape import OpenAIChoice, OpenAIShape, stop_reason
from twinpool.coordinator.gateway.shapes import UsageSoFar
from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.errors import InvariantViolation
from twinpool.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the answer repeats it: its text, and how many characters of it come before each token."""

    text: str
    text_offsets: tuple[int, ...]


class CompletionShape(OpenAIShape):
    """One answer of `/v1/completions`."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int) -> CompletionChoice:
        """A new writer of that choice."""
        return CompletionChoice(self, index)

    def echo(self, index: int) -> Echo | None:
        """The prompt that choice `index` repeats, if it does."""
        if not self.wanted.echo:
            return None
        prompt, tokenizer = self.heading.prompt_of(index), self.heading.texts.tokenizer
        skips_special = self.wanted.skips_special_tokens
        text = prompt.text if prompt.text is not None else tokenizer.decode(prompt.token_ids, skips_special)
        offsets = [0]
        if self.wanted.num_logprobs is not None:
            detokenizer = IncrementalDetokenizer(tokenizer, skips_special)
            for token_id in prompt.token_ids:
                offsets.append(offsets[-1] + len(detokenizer.add((token_id,))))
        return Echo(text, tuple(offsets[: len(prompt.token_ids)]))

    def logprobs(self, index: int, echo: Echo | None, answer: Piece) -> dict[str, Any] | None:
        """The log probabilities of the answer's tokens, after those of the prompt that it repeats; None: nobody asked.

        Raises:
            InvariantViolation: those of the prompt are missing.
        """
        num_top = self.wanted.num_logprobs
        if num_top is None:
            return None
        if echo is None:
            return self.writer.completion(answer.token_ids, answer.logprobs, answer.text_offsets, num_top)
        if answer.prompt_logprobs is None:
            raise InvariantViolation("a prompt is to be repeated, but its log probabilities are not known")
        logprobs: list[TokenLogprobs | None] = [None, *answer.prompt_logprobs, *answer.logprobs]
        token_ids = (*self.heading.prompt_of(index).token_ids, *answer.token_ids)
        offsets = (*echo.text_offsets, *(len(echo.text) + offset for offset in answer.text_offsets))
        return self.writer.completion(token_ids, logprobs, offsets, num_top)

    def _whole_choice(self, index: int, answer: Piece) -> dict[str, Any]:
        echo = self.echo(index)
        ids = {"token_ids": answer.token_ids} if self.wanted.return_token_ids else {}
        return {
            "index": index,
            "text": answer.text if echo is None else echo.text + answer.text,
            "logprobs": self.logprobs(index, echo, answer),
            "finish_reason": answer.finish,
            **stop_reason(answer),
            **ids,
            **self.prompt_ids(index),
            **self.prompt_logprobs(index, answer),
        }


class CompletionChoice(OpenAIChoice):
    """One choice of a stream."""

    def __init__(self, shape: CompletionShape, index: int) -> None:
        super().__init__(shape, index, has_only_text=True)
        self._completion = shape
        self._echo_chars = 0

    def opening(self, first: Piece, usage_so_far: UsageSoFar) -> bytes:  # noqa: ARG002  # it is not shown here
        """The prompt, with `echo`, and its token ids, if they were asked for."""
        shape = self._completion
        echo, ids = shape.echo(self._index), shape.prompt_ids(self._index)
        if echo is None:
            return shape.chunk(self._choice("") | ids) if ids else b""
        self._echo_chars = len(echo.text)
        choice = self._choice(echo.text) | ids
        prompt_only = Piece("", (), 0, prompt_logprobs=first.prompt_logprobs)
        choice["logprobs"] = shape.logprobs(self._index, echo, prompt_only)
        return shape.chunk(choice)

    def ending(self, last: Piece) -> bytes:
        """The finish reason."""
        return self._shape.chunk(self._choice("") | {"finish_reason": last.finish} | stop_reason(last))

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        offsets = (self._echo_chars + offset for offset in piece.text_offsets)
        num_top = self._shape.wanted.num_logprobs or 0
        return self._shape.writer.completion(piece.token_ids, piece.logprobs, offsets, num_top)
