"""`cloud_reader` of EDL's tutorial: the records of a data set that many readers share, task by task.

    for record in cloud_reader(["/data/train/*.parquet"], "redis://127.0.0.1:6379/0", job="mnist"):
        ...

Each call reads this process's part of one pass. Readers come and go: a task of one that is killed is read again from
its start by another, after the timeout. `edl tasks JOB` shows the tasks.
"""

from __future__ import annotations

import atexit
import glob
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from edl_runtime.errors import EdlError, SpecError
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings
from edl_runtime.shards.errors import AllTasksFailedError, PassLostError, TaskLostError
from edl_runtime.shards.ledger import MAX_RETRY_HOLD_S, RETRY_HOLD_S
from edl_runtime.shards.tasks import RETRIES, TIMEOUT_S, BlockingTaskQueue, NoTask, Task

POLL_S = 0.2
"""How often a reader asks whether there is a task, while others hold all that is left of the pass."""

DEFAULT_JOB = "cloud-reader"
"""The name of the queue outside of jobs."""

LEAVE_S = 3.0
"""How long a reader that leaves its loop tries to give each of its tasks back, while Redis is unavailable."""

ReadShard = Callable[[str], Iterable[Any]]

log = get_logger(__name__)

_passes: dict[tuple[str, str, str], int] = {}
"""How many passes this process has been through, by endpoint, namespace and job."""


def cloud_reader(
    paths: str | Sequence[str],
    endpoint: str,
    *,
    read: ReadShard | None = None,
    job: str = "",
    shards_per_task: int = 1,
    timeout_s: float = TIMEOUT_S,
    retries: int = RETRIES,
    commit: Callable[[Task], object] | None = None,
    pass_number: int | None = None,
) -> Iterator[Any]:
    """Return a generator of records: those of the tasks that this reader gets in one pass, until the pass is over.

    The first call of a process reads pass 0, the next one pass 1, and so on; a pass that is over yields nothing. After
    a generator that was left early, the next one reads on in the same pass; and tasks of the pass before that were put
    back since are read first. Records have no order of their own.

    - `paths`: files, globs as "/data/*.parquet" or "s3://bucket/*.parquet", or folders of `edl convert`; the same for
      all readers. A path of a shard is passed to `read` as it stands.
    - `endpoint`: the URL of the Redis, as redis://127.0.0.1:6379/0; it was etcd's.
    - `read`: returns a shard's records; by default those of `edl convert`.
    - `job`: whose tasks; by default EDL_JOB, or DEFAULT_JOB. The namespace is EDL_NAMESPACE.
    - `shards_per_task`: how many are leased together. All records of a task are in memory, and of the next one, too.
    - `timeout_s`: after so long a task is another reader's; it includes the time that the task before it takes.
    - `retries`: a task that fails, or takes too long, more often is left out of the pass.
    - `commit`: called with a task when the script has taken all its records and asks for the next one, before the task
      is done. What is saved there under the task's pass and number, in one step, has each record once a pass.
    - `pass_number`: which pass, where processes do not live as long as the training, as a DataLoader's.

    A task whose shards can't be read yields nothing, and is tried again. Iterating raises TasksDifferError for other
    paths than the job's, AllTasksFailedError, RegistryUnavailableError after a minute without Redis,
    TasksMissingError and PassLostError when it has lost the tasks. Raises SpecError.
    """
    settings = RuntimeSettings.from_env(os.environ)
    job = job or settings.job or DEFAULT_JOB
    shards = _expand([paths] if isinstance(paths, str) else paths, are_sets=read is None)

    def open_queue() -> BlockingTaskQueue:
        worker = f"{socket.gethostname()}-{os.getpid()}"
        return BlockingTaskQueue(endpoint, settings.namespace, job, worker=worker, timeout_s=timeout_s, retries=retries)

    def records() -> Iterator[Any]:
        key = endpoint, settings.namespace, job
        with open_queue() as queue:
            queue.set_dataset(shards, shards_per_task=shards_per_task)
            number = _passes.get(key, 0) if pass_number is None else pass_number
            tasks = _PassReader(queue, number, read or _default_read())
            yield from tasks.records(commit)
            _passes[key] = max(_passes.get(key, 0), tasks.pass_number + 1)

    return records()


class _LoadedTask(msgspec.Struct, frozen=True):
    """A task that this process holds, and all its records."""

    task: Task
    records: list[Any]


class _PassReader:
    """Reads the tasks that this process gets in a pass, each in a thread while the script has the one before."""

    def __init__(self, queue: BlockingTaskQueue, pass_number: int, read: ReadShard) -> None:
        self.pass_number = pass_number
        self._queue = queue
        self._read = read
        self._stopped = threading.Event()
        self._held: deque[Future[_LoadedTask | None]] = deque()  # the task that the script has, and the next one
        self._hold_s = RETRY_HOLD_S  # of the next task that can't be read

    def records(self, commit: Callable[[Task], object] | None) -> Iterator[Any]:
        """Yield the records of all tasks; finish each one when the record after its last is asked for."""
        count = 0
        atexit.register(self.close)  # when nothing else closes this generator it is too late: threads have stopped
        try:
            self._held.append(_in_thread(self._load))
            while loaded := self._held[0].result():
                self._held.append(_in_thread(self._load))
                yield from loaded.records
                if commit and not self._queue.forked:
                    commit(loaded.task)
                self._finish(loaded.task)
                self._held.popleft()
                count += 1
            self._log_end(count)
        finally:
            atexit.unregister(self.close)
            self.close()

    def close(self) -> None:
        """Let others read what this process has not finished at once; may be called again. Not for a forked child."""
        if self._queue.forked:
            return
        self._stopped.set()
        self._queue.wait_s = LEAVE_S
        while self._held:
            with suppress(EdlError):  # has been raised, or does not matter any more
                if loaded := self._held.popleft().result():
                    self._queue.release(loaded.task)
        self._queue.close()

    def _load(self) -> _LoadedTask | None:
        """Return the next task that can be read; None when the pass is over, or the script has left it."""
        while not self._stopped.is_set():
            got = self._queue.get(self.pass_number)
            if isinstance(got, NoTask) and (got.reason, got.pass_number) == ("pass after", self.pass_number - 1):
                # Tasks of the pass before were put back, or Redis has lost its last writes.
                got = self._queue.get(self.pass_number - 1)
            if isinstance(got, Task):
                if loaded := self._load_task(got):
                    return loaded
            elif self._is_over(got):
                return None
            else:
                self._stopped.wait(POLL_S)
        return None

    def _is_over(self, got: NoTask) -> bool:
        if got.pass_number < self.pass_number - 1:
            raise PassLostError(self._queue.job, self.pass_number, got.pass_number)
        if got.pass_number < self.pass_number:
            return False
        if got.reason == "all failed":
            raise AllTasksFailedError(self._queue.job, self.pass_number)
        return got.reason == "pass before"

    def _load_task(self, task: Task) -> _LoadedTask | None:
        records: list[Any] = []
        try:
            for record in itertools.chain.from_iterable(map(self._read, task.shards)):
                records.append(record)
                if self._stopped.is_set():
                    break
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with a task, others can be read
            reason = f"{type(error).__name__}: {error}"
            log.warning("task.failed", shards=task.shards, reason=reason, held_s=self._hold_s)
            self._stopped.wait(self._hold_s)  # the storage may be at fault, and recover
            self._hold_s = min(2 * self._hold_s, MAX_RETRY_HOLD_S)
            with _unless_lost():
                self._queue.fail(task, reason)
            return None
        self._hold_s = RETRY_HOLD_S
        return _LoadedTask(task, records)

    def _finish(self, task: Task) -> None:
        with _unless_lost():
            self._queue.finish(task)

    def _log_end(self, count: int) -> None:
        """Log how the pass has ended, of which `count` tasks were this reader's."""
        report = self._queue.report()
        of = {"job": report.job, "pass_number": self.pass_number}
        if report.pass_number == self.pass_number:
            names = [shard for failed in report.failed for shard in failed.shards]
            log.info("pass.over", **of, tasks=report.tasks, mine=count, failed=names)
        elif not count:
            log.info("pass.over", **of, mine=0, current=report.pass_number)


@contextmanager
def _unless_lost() -> Iterator[None]:
    try:
        yield
    except TaskLostError as error:
        log.warning("task.lost", task=error.number, pass_number=error.pass_number, cause=str(error))


def _in_thread(load: Callable[[], _LoadedTask | None]) -> Future[_LoadedTask | None]:
    """Call it in a thread that ends with the process: one that waits for others must not keep a script that exits."""
    future: Future[_LoadedTask | None] = Future()

    def run() -> None:
        try:
            future.set_result(load())
        except BaseException as error:  # noqa: BLE001 -- it is the caller's
            future.set_exception(error)

    threading.Thread(target=run, name="edl cloud_reader", daemon=True).start()
    return future


def _expand(paths: Sequence[str], *, are_sets: bool) -> list[str]:
    """Return the shards at these paths, in order. Raises SpecError for a glob without one."""
    shards: list[str] = []
    for path in paths:
        if glob.has_magic(path) and (found := _glob(path)) is not None:
            if not found:
                raise SpecError("paths", path, "a pattern of files that exist")
            shards += found
        elif are_sets and not path.endswith(".parquet"):
            from edl_runtime.shards.dataset import list_shards

            shards += list_shards(path)
        else:
            shards.append(path)
    return shards


def _glob(pattern: str) -> list[str] | None:
    """Return the paths of a pattern; None for the path of what is there, with such characters in its name."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    fs, path = url_to_fs(pattern)
    if fs.exists(path):
        return None
    found = sorted(fs.glob(path))
    return list(map(fs.unstrip_protocol, found)) if "://" in pattern else found


def _default_read() -> ReadShard:
    from edl_runtime.shards.dataset import read_shard

    read: ReadShard = read_shard
    return read
