"""Log probabilities as JSON values, in the three forms that clients know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from twinpool.coordinator.gateway.token_texts import TokenTexts
from twinpool.request import TokenLogprobs


class LogprobsWriter:
    """Writes the tokens of one request: by their texts, or as `token_id:N` (`as_ids`)."""

    def __init__(self, texts: TokenTexts, *, as_ids: bool) -> None:
        self._texts = texts
        self._as_ids = as_ids

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """A chat choice's `logprobs`. A token's `top_logprobs` are the likeliest ones, and need not have it."""
        content = [
            self._entry(token_id, logprob)
            | {"top_logprobs": [self._entry(top_id, top_logprob) for top_id, top_logprob in top]}
            for token_id, (logprob, top) in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        text_offsets: Iterable[int],
        num_top: int,
    ) -> dict[str, Any]:
        """A completion choice's `logprobs`; None is of a prompt's first token, which nothing comes before.

        A token's `top_logprobs` are the likeliest `num_top`, and itself. Where texts are equal (parts of characters)
        the likeliest counts, so that a chosen token is the likeliest if its value is the greatest of them.
        """
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else entry.logprob for entry in logprobs],
            "top_logprobs": [
                None if entry is None else self._likeliest(token_id, entry, num_top)
                for token_id, entry in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": list(text_offsets),
        }

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
    ) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`: for each token but the first, the likeliest of its place and itself, by token id. The
        `rank` counts from 1; of a token beyond the likeliest it is not known, and null.

        Raises:
            ValueError: `logprobs` are not of all tokens but the first.
        """
        if len(token_ids) != len(logprobs) + 1:
            raise ValueError(f"{len(logprobs)} log probabilities are not of {len(token_ids)} prompt tokens")
        return [None, *(self._ranked(*pair, num_top) for pair in zip(token_ids[1:], logprobs, strict=True))]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token_id), "logprob": logprob, "bytes": self._texts.bytes(token_id)}

    def _likeliest(self, token_id: int, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        likeliest: dict[str, float] = {}
        for top_id, logprob in (*entry.top[:num_top], (token_id, entry.logprob)):
            likeliest.setdefault(self._name(top_id), logprob)
        return likeliest

    def _ranked(self, token_id: int, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
        ranks = {top_id: rank for rank, (top_id, _) in enumerate(entry.top, start=1)}
        wanted = {token_id: entry.logprob} | dict(entry.top[:num_top])
        return {
            str(id_): {"logprob": value, "rank": ranks.get(id_), "decoded_token": self._texts.text(id_)}
            for id_, value in wanted.items()
        }

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.text(token_id)
