"""What one model step computes, and what it gives back. No torch: schedulers build these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twinpool.engine.look_back import LookBack
from twinpool.request import RequestKey, SamplingParams, TokenLogprobs


class Scoring(NamedTuple):
    """The tokens that follow a slice's, from its first one's follower on, whose log probabilities are asked for, with
    those of the `num_top` likeliest at each place."""

    followers: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that run in one step.

    `token_ids` (one or more) stand at positions `start`, `start` + 1, …; the KV of all positions before `start` is
    in the blocks of `block_table`, which also has the slots that the new tokens' KV goes to. With `sampling` the next
    token, at position `start + len(token_ids)`, is sampled, never one of `banned_token_ids`; without, this is a chunk
    that does not reach the end of the prompt. `look_back` is the sequence's own, the same object in all its slices, if
    its `sampling` looks back.
    """

    key: RequestKey
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None = None
    banned_token_ids: tuple[int, ...] = ()
    look_back: LookBack | None = None
    scoring: Scoring | None = None

    @property
    def end(self) -> int:
        """Number of tokens whose KV is in the blocks after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The slices of one step, at most one per sequence; decoding ones (one token) first."""

    slices: tuple[SequenceSlice, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that run through the model."""
        return sum(len(s.token_ids) for s in self.slices)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampled token of every slice that asked for one, the step's duration in seconds, and how much processor time
    (`cpu_s`) the thread that ran it used.

    `missed_graph`: decode steps were to be captured CUDA graphs, and this one ran kernel by kernel all the same.
    `logprobs` are those of sampled tokens whose `sampling` asks for them, `scores` those of a slice's `scoring`.
    `failed` has the sequences that cannot go on, with the reason for people; their `token_ids` mean nothing.
    """

    token_ids: dict[RequestKey, int]
    seconds: float
    missed_graph: bool = False
    logprobs: dict[RequestKey, TokenLogprobs] = field(default_factory=dict)
    scores: dict[RequestKey, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed: dict[RequestKey, str] = field(default_factory=dict)
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerGroupsDone:
    """An `on_layer_done` that does something after the layers in `last_layers` only: a model may compute those between
    in one go, and need not call it after them.
    """

    last_layers: frozenset[int]
    done: Callable[[int], None]

    def __call__(self, layer: int) -> None:
        """Layer `layer`, and all before it, are final."""
        self.done(layer)
