"""Who may lead, and that nobody leads for longer than its Lease is renewed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edl_runtime.backends.errors import ClusterUnavailableError, ConflictError
from edl_runtime.controller.leader import Candidate, LeaseTimes, Substitute, may_take, taken

TIMES = LeaseTimes(lease_s=1, give_up_s=0.3, retry_s=0.05)
NEVER_LOST = LeaseTimes(lease_s=3600, give_up_s=3600.0, retry_s=0.05)


def lease(holder: str, duration_s: int = 15) -> dict[str, Any]:
    return {"spec": {"holderIdentity": holder, "leaseDurationSeconds": duration_s, "leaseTransitions": 4}}


@pytest.mark.parametrize(
    ("holder", "unchanged_s", "may"),
    [("other", 14.9, False), ("other", 15.1, True), ("", 0.0, True), ("me", 0.0, True)],
)
def test_a_lease_is_taken_when_it_is_free_or_has_expired(holder: str, unchanged_s: float, *, may: bool) -> None:
    """By the holder's own duration, counted from when we saw it change."""
    assert may_take(lease(holder), "me", unchanged_s) is may


def test_a_renewal_keeps_when_it_was_acquired() -> None:
    """Another's is acquired anew, and counted as a transition."""
    first = taken(None, "me", TIMES, 0.0)
    assert (first["acquireTime"], first["leaseTransitions"]) == ("1970-01-01T00:00:00.000000Z", 0)
    again = taken({"spec": first}, "me", TIMES, 5.0)
    assert (again["acquireTime"], again["renewTime"]) == (first["acquireTime"], "1970-01-01T00:00:05.000000Z")
    assert taken(lease("other"), "me", TIMES, 5.0)["leaseTransitions"] == 5


async def test_a_substitute_works_while_nobody_holds_the_lease() -> None:
    """It leaves the work to one that takes the Lease, and never takes it itself."""
    leases = Leases()
    own = Worker(leases, "own", NEVER_LOST)
    substitute = Worker(leases, "")
    standing_in = asyncio.create_task(Substitute(leases, "lease", retry_s=0.01).stand_in(substitute.work))  # type: ignore[arg-type]
    await substitute.began.wait()
    assert leases.lease is None
    leading = asyncio.create_task(own._candidate.lead(own.work))
    await substitute.ended.wait()
    assert own.began.is_set()
    substitute.began.clear()
    leading.cancel()  # which gives the Lease back
    await substitute.began.wait()
    standing_in.cancel()
    await asyncio.wait([standing_in, leading])


class Leases:
    """Has one Lease, as the API server does; `away` while it does not answer."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = False
        self.version = 0

    def _answer(self) -> None:
        if self.away:
            raise ClusterUnavailableError("https://far", "refused")

    async def get(self, kind: str, name: str) -> dict[str, Any] | None:
        assert (kind, name) == ("Lease", "lease")
        self._answer()
        return self.lease

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        if self.lease:
            raise ConflictError(409, "AlreadyExists", "")
        return self._save(manifest["spec"])

    async def patch(self, manifest: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        if change["metadata"]["resourceVersion"] != str(self.version):
            raise ConflictError(409, "Conflict", "")
        return self._save({**manifest["spec"], **change["spec"]})

    def _save(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = {
            "kind": "Lease",
            "metadata": {"name": "lease", "resourceVersion": str(self.version)},
            "spec": spec,
        }
        return self.lease


class Worker:
    """Work that never ends, and whether it goes on."""

    def __init__(self, leases: Leases, name: str, times: LeaseTimes = TIMES) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self._candidate = Candidate(leases, "lease", name, times)  # type: ignore[arg-type]

    async def work(self) -> None:
        self.ended.clear()
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.began.clear()
            self.ended.set()

    async def lead(self) -> None:
        await self._candidate.lead(self.work)


async def test_one_leads_and_another_takes_over_at_once_when_it_ends() -> None:
    """The first releases its Lease; meanwhile the other has not begun."""
    leases = Leases()
    first, second = (Worker(leases, name, NEVER_LOST) for name in ("first", "second"))
    leading = asyncio.create_task(first.lead())
    await first.began.wait()
    waiting = asyncio.create_task(second.lead())
    await asyncio.sleep(3 * TIMES.retry_s)
    assert not second.began.is_set()
    leading.cancel()
    await second.began.wait()
    assert first.ended.is_set()
    assert leases.lease is not None
    assert leases.lease["spec"]["holderIdentity"] == "second"
    waiting.cancel()
    await asyncio.gather(leading, waiting, return_exceptions=True)


async def test_a_leader_that_cannot_renew_stops_and_leads_again_later() -> None:
    """It has stopped before its Lease has expired."""
    leases = Leases()
    only = Worker(leases, "only")
    leading = asyncio.create_task(only.lead())
    await only.began.wait()
    leases.away = True
    await only.ended.wait()
    leases.away = False
    await only.began.wait()
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)


async def test_a_leader_whose_lease_another_has_stops() -> None:
    """As after a long pause of its process."""
    leases = Leases()
    only = Worker(leases, "only")
    leading = asyncio.create_task(only.lead())
    await only.began.wait()
    leases._save(lease("other")["spec"])
    await only.ended.wait()
    assert leases.lease is not None
    assert leases.lease["spec"]["holderIdentity"] == "other"
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
