"""The wire form of messages."""

from __future__ import annotations

import pytest

from twinpool.errors import InvariantViolation
from twinpool.messages import Cancel, Dropped, encode
from twinpool.request import RequestKey


@pytest.mark.parametrize("message", [Cancel(RequestKey("r", 2**70)), Dropped(RequestKey("r", 1), "\ud800")])
def test_a_message_that_cannot_be_sent_is_a_named_bug(message: Cancel | Dropped) -> None:
    with pytest.raises(InvariantViolation, match=f"a {type(message).__name__} that cannot be sent"):
        encode(message)
