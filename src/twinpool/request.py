"""A request as every process sees it: states, reasons to end, sampling parameters, and the work order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from twinpool.bounds import (
    Biases,
    Bits64,
    Count,
    Factor,
    Fraction,
    GrammarSource,
    Logprob,
    NumLogprobs,
    Penalty,
    RequestId,
    Salt,
    Size,
    Temperature,
    TokenIds,
    TokenSequences,
    TopLogprobs,
)


class RequestState(StrEnum):
    """Where a request is in its life. The moves between them are `coordinator/lifecycle.py`'s table."""

    RECEIVED = "received"
    VALIDATED = "validated"
    TOKENIZED = "tokenized"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    DRAINING = "draining"
    COMPLETED = "completed"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing follows."""
        return self in TERMINAL_STATES


TERMINAL_STATES = frozenset(
    {
        RequestState.COMPLETED,
        RequestState.REJECTED,
        RequestState.TIMED_OUT,
        RequestState.CANCELLED,
        RequestState.FAILED,
    }
)


class FinishReason(StrEnum):
    """Why a stream ended. The first two are answers; the others are explicit error events."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


class RequestKey(NamedTuple):
    """One attempt at one request. Workers know requests only by this pair; a stale attempt never matches."""

    request_id: RequestId
    attempt: Count


class TokenLogprobs(NamedTuple):
    """How likely the model held a token: natural logarithms, of the logits as the model gave them (before temperature,
    penalties, bias and bans), at least `bounds.LEAST_LOGPROB`. `top` are the likeliest tokens of the place in falling
    order, of equal ones the lowest id first; the token itself is among them only if it is one of the likeliest.
    """

    logprob: Logprob
    top: TopLogprobs = ()


class GrammarKind(StrEnum):
    """What a `Grammar`'s source is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """llguidance's dialect of Lark."""
    GBNF = "gbnf"
    """llama.cpp's notation: only on its way to the check, which gives it back in Lark."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must match, from its first token to its end."""

    kind: GrammarKind
    source: GrammarSource


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when generation ends at a token.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 are off. The noise of the token at absolute
    position p of the sequence is a pure function of (`seed`, p). `max_tokens` and `min_tokens` count output tokens
    of the whole request, over all attempts.

    `repetition_penalty` 1, `presence_penalty` 0 and `frequency_penalty` 0 are off (`kernels/batch_sampling.py` has the
    formulas). `logit_bias` is (token id, what is added to its logit). `logprobs`: each output token comes with its log
    probability and that of so many of the likeliest; `prompt_logprobs`: so do the prompt's tokens but the first. None:
    not asked for. `allowed_token_ids`: no others are in the answer, those that end it neither; empty: all are allowed.
    `bad_words` are sequences of tokens that are not in it.
    """

    max_tokens: Size
    seed: Bits64
    temperature: Temperature = 1.0
    top_p: Fraction = 1.0
    top_k: Count = 0
    min_p: Fraction = 0.0
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: TokenIds = ()
    repetition_penalty: Factor = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Biases = ()
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    grammar: Grammar | None = None
    allowed_token_ids: TokenIds = ()
    bad_words: TokenSequences = ()

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred already are less likely, or more."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def looks_back(self) -> bool:
        """Whether choosing a token takes more of the tokens before it than the model does."""
        chooses = self.grammar is not None or self.allowed_token_ids or self.bad_words
        return self.has_penalties or bool(chooses)


@dataclass(frozen=True, slots=True)
class Job:
    """The work order for one attempt at one request.

    `token_ids` is the prompt followed by the `num_emitted` output tokens that the client already has (zero at the
    first attempt): resuming is prefilling them too. `eos_token_ids` end the answer unless `ignore_eos`.
    """

    request_id: RequestId
    attempt: Count
    token_ids: TokenIds
    sampling: SamplingParams
    eos_token_ids: TokenIds
    num_emitted: Count = 0
    cache_salt: Salt = ""

    def __post_init__(self) -> None:
        if not self.num_emitted < len(self.token_ids):
            raise ValueError(
                f"{self.num_emitted} of {len(self.token_ids)} tokens are output: there is no prompt"
            )

    @property
    def key(self) -> RequestKey:
        """Which attempt at which request this is."""
        return RequestKey(self.request_id, self.attempt)

    @property
    def num_prompt(self) -> int:
        """Tokens of the client's own prompt."""
        return len(self.token_ids) - self.num_emitted

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether this attempt is to tell the log probabilities of the prompt's tokens: the client, who gets them with
        the first output token, has none yet. Every prompt token is computed then, whatever a prefix cache holds."""
        return self.sampling.prompt_logprobs is not None and not self.num_emitted

    @property
    def ends_with_first_token(self) -> bool:
        """Whether this attempt's first token is sure to be the answer's last: no pool ever decodes it."""
        return self.is_last(self.num_emitted)

    def is_last(self, output_index: int) -> bool:
        """Whether the answer ends with the output token at `output_index`, whichever it is."""
        return output_index + 1 >= self.sampling.max_tokens

    def finish_reason(self, output_index: int, token_id: int) -> FinishReason | None:
        """Why generation ends with the output token `token_id` at `output_index` (from 0), or None to go on.

        Tokens that would end the answer are banned before `min_tokens` (`banned_token_ids`), so they are not
        looked at again here.
        """
        if output_index + 1 > self.sampling.min_tokens:
            if token_id in self.sampling.stop_token_ids:
                return FinishReason.STOP
            if not self.sampling.ignore_eos and token_id in self.eos_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.is_last(output_index) else None

    def banned_token_ids(self, output_index: int) -> tuple[int, ...]:
        """Tokens that must not be sampled at `output_index`, because `min_tokens` is not reached yet."""
        if output_index + 1 > self.sampling.min_tokens:
            return ()
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return (*self.sampling.stop_token_ids, *eos)
