"""How a simulation's cores tell each other of a step at a cost that does not grow with the batch."""

from __future__ import annotations

from twinpool.messages.base import Message
from twinpool.messages.control import Token
from twinpool.request import RequestKey


class LockstepTokens(Message, frozen=True, tag=True):
    """What `StepTokens` would say of a step whose tokens are all `token_id`, as the difference to the worker's step
    before.

    A sequence that had a token there has its next one now, and that is not its last, unless it is in `tokens` or in
    `left`. `tokens` are of the sequences that had none there, and last ones; `left` had one there, and has none now.
    It is no `ControlMessage`: on a wire each token has an id of its own.
    """

    tokens: tuple[Token, ...]
    left: tuple[RequestKey, ...]
    token_id: int
