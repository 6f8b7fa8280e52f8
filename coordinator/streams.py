"""The way of a request's tokens from the core to whoever reads them."""

from __future__ import annotations

import asyncio

from twinpool.coordinator.service import Output, Take
from twinpool.errors import InvariantViolation, RequestError
from twinpool.request import FinishReason, TokenLogprobs


class OutputStream:
    """An async iterator over one request's outputs, for one reader.

    What the reader has not taken yet is kept as one Output that grows, so a slow reader costs no more than
    the tokens of its own request (at most its `max_tokens`) and catches up in one step.

    While nothing waits for the reader, outputs that do not end the stream are offered to `take` first, which spares
    waking the reader's task. If it raises, the reader gets that error as the stream's end.
    """

    def __init__(self, take: Take | None = None) -> None:
        self._take_at_once = take
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._first_index = 0
        self._finish: FinishReason | None = None
        self._error: RequestError | None = None
        self._failure: Exception | None = None
        self._is_over = False
        self._is_broken = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        """Adds what comes next. After an output with `finish` nothing may come.

        Raises:
            InvariantViolation: the tokens do not follow those before, or the stream has ended.
        """
        if self._is_broken:
            return
        if self._finish is not None:
            raise InvariantViolation(f"an output at {output.first_index} behind the last one of its stream")
        if output.first_index != self._first_index + len(self._token_ids):
            expected = self._first_index + len(self._token_ids)
            raise InvariantViolation(f"an output starts at token {output.first_index}, expected {expected}")
        if self._take_at_once is not None and not self._token_ids and output.finish is None:
            try:
                is_taken = self._take_at_once(output)
            except Exception as exc:  # noqa: BLE001  # the reader's to handle, whatever it is
                self._failure, self._is_broken = exc, True
                self._wake()
                return
            if is_taken:
                self._first_index += len(output.token_ids)
                return
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        self._finish, self._error = output.finish, output.error
        self._wake()

    def break_off(self, error: RequestError) -> None:
        """Ends the stream with an error, whatever else is put in: what came does not add up."""
        self._is_broken = True
        self._finish, self._error = FinishReason.ERROR, error
        self._wake()

    def close(self) -> None:
        """Ends the stream without another output, whatever else is put in."""
        self._is_over = self._is_broken = True
        self._wake()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Output:
        while not self._is_over:
            if self._failure is not None:
                self._is_over = True
                raise self._failure
            if self._token_ids or self._finish is not None:
                return self._take()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        raise StopAsyncIteration

    def _take(self) -> Output:
        output = Output(
            tuple(self._token_ids),
            self._first_index,
            self._finish,
            self._error,
            tuple(self._logprobs),
            self._prompt_logprobs,
        )
        self._first_index += len(self._token_ids)
        self._token_ids.clear()
        self._logprobs.clear()
        self._prompt_logprobs = None
        self._is_over = self._finish is not None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
