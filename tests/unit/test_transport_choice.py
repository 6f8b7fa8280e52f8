"""Which transport a link uses, and how faults are specified."""

from __future__ import annotations

import pytest

from twinpool.config import Encryption, TransportName
from twinpool.errors import ConfigError, TransportUnavailable
from twinpool.kv_transfer.faulty import FaultPlan
from twinpool.kv_transfer.transports import available, choose

ALL = ["shm", "ucx", "tcp"]


def test_auto_prefers_shared_memory_on_one_host_then_ucx_then_tcp() -> None:
    assert choose("auto", ALL, ALL, same_host=True, must_seal=False) is TransportName.SHM
    assert choose("auto", ALL, ALL, same_host=False, must_seal=False) is TransportName.UCX
    assert choose("auto", ALL, ["shm", "tcp"], same_host=False, must_seal=False) is TransportName.TCP
    assert choose("auto", ["ucx", "tcp"], ALL, same_host=True, must_seal=False) is TransportName.UCX


def test_loopback_is_never_chosen_unasked() -> None:
    with pytest.raises(TransportUnavailable, match="no common transport: here loopback, there loopback, tcp"):
        choose("auto", ["loopback"], ["tcp", "loopback"], same_host=True, must_seal=False)
    assert (
        choose("loopback", ["loopback"], ["loopback"], same_host=True, must_seal=False)
        is TransportName.LOOPBACK
    )


def test_a_transport_asked_for_by_name_is_used_or_refused() -> None:
    assert choose("tcp", ALL, ALL, same_host=True, must_seal=False) is TransportName.TCP
    with pytest.raises(TransportUnavailable, match=r"'ucx' was asked for, but the other cannot use it"):
        choose("ucx", ALL, ["tcp"], same_host=True, must_seal=False)
    with pytest.raises(TransportUnavailable, match="this worker and the other cannot"):
        choose("ucx", ["tcp"], ["tcp"], same_host=True, must_seal=False)
    with pytest.raises(TransportUnavailable, match="between two hosts"):
        choose("shm", ALL, ALL, same_host=False, must_seal=False)


def test_what_must_be_encrypted_never_goes_by_ucx() -> None:
    assert choose("auto", ALL, ALL, same_host=False, must_seal=True) is TransportName.TCP
    assert choose("auto", ALL, ALL, same_host=True, must_seal=True) is TransportName.SHM
    with pytest.raises(TransportUnavailable, match="ucx cannot do; use --transport tcp or auto, or --kv-enc"):
        choose("ucx", ALL, ALL, same_host=False, must_seal=True)


@pytest.mark.parametrize(
    ("encryption", "on_one_host", "between_hosts"),
    [("auto", False, True), ("on", True, True), ("off", False, False)],
)
def test_kv_is_encrypted_between_hosts_unless_told_otherwise(
    encryption: str, on_one_host: bool, between_hosts: bool
) -> None:
    setting = Encryption(encryption)
    assert setting.seals(same_host=True) is on_one_host
    assert setting.seals(same_host=False) is between_hosts


def test_every_transport_says_whether_it_is_usable() -> None:
    assert set(available()) == set(TransportName) - {TransportName.AUTO}
    assert available()[TransportName.TCP] is None


def test_a_fault_plan_reads_what_it_names() -> None:
    assert FaultPlan.parse("delay=0.01, corrupt=0.1,seed=3") == FaultPlan(delay=0.01, corrupt=0.1, seed=3)
    assert FaultPlan.parse("") == FaultPlan()


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("explode=1", "names 'explode'; allowed: delay, late, corrupt, drop, stall, death, seed"),
        ("drop", "'drop' needs a number"),
        ("drop=often", "'drop=often' needs a number"),
        ("drop=2", "'drop=2' is out of range"),
        ("delay=-1", "'delay=-1' is out of range"),
        ("delay=nan", "'delay=nan' is out of range"),
    ],
)
def test_a_malformed_fault_plan_is_refused_by_name(spec: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        FaultPlan.parse(spec)
