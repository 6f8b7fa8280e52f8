"""Wrong about what is told beside tokens: log probabilities, and that a sequence cannot go on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from twinpool.coordinator.delivery import Delivery
from twinpool.coordinator.lifecycle import Leg, Request
from twinpool.decode_pool.scheduler import DecodeScheduler
from twinpool.engine.look_back import LookBack
from twinpool.messages import Token
from twinpool.prefill_pool.scheduler import PrefillScheduler, Prompt
from world.wrong_variants import Catalogue

VARIANTS = Catalogue()


@VARIANTS.add
def what_a_lost_attempt_told_of_the_prompt_is_kept(patch: pytest.MonkeyPatch) -> None:
    """The next attempt tells it again, and is not believed."""
    patch.setattr(Request, "forget_outputs", lambda self: self.early.clear())


@VARIANTS.add
def early_tokens_lose_their_log_probabilities(patch: pytest.MonkeyPatch) -> None:
    """Of a token that has to wait for its turn only the token is kept."""
    honest = Delivery.take

    def take(self: Delivery, leg: Leg, token: Token, now: float) -> None:
        honest(self, leg, token, now)
        for index, kept in leg.request.early.items():
            leg.request.early[index] = msgspec.structs.replace(kept, logprobs=None)

    patch.setattr(Delivery, "take", take)


@VARIANTS.add
def log_probabilities_of_a_prompt_are_told_twice(patch: pytest.MonkeyPatch) -> None:
    """Each attempt is asked for them, whatever the client has."""
    patch.setattr(
        "twinpool.request.Job.wants_prompt_logprobs",
        property(lambda self: self.sampling.prompt_logprobs is not None),
    )


@VARIANTS.add
def a_cached_prefix_is_told_nothing_of(patch: pytest.MonkeyPatch) -> None:
    """A prompt whose tokens are asked for is not computed where the prefix cache has it."""

    def usable(self: PrefillScheduler, prompt: Prompt) -> list[bytes]:
        return prompt.chain.digests[: (prompt.num_tokens - 1) // self._pool.block_size]

    patch.setattr(PrefillScheduler, "_usable", usable)


@VARIANTS.add
def a_prompt_that_starts_over_keeps_what_was_told(patch: pytest.MonkeyPatch) -> None:
    """Its blocks are gone and its chunks are computed again, behind the scores that they gave before."""
    honest = PrefillScheduler.unstart_youngest

    def unstart_youngest(self: PrefillScheduler) -> bool:
        before = {prompt.job.key: list(prompt.scores) for prompt in self}
        did = honest(self)
        for prompt in self:
            prompt.scores[:] = before[prompt.job.key]
        return did

    patch.setattr(PrefillScheduler, "unstart_youngest", unstart_youngest)


@VARIANTS.add
def who_cannot_go_on_goes_on(patch: pytest.MonkeyPatch) -> None:
    """The token of a sequence that has failed is taken for one."""
    for core in ("prefill_pool", "decode_pool", "colocated_pool"):
        patch.setattr(f"twinpool.{core}.core.cannot_go_on", lambda *_: None)


@VARIANTS.add
def a_step_that_follows_has_forgotten_the_past(patch: pytest.MonkeyPatch) -> None:
    """A sequence gets a new past whenever its step is planned."""
    honest = DecodeScheduler._slice

    def forgetful(self: DecodeScheduler, sequence: Any) -> Any:
        sequence.look_back = LookBack.of(sequence.job)
        return honest(self, sequence)

    patch.setattr(DecodeScheduler, "_slice", forgetful)
