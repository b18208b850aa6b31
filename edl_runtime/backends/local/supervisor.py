"""A job's supervisor: `python -m edl_runtime.backends.local.supervisor JOB_FOLDER`, with a `Start` on standard input.

It leaves its caller's process tree, session and signal settings behind, so that no zombie, terminal or signal mask
ties the two, and says on standard output that it is up. A start that goes wrong says so on standard error and leaves
nothing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import msgspec

from edl_runtime import locks
from edl_runtime.backends.base import JobStatus
from edl_runtime.backends.local.capacity import machine_total, scaling_of
from edl_runtime.backends.local.folders import JobFolder, WorkFolder
from edl_runtime.backends.local.instances import Instances
from edl_runtime.backends.local.job import Job
from edl_runtime.backends.local.messages import REPLY_WITHIN_S, Request, Start
from edl_runtime.backends.local.processes import Processes
from edl_runtime.backends.local.restarts import RestartPolicy
from edl_runtime.backends.local.retention import prune
from edl_runtime.decoding import Decoder

_requests: Decoder[Request] = Decoder(Request)

_LONGEST_SOCKET_PATH = 100
"""Bytes, a little below what systems allow (104 to 108)."""


def main() -> None:
    """Become a supervisor, and end with its job."""
    _detach()
    asyncio.run(_supervise(msgspec.json.decode(sys.stdin.buffer.read(), type=Start)))


def _detach() -> None:
    if os.fork():
        os._exit(0)  # the caller waits for this process only: the other one is nobody's child
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python itself ignores these two
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


async def _supervise(start: Start) -> None:
    os.set_inheritable(start.held, False)
    status = _first_status(start)
    work = WorkFolder(Path(start.work_folder))
    hidden, folder, run_folder = JobFolder(Path(start.folder)), work.job(start.spec.name), work.run_folder(status)
    _own(hidden.supervisor_lock)
    with Processes(_own(hidden.processes_lock)) as processes:
        instances = Instances(
            start.spec,
            folder=folder,
            run_folder=run_folder,
            processes=processes,
            environ=os.environ,
            secrets=start.secrets,
        )
        job = Job(start.spec, status=status, folder=folder, instances=instances, restarts=RestartPolicy())
        async with await asyncio.start_unix_server(partial(_serve, job), _socket(hidden, folder)):
            try:
                work.new_run(status)
                hidden.write_status(status)
                hidden.path.rename(folder.path)
                _tell(status)
            except BaseException:
                shutil.rmtree(run_folder, ignore_errors=True)
                folder.remove()
                raise
            os.close(start.held)
            _redirect(run_folder / "supervisor.log")
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, job.stop, "its supervisor was told to stop")
            pruning = loop.run_in_executor(None, prune, work, start.spec.name)
            await job.run()
            await asyncio.wait([pruning])
        job.close()


def _first_status(start: Start) -> JobStatus:
    return JobStatus(
        name=start.spec.name,
        kind=start.spec.kind,
        phase="running",
        token=start.token,
        digest=start.spec.digest,
        wanted=start.spec.instances,
        scaling=scaling_of(start.spec, machine_total()),
        elastic=start.spec.elastic,
        cwd=start.spec.cwd,
        created_at=time.time(),
    )


async def _serve(job: Job, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one connection's request. Who asks nonsense, or nothing in time, gets no answer."""
    try:
        async with asyncio.timeout(REPLY_WITHIN_S):
            request = _requests.decode(await reader.read())
            writer.write(msgspec.json.encode(job.answer(request)))
            await writer.drain()
    except (ConnectionError, TimeoutError, msgspec.DecodeError):
        pass
    finally:
        writer.close()


def _own(lock: Path) -> int:
    descriptor = locks.take(lock)
    if descriptor is None:
        raise BlockingIOError(f"{lock} is held by another process")
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _socket(hidden: JobFolder, target: JobFolder) -> Path:
    """Return where to listen, and write down where that will be found."""
    path, address = hidden.path / "socket", target.path / "socket"
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        path = address = Path(tempfile.mkdtemp(prefix="edl-")) / "socket"
    hidden.address_file.write_text(str(address))
    return path


def _tell(status: JobStatus) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(status))
    sys.stdout.buffer.flush()


def _redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, descriptor in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, descriptor)
    os.close(nothing)
    os.close(output)


if __name__ == "__main__":
    main()
