"""Reads passes of a job's tasks as a script would, slowly, and saves what it read of each task.

`python -m support.tasks.consumer KIND FOLDER OUT PASSES`; KIND is "reader" for `cloud_reader`, "queue" for the queue.
What is saved of a task is a file OUT/PASS-NUMBER. With "queue", OUT/accepted.PID has a line for each that was accepted.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from edl_runtime.compat.cloud_reader import cloud_reader
from edl_runtime.shards.errors import TaskLostError
from edl_runtime.shards.tasks import BlockingTaskQueue, NoTask, Task

JOB = "chaos"
TIMEOUT_S = 1.0
SHARDS_PER_TASK = 2
RETRIES = 1_000_000


def read_lines(path: str) -> list[str]:
    return Path(path).read_text().split()


def worked_on(record: str) -> str:
    """Return the record after a while; now and then after its task's time is over."""
    time.sleep(TIMEOUT_S * 1.2 if random.random() < 0.002 else random.uniform(0, 0.02))
    return record


def save(out: Path, task: Task, records: Iterable[str]) -> None:
    """Make the task's file durable, in one step."""
    draft = out / f"draft.{os.getpid()}"
    with draft.open("w") as file:
        file.writelines(f"{record}\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(out / f"{task.pass_number}-{task.number}")


def consume_by_reader(folder: Path, out: Path, passes: int) -> None:
    """Use `cloud_reader`, and save by its `commit`."""
    taken: list[str] = []

    def commit(task: Task) -> None:
        save(out, task, taken)
        taken.clear()

    for _ in range(passes):
        for record in cloud_reader(
            str(folder / "*"),
            os.environ["EDL_REDIS_URL"],
            read=read_lines,
            job=JOB,
            shards_per_task=SHARDS_PER_TASK,
            timeout_s=TIMEOUT_S,
            retries=RETRIES,
            commit=commit,
        ):
            taken.append(worked_on(record))  # noqa: PERF401 - one by one


def consume_by_queue(folder: Path, out: Path, passes: int) -> None:
    """Use the queue, and note which tasks it accepted."""
    with BlockingTaskQueue(
        os.environ["EDL_REDIS_URL"], "default", JOB, worker=f"queue-{os.getpid()}", timeout_s=TIMEOUT_S, retries=RETRIES
    ) as queue:
        queue.set_dataset(sorted(map(str, folder.iterdir())), shards_per_task=SHARDS_PER_TASK)
        pass_number = 0
        while pass_number < passes:
            got = queue.get(pass_number)
            if isinstance(got, NoTask):
                assert got.reason in ("pass before", "no more available"), got
                if got.reason == "pass before":
                    pass_number += 1
                else:
                    time.sleep(0.05)
                continue
            save(out, got, [worked_on(record) for shard in got.shards for record in read_lines(shard)])
            try:
                queue.finish(got)
            except TaskLostError:
                continue
            with (out / f"accepted.{os.getpid()}").open("a") as journal:
                journal.write(f"{got.pass_number}-{got.number}\n")


if __name__ == "__main__":
    kind, folder, out, passes = sys.argv[1:]
    {"reader": consume_by_reader, "queue": consume_by_queue}[kind](Path(folder), Path(out), int(passes))
