"""The lock on a checkpoint folder, among processes that don't share a Redis."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from edl_runtime import locks
from edl_runtime.checkpoint.errors import CheckpointHeldError
from edl_runtime.checkpoint.folder_lease import FILE, FolderLock
from edl_runtime.settings import RuntimeSettings


def job(name: str) -> RuntimeSettings:
    return RuntimeSettings(job=name, redis_url="redis://user:secret@127.0.0.1:6379/0")


BY_HAND = RuntimeSettings()


@contextmanager
def held(settings: RuntimeSettings, folder: Path | str, *known: str) -> Iterator[FolderLock]:
    """Hold a folder; the job's Redis has the tokens `known`."""
    lock = FolderLock(settings, str(folder))
    try:
        lock.take(known)
        yield lock
    finally:
        lock.close()


def refusal(settings: RuntimeSettings, folder: Path | str) -> str:
    with pytest.raises(CheckpointHeldError) as refused, held(settings, folder):
        pass
    return str(refused.value)


def test_a_job_of_another_redis_is_refused_by_an_error_that_names_the_holder(tmp_path: Path) -> None:
    """So is a script that is started by hand. When the last one has released it, the folder is free."""
    with held(job("first"), tmp_path):
        for other in (job("first"), BY_HAND):
            assert refusal(other, f"{tmp_path}/").startswith("job 'first' (in namespace 'default') has used the check")
        with held(BY_HAND, "s3://bucket/nightly"):
            pass
    assert list(tmp_path.iterdir()) == []
    with held(BY_HAND, tmp_path):
        error = refusal(job("first"), tmp_path)
        assert error.startswith(f"a script that was started by hand (process {os.getpid()} on ")
        assert "stop that process" in error
    with held(job("second"), tmp_path):
        pass


def test_all_of_one_redis_hold_a_folder_together(tmp_path: Path) -> None:
    """They know each other by the token. A script that is started by hand may lock a folder twice."""
    with held(job("first"), tmp_path) as first:
        assert "secret" not in (tmp_path / FILE).read_text()
        with held(job("second"), tmp_path, "another", first.token) as second:
            assert second.token == first.token
            first.close()
            assert "'first'" in refusal(BY_HAND, tmp_path)
        assert not (tmp_path / FILE).exists()
    with held(BY_HAND, tmp_path), held(BY_HAND, tmp_path):
        pass


KILLED = """
import os, sys
from edl_runtime.checkpoint.folder_lease import FolderLock
from edl_runtime.settings import RuntimeSettings

FolderLock(RuntimeSettings(), sys.argv[1]).take()
os._exit(1)
"""


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    """The file that it has written stays."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert (tmp_path / FILE).exists()
    with held(job("next"), tmp_path):
        assert "'next'" in refusal(BY_HAND, tmp_path)


def test_a_folder_that_replaces_a_locked_one_has_its_own_lock(tmp_path: Path) -> None:
    """Releasing the folder that was moved away leaves the new lock alone; the next `take` locks the new one."""
    folder = tmp_path / "kept"
    folder.mkdir()
    with held(job("first"), folder) as first:
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        with held(BY_HAND, folder):
            with pytest.raises(CheckpointHeldError, match="by hand"):
                first.take()
            first.close()
            assert "by hand" in refusal(job("first"), folder)
    with held(job("first"), folder) as first:
        (folder / FILE).unlink()
        first.take()
        assert "'first'" in refusal(BY_HAND, folder)


@pytest.mark.parametrize("next_has_made_the_file", [False, True])
def test_a_holder_that_leaves_while_another_looks_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, next_has_made_the_file: bool
) -> None:
    """Neither the file that it has removed nor the empty one of a third process, not yet locked, is a holder's."""
    take = locks.take

    def take_late(file: Path) -> int | None:
        descriptor = take(file)
        if descriptor is None:
            first.close()
            if next_has_made_the_file:
                file.touch()
        return descriptor

    with held(job("first"), tmp_path) as first:
        monkeypatch.setattr(locks, "take", take_late)
        with held(job("second"), tmp_path):
            assert "'second'" in refusal(BY_HAND, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_died_while_others_looked_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file stays, and one that still reads it keeps the next from locking it for an instant."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    take, readers = locks.take, [os.open(tmp_path / FILE, os.O_RDONLY)]
    assert locks.share(readers[0])

    def take_late(file: Path) -> int | None:
        descriptor = take(file)
        while readers:
            os.close(readers.pop())
        return descriptor

    monkeypatch.setattr(locks, "take", take_late)
    with held(job("next"), tmp_path):
        assert "'next'" in refusal(BY_HAND, tmp_path)


IN_TURN = """
import sys
from edl_runtime.checkpoint import folder_lease
from edl_runtime.checkpoint.errors import FolderHolder
from edl_runtime.checkpoint.folder_lease import FolderLock
from edl_runtime.settings import RuntimeSettings

folder_lease.SETTLES_IN_S = 60.0  # a busy machine may let whoever writes or removes the file stand still for seconds
lock = FolderLock(RuntimeSettings(), sys.argv[1])
lock.holder = FolderHolder(namespace="default", job="train", since=0.0, group="one job")
for _ in range(1000):
    lock.take()
    lock.release()
"""


def test_instances_of_one_job_that_come_and_go_are_never_refused(tmp_path: Path) -> None:
    """Whoever removes or creates the file at that moment."""
    command = [sys.executable, "-c", IN_TURN, str(tmp_path)]
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(subprocess.run, command, capture_output=True, text=True, check=False) for _ in range(4)]
    assert [each.result().stderr for each in ended] == [""] * 4


def test_a_file_system_without_locks_is_used_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning."""

    def none(_: Path) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("edl_runtime.locks.take", none)
    with capture_logs() as logs, held(job("first"), tmp_path) as first:
        first.take()
    assert [log["event"] for log in logs] == ["checkpoint.folder_not_locked"]
