"""`cloud_reader` and `edl tasks`, on a real Redis."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.edl_command import Edl, edl_command
from support.teachers.process import wait_until

from edl_runtime.compat import cloud_reader as module
from edl_runtime.compat.cloud_reader import cloud_reader
from edl_runtime.errors import SpecError
from edl_runtime.shards.convert import convert
from edl_runtime.shards.errors import AllTasksFailedError, ForkedLedgerError, PassLostError, TasksDifferError
from edl_runtime.shards.tasks import BlockingTaskQueue, Task
from edl_runtime.store.redis_server import RedisServer

SHARDS, LINES = 5, 3
ALL = [f"{shard}-{line}" for shard in range(SHARDS) for line in range(LINES)]


def read_lines(path: str) -> list[str]:
    return Path(path).read_text().split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of text files."""
    made = tmp_path / "data"
    made.mkdir()
    for shard in range(SHARDS):
        (made / f"part-{shard}.txt").write_text("".join(f"{shard}-{line}\n" for line in range(LINES)))
    return made


@pytest.fixture
def job(namespace: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job that no other test has."""
    monkeypatch.setenv("EDL_NAMESPACE", namespace)
    monkeypatch.delenv("EDL_JOB", raising=False)
    monkeypatch.setattr(module, "_passes", {})
    return f"job-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def reader(folder: Path, redis_url: str, job: str) -> Callable[..., Iterator[str]]:
    """Calls `cloud_reader` with the folder's files."""

    def make(**more: Any) -> Iterator[str]:
        return cloud_reader([str(folder / "*.txt")], redis_url, **{"read": read_lines, "job": job} | more)

    return make


@pytest.fixture
def queue(redis_url: str, namespace: str, job: str) -> Iterator[BlockingTaskQueue]:
    """The job's tasks, as another reader uses them."""
    with BlockingTaskQueue(redis_url, namespace, job, worker="other") as made:
        yield made


@pytest.fixture
def edl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], redis_url: str) -> Iterator[Edl]:
    with edl_command(monkeypatch, capsys) as run:
        monkeypatch.setenv("EDL_REDIS_URL", redis_url)
        yield run


Reader = Callable[..., Iterator[str]]


def test_each_call_reads_a_pass(reader: Reader, queue: BlockingTaskQueue) -> None:
    """All records of all files, each once."""
    for pass_number in range(3):
        assert sorted(reader(shards_per_task=2)) == ALL
        report = queue.report()
        assert (report.pass_number, report.tasks, report.done) == (pass_number, 3, 3)


def test_paths_and_endpoint_are_enough(reader: Reader, edl: Edl) -> None:
    """The queue has a name of its own; the log says when others have read all of a pass."""
    assert sorted(reader(job="")) == ALL
    with capture_logs() as logs:
        module._passes.clear()  # as in another process
        assert list(reader(job="")) == []
    assert [(entry["event"], entry["mine"]) for entry in logs] == [("pass.over", 0)]
    assert edl("tasks", module.DEFAULT_JOB)[0] == 0


def test_a_process_may_say_which_pass_it_reads(
    reader: Reader, queue: BlockingTaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was started for an epoch, as those of a DataLoader are; a pass that is over has nothing."""
    for pass_number in (0, 1):
        monkeypatch.setattr(module, "_passes", {})
        assert sorted(reader(pass_number=pass_number)) == ALL
        assert list(reader(pass_number=pass_number)) == []
    assert queue.report().pass_number == 1


def test_readers_share_a_pass(reader: Reader, queue: BlockingTaskQueue) -> None:
    """Each has other records; one that has no task waits until those of the other are done."""
    first, second = reader(), reader()
    records = [next(first), next(second)]
    threads = [threading.Thread(target=lambda one=one: records.extend(one)) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sorted(records) == ALL
    assert queue.report().is_over


def test_the_next_task_is_read_while_the_script_has_this_one(reader: Reader, queue: BlockingTaskQueue) -> None:
    """A task is done when the script asks for the record after its last."""
    read: list[str] = []

    def note(path: str) -> list[str]:
        read.append(path)
        return read_lines(path)

    records = reader(read=note)
    for _ in range(LINES):
        next(records)
    wait_until(lambda: len(read) == 2)
    report = queue.report()
    assert (report.done, [task.number for task in report.pending]) == (0, [0, 1])
    next(records)
    assert queue.report().done == 1
    records.close()  # type: ignore[attr-defined]


def test_a_script_that_leaves_gives_its_tasks_back(reader: Reader, queue: BlockingTaskQueue) -> None:
    """At once; the next call reads on in that pass."""
    records = reader()
    taken = [next(records) for _ in range(LINES + 1)]
    records.close()  # type: ignore[attr-defined]
    report = queue.report()
    assert (report.pass_number, report.done, report.todo, report.pending) == (0, 1, SHARDS - 1, ())
    rest = list(reader())
    assert sorted([*taken[:LINES], *rest]) == ALL
    assert queue.report().pass_number == 0


def test_a_task_is_committed_before_it_is_done(reader: Reader, queue: BlockingTaskQueue) -> None:
    """With its pass and number, when the script has all its records; one whose commit fails comes again."""
    taken: list[str] = []
    saved: dict[tuple[int, int], list[str]] = {}

    def commit(task: Task) -> None:
        assert task.number in [pending.number for pending in queue.report().pending]
        if task.number == 3 and len(saved) == 3:
            taken.clear()
            saved[-1, -1] = []
            raise OSError
        saved[task.pass_number, task.number] = taken.copy()
        taken.clear()

    with pytest.raises(OSError):  # noqa: PT011 - raised above
        taken.extend(reader(commit=commit))
    taken.extend(reader(commit=commit))
    assert sorted(saved) == [(-1, -1), *((0, number) for number in range(SHARDS))]


def test_a_late_reader_is_told_in_the_log(reader: Reader, queue: BlockingTaskQueue) -> None:
    """Another has its task meanwhile; it goes on with the next."""
    slow = reader(timeout_s=0.2, retries=1000)
    first = next(slow)
    with capture_logs() as logs:
        wait_until(lambda: not queue.report().pending)
        task = queue.get(0)
        assert isinstance(task, Task)
        others = [record for shard in task.shards for record in read_lines(shard)]
        queue.finish(task)
        rest = list(slow)
    assert "task.lost" in [entry["event"] for entry in logs]
    assert {first, *others, *rest} == set(ALL)
    assert queue.report().done == SHARDS


def test_a_file_that_can_not_be_read_is_tried_again(
    reader: Reader, queue: BlockingTaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its task is yielded until all of it can be read."""
    monkeypatch.setattr(module, "RETRY_HOLD_S", 0.01)
    tries: list[str] = []

    def torn(path: str) -> Iterator[str]:
        yield from read_lines(path)[:2]
        tries.append(path)
        if path.endswith("part-1.txt") and tries.count(path) < 3:
            message = "torn"
            raise ValueError(message)
        yield from read_lines(path)[2:]

    assert sorted(reader(read=torn)) == ALL
    assert queue.report().failed == ()


def test_failed_tasks_are_shown_and_put_back(
    reader: Reader, job: str, edl: Edl, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass is over without one; then it is read alone, in the same pass."""
    monkeypatch.setattr(module, "RETRY_HOLD_S", 0.01)
    bad = folder / "part-1.txt"
    content = bad.read_bytes()
    bad.write_bytes(b"\xff")
    with capture_logs():
        assert len(list(reader(retries=1))) == len(ALL) - LINES
    status, out, _ = edl("tasks", job)
    assert status == 0
    assert "0     5      0     0        4     1" in out
    assert out.count("UnicodeDecodeError: 'utf-8' codec") == 2
    assert str(bad) in out

    for wrong in ("2", "all"):
        status, _, err = edl("tasks", job, "--requeue", wrong)
        assert status == 78
        assert "--requeue" in err
    bad.write_bytes(content)
    status, out, err = edl("tasks", job, "--requeue", "1", "--json")
    assert (status, err) == (0, "put back 1 task\n")
    assert (json.loads(out)["todo"], json.loads(out)["failed"]) == (1, [])
    status, _, err = edl("tasks", job, "--requeue", "failed")
    assert (status, err) == (0, "put back 0 tasks\n")
    monkeypatch.setattr(module, "_passes", {})
    assert sorted(reader()) == ["1-0", "1-1", "1-2"]


def test_tasks_that_are_put_back_after_their_pass_are_read_before_the_next(
    reader: Reader, queue: BlockingTaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By readers that have seen its end."""
    monkeypatch.setattr(module, "RETRY_HOLD_S", 0.0)
    calls: list[str] = []

    def once_torn(path: str) -> list[str]:
        calls.append(path)
        if len(calls) == 1:
            message = "torn"
            raise ValueError(message)
        return read_lines(path)

    assert len(list(reader(read=once_torn, retries=0))) == len(ALL) - LINES
    assert queue.requeue() == 1
    passes: list[tuple[int, int]] = []
    records = list(reader(commit=lambda task: passes.append((task.pass_number, task.number))))
    assert sorted(records) == sorted([*ALL, "0-0", "0-1", "0-2"])
    assert passes == [(0, 0), *((1, number) for number in range(SHARDS))]


def test_who_holds_a_task_is_shown(job: str, edl: Edl, queue: BlockingTaskQueue) -> None:
    """With since when, and until when it may."""
    queue.set_dataset(["a", "b", "c"], shards_per_task=2)
    queue.get(0)
    status, out, _ = edl("tasks", job)
    assert status == 0
    shown = re.fullmatch(r"0 other (\d+) s ago in (\d+) s a", " ".join(out.splitlines()[-2].split()))
    assert shown
    assert 1199 <= int(shown[1]) + int(shown[2]) <= 1201
    assert out.split()[-1] == "b"
    [pending] = json.loads(edl("tasks", job, "--json")[1])["pending"]
    assert (pending["number"], pending["worker"], pending["shards"]) == (0, "other", ["a", "b"])
    assert 1199 < pending["held_s"] + pending["left_s"] <= 1200


def test_a_job_without_tasks_is_an_error(edl: Edl, job: str, namespace: str) -> None:
    """It says where was looked."""
    status, _, err = edl("tasks", job)
    assert status == 1
    assert f"no tasks of job '{job}' in namespace '{namespace}'" in err


def test_a_pass_of_which_all_failed_is_an_error(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what shows why; not an empty pass."""
    monkeypatch.setattr(module, "RETRY_HOLD_S", 0.0)
    with pytest.raises(AllTasksFailedError, match="--requeue failed"):
        list(reader(read=lambda path: [int(path)], retries=0))


def test_other_files_than_the_job_has_are_refused(reader: Reader, folder: Path) -> None:
    """With both lists."""
    assert len(list(reader())) == len(ALL)
    (folder / "part-9.txt").write_text("more")
    with pytest.raises(TasksDifferError, match=r"has 5 tasks, .*none; given was 6 tasks, number 5 being .*part-9"):
        list(reader())


def test_a_redis_that_forgot_a_pass_is_an_error(reader: Reader, job: str, redis_url: str, namespace: str) -> None:
    """The reader has seen its end, and would read its tasks as those of the next."""
    import redis

    from edl_runtime.store import keys

    for _ in range(2):
        list(reader())
    with redis.Redis.from_url(redis_url) as client:
        client.delete(*keys.ledger_keys(namespace, job, "tasks"))
    with pytest.raises(PassLostError, match=r"pass 2 .* is in pass 0 again"):
        list(reader())


@pytest.mark.parametrize("leave", ["", "raise RuntimeError", "sys.modules['kept'] = records"])
def test_a_script_that_exits_in_a_pass_gives_its_tasks_back(
    folder: Path, job: str, redis_url: str, queue: BlockingTaskQueue, leave: str
) -> None:
    """Though nobody closed its generator, and a thread of it waits for the next task."""
    script = (
        "import sys\nfrom edl_runtime.compat.cloud_reader import cloud_reader\n"
        "records = cloud_reader(sys.argv[1], sys.argv[2], job=sys.argv[3], read=lambda path: open(path).readlines())\n"
        f"next(records)\n{leave}\n"
    )
    command = [sys.executable, "-c", script, str(folder / "part-0.txt"), redis_url, job]
    done = subprocess.run(command, timeout=300, check=False, capture_output=True)
    assert done.returncode == ("raise" in leave)
    assert queue.report().todo == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_forked_child_leaves_its_parent_s_tasks_alone(
    reader: Reader, queue: BlockingTaskQueue, *, goes_on: bool
) -> None:
    """It may exit in the loop, as one that does something else; one that goes on with the loop is told."""
    commits: list[int] = []
    records = reader(commit=lambda task: commits.append(task.number))
    taken = [next(records)]
    wait_until(lambda: len(queue.report().pending) == 2)
    child = os.fork()
    if not child:
        signal.alarm(100)
        try:
            if goes_on:
                list(records)
            records.close()  # type: ignore[attr-defined]
        except ForkedLedgerError:
            os._exit(1 if commits else 7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (7 if goes_on else 0)
    assert len(queue.report().pending) == 2
    assert sorted([*taken, *records]) == ALL


def test_a_script_that_leaves_does_not_wait_for_redis(
    folder: Path, job: str, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its tasks is tried to be given back, for a moment."""
    monkeypatch.setattr(module, "LEAVE_S", 0.0)
    records = cloud_reader(str(folder / "*.txt"), own_redis.url, job=job, read=read_lines)
    next(records)
    own_redis.kill()
    with capture_logs():
        leaving = threading.Thread(target=records.close, daemon=True)  # type: ignore[attr-defined]
        leaving.start()
        leaving.join(100)
    assert not leaving.is_alive()


@pytest.mark.parametrize("where", ["{}", "{}/*.parquet"])
def test_shards_of_edl_convert_need_no_read(tmp_path: Path, redis_url: str, job: str, where: str) -> None:
    """By their folder, or by a glob."""
    pytest.importorskip("pyarrow")
    samples = [(number, f"text {number}") for number in range(10)]
    convert(lambda: samples, str(tmp_path / "set"), records_per_shard=3)
    records = cloud_reader(where.format(tmp_path / "set"), redis_url, job=job, shards_per_task=2)
    assert sorted(records) == samples


def test_a_path_may_have_the_characters_of_a_glob(tmp_path: Path, job: str, redis_url: str) -> None:
    """Where such a file exists, or a folder of `edl convert`; the first as it was given."""
    pytest.importorskip("pyarrow")
    (tmp_path / "part [1]").write_text("one two")
    assert list(cloud_reader(str(tmp_path / "part [1]"), redis_url, job=job, read=read_lines)) == ["one", "two"]
    convert(lambda: [(1,), (2,)], str(tmp_path / "digits*"), records_per_shard=1)
    assert list(cloud_reader(str(tmp_path / "digits*"), redis_url, job=f"{job}-set")) == [(1,), (2,)]


def test_what_can_not_be_read_is_refused(folder: Path, redis_url: str) -> None:
    """When it is called if no file is there; or when it is read."""
    with pytest.raises(SpecError, match=r"paths: got '.*\*\.csv'"):
        cloud_reader(str(folder / "*.csv"), redis_url, job="job")
    with pytest.raises(SpecError, match="redis_url"):
        list(cloud_reader(str(folder / "part-0.txt"), "127.0.0.1:2379", job="job", read=read_lines))
