"""The local backend: jobs as processes of this machine.

Statuses are read from a file. Changes go through the Unix socket of the job's supervisor, one JSON request and one JSON
reply per connection, so that one process decides on a job.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from edl_runtime import locks
from edl_runtime.backends.errors import JobEndedError, JobReplacedError, SubmitError, SupervisorError, UnknownJobError
from edl_runtime.backends.interface import (
    MAX_REASON_LENGTH,
    Capacity,
    JobStatus,
    LogLine,
    NodeCapacity,
    Origin,
    Scaling,
    check_owner,
    token_owner,
)
from edl_runtime.backends.local.job_folders import JobFolder, WorkFolder, follow_run, name_full_folder
from edl_runtime.errors import BackendError, SpecError
from edl_runtime.settings import count_gpus
from edl_runtime.specs import JobSpec, check_name

NODE_NAME = "localhost"
"""Name of this machine as a node."""

REPLY_TIMEOUT_S = 15.0
"""Supervisors reply at once; one that takes longer is stuck."""


class AdoptRequest(msgspec.Struct, frozen=True, tag="adopt"):
    """Replace token and origin, if the job has this digest and has not failed."""

    digest: str
    token: str
    origin: Origin | None = None


class ResizeRequest(msgspec.Struct, frozen=True, tag="resize"):
    """Request another number of instances; with a token, only if the job has it."""

    instances: int
    token: str | None = None
    reason: str = ""


class DeleteRequest(msgspec.Struct, frozen=True, tag="delete"):
    """Stop all instances, remove the job and exit; with a token, only if the job has it."""

    token: str | None = None


class Accepted(msgspec.Struct, frozen=True, tag="done"):
    """It is done; a `DeleteRequest` has begun."""

    status: JobStatus


class Rejected(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


Request = AdoptRequest | ResizeRequest | DeleteRequest
Reply = Accepted | Rejected
_reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


class SupervisorStart(msgspec.Struct, frozen=True):
    """Input of a supervisor, on stdin so that `secrets` are in no file and no argument.

    - `folder`: a hidden folder, which the supervisor renames to `jobs/NAME` once it is ready.
    - `held`: the descriptor of the job's lock, which the supervisor holds until it is ready.
    """

    spec: JobSpec
    token: str
    origin: Origin | None
    secrets: dict[str, str]
    work_folder: str
    folder: str
    held: int


class LocalBackend:
    """Runs jobs as processes of this machine; see `edl_runtime.backends.interface.Backend`.

    All processes with the same `work_dir` see the same jobs, which outlive the process that started them. The folder is
    made when it is needed, readable by its owner only.
    """

    def __init__(self, work_dir: Path | str) -> None:
        self._work = WorkFolder(Path(work_dir).expanduser().absolute())

    @property
    def place(self) -> str:
        return str(self._work.path)

    async def submit(
        self, spec: JobSpec, *, token: str, secrets: Mapping[str, str], origin: Origin | None = None
    ) -> JobStatus:
        """Get or create the job. When this is cancelled, a start that has begun is completed first."""
        try:
            return await self._submit(spec, token, origin, secrets)
        except OSError as error:
            raise SubmitError(spec.name, name_full_folder(str(error), self._work.path)) from error

    async def _submit(self, spec: JobSpec, token: str, origin: Origin | None, secrets: Mapping[str, str]) -> JobStatus:
        await asyncio.to_thread(self._prepare, spec)
        folder = self._work.job(spec.name)
        async with locks.hold(self._work.lock(spec.name)) as held:
            check_owner(await asyncio.to_thread(folder.read_status), token)
            if adopted := await _adopt(folder, AdoptRequest(spec.digest, token, origin)):
                await asyncio.to_thread(self._work.keep_owner, adopted)
                return adopted
            await _stop_and_remove(folder)
            starting = asyncio.ensure_future(asyncio.to_thread(self._start, spec, token, origin, secrets, held))
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                with suppress(SubmitError, OSError):
                    await starting
                raise

    async def get(self, name: str) -> JobStatus:
        status = await asyncio.to_thread(self._job(name).read_status)
        if status is None:
            raise self._unknown(name)
        return status

    async def list(self) -> builtins.list[JobStatus]:
        try:
            return await asyncio.to_thread(self._list)
        except OSError as error:
            raise BackendError(f"the work folder {self._work.path} can't be read: {error.strerror}") from error

    async def resize(self, name: str, instances: int, *, token: str | None = None, reason: str = "") -> JobStatus:
        status = await self.get(name)
        if token not in (None, status.token):
            raise JobReplacedError(name)
        if status.scaling:
            status.scaling.bounds.check_size(instances)
        request = ResizeRequest(instances, token, reason[:MAX_REASON_LENGTH])
        match reply := await _ask_supervisor(self._job(name), request):
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
        try:
            async with locks.hold(lock):
                return await _stop_and_remove(folder, token)
        except OSError as error:
            raise BackendError(f"{name!r} could not be removed: {error}") from error

    async def evacuate(self, jobs: Collection[str] | None = None) -> builtins.list[str]:  # noqa: ARG002
        """Return nothing: this machine has no other to leave for."""
        return []

    async def capacity(self) -> Capacity:
        """Return what this machine has, and what no instance reserves: what its pod would, by default one core."""
        return await asyncio.to_thread(lambda: free_capacity(self._list(), machine_total()))

    def _prepare(self, spec: JobSpec) -> None:
        if spec.cwd and not Path(spec.cwd).is_dir():
            raise SubmitError(spec.name, f"its folder {spec.cwd!r} does not exist")
        self._work.make()

    def _start(
        self, spec: JobSpec, token: str, origin: Origin | None, secrets: Mapping[str, str], held: int
    ) -> JobStatus:
        try:
            folder = self._work.new_job(spec.name)
            return launch_supervisor(
                SupervisorStart(
                    spec=spec,
                    token=token,
                    origin=origin,
                    secrets=dict(secrets),
                    work_folder=str(self._work.path),
                    folder=str(folder.path),
                    held=held,
                )
            )
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


async def _adopt(folder: JobFolder, request: AdoptRequest) -> JobStatus | None:
    """Return the job's status, with the new token and origin, if it can be adopted. Needs the job's lock."""
    try:
        reply = await _ask_supervisor(folder, request)
    except SupervisorError:
        return None
    if reply is not None:
        return reply.status if isinstance(reply, Accepted) else None
    status = await asyncio.to_thread(folder.read_status)
    if status is None or status.phase != "succeeded" or status.digest != request.digest:
        return None
    adopted = msgspec.structs.replace(status, token=request.token, origin=request.origin)
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
        except SupervisorError:
            folder.kill_supervisor()
        await released()
    await asyncio.to_thread(folder.remove)  # a supervisor that had ended before leaves its files
    return True


async def _ask_supervisor(folder: JobFolder, request: Request) -> Reply | None:
    """Return the supervisor's reply, None if it has ended. Raises SupervisorError."""
    name = folder.path.name
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            while locks.is_held(folder.supervisor_lock):
                try:
                    return await send_request(folder.address(), request)
                except (ConnectionError, FileNotFoundError):  # it is ending and will release the lock
                    await asyncio.sleep(locks.POLL_S)
    except TimeoutError:
        raise SupervisorError(name, "does not answer") from None
    except OSError as error:
        raise SupervisorError(name, f"can't be reached: {error}") from error
    return None


async def send_request(address: Path, request: Request) -> Reply:
    """Send a request to the supervisor whose socket is at `address`.

    Raises ConnectionError or FileNotFoundError if it has ended or has too many requests, TimeoutError if it does not
    reply.
    """
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        reader, writer = await asyncio.open_unix_connection(address)
        try:
            writer.write(msgspec.json.encode(request))
            writer.write_eof()
            content = await reader.read()
        except OSError as error:
            if error.errno == errno.ENOTCONN:  # asyncio takes a full backlog for a connection
                raise ConnectionRefusedError from error
            raise
        finally:
            writer.close()
    if not content:
        raise ConnectionResetError
    return _reply_decoder.decode(content)


_INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    }
)
_INHERITED_PREFIXES = (
    *("LC_", "PYTHON", "XDG_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "ROCR_", "HIP_"),
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GLOG_", "FLAGS_"),
)


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a supervisor and its instances inherit."""
    return {
        name: value for name, value in environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }


START_TIMEOUT_S = 30.0


def launch_supervisor(start: SupervisorStart) -> JobStatus:
    """Start a supervisor and return its job's first status. Blocks for some tenths of a second.

    Even if the caller dies, the job is started completely or not at all. Raises SubmitError or OSError.
    """
    name = start.spec.name
    folder = WorkFolder(Path(start.work_folder)).job(name).path
    command = [sys.executable, "-P", "-m", "edl_runtime.backends.local.supervisor", str(folder)]
    try:
        run = subprocess.run(
            command,
            input=msgspec.json.encode(start),
            capture_output=True,
            check=False,
            cwd=start.work_folder,
            env=inherited_environment(os.environ),
            pass_fds=(start.held,),
            start_new_session=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(name, f"its supervisor was not ready within {START_TIMEOUT_S:.0f} s") from error
    if not run.stdout:
        lines = run.stderr.decode(errors="replace").strip().splitlines() or ["its supervisor ended without output"]
        raise SubmitError(name, lines[-1])
    return msgspec.json.decode(run.stdout, type=JobStatus)


def machine_total() -> dict[str, float]:
    import psutil

    return {
        "cpu": float(os.cpu_count() or 1),
        "memory": float(psutil.virtual_memory().total),
        "gpu": float(count_gpus(os.environ)),
    }


def free_capacity(jobs: Iterable[JobStatus], total: Mapping[str, float]) -> Capacity:
    """Return what the running instances of these jobs leave of `total`; those that are leaving count as gone."""
    free = dict(total)
    for job in jobs:
        staying = sum(one.phase == "running" and not one.leaving for one in job.instances)
        for name, much in (job.scaling.resources if job.scaling else {}).items():
            if name in free:
                free[name] = max(0.0, free[name] - staying * much)
    return Capacity(nodes=(NodeCapacity(name=NODE_NAME, total=dict(total), free=free),))


def scaling_of(spec: JobSpec, total: Mapping[str, float]) -> Scaling:
    """Return the scaling of a new job.

    Its instances reserve what their pods would of the resources in `total`, or else one core. Nothing enforces that.
    """
    asked = spec.pod.reserves() if spec.pod else {}
    asked = {name: much for name, much in asked.items() if much and total.get(name)}
    return Scaling(
        bounds=spec.bounds,
        resources=asked or {"cpu": 1.0},
        priority=spec.priority,
        weight=spec.weight,
        resumes=spec.kind == "pool" or (spec.elastic and bool(spec.env.get("EDL_CHECKPOINT"))),
        pool=spec.env.get("EDL_POOL", ""),
    )
