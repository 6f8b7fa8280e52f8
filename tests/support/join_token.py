"""The join token of tests: the product has no way without one."""

from __future__ import annotations

from twinpool.join_token import JoinToken

TEST_TOKEN = JoinToken("test-" * 10)
