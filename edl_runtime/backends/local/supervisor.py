"""A job's supervisor: `python -m edl_runtime.backends.local.supervisor JOB_FOLDER`.

It reads a `SupervisorStart` from stdin, detaches from its caller's process tree, session and signal settings, and
writes the job's first status to stdout when it is ready. A failed start writes to stderr and leaves no files.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from functools import cache, partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from edl_runtime import locks
from edl_runtime.backends.interface import SUSPENDED, JobStatus, Phase
from edl_runtime.backends.local.backend import (
    REPLY_TIMEOUT_S,
    Accepted,
    AdoptRequest,
    DeleteRequest,
    Rejected,
    Reply,
    Request,
    ResizeRequest,
    SupervisorStart,
    machine_total,
    scaling_of,
)
from edl_runtime.backends.local.instances import FailureDetail, InstanceLauncher, InstanceSlot, ProcessTable
from edl_runtime.backends.local.job_folders import JobFolder, WorkFolder, prune_runs
from edl_runtime.backends.restarts import FailJob, GiveUpInstance, Restart, RestartPolicy, decide_restart
from edl_runtime.concurrency import wait_for_event
from edl_runtime.errors import EX_CONFIG, EX_DRAINED, SpecError
from edl_runtime.exit_status import describe_exit
from edl_runtime.parsing import JsonDecoder
from edl_runtime.specs import JobSpec

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


SAVE_AGAIN_S = 5.0
"""Between two tries to write a status, as on a full disk."""


class SupervisedJob:
    """Runs `spec` until its instances have ended, it has failed or it is stopped. `status`: the first one.

    Each change happens between two awaits of one event loop, so changes can't interleave, and is in the status file
    before a reply is sent.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        status: JobStatus,
        folder: JobFolder,
        instances: InstanceLauncher,
        restarts: RestartPolicy,
    ) -> None:
        self._spec = spec
        self._status = status
        self._folder = folder
        self._instances = instances
        self._restarts = restarts
        self._slots: dict[int, InstanceSlot] = {}
        self._indexes = set(range(status.wanted))
        self._slot_tasks = asyncio.TaskGroup()
        self._ending = asyncio.Event()
        self._deleted = False
        self._saving_again: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Keep the job running and return when its last process has ended. Then `close` it."""
        async with self._slot_tasks:
            self._start_missing()
            await self._ending.wait()
            self._stop_all_except(())

    def close(self) -> None:
        """Write the last status, or remove the job if it was deleted."""
        if self._deleted:
            self._folder.remove()
            _log().info("job.deleted", job=self._spec.name)
        else:
            self._save()
            _log().info("job.ended", job=self._spec.name, phase=self._status.phase, reason=self._status.reason)

    def stop(self, reason: str) -> None:
        """End the job as failed."""
        self._end("failed", FailureDetail(reason))

    def answer(self, request: Request) -> Reply:
        """Execute a request, or reject it. A `DeleteRequest` is only begun."""
        match request:
            case AdoptRequest():
                return self._adopt(request)
            case ResizeRequest():
                return self._resize(request)
            case DeleteRequest():
                return self._delete(request)
            case _:
                assert_never(request)

    def _adopt(self, request: AdoptRequest) -> Reply:
        if self._deleted or self._status.phase == "failed":
            return Rejected("it has ended")
        if request.digest != self._status.digest:
            return Rejected("it has another spec")
        self._change(token=request.token, origin=request.origin)
        return Accepted(self._status)

    def _resize(self, request: ResizeRequest) -> Reply:
        instances = request.instances
        if self._ending.is_set() or request.token not in (None, self._status.token):
            return Rejected("it has ended, or has another token")
        try:
            self._spec.bounds.check_size(instances)
        except SpecError:
            return Rejected("outside its bounds")
        before, scaling = self._status.wanted, self._status.scaling
        if scaling:
            at = scaling.resized_at if instances == before else time.time()
            scaling = msgspec.structs.replace(scaling, resized_at=at, resized_for=request.reason)
        given_up = [slot.status.index for _, slot in sorted(self._slots.items()) if slot.status.given_up]
        living = [index for index in sorted(self._indexes) if index not in given_up]
        self._indexes = indexes_for(instances, living, given_up)
        self._stop_all_except(self._indexes)
        self._change(wanted=instances, phase="running" if instances else "pending", scaling=scaling)
        if instances > before:
            self._slots = {index: slot for index, slot in self._slots.items() if not slot.status.given_up}
        self._start_missing()
        self._save()
        _log().info("job.resized", job=self._spec.name, wanted=instances)
        return Accepted(self._status)

    def _delete(self, request: DeleteRequest) -> Reply:
        if request.token not in (None, self._status.token):
            return Rejected("it has another token")
        self._deleted = True
        self._change(scaling=None)
        self._ending.set()
        return Accepted(self._status)

    def _start_missing(self) -> None:
        for index in sorted(self._indexes):
            if index not in self._slots:
                slot = self._slots[index] = InstanceSlot(index)
                self._slot_tasks.create_task(self._run_slot(slot))

    def _stop_all_except(self, staying: Collection[int]) -> None:
        for index in sorted(self._slots, reverse=True):
            if index in staying:
                continue
            if not self._slots[index].finished:
                self._slots[index].request_leave()
            elif not self._ending.is_set():
                del self._slots[index]

    async def _run_slot(self, slot: InstanceSlot) -> None:
        """Run the slot's instance, with its restarts, until it leaves or its work is done."""
        index = slot.status.index
        try:
            await self._run_with_restarts(slot)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the command or a variable
            slot.failure = FailureDetail(f"instance {index} could not be started: {error}")
            slot.update(phase="failed", given_up=True)  # others may go on, as when a disk is full
            self._save()
            if not (self._spec.elastic or self._spec.kind == "pool"):
                self._end("failed", slot.failure)
        slot.finished = True
        if self._ending.is_set():
            return
        if slot.leave.is_set():
            del self._slots[index]
            self._start_missing()  # a resize may have requested it again meanwhile
            self._save()
        self._end_if_done(slot)

    def _end_if_done(self, ended: InstanceSlot) -> None:
        """End the job if too few instances are left to continue, now that this one has ended."""
        if self._status.is_suspended:
            return
        is_pool = self._spec.kind == "pool"
        left = [slot for slot in self._slots.values() if not slot.status.given_up]
        if left and not is_pool and all(slot.status.phase == "succeeded" for slot in left):
            self._end("succeeded")
        elif self._slots and len(left) < (1 if is_pool else self._spec.bounds.min):
            self._end("failed", ended.failure or self._failure())

    async def _run_with_restarts(self, slot: InstanceSlot) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = time.monotonic()
            settling = loop.call_later(self._restarts.healthy_after_s, self._mark_healthy, slot)
            try:
                exit_code = await self._run_once(slot)
            finally:
                settling.cancel()
            if slot.leave.is_set():
                return
            instance_only = exit_code < 0 or exit_code == EX_CONFIG  # a signal says nothing about the job
            if self._spec.kind == "trainer" and not (self._spec.elastic and instance_only):
                if exit_code:
                    self._end("failed", self._instances.failure(slot.status.index, describe_exit(exit_code)))
                return
            delay_s = self._decide_restart(slot, exit_code, started, time.monotonic())
            if delay_s is None:
                return
            if await wait_for_event(slot.leave, delay_s):
                return
            slot.update(phase="running", started_at=time.time(), exit_code=None, restarts=slot.status.restarts + 1)

    def _decide_restart(self, slot: InstanceSlot, exit_code: int, started: float, now: float) -> float | None:
        """Return the delay before the instance is restarted, None if it is not."""
        most, is_pool = self._restarts.max_short_lives, self._spec.kind == "pool"
        decision = decide_restart(
            self._restarts,
            exit_code,
            now - started,
            slot.short_lives,
            others=is_pool and any(other.may_recover(most) for other in self._slots.values() if other is not slot),
            within_an_hour=0 if is_pool else slot.count_exit(now),
        )
        slot.failure = self._instances.failure(slot.status.index, decision.reason) if decision.reason else None
        match decision:
            case GiveUpInstance():
                slot.update(phase="failed", given_up=True)
                _log().warning("instance.given_up", job=self._spec.name, reason=decision.reason)
            case FailJob():
                self._end("failed", slot.failure)
            case Restart():
                slot.short_lives = decision.short_lives
        self._save()
        return decision.delay_s if isinstance(decision, Restart) else None

    def _mark_healthy(self, slot: InstanceSlot) -> None:
        """Reset the failure of an instance that has run for long enough."""
        slot.short_lives = 0
        if slot.failure:
            slot.failure = None
            self._save()

    def _failure(self) -> FailureDetail | None:
        """Return the failure of the first instance that has one, or that the job is suspended."""
        if self._status.is_suspended:
            return FailureDetail((self._status.scaling and self._status.scaling.resized_for) or SUSPENDED)
        return next((slot.failure for _, slot in sorted(self._slots.items()) if slot.failure), None)

    async def _run_once(self, slot: InstanceSlot) -> int:
        index = slot.status.index
        process = self._instances.start(index)
        self._save()
        _log().info("instance.started", job=self._spec.name, instance=index, pid=process.pid)
        exit_code = await process.run(slot.leave, self._spec.grace_s)
        slot.update(phase="succeeded" if exit_code in (0, EX_DRAINED) else "failed", exit_code=exit_code)
        self._save()
        _log().info("instance.ended", job=self._spec.name, instance=index, exit_code=exit_code)
        return exit_code

    def _end(self, phase: Phase, failure: FailureDetail | None = None) -> None:
        if not self._ending.is_set():
            self._ending.set()
            self._change(phase=phase, scaling=None, **_failure_fields(failure))

    def _change(self, **changes: object) -> None:
        self._status = msgspec.structs.replace(self._status, **changes)
        self._save()

    def _save(self) -> None:
        instances = tuple(slot.status for _, slot in sorted(self._slots.items()))
        failure = {} if self._ending.is_set() else _failure_fields(self._failure())
        self._status = msgspec.structs.replace(self._status, instances=instances, **failure)
        if self._saving_again:
            self._saving_again.cancel()
        try:
            self._folder.write_status(self._status)
        except OSError as error:  # a full disk must not end the job
            _log().warning("status.write_failed", job=self._spec.name, error=str(error))
            self._saving_again = asyncio.get_running_loop().call_later(SAVE_AGAIN_S, self._save)


def indexes_for(instances: int, living: Sequence[int], given_up: Sequence[int]) -> set[int]:
    """Return the indexes of a job with so many instances. `living`, `given_up`: those that it has, sorted.

    A smaller job keeps the lowest living indexes, and given-up ones only if there are not enough. A larger one keeps
    all that live and adds the lowest free indexes, given-up ones included.
    """
    kept = living[:instances]
    missing = instances - len(kept)
    if instances > len(living) + len(given_up):
        return {*kept, *islice((index for index in count() if index not in kept), missing)}
    return {*kept, *given_up[len(given_up) - missing :]}


def _failure_fields(failure: FailureDetail | None) -> dict[str, Any]:
    """Return the failure as fields of a status, empty without one."""
    return msgspec.structs.asdict(failure or FailureDetail(""))


@cache
def _log() -> FilteringBoundLogger:
    from edl_runtime.log import get_logger  # slow to import: after the caller has its reply

    log: FilteringBoundLogger = get_logger(__name__)
    return log


_requests: JsonDecoder[Request] = JsonDecoder(Request)

_LONGEST_SOCKET_PATH = 100
"""Bytes. Systems allow 104 to 108."""

_BACKLOG = 4096
"""Requests that wait to be accepted, as far as the system allows."""


def main() -> None:
    _detach()
    asyncio.run(_supervise(msgspec.json.decode(sys.stdin.buffer.read(), type=SupervisorStart)))


def _detach() -> None:
    if os.fork():
        os._exit(0)  # the caller waits for this process; init adopts the child
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python itself ignores these two
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


async def _supervise(start: SupervisorStart) -> None:
    os.set_inheritable(start.held, False)
    status = _first_status(start)
    work = WorkFolder(Path(start.work_folder))
    hidden, folder, run_folder = JobFolder(Path(start.folder)), work.job(start.spec.name), work.run_folder(status)
    _take_lock(hidden.supervisor_lock)
    with ProcessTable(_take_lock(hidden.processes_lock)) as processes:
        instances = InstanceLauncher(
            start.spec,
            folder=folder,
            run_folder=run_folder,
            processes=processes,
            environ=os.environ,
            secrets=start.secrets,
        )
        job = SupervisedJob(start.spec, status=status, folder=folder, instances=instances, restarts=RestartPolicy())
        async with await asyncio.start_unix_server(partial(_serve, job), _socket(hidden, folder), backlog=_BACKLOG):
            try:
                work.new_run(status)
                log = os.open(run_folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                hidden.write_status(status)
                hidden.path.rename(folder.path)  # now the job is visible, so its files must be complete
                _report_started(status)
            except BaseException:
                shutil.rmtree(run_folder, ignore_errors=True)
                folder.remove()
                raise
            os.close(start.held)  # releases the job's lock: it may be stopped from now on
            _redirect(log)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, job.stop, "its supervisor was stopped by SIGTERM")
            pruning = loop.run_in_executor(None, prune_runs, work, start.spec.name)
            await job.run()
            await asyncio.wait([pruning])
        job.close()


def _first_status(start: SupervisorStart) -> JobStatus:
    return JobStatus(
        name=start.spec.name,
        kind=start.spec.kind,
        phase="running",
        token=start.token,
        origin=start.origin,
        digest=start.spec.digest,
        wanted=start.spec.instances,
        scaling=scaling_of(start.spec, machine_total()),
        elastic=start.spec.elastic,
        cwd=start.spec.cwd,
        created_at=time.time(),
    )


async def _serve(job: SupervisedJob, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reply to one connection's request. Invalid or late requests get no reply."""
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            request = _requests.decode(await reader.read())
            writer.write(msgspec.json.encode(job.answer(request)))
            await writer.drain()
    except (ConnectionError, TimeoutError, msgspec.DecodeError):
        pass
    finally:
        writer.close()


def _take_lock(lock: Path) -> int:
    descriptor = locks.take(lock)
    if descriptor is None:
        raise BlockingIOError(f"{lock} is held by another process")
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _socket(hidden: JobFolder, target: JobFolder) -> Path:
    """Return the path to listen at, and write the address file: the hidden folder will be renamed to the target."""
    path, address = hidden.path / "socket", target.path / "socket"
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        path = address = Path(tempfile.mkdtemp(prefix="edl-")) / "socket"
    hidden.address_file.write_text(str(address))
    return path


def _report_started(status: JobStatus) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(status))
    sys.stdout.buffer.flush()


def _redirect(log: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, descriptor in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, descriptor)
    os.close(nothing)
    os.close(log)


if __name__ == "__main__":
    main()
