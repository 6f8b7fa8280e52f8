"""Which request is which: the ids that clients choose, kept apart by tenant.

A request has two ids. The shown one comes from its `X-Request-Id`, or is drawn here, and is all that its client sees.
The internal one, which the coordinator and the workers know, also names the tenant: whatever ids tenants choose, two
tenants' ids never meet, and none tells of another's.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections import OrderedDict
from dataclasses import dataclass

from twinpool.coordinator.gateway.connection import Connection
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.errors import DuplicateRequest, RequestCancelled

REMEMBERED_IDS = 16_384

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def is_sane(wanted: str) -> bool:
    """Whether a client may call a request that."""
    return _SANE_ID.fullmatch(wanted) is not None


def fresh_id() -> str:
    """An id for a request that came without one."""
    return uuid.uuid4().hex


def numbered_id(request_id: str, number: int) -> str:
    """What the coordinator calls choice `number` of a request that has several. No id that a client chooses has this
    mark, so none meets another's choice."""
    return f"{request_id}#{number}"


def internal_id(tenant: Tenant, shown_id: str) -> str:
    """What the coordinator calls the request that `tenant` knows as `shown_id`."""
    return shown_id if tenant is ANYONE else f"{tenant.name}:{shown_id}"


@dataclass(slots=True, eq=False)
class Claim:
    """A running request's hold on its id.

    `wanted` is the id that the client asked for, `shown_id` the one that it got. Once its `connection` is gone the
    request is about to end, and another one with its id is no duplicate. It asks for `num_choices` answers.
    """

    tenant: Tenant
    wanted: str
    shown_id: str
    connection: Connection
    is_cancelled: bool = False
    num_choices: int = 1

    @property
    def request_id(self) -> str:
        """The internal id."""
        return internal_id(self.tenant, self.shown_id)

    @property
    def strand_ids(self) -> tuple[str, ...]:
        """The internal ids of its choices: its own, if there is one, else numbered."""
        if self.num_choices == 1:
            return (self.request_id,)
        return tuple(numbered_id(self.request_id, number) for number in range(self.num_choices))

    def check(self) -> None:
        """Raises RequestCancelled if it was cancelled before the coordinator heard of it."""
        if self.is_cancelled:
            raise RequestCancelled("the request was cancelled")


class RequestIds:
    """Gives every request an id of its own, the client's where that is possible. No other place looks for duplicates.

    An id that a running or a recent request of the same tenant has or had gets a suffix, so late news of the one never
    meets the other.
    """

    def __init__(self, remembered: int = REMEMBERED_IDS) -> None:
        self._remembered = remembered
        self._taken: OrderedDict[str, None] = OrderedDict()
        self._running: dict[str, list[Claim]] = {}
        self._held: set[str] = set()

    def claim(
        self,
        tenant: Tenant,
        wanted: str | None,
        connection: Connection,
        *,
        is_duplicate_fine: bool = False,
    ) -> Claim:
        """A hold on a fresh id, until `release`: `wanted` itself if it is sane and not taken.

        Raises:
            DuplicateRequest: one that wanted the same id runs, and `is_duplicate_fine` does not say to go on.
        """
        if wanted is None or not is_sane(wanted):
            wanted = fresh_id()
        key = internal_id(tenant, wanted)
        is_duplicate = not all(other.connection.is_gone for other in self._running.get(key, ()))
        if is_duplicate and not is_duplicate_fine:
            raise DuplicateRequest(
                f"a request with the id {wanted!r} is running; wait for it, cancel it, choose another X-Request-Id, "
                "or send X-Allow-Duplicate: true"
            )
        claim = Claim(tenant, wanted, wanted, connection)
        while claim.request_id in self._taken or claim.request_id in self._held:
            claim.shown_id = f"{wanted}-{secrets.token_hex(4)}"
        self._held.add(claim.request_id)
        self._taken[claim.request_id] = None
        if len(self._taken) > self._remembered:
            self._taken.popitem(last=False)
        self._running.setdefault(key, []).append(claim)
        return claim

    def release(self, claim: Claim) -> None:
        """The request has ended: its id may be wanted again."""
        key = internal_id(claim.tenant, claim.wanted)
        self._held.remove(claim.request_id)
        self._running[key].remove(claim)
        if not self._running[key]:
            del self._running[key]

    def running(self, tenant: Tenant, shown_id: str) -> Claim | None:
        """The tenant's running request with that id: the one that got it, or else the last that wanted it."""
        claims = self._running.get(internal_id(tenant, shown_id))
        if claims is None:  # perhaps one with a suffix
            claims = self._running.get(internal_id(tenant, shown_id.rpartition("-")[0]), [])
            claims = [claim for claim in claims if claim.shown_id == shown_id]
        exact = [claim for claim in claims if claim.shown_id == shown_id]
        return next(reversed(exact or claims), None)
