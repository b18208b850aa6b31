"""Rescaling passes of the controller: on a schedule, and when jobs or traffic windows change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.autoscale.cluster.changes import JobsSeen, job_changes, jobs_seen
from edl_runtime.autoscale.history import RescaleOutcome
from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.interface import Policy
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic.capacity import LEAD_S
from edl_runtime.concurrency import first_completed
from edl_runtime.controller.controller import RETRY_S
from edl_runtime.controller.vitals import Vitals
from edl_runtime.controller.windows import WindowsConfigMap
from edl_runtime.errors import EdlError, isolated
from edl_runtime.log import get_logger

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.backends.kubernetes.backend import KubernetesBackend

DEBOUNCE_S = 1.0
"""How long after a change a pass waits for others: several jobs are often submitted together."""

log = get_logger(__name__)


class PassOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When and how to rescale.

    - `interval_s`: the longest time between two passes.
    - `max_load`: the share of CPU and memory that everything on the nodes together may reserve. Devices count whole.
    - `policy`: decides the sizes.
    - `show`: called with each outcome.
    """

    interval_s: float = 30.0
    max_load: float = 1.0
    policy: Policy = decide
    show: Callable[[RescaleOutcome], None] = lambda _: None


class Passes:
    """Rescaling passes over one namespace of the cluster. `namespace`: of Redis. `windows`: None for none."""

    def __init__(
        self,
        *,
        backend: KubernetesBackend,
        client: Redis,
        namespace: str,
        options: PassOptions,
        windows: WindowsConfigMap | None,
        vitals: Vitals,
    ) -> None:
        self._backend = backend
        self._client = client
        self._namespace = namespace
        self._options = options
        self._windows = windows
        self._vitals = vitals
        self._seen: JobsSeen = {}
        self._changes = 0

    async def run(self) -> None:
        """Make passes until cancelled. What fails is logged, and the next pass tries again."""
        while True:
            windows = self._windows.version if self._windows else 0
            try:
                with isolated("this rescaling"):
                    await self._pass()
            except EdlError as error:
                self._vitals.passes["failed"] += 1
                log.warning("rescaling.failed", cause=str(error), retry_in_s=self._options.interval_s)
            waits = [asyncio.sleep(self._options.interval_s), self._jobs_change()]
            await first_completed(*waits, *([self._windows.newer_than(windows)] if self._windows else []))

    async def _pass(self) -> None:
        if self._windows and self._windows.windows is None:
            return
        rules = RescalingRules(
            windows=self._windows.windows if self._windows else None,
            max_load=self._options.max_load,
            lead_s=LEAD_S + self._options.interval_s,
        )
        done = await rescale(self._backend, self._client, self._namespace, rules, policy=self._options.policy)
        self._vitals.passes["done"] += 1
        self._vitals.last_pass_at = done.plan.at
        self._options.show(done)

    async def _jobs_change(self) -> None:
        """Wait until a job was submitted, has ended or has become pending."""
        while True:
            try:
                with isolated("the watch of jobs"):
                    self._changes = await self._backend.wait_for_change(self._changes)
                    await asyncio.sleep(DEBOUNCE_S)
                    before, self._seen = self._seen, jobs_seen(await self._backend.list())
            except EdlError:  # the controller logs it
                await asyncio.sleep(RETRY_S)
                continue
            if job_changes(before, self._seen):
                return
