"""Tasks of several shards, on a real Redis whose clock the test sets."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from support.redis_clock import later, set_clock, take_time_from_a_key

from edl_runtime.errors import SpecError
from edl_runtime.shards.errors import LedgerMissingError, TaskLostError, TasksDifferError, TasksMissingError
from edl_runtime.shards.ledger import Ledger
from edl_runtime.shards.tasks import FailedTask, NoTask, PendingTask, Task, TaskQueue
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.store.redis_server import RedisServer

SHARDS = ["a", "b", "c", "d", "e"]
TASKS = [("a", "b"), ("c", "d"), ("e",)]

Make = Callable[..., TaskQueue]


@pytest.fixture
async def client(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Redis]:
    """A client of a Redis of this test's own, whose clock starts at START_S."""
    take_time_from_a_key(monkeypatch)
    async with connect(own_redis.url) as made:
        await later(made, 0)
        yield made


@pytest.fixture
def queue_of(client: Redis) -> Make:
    """A worker's view of a job's tasks."""

    def make(worker: str = "w1", **settings: Any) -> TaskQueue:
        return TaskQueue(client, "n", "job", worker=worker, **settings)

    return make


@pytest.fixture
async def queue(queue_of: Make) -> TaskQueue:
    """Three tasks of the shards a to e."""
    made = queue_of()
    await made.set_dataset(SHARDS, shards_per_task=2)
    return made


async def task_of(queue: TaskQueue, pass_number: int = 0) -> Task:
    task = await queue.get(pass_number)
    assert isinstance(task, Task), task
    return task


async def finish_pass(queue: TaskQueue, pass_number: int = 0) -> list[Task]:
    """Finish what is left of a pass."""
    finished = []
    while isinstance(task := await queue.get(pass_number), Task):
        await queue.finish(task)
        finished.append(task)
    assert task == NoTask("pass before", pass_number)
    return finished


async def test_each_pass_has_each_task_once(queue: TaskQueue) -> None:
    """It is over with its last task, and the next one starts when somebody asks for it."""
    for pass_number in range(3):
        finished = await finish_pass(queue, pass_number)
        assert [(task.number, task.shards) for task in finished] == list(enumerate(TASKS))
        report = await queue.report()
        assert (report.pass_number, report.done, report.todo, report.is_over) == (pass_number, 3, 0, True)


async def test_a_reader_is_told_why_there_is_no_task(queue: TaskQueue, queue_of: Make) -> None:
    """The pass is over, comes later, or others hold what is left of it."""
    assert await queue.get(1) == NoTask("pass after", 0)
    held = [await task_of(queue) for _ in TASKS]
    other = queue_of("w2")
    assert await other.get(0) == NoTask("no more available", 0)
    assert await other.get(1) == NoTask("pass after", 0)
    for task in held:
        await queue.finish(task)
    assert await other.get(0) == NoTask("pass before", 0)
    assert await other.get(2) == NoTask("pass after", 0)
    await task_of(other, 1)
    assert await queue.get(0) == NoTask("pass before", 1)


async def test_a_task_that_takes_too_long_is_another_readers(queue_of: Make, client: Redis) -> None:
    """Its first reader is refused, whatever it reports, and changes nothing; by Redis's clock alone."""
    slow, quick = queue_of("slow", timeout_s=10), queue_of("quick", timeout_s=10)
    await slow.set_dataset(["a"])
    late = await task_of(slow)
    await later(client, 9.9)
    assert await quick.get(0) == NoTask("no more available", 0)
    await later(client, 0.1)
    for refused in (slow.finish(late), slow.fail(late, "torn"), slow.release(late)):
        with pytest.raises(TaskLostError, match="'slow' no longer holds task 0 of pass 0 of job 'job'"):
            await refused
    again = await task_of(quick)
    assert (again.number, again.failures) == (0, 1)
    with pytest.raises(TaskLostError):
        await slow.finish(late)
    await quick.finish(again)
    with pytest.raises(TaskLostError):
        await slow.finish(late)
    assert (await quick.report()).done == 1


async def test_a_reader_that_gets_its_late_task_again_has_another_lease(queue_of: Make, client: Redis) -> None:
    """What it reports of the first lease does not end the second."""
    queue = queue_of(timeout_s=10)
    await queue.set_dataset(["a"])
    first = await task_of(queue)
    await later(client, 10)
    second = await task_of(queue)
    with pytest.raises(TaskLostError):
        await queue.finish(first)
    assert (await queue.report()).pending == (PendingTask(0, ("a",), "w1", 0.0, 10.0),)
    await queue.finish(second)


async def test_a_clock_that_is_set_back_ends_no_task_and_keeps_none_for_ever(queue_of: Make, client: Redis) -> None:
    """The queue's clock goes on with the time that passes after that."""
    queue = queue_of(timeout_s=10)
    await queue.set_dataset(["a"])
    await task_of(queue)
    await set_clock(client, 1_000_000_000)
    assert await queue.get(0) == NoTask("no more available", 0)
    await later(client, 10)
    assert (await task_of(queue)).failures == 1


async def test_a_task_that_fails_more_often_than_it_may_is_failed(queue_of: Make) -> None:
    """It comes back behind the others; its pass goes on without it, and the next one has it again."""
    queue = queue_of(retries=2)
    await queue.set_dataset(["bad", "good"])
    bad = await task_of(queue)
    assert not await queue.fail(bad, "torn 0")
    assert (await task_of(queue)).shards == ("good",)
    for attempt in (1, 2):
        bad = await task_of(queue)
        assert (bad.shards, bad.failures) == (("bad",), attempt)
        assert await queue.fail(bad, f"torn {attempt}") is (attempt == 2)
    report = await queue.report()
    assert report.failed == (FailedTask(0, ("bad",), ("torn 0", "torn 1", "torn 2")),)
    assert (len(report.pending), report.done, report.todo) == (1, 0, 0)
    with pytest.raises(TaskLostError):
        await queue.finish(bad)


async def test_the_next_pass_starts_with_done_and_failed_tasks(queue_of: Make) -> None:
    """Failures of a pass don't count in the next, nor do those of a task that was done after all."""
    queue = queue_of(retries=0)
    await queue.set_dataset(["a", "b"])
    await queue.fail(await task_of(queue), "torn")
    await queue.finish(await task_of(queue))
    assert await queue.get(0) == NoTask("pass before", 0)
    assert [(task.number, task.failures) for task in await finish_pass(queue, 1)] == [(0, 0), (1, 0)]
    assert (await queue.report()).failed == ()


async def test_a_pass_of_which_all_failed_is_told_from_one_that_is_over(queue_of: Make) -> None:
    """A reader would take an empty pass for one that others have read."""
    queue = queue_of(retries=0)
    await queue.set_dataset(["a", "b"])
    for _ in range(2):
        await queue.fail(await task_of(queue), "torn")
    assert await queue.get(0) == NoTask("all failed", 0)
    assert await queue.requeue(1) == 1
    assert [task.number for task in await finish_pass(queue)] == [1]


async def test_failed_tasks_are_put_back(queue_of: Make) -> None:
    """One or all, with all their tries; what has not failed is not touched."""
    queue = queue_of(retries=0)
    await queue.set_dataset(["a", "b", "c"])
    for _ in range(2):
        await queue.fail(await task_of(queue), "torn")
    await task_of(queue)
    assert await queue.requeue(2) == 0
    assert await queue.requeue(7) == 0
    assert await queue.requeue() == 2
    assert await queue.requeue() == 0
    report = await queue.report()
    assert (report.todo, len(report.pending), report.failed, report.done) == (2, 1, (), 0)
    assert [(task.number, task.failures) for task in [await task_of(queue), await task_of(queue)]] == [(0, 0), (1, 0)]


async def test_a_task_that_is_given_back_has_not_failed(queue: TaskQueue) -> None:
    """As by a reader that stops: it is read again, from its start."""
    task = await task_of(queue)
    await queue.release(task)
    with pytest.raises(TaskLostError):
        await queue.finish(msgspec.structs.replace(task, token="0" * 16))
    assert [(task.number, task.failures) for task in await finish_pass(queue)] == [(1, 0), (2, 0), (0, 0)]


async def test_a_report_whose_answer_was_lost_can_be_repeated(queue: TaskQueue, queue_of: Make) -> None:
    """Also once the next pass has begun; by another reader it is refused."""
    tasks = [await task_of(queue) for _ in TASKS]
    for task in tasks:
        await queue.finish(task)
    await task_of(queue_of("w2"), 1)
    for task in tasks:
        await queue.finish(task)
        with pytest.raises(TaskLostError):
            await queue_of("w2").finish(task)
    assert (await queue.report()).done == 0


async def test_a_lease_whose_answer_was_lost_is_answered_again(queue: TaskQueue) -> None:
    """The reader does not know of it, so its time would have to run out."""
    token = queue._token
    first = await task_of(queue)
    queue._token = token
    assert await task_of(queue) == first
    assert (await task_of(queue)).number == 1


async def test_the_first_list_of_a_job_holds(queue: TaskQueue, queue_of: Make) -> None:
    """Others are refused, and the error has what differs; the same list may be set again at any time."""
    await queue.finish(await task_of(queue))
    await queue_of("w2").set_dataset(SHARDS, shards_per_task=2)
    assert (await queue.report()).done == 1
    for shards, size, differ in (
        (
            ["a", "b", "c", "x", "e"],
            2,
            '3 tasks, number 1 being ["c","d"]; given was 3 tasks, number 1 being ["c","x"]',
        ),
        (SHARDS, 1, '3 tasks, number 0 being ["a","b"]; given was 5 tasks, number 0 being ["a"]'),
        (SHARDS[:4], 2, '3 tasks, number 2 being ["e"]; given was 2 tasks, number 2 being none'),
        ([*SHARDS, "f", "g"], 2, '3 tasks, number 2 being ["e"]; given was 4 tasks, number 2 being ["e","f"]'),
    ):
        with pytest.raises(TasksDifferError, match=re.escape(f"job 'job' has {differ}")):
            await queue_of("w2").set_dataset(shards, shards_per_task=size)
    assert [task.number for task in await finish_pass(queue)] == [1, 2]


async def test_a_job_may_have_a_queue_and_a_ledger(queue: TaskQueue, client: Redis) -> None:
    """A training reads shards, and scores others by `cloud_reader`: neither takes, or ends, the other's."""
    first = await task_of(queue)
    ledger = Ledger(client, "n", "job", worker="t", shards=["x"])
    with pytest.raises(LedgerMissingError):
        await ledger.begin(1)
    await ledger.restore(None, 1)
    assert [shard.name for shard in await ledger.lease() or ()] == ["x"]
    await queue.finish(first)
    assert [task.number for task in await finish_pass(queue)] == [1, 2]
    assert (await ledger.report()).doing == 1


async def test_a_list_that_its_first_reader_did_not_complete_is_completed(queue_of: Make, client: Redis) -> None:
    """It was killed in the middle of its call; until then there is no task."""
    first = queue_of()
    await first.set_dataset(SHARDS)
    await client.hset(keys.ledger_keys("n", "job", "tasks")[0], mapping={"closed": 0, "added": 3})
    await client.hdel(keys.ledger_keys("n", "job", "tasks")[5], "3", "4")
    with pytest.raises(TasksMissingError):
        await first.get(0)
    await queue_of("w2").set_dataset(SHARDS)
    assert [task.shards for task in await finish_pass(first)] == [(name,) for name in SHARDS]


async def test_a_queue_that_is_lost_while_its_list_is_added_starts_anew(queue_of: Make, client: Redis) -> None:
    """The names that were added after that are no queue's."""
    await Ledger(client, "n", "job", worker="w", of="tasks").add(['["x"]'], first=0)
    await queue_of().set_dataset(SHARDS)
    assert [task.shards for task in await finish_pass(queue_of())] == [(name,) for name in SHARDS]


@pytest.mark.parametrize("part", ["state", "doing", "failures", "names"])
async def test_a_queue_that_lacks_a_part_is_missing(queue: TaskQueue, client: Redis, part: str) -> None:
    """As where Redis evicts: readers are told, and it starts anew with the next list."""
    await queue.fail(await task_of(queue), "torn")
    held = await task_of(queue)
    await client.delete(next(key for key in keys.ledger_keys("n", "job", "tasks") if key.endswith(part)))
    for refused in (queue.get(0), queue.finish(held), queue.report(), queue.requeue()):
        with pytest.raises(TasksMissingError, match="Redis has no tasks of job 'job' in namespace 'n'"):
            await refused
    await queue.set_dataset(["other"])
    assert len(await finish_pass(queue)) == 1


async def test_an_unused_queue_expires(queue: TaskQueue, client: Redis) -> None:
    """Every key of it has an end, a week from the last use."""
    await queue.finish(await task_of(queue))
    await queue.fail(await task_of(queue), "torn")
    await task_of(queue)
    lifetimes = [await client.ttl(key) for key in keys.ledger_keys("n", "job", "tasks") if await client.exists(key)]
    assert len(lifetimes) == 6
    assert all(600_000 < lifetime <= 604_800 for lifetime in lifetimes)


async def test_a_queue_that_can_not_be_is_refused(queue_of: Make) -> None:
    """By name, before Redis is asked."""
    for wrong in ({"timeout_s": 0.0}, {"timeout_s": math.inf}, {"retries": -1}):
        with pytest.raises(SpecError, match=next(iter(wrong))):
            queue_of(**wrong)
    with pytest.raises(SpecError, match="shards: got"):
        await queue_of().set_dataset([])
    with pytest.raises(SpecError, match="shards_per_task"):
        await queue_of().set_dataset(SHARDS, shards_per_task=0)
