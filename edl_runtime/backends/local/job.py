"""A running job, as its supervisor has it: its instances, and the decisions on all that is asked of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from itertools import count, islice
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from edl_runtime.backends.base import SUSPENDED, JobStatus, Phase, check_size
from edl_runtime.backends.local.folders import JobFolder
from edl_runtime.backends.local.instances import Instances
from edl_runtime.backends.local.messages import Adopt, Delete, Done, Refused, Reply, Request, Resize
from edl_runtime.backends.local.restarts import Again, Fail, GiveUp, RestartPolicy, after_end
from edl_runtime.backends.local.slots import Slot, Trouble
from edl_runtime.errors import EX_CONFIG, SpecError
from edl_runtime.exit_status import ending
from edl_runtime.specs import JobSpec

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


class Job:
    """Runs `spec` until its instances have ended, it has failed or it is told to stop.

    All that changes the job happens between two awaits of the one event loop, so nothing can come between; each
    change is in the job's status file before anybody is told of it. `status` is as it is to begin with.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        status: JobStatus,
        folder: JobFolder,
        instances: Instances,
        restarts: RestartPolicy,
    ) -> None:
        self._spec = spec
        self._status = status
        self._folder = folder
        self._instances = instances
        self._restarts = restarts
        self._slots: dict[int, Slot] = {}
        self._indexes = set(range(status.wanted))
        self._keepers = asyncio.TaskGroup()
        self._ending = asyncio.Event()
        self._deleted = False

    async def run(self) -> None:
        """Keep the job running and return once the last process is gone. Then `close` it."""
        async with self._keepers:
            self._fill()
            await self._ending.wait()
            self._dismiss_all_but(())

    def close(self) -> None:
        """Write down what became of the job, or remove it if it was deleted."""
        if self._deleted:
            self._folder.remove()
            _log().info("job.deleted", job=self._spec.name)
        else:
            self._save()
            _log().info("job.ended", job=self._spec.name, phase=self._status.phase, reason=self._status.reason)

    def stop(self, reason: str) -> None:
        """End the job as failed because of `reason`, which lies outside of it."""
        self._end("failed", Trouble(reason))

    def answer(self, request: Request) -> Reply:
        """Decide on `request` and carry it out, or in the case of Delete begin to."""
        match request:
            case Adopt():
                return self._adopt(request)
            case Resize():
                return self._resize(request.instances)
            case Delete():
                return self._delete(request)
            case _:
                assert_never(request)

    def _adopt(self, request: Adopt) -> Reply:
        if self._deleted or self._status.phase == "failed":
            return Refused("it has ended")
        if request.digest != self._status.digest:
            return Refused("it has another spec")
        self._change(token=request.token)
        return Done(self._status)

    def _resize(self, instances: int) -> Reply:
        if self._ending.is_set():
            return Refused("it has ended")
        try:
            check_size(instances, self._spec.bounds)
        except SpecError as error:
            return Refused("outside its bounds", error.allowed)
        before, scaling = self._status.wanted, self._status.scaling
        raised = instances > before
        if scaling and instances != before:
            scaling = msgspec.structs.replace(scaling, resized_at=time.time())
        given_up = [slot.status.index for _, slot in sorted(self._slots.items()) if slot.status.given_up]
        living = [index for index in sorted(self._indexes) if index not in given_up]
        self._indexes = indexes_for(instances, living, given_up)
        self._dismiss_all_but(self._indexes)
        self._change(wanted=instances, phase="running" if instances else "pending", scaling=scaling)
        if raised:
            self._slots = {index: slot for index, slot in self._slots.items() if not slot.status.given_up}
        self._fill()
        self._save()
        _log().info("job.resized", job=self._spec.name, wanted=instances)
        return Done(self._status)

    def _delete(self, request: Delete) -> Reply:
        if request.token not in (None, self._status.token):
            return Refused("it carries another token")
        self._deleted = True
        self._change(scaling=None)
        self._ending.set()
        return Done(self._status)

    def _fill(self) -> None:
        for index in sorted(self._indexes):
            if index not in self._slots:
                slot = self._slots[index] = Slot(index)
                self._keepers.create_task(self._keep(slot))

    def _dismiss_all_but(self, staying: Collection[int]) -> None:
        for index in sorted(self._slots, reverse=True):
            if index in staying:
                continue
            if not self._slots[index].finished:
                self._slots[index].send_away()
            elif not self._ending.is_set():
                del self._slots[index]

    async def _keep(self, slot: Slot) -> None:
        """Keep instances in the slot until it has to be left or its work is done."""
        index = slot.status.index
        try:
            await self._occupy(slot)
        except (OSError, ValueError) as error:  # a ValueError for a null byte in the command or a variable
            self._end("failed", Trouble(f"instance {index} could not be started: {error}"))
        slot.finished = True
        if self._ending.is_set():
            return
        if slot.leave.is_set():
            del self._slots[index]
            self._fill()  # it may be wanted again since
            self._save()
        self._conclude(slot)

    def _conclude(self, ended: Slot) -> None:
        """End the job if nobody is left to go on with, since the instance in this slot has ended.

        One that is suspended waits for others.
        """
        if self._status.is_suspended:
            return
        is_pool = self._spec.kind == "pool"
        left = [slot for slot in self._slots.values() if not slot.status.given_up]
        if left and not is_pool and all(slot.status.phase == "succeeded" for slot in left):
            self._end("succeeded")
        elif self._slots and len(left) < (1 if is_pool else self._spec.bounds.min):
            self._end("failed", ended.trouble or self._trouble())

    async def _occupy(self, slot: Slot) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = time.monotonic()
            settling = loop.call_later(self._restarts.healthy_after_s, self._settle, slot)
            try:
                exit_code = await self._live(slot)
            finally:
                settling.cancel()
            if slot.leave.is_set():
                return
            for_itself = exit_code < 0 or exit_code == EX_CONFIG  # a signal is nothing that the program decides
            if self._spec.kind == "trainer" and not (self._spec.elastic and for_itself):
                if exit_code:
                    self._end("failed", self._instances.trouble(slot.status.index, ending(exit_code)))
                return
            delay_s = self._judge(slot, exit_code, started, time.monotonic())
            if delay_s is None:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(slot.leave.wait(), delay_s)
                return
            slot.update(phase="running", started_at=time.time(), exit_code=None, restarts=slot.status.restarts + 1)

    def _judge(self, slot: Slot, exit_code: int, started: float, now: float) -> float | None:
        """Return how long to wait before the instance is started again, None if it is not."""
        most, is_pool = self._restarts.most_short_lives, self._spec.kind == "pool"
        decision = after_end(
            self._restarts,
            exit_code,
            now - started,
            slot.short_lives,
            others=is_pool and any(other.promising(most) for other in self._slots.values() if other is not slot),
            within_an_hour=0 if is_pool else slot.count_end(now),
        )
        slot.trouble = self._instances.trouble(slot.status.index, decision.reason) if decision.reason else None
        match decision:
            case GiveUp():
                slot.update(phase="failed", given_up=True)
                _log().warning("instance.given_up", job=self._spec.name, reason=decision.reason)
            case Fail():
                self._end("failed", slot.trouble)
            case Again():
                slot.short_lives = decision.short_lives
        self._save()
        return decision.delay_s if isinstance(decision, Again) else None

    def _settle(self, slot: Slot) -> None:
        """Forget the troubles of an instance that has come up after all."""
        slot.short_lives = 0
        if slot.trouble:
            slot.trouble = None
            self._save()

    def _trouble(self) -> Trouble | None:
        """Return what is wrong with an instance, the first that has something, or that there are to be none."""
        if self._status.is_suspended:
            return Trouble(SUSPENDED)
        return next((slot.trouble for _, slot in sorted(self._slots.items()) if slot.trouble), None)

    async def _live(self, slot: Slot) -> int:
        index = slot.status.index
        process = self._instances.start(index)
        self._save()
        _log().info("instance.started", job=self._spec.name, instance=index, pid=process.pid)
        exit_code = await process.run(slot.leave, self._spec.grace_s)
        slot.update(phase="failed" if exit_code else "succeeded", exit_code=exit_code)
        self._save()
        _log().info("instance.ended", job=self._spec.name, instance=index, exit_code=exit_code)
        return exit_code

    def _end(self, phase: Phase, trouble: Trouble | None = None) -> None:
        if not self._ending.is_set():
            self._ending.set()
            self._change(phase=phase, scaling=None, **_told(trouble))

    def _change(self, **changes: object) -> None:
        self._status = msgspec.structs.replace(self._status, **changes)
        self._save()

    def _save(self) -> None:
        instances = tuple(slot.status for _, slot in sorted(self._slots.items()))
        told = {} if self._ending.is_set() else _told(self._trouble())
        self._status = msgspec.structs.replace(self._status, instances=instances, **told)
        try:
            self._folder.write_status(self._status)
        except OSError as error:  # a full disk must not end the job
            _log().warning("status.unwritten", job=self._spec.name, error=str(error))


def indexes_for(instances: int, living: Sequence[int], given_up: Sequence[int]) -> set[int]:
    """Return the indexes of a job that is to have so many instances.

    `living`, `given_up`: those that it has, sorted. A smaller number is one of instances that live as far as there are
    enough, of the lowest indexes. A larger one keeps all that live and takes the lowest other indexes, those that were
    given up among them.
    """
    kept = living[:instances]
    missing = instances - len(kept)
    if instances > len(living) + len(given_up):
        return {*kept, *islice((index for index in count() if index not in kept), missing)}
    return {*kept, *given_up[len(given_up) - missing :]}


def _told(trouble: Trouble | None) -> dict[str, Any]:
    """Return the fields of a status that tell of the trouble, or of its absence."""
    return msgspec.structs.asdict(trouble or Trouble(""))


@cache
def _log() -> FilteringBoundLogger:
    from edl_runtime.log import get_logger  # takes longer than the rest of the start: the caller has its answer first

    log: FilteringBoundLogger = get_logger(__name__)
    return log
