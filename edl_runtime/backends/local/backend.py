"""The local backend: jobs as processes of this machine."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from edl_runtime import locks
from edl_runtime.backends.errors import JobEndedError, SubmitError, UnknownJobError
from edl_runtime.backends.interface import Capacity, JobStatus, LogLine, check_owner, check_size, token_owner
from edl_runtime.backends.local.capacity import free_capacity, machine_total
from edl_runtime.backends.local.job_folders import JobFolder, WorkFolder, name_full_folder
from edl_runtime.backends.local.logs import follow_run
from edl_runtime.backends.local.rpc import (
    REPLY_TIMEOUT_S,
    Accepted,
    AdoptRequest,
    DeleteRequest,
    Reply,
    Request,
    ResizeRequest,
    SupervisorStart,
    launch_supervisor,
    send_request,
)
from edl_runtime.errors import BackendError, SpecError
from edl_runtime.specs import JobSpec, check_name


class LocalBackend:
    """Runs jobs as processes of this machine; see `edl_runtime.backends.interface.Backend`.

    All processes with the same `work_dir` see the same jobs, which outlive the process that started them. The folder is
    made when it is needed, readable by its owner only.
    """

    def __init__(self, work_dir: Path | str) -> None:
        self._work = WorkFolder(Path(work_dir).expanduser().absolute())

    async def submit(self, spec: JobSpec, *, token: str, secrets: Mapping[str, str]) -> JobStatus:
        """Get or create the job. When this is cancelled, a start that has begun is completed first."""
        await asyncio.to_thread(self._prepare, spec)
        folder = self._work.job(spec.name)
        async with locks.hold(self._work.lock(spec.name)) as held:
            check_owner(await asyncio.to_thread(folder.read_status), token)
            if adopted := await _adopt(folder, spec, token):
                await asyncio.to_thread(self._work.keep_owner, adopted)
                return adopted
            await _stop_and_remove(folder)
            starting = asyncio.ensure_future(asyncio.to_thread(self._start, spec, token, secrets, held))
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                with suppress(SubmitError):
                    await starting
                raise

    async def get(self, name: str) -> JobStatus:
        status = await asyncio.to_thread(self._job(name).read_status)
        if status is None:
            raise self._unknown(name)
        return status

    async def list(self) -> builtins.list[JobStatus]:
        return await asyncio.to_thread(self._list)

    async def resize(self, name: str, instances: int) -> JobStatus:
        status = await self.get(name)
        if status.scaling:
            check_size(instances, status.scaling.bounds)
        try:
            reply = await _ask_supervisor(self._job(name), ResizeRequest(instances))
        except TimeoutError:
            raise BackendError(
                f"the supervisor of {name!r} does not answer; end it with `edl stop {name}`, and submit it again"
            ) from None
        match reply:
            case Accepted():
                return reply.status
            case _:
                raise JobEndedError(name, f"has {status.phase}" if status.has_ended else "is ending")

    async def logs(
        self, name: str, *, instance: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        job = self._job(name)
        runs = await asyncio.to_thread(self._work.runs, name)
        if not runs:
            raise UnknownJobError(name, self._work.logged())

        def ended() -> bool:
            if not follow:
                return True
            status = job.read_status()
            return status is None or self._work.run_folder(status) != runs[-1] or not locks.is_held(job.processes_lock)

        async for line in follow_run(runs[-1], instance=instance, last=tail, ended=ended):
            yield line

    async def owner(self, name: str) -> str:
        return await asyncio.to_thread(self._owner, name)

    async def delete(self, name: str, *, token: str | None = None) -> bool:
        folder, lock = self._job(name), self._work.lock(name)
        if not lock.exists():  # it was never started
            return False
        async with locks.hold(lock):
            return await _stop_and_remove(folder, token)

    async def capacity(self) -> Capacity:
        """Return what this machine has, and what no instance reserves: what its pod would, by default one core."""
        return await asyncio.to_thread(lambda: free_capacity(self._list(), machine_total()))

    def _prepare(self, spec: JobSpec) -> None:
        if spec.cwd and not Path(spec.cwd).is_dir():
            raise SubmitError(spec.name, f"its folder {spec.cwd!r} does not exist")
        try:
            self._work.make()
        except OSError as error:
            raise SubmitError(spec.name, name_full_folder(str(error), self._work.path)) from error

    def _start(self, spec: JobSpec, token: str, secrets: Mapping[str, str], held: int) -> JobStatus:
        try:
            folder = self._work.new_job(spec.name)
            return launch_supervisor(
                SupervisorStart(
                    spec=spec,
                    token=token,
                    secrets=dict(secrets),
                    work_folder=str(self._work.path),
                    folder=str(folder.path),
                    held=held,
                )
            )
        except OSError as error:
            raise SubmitError(spec.name, name_full_folder(str(error), self._work.path)) from error
        except SubmitError as error:
            raise SubmitError(spec.name, name_full_folder(error.reason, self._work.path)) from error

    def _owner(self, name: str) -> str:
        status = self._job(name).read_status()
        if status:
            return token_owner(status.token)
        if not (runs := self._work.runs(name)):
            raise UnknownJobError(name, self._work.logged())
        return self._work.owner(runs[-1])

    def _job(self, name: str) -> JobFolder:
        try:
            check_name("name", name)
        except SpecError:  # as a path, it might lead out of the work folder
            raise self._unknown(name) from None
        return self._work.job(name)

    def _list(self) -> builtins.list[JobStatus]:
        found = (self._work.job(name).read_status() for name in self._work.jobs())
        return [status for status in found if status]

    def _unknown(self, name: str) -> UnknownJobError:
        return UnknownJobError(name, self._work.jobs())


async def _adopt(folder: JobFolder, spec: JobSpec, token: str) -> JobStatus | None:
    """Return the job's status, with the new token, if it can be adopted. Needs the job's lock."""
    try:
        reply = await _ask_supervisor(folder, AdoptRequest(spec.digest, token))
    except TimeoutError:
        return None
    if reply is not None:
        return reply.status if isinstance(reply, Accepted) else None
    status = await asyncio.to_thread(folder.read_status)
    if status is None or status.phase != "succeeded" or status.digest != spec.digest:
        return None
    adopted = msgspec.structs.replace(status, token=token)
    await asyncio.to_thread(folder.write_status, adopted)
    return adopted


async def _stop_and_remove(folder: JobFolder, token: str | None = None) -> bool:
    """Stop and remove the job; with a `token`, only if the job has it. Needs the job's lock.

    A supervisor that does not answer is killed, and its instances with it.
    """
    status = await asyncio.to_thread(folder.read_status)
    if status is None:
        await asyncio.to_thread(folder.remove)  # a crash of the machine may have left files
        return False
    if token not in (None, status.token):
        return False
    with locks.watch(folder.processes_lock) as released:
        try:
            await _ask_supervisor(folder, DeleteRequest(token))
        except TimeoutError:
            folder.kill_supervisor()
        await released()
    await asyncio.to_thread(folder.remove)  # a supervisor that had ended before leaves its files
    return True


async def _ask_supervisor(folder: JobFolder, request: Request) -> Reply | None:
    """Return the supervisor's reply, None if it has ended. Raises TimeoutError."""
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        while locks.is_held(folder.supervisor_lock):
            try:
                return await send_request(folder.address(), request)
            except (ConnectionError, FileNotFoundError):  # it is ending and will release the lock
                await asyncio.sleep(locks.POLL_S)
    return None
