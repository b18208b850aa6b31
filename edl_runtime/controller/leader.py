"""Leader election by a Lease: of several controllers one acts, and another takes over when it can't renew its Lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from edl_runtime.backends.errors import ClusterUnavailableError, ConflictError
from edl_runtime.backends.kubernetes.client import KubernetesClient, Manifest
from edl_runtime.backends.kubernetes.pod_template import mapping_at
from edl_runtime.concurrency import first_completed
from edl_runtime.controller.vitals import Vitals
from edl_runtime.errors import BackendError
from edl_runtime.log import get_logger

log = get_logger(__name__)

clock = time.monotonic

SUBSTITUTE_RETRY_S = 10.0
"""How often one that works in many namespaces looks whether others have come."""


class LeaseTimes(msgspec.Struct, frozen=True):
    """Kubernetes' own components use the same times, in seconds.

    - `lease_s`: how long after its last renewal others leave the Lease to its holder.
    - `give_up_s`: how long after it the holder itself stops, so that never two act.
    - `retry_s`: how often the Lease is renewed, or tried for.
    """

    lease_s: int = 15
    give_up_s: float = 10.0
    retry_s: float = 2.0


def may_take(lease: Manifest, identity: str, unchanged_s: float) -> bool:
    """Whether a Lease is free, ours, or has expired.

    `unchanged_s`: how long we have seen it unchanged, by our own clock: those of two machines may differ.
    """
    spec = mapping_at(lease, "spec")
    return spec.get("holderIdentity") in (None, "", identity) or unchanged_s > (spec.get("leaseDurationSeconds") or 0)


def taken(lease: Manifest | None, identity: str, times: LeaseTimes, now: float) -> dict[str, Any]:
    """Return the spec of the Lease held by `identity` from a Unix time on."""
    spec = mapping_at(lease or {}, "spec")
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    is_ours = spec.get("holderIdentity") == identity
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": times.lease_s,
        "acquireTime": spec.get("acquireTime") or at if is_ours else at,
        "renewTime": at,
        "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (lease is not None and not is_ours),
    }


class _SeenLease:
    """The Lease `name` as it was last read, and since when it has not changed, by our clock."""

    def __init__(self, api: KubernetesClient, name: str) -> None:
        self.lease: Manifest | None = None
        self._api = api
        self._name = name
        self._seen_at = clock()

    async def read(self) -> Manifest | None:
        """Return it, None if there is none. Raises BackendError."""
        found = await self._api.get("Lease", self._name)
        if found is None or self.lease is None or _version(found) != _version(self.lease):
            self._seen_at = clock()
        self.lease = found
        return found

    def may_take(self, identity: str) -> bool:
        """Whether it is there no more, free, of `identity`, or has expired."""
        return self.lease is None or may_take(self.lease, identity, clock() - self._seen_at)

    @property
    def holder(self) -> str:
        return str(mapping_at(self.lease or {}, "spec").get("holderIdentity"))


class Candidate:
    """One of those that want the Lease `name`. `identity`: its own, unique."""

    def __init__(
        self,
        api: KubernetesClient,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
        vitals: Vitals | None = None,
    ) -> None:
        self._api = api
        self._name = name
        self._identity = identity
        self._times = times or LeaseTimes()
        self._vitals = vitals or Vitals()
        self._seen = _SeenLease(api, name)

    async def lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do `work` whenever this one holds the Lease, and cancel it when that can't be renewed. Never ends."""
        while True:
            held_at = await self._acquire()
            log.info("leader.elected", lease=self._name, identity=self._identity)
            self._vitals.leads = True
            try:
                await first_completed(work(), self._renew(held_at))
            finally:
                self._vitals.leads = False
                await self._release()
            log.warning("leader.lost", lease=self._name, identity=self._identity)

    async def _acquire(self) -> float:
        """Return when the Lease was taken, by our clock."""
        while True:
            try:
                tried_at = clock()
                if await self._try():
                    return tried_at
            except ClusterUnavailableError:
                pass
            except BackendError as error:
                log.warning("leader.cannot_try", lease=self._name, cause=str(error))
            await asyncio.sleep(self._times.retry_s)

    async def _try(self) -> bool:
        """Take or renew the Lease; False if another holds it, or was faster."""
        found = await self._seen.read()
        self._vitals.answered_at = clock()
        if not self._seen.may_take(self._identity):
            return False
        spec = taken(found, self._identity, self._times, time.time())
        try:
            if found is None:
                about = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
                self._seen.lease = await self._api.create({**about, "spec": spec})
            else:
                change = {"metadata": {"resourceVersion": _version(found)}, "spec": spec}
                self._seen.lease = await self._api.patch({**found, "kind": "Lease"}, change)
        except ConflictError:
            return False
        return True

    async def _renew(self, held_at: float) -> None:
        """Renew the Lease until that has failed for too long, or another has it."""
        while True:
            await asyncio.sleep(self._times.retry_s)
            tried_at = clock()
            left_s = held_at + self._times.give_up_s - tried_at
            if left_s <= 0:
                return
            try:
                async with asyncio.timeout(left_s):
                    if await self._try():
                        held_at = tried_at
                    elif self._seen.holder != self._identity:
                        return
            except TimeoutError:
                return
            except BackendError as error:
                log.warning("leader.cannot_renew", lease=self._name, cause=str(error))

    async def _release(self) -> None:
        """Let another take the Lease at once, if it is still ours."""
        lease = self._seen.lease
        if lease is None or self._seen.holder != self._identity:
            return
        change = {"metadata": {"resourceVersion": _version(lease)}, "spec": {"holderIdentity": ""}}
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(self._times.retry_s):
                await self._api.patch({**lease, "kind": "Lease"}, change)


class Substitute:
    """One that works where nobody holds the Lease `name`, and never takes it: whoever wants it may have it."""

    def __init__(self, api: KubernetesClient, name: str, retry_s: float = SUBSTITUTE_RETRY_S) -> None:
        self._name = name
        self._retry_s = retry_s
        self._seen = _SeenLease(api, name)

    async def stand_in(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do `work` whenever nobody holds the Lease, and cancel it when somebody does. Raises BackendError at first."""
        while True:
            holder = ""
            while await self._is_held():
                if self._seen.holder != holder:
                    holder = self._seen.holder
                    log.info("namespace.left_to", lease=self._name, identity=holder)
                await asyncio.sleep(self._retry_s)
            log.info("namespace.taken", lease=self._name)
            await first_completed(work(), self._wait_held())

    async def _wait_held(self) -> None:
        while True:
            await asyncio.sleep(self._retry_s)
            with suppress(BackendError):  # the work meets it, too, and handles it
                if await self._is_held():
                    return

    async def _is_held(self) -> bool:
        await self._seen.read()
        return not self._seen.may_take("")


def _version(lease: Manifest) -> str:
    return str(lease["metadata"]["resourceVersion"])
