"""`twinpool worker` before it starts anything."""

from __future__ import annotations

from twinpool.commands.worker import default_id
from twinpool.config import Role


def test_the_default_name_tells_hosts_and_processes_apart_and_can_name_a_file() -> None:
    assert default_id(Role.DECODE, "node-7.example.com", 1) == "decode-node-7-example-com-1"
    assert default_id(Role.DECODE, "node-8", 1) != default_id(Role.DECODE, "node-7", 1)
