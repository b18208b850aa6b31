"""A queue of tasks on the ledger: each is several shards that one reader leases, and finishes or fails, together.

A task is todo, pending, done or failed. It is pending for `timeout_s` at most; then, as when it fails, it is todo
again, or failed if that happened more than `retries` times in this pass. When nothing is todo or pending the pass is
over, and the next one begins with all tasks when somebody asks for it.

A task may be read twice: a reader that is killed, or too slow, has read a part of it. It is finished once a pass: one
of its readers is told so, and `finish` of the others raises. So a consumer saves what it makes of a task under the
task's pass and number, in one step as by a rename, and then calls `finish`. Then each record counts once a pass.

This commits with no checkpoint; in an elastic training `Run.shards` does. A job may have both.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.parsing import JsonDecoder
from edl_runtime.shards.blocking import WAIT_S, Blocking, blocking
from edl_runtime.shards.errors import TaskLostError, TasksDifferError, TasksMissingError
from edl_runtime.shards.ledger import MAX_REASON_LENGTH, ONE_EPOCH, Ledger, digest_of, failures_in, pairs, slices
from edl_runtime.store import keys
from edl_runtime.store.redis_client import malformed_if_unreadable, run_script, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

TIMEOUT_S = 1200.0
RETRIES = 3

NoTaskReason = Literal["pass before", "pass after", "no more available", "all failed"]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A leased task: `number` of the list, in pass `pass_number`, both counted from 0; `shards` are what to read.

    - `failures`: how often it has failed in this pass, or was not finished in time.
    - `token`: identifies the lease; another lease of the same task has another one.
    """

    number: int
    pass_number: int
    shards: tuple[str, ...]
    failures: int
    token: str


class NoTask(msgspec.Struct, frozen=True):
    """Why there is no task now, the `reason`; `pass_number` is the current pass, counted from 0.

    - "pass before": the pass that was asked for is over.
    - "pass after": an earlier one is not over yet.
    - "no more available": other readers hold all that is left of the pass. If they fail there may be more.
    - "all failed": the pass is over, and no task was done.
    """

    reason: NoTaskReason
    pass_number: int


class PendingTask(msgspec.Struct, frozen=True):
    """A task that `worker` has held for `held_s`, and may hold for another `left_s`."""

    number: int
    shards: tuple[str, ...]
    worker: str
    held_s: float
    left_s: float


class FailedTask(msgspec.Struct, frozen=True):
    """A task that has failed too often in this pass, with the reason of each failure."""

    number: int
    shards: tuple[str, ...]
    reasons: tuple[str, ...]


class TasksReport(msgspec.Struct, frozen=True, kw_only=True):
    """A job's tasks in the current pass, counted from 0; `todo` and `done` are numbers of tasks."""

    job: str
    pass_number: int
    tasks: int
    todo: int
    pending: tuple[PendingTask, ...]
    done: int
    failed: tuple[FailedTask, ...]

    @property
    def is_over(self) -> bool:
        """Whether nothing of the pass is todo or pending."""
        return not self.todo and not self.pending


class TaskQueue:
    """A job's tasks, as one reader uses them. Every method raises RegistryUnavailableError and may then be repeated.

    `client` is a connection to Redis, where `job` has its tasks in `namespace`.
    `worker` names the reader to people. `timeout_s` is how long it may hold a task, by Redis's clock, and `retries`
    how many failures a task may have in a pass; with one more it is failed. Methods raise TasksMissingError when Redis
    has no tasks of the job. Raises SpecError.
    """

    def __init__(
        self,
        client: Redis,
        namespace: str,
        job: str,
        *,
        worker: str,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise SpecError("timeout_s", timeout_s, "a time above 0, in seconds")
        if retries < 0:
            raise SpecError("retries", retries, "0 or more")
        self._client = client
        self._namespace = namespace
        self._job = job
        self._keys = keys.ledger_keys(namespace, job, "tasks")
        self._worker = worker
        self._timeout_ms = max(1, round(1000 * timeout_s))
        self._retries = retries
        self._getting = asyncio.Lock()
        self._token = _new_token()

    async def set_dataset(self, shards: Sequence[str], *, shards_per_task: int = 1) -> None:
        """Make the tasks of `shards`, `shards_per_task` of them each, in this order.

        A job's first list holds; `retries` are the last caller's.
        Raises TasksDifferError for another list, SpecError for an empty one.
        """
        if not shards:
            raise SpecError("shards", list(shards), "at least one")
        if shards_per_task < 1:
            raise SpecError("shards_per_task", shards_per_task, "1 or more")
        names = names_of_tasks(shards, shards_per_task)
        digest = digest_of(["tasks", *names], ONE_EPOCH)
        status, *closed = await self._run("ledger_task_open", digest, self._retries + 1)
        if status == "differs":
            raise await self._difference(names)
        if closed == [1]:
            return
        ledger = Ledger(self._client, self._namespace, self._job, worker=self._worker, of="tasks")
        await ledger.add(names, first=0)
        await ledger.close_stream()

    async def get(self, pass_number: int) -> Task | NoTask:
        """Lease a task of pass `pass_number` for `timeout_s`. The first call for the next pass starts it."""
        async with self._getting:
            token = self._token
            kind, first, second, *failures = await self._run(
                "ledger_task_get", pass_number, self._worker, token, self._timeout_ms
            )
            self._token = _new_token()  # only now is it certain that this answer is not needed again
        if kind == "none":
            return NoTask(second, first)
        (count,) = failures
        return Task(number=first, pass_number=pass_number, shards=self._decode(second), failures=count, token=token)

    async def finish(self, task: Task) -> None:
        """Make `task` done. Raises TaskLostError, and changes nothing, if this reader does not hold it any more."""
        await self._end(task, "done")

    async def fail(self, task: Task, reason: str) -> bool:
        """Return `task`, which can't be read for this `reason`; return whether it has failed too often now.

        Raises as `finish` does.
        """
        return await self._end(task, "failed", reason[:MAX_REASON_LENGTH])

    async def release(self, task: Task) -> None:
        """Return `task`, which was not finished, without counting a failure. Raises as `finish` does."""
        await self._end(task, "back")

    async def report(self) -> TasksReport:
        """Return how far the current pass is."""
        _, pass_number, tasks, free, now, leases, failures, failed = await self._run("ledger_task_report")
        reasons = failures_in(self._keys[4], failures)
        first = pass_number * tasks
        with malformed_if_unreadable(self._keys[1]):
            held = {int(ticket) - first: lease.split(" ", 4)[1:] for ticket, lease in pairs(leases)}
            times = {number: (int(since), int(ends)) for number, (since, ends, _, _) in held.items()}
        lost = {int(ticket) - first: reasons[int(ticket)].reasons for ticket in failed}
        shards = await self._shards_of({*held, *lost})
        return TasksReport(
            job=self._job,
            pass_number=pass_number,
            tasks=tasks,
            todo=free,
            pending=tuple(
                PendingTask(number, shards[number], held[number][3], (now - since) / 1000, (ends - now) / 1000)
                for number, (since, ends) in sorted(times.items())
            ),
            done=tasks - free - len(held) - len(lost),
            failed=tuple(FailedTask(number, shards[number], why) for number, why in sorted(lost.items())),
        )

    async def requeue(self, number: int | None = None) -> int:
        """Put tasks that have failed in the current pass back, with no failures: `number`, or all. Return how many."""
        _, count = await self._run("ledger_task_requeue", "" if number is None else number)
        return int(count)

    async def _end(self, task: Task, how: str, reason: str = "") -> bool:
        status, has_failed = await self._run(
            "ledger_task_end", task.pass_number, task.number, self._worker, task.token, how, reason
        )
        if status == "lost":
            raise TaskLostError(self._job, task.number, task.pass_number, self._worker)
        return bool(has_failed)

    async def _shards_of(self, numbers: Collection[int]) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        for some in slices(sorted(numbers)):
            found |= zip(some, map(self._decode, await self._names(some)), strict=True)
        return found

    async def _names(self, numbers: Sequence[int]) -> list[str | None]:
        with unavailable_if_lost(self._client, self._keys[5]):
            found: list[Any] = await self._client.hmget(self._keys[5], [str(number) for number in numbers])
        return found

    def _decode(self, name: str | None) -> tuple[str, ...]:
        if name is None:  # lost since the script answered
            raise TasksMissingError(self._job, self._namespace)
        with malformed_if_unreadable(self._keys[5]):
            shards: tuple[str, ...] = JsonDecoder(tuple[str, ...]).decode(name)
        return shards

    async def _difference(self, names: Sequence[str]) -> TasksDifferError:
        """Return the error that names the first task that differs."""
        with unavailable_if_lost(self._client, self._keys[5]):
            count = await self._client.hlen(self._keys[5])
        there = [name or "" for some in slices(list(range(count))) for name in await self._names(some)]
        first = next(at for at, (one, other) in enumerate(itertools.zip_longest(there, names)) if one != other)
        return TasksDifferError(self._job, _described(there, first), _described(names, first))

    async def _run(self, script: str, *args: str | int) -> list[Any]:
        answer: list[Any] = await run_script(self._client, script, self._keys, args)
        if answer[0] == "missing":
            raise TasksMissingError(self._job, self._namespace)
        return answer


class BlockingTaskQueue(Blocking[TaskQueue]):
    """`TaskQueue`'s methods without `await`, for any thread. Raises SpecError as `TaskQueue` does.

    `redis_url` is the Redis where `job` has its tasks in `namespace`; `worker`, `timeout_s` and `retries` are those of
    `TaskQueue`. While Redis is unavailable a call is repeated for up to `wait_s`. A context manager.
    """

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        job: str,
        *,
        worker: str,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        wait_s: float = WAIT_S,
    ) -> None:
        def make(client: Redis) -> TaskQueue:
            return TaskQueue(client, namespace, job, worker=worker, timeout_s=timeout_s, retries=retries)

        super().__init__(redis_url, job, worker, make, wait_s=wait_s)

    set_dataset = blocking(TaskQueue.set_dataset)
    get = blocking(TaskQueue.get)
    finish = blocking(TaskQueue.finish)
    fail = blocking(TaskQueue.fail)
    release = blocking(TaskQueue.release)
    report = blocking(TaskQueue.report)
    requeue = blocking(TaskQueue.requeue)


def names_of_tasks(shards: Sequence[str], shards_per_task: int) -> list[str]:
    """Return the ledger's name of each task: JSON of its shards."""
    starts = range(0, len(shards), shards_per_task)
    return [msgspec.json.encode(shards[start : start + shards_per_task]).decode() for start in starts]


def _described(names: Sequence[str], number: int) -> str:
    return f"{len(names)} tasks, number {number} being {names[number] if number < len(names) else 'none'}"


def _new_token() -> str:
    return secrets.token_hex(8)
