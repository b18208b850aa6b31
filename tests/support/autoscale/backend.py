"""A backend that resizes jobs immediately, for tests of rescaling."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from support.autoscale.jobs import job

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import Capacity, JobStatus, NodeCapacity
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.errors import BackendError

CPUS = 40


async def _at_once() -> None:
    """Do nothing."""


class Jobs(LocalBackend):
    """Jobs on a node of 40 CPUs, one for each instance. They are resized at once, but those in `hang` do not answer.

    `before_capacity` and `before_resize` are called before `capacity` and `resize`.
    """

    hang: tuple[str, ...] = ()

    def __init__(
        self,
        *jobs: JobStatus,
        before_capacity: Callable[[], Awaitable[Any]] = _at_once,
        before_resize: Callable[[Jobs], object] = lambda _: None,
    ) -> None:
        super().__init__(Path("/nowhere"))
        self.jobs = {each.name: each for each in jobs}
        self._before_capacity, self._before_resize = before_capacity, before_resize

    @property
    def wanted(self) -> dict[str, int]:
        return {name: each.wanted for name, each in self.jobs.items()}

    async def list(self) -> list[JobStatus]:
        return [*self.jobs.values()]

    async def capacity(self) -> Capacity:
        await self._before_capacity()
        free = CPUS - sum(self.wanted.values())
        return Capacity(nodes=(NodeCapacity(name="node", total={"cpu": CPUS}, free={"cpu": free}),))

    async def resize(self, name: str, instances: int, *, reason: str = "") -> JobStatus:
        self._before_resize(self)
        if name in self.hang:
            raise BackendError(f"the supervisor of {name!r} does not answer")
        if name not in self.jobs:
            raise UnknownJobError(name)
        before = self.jobs[name]
        assert before.scaling
        changed: dict[str, Any] = {"resized_at": time.time(), "resized_for": reason, "kind": before.kind}
        self.jobs[name] = job(name, before.scaling.bounds, 1.0, instances, **changed)
        return self.jobs[name]
