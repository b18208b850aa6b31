"""Whatever happens to a local job, no process of it is left."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest
from support.backends.jobs import IGNORES_SIGTERM, WAITS, ended, eventually, lines, reach, wait_for_line
from support.backends.local_processes import below, job, processes, supervisor, wait_until_gone
from support.paths import TESTS
from support.teachers.process import PATIENCE_S, is_gone, wait_until

from edl_runtime import locks
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.backends.local.instances import start_wrapped
from edl_runtime.specs import JobSpec

FAMILY = """
import signal, subprocess, sys, time
wait = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
children = [
    subprocess.Popen([sys.executable, "-c", wait], start_new_session=own, stdout=subprocess.PIPE)
    for own in (False, True)
]
for child in children: child.stdout.readline()
subprocess.Popen(["sh", "-c", "(setsid sleep 600 &)"]).wait()
print("up")
time.sleep(float(sys.argv[1]))
"""
"""Starts three processes that ignore SIGTERM or don't get it, in its session, in one of their own and as an orphan."""


def family(work_dir: Path, *, lives_s: float) -> JobSpec:
    spec = job(FAMILY, work_dir, kind="trainer")
    return msgspec.structs.replace(spec, command=(*spec.command, str(lives_s)))


async def test_a_delete_leaves_no_descendant(backend: LocalBackend, work_dir: Path) -> None:
    """Grandchildren go with their instance, also those in sessions of their own and orphans."""
    await backend.submit(family(work_dir, lives_s=600), token="mine", secrets={})
    await wait_for_line(backend, "up")
    wait_until(lambda: len(processes(work_dir)) == 1 + 2 + 3)  # supervisor, wrapper and command, descendants
    keeper = supervisor(work_dir).pid
    await backend.delete("job")
    assert [process for process in processes(work_dir) if process.pid != keeper] == []
    wait_until_gone(work_dir)


@pytest.mark.parametrize("lives_s", [0, 600])
def test_a_wrapper_by_itself_leaves_no_descendant(work_dir: Path, tmp_path: Path, lives_s: float) -> None:
    """Without a supervisor too: what a command leaves behind goes with it, and all of it when the lifeline is cut."""
    environ = {**os.environ, "STARTED_BY_TEST_IN": str(work_dir)}
    command = [sys.executable, "-u", "-c", FAMILY, str(lives_s)]
    log, lock = tmp_path / "log", locks.take(tmp_path / "lock")
    assert lock is not None
    with log.open("wb") as output:
        wrapper, lifeline = start_wrapped(command, env=environ, cwd=tmp_path, output=output, lock=lock)
    if lives_s:
        wait_until(lambda: "up" in log.read_text())
    else:
        assert wrapper.wait(PATIENCE_S) == 0
    os.close(lifeline)
    wrapper.wait(PATIENCE_S)
    os.close(lock)
    assert processes(work_dir) == []


async def test_instances_die_with_their_supervisor(backend: LocalBackend, work_dir: Path) -> None:
    """A supervisor killed without a chance to say a word takes everything with it, and the status says so."""
    spec = family(work_dir, lives_s=600)
    first = await backend.submit(spec, token="mine", secrets={})
    await wait_for_line(backend, "up")
    supervisor(work_dir).kill()
    wait_until_gone(work_dir)
    status = await backend.get("job")
    assert status.phase == "failed"
    assert "supervisor died" in status.reason
    assert [instance.exit_code for instance in status.instances] == [-signal.SIGKILL]
    anew = await backend.submit(spec, token="mine", secrets={})
    assert anew.created_at > first.created_at
    assert anew.phase == "running"


async def test_a_job_of_a_dead_supervisor_is_deleted_with_all_it_had(backend: LocalBackend, work_dir: Path) -> None:
    """A delete right after the supervisor's death waits for the instances, too."""
    await backend.submit(job(IGNORES_SIGTERM, work_dir, instances=2), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=2)
    supervisor(work_dir).kill()
    assert not await backend.delete("job", token="other")
    assert await backend.delete("job", token="mine")
    assert processes(work_dir) == []
    assert await backend.list() == []


async def test_a_stuck_supervisor_is_killed(
    backend: LocalBackend, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that does not answer can't keep its job from being deleted."""
    await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
    await wait_for_line(backend, "up")
    supervisor(work_dir).suspend()
    monkeypatch.setattr("edl_runtime.backends.local.backend.REPLY_TIMEOUT_S", 0.1)
    assert await backend.delete("job")
    wait_until_gone(work_dir)


async def test_a_supervisor_told_to_stop_stops_its_instances(backend: LocalBackend, work_dir: Path) -> None:
    """SIGTERM, as a machine sends it that shuts down, ends the job in good order."""
    await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
    await wait_for_line(backend, "up")
    supervisor(work_dir).terminate()
    status = await ended(backend)
    assert (status.phase, status.reason) == ("failed", "its supervisor was stopped by SIGTERM")
    wait_until_gone(work_dir)


async def test_a_killed_wrapper_takes_its_command_with_it(backend: LocalBackend, work_dir: Path) -> None:
    """When the process between supervisor and command is killed, the command does not run on beside its successor."""
    await backend.submit(job(IGNORES_SIGTERM, work_dir), token="mine", secrets={})
    await wait_for_line(backend, "up")
    [wrapper] = supervisor(work_dir).children()
    [command] = wrapper.children()
    wrapper.kill()
    await reach(backend, "job", lambda status: [one.restarts for one in status.instances] == [1])
    assert is_gone(command)


TRACEABLE = """
import ctypes, time
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: any process may trace it
print("up", flush=True)
time.sleep(600)
"""
PTRACE_SEIZE = 0x4206


async def test_an_orphan_that_does_not_end_holds_up_nobody(backend: LocalBackend, work_dir: Path) -> None:
    """As one in a system call of a hung NFS: its parent can't reap it, as while another process traces it.

    The supervisor answers, and the instance is started again.
    """
    await backend.submit(job(TRACEABLE, work_dir), token="mine", secrets={})
    await wait_for_line(backend, "up")
    [wrapper] = supervisor(work_dir).children()
    [command] = wrapper.children()
    if ctypes.CDLL(None).ptrace(PTRACE_SEIZE, command.pid, None, None) < 0:
        pytest.skip("this machine allows no tracing")
    try:
        wrapper.kill()
        wait_until(lambda: is_gone(command))
        await backend.resize("job", 2)
        await reach(backend, "job", lambda status: [one.restarts for one in status.instances] == [1, 0])
        assert command.pid in [child.pid for child in supervisor(work_dir).children()]
    finally:
        command.kill()
        os.waitpid(command.pid, 0)  # noqa: ASYNC222 - it is dead
    wait_until(lambda: not command.is_running())


async def test_a_submit_leaves_the_caller_no_child(backend: LocalBackend, work_dir: Path) -> None:
    """A supervisor is nobody's child, so a caller that lives long collects no zombies; nor is it in its session."""
    before = psutil.Process().children()
    await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
    assert os.getsid(supervisor(work_dir).pid) != os.getsid(0), "a Ctrl-C at the caller's terminal would end the job"
    await backend.delete("job")
    assert set(psutil.Process().children()) <= set(before)


CALLER = """
import asyncio, os, signal, sys
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.specs import Bounds, JobSpec
code = '''
import asyncio
import os
for line in open("/proc/self/status"):
    if line.startswith(("SigBlk", "SigIgn", "Umask")): print(" ".join(line.split()))
print("fds", sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1])
print("stdin", os.readlink("/proc/self/fd/0"))
'''
for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGPIPE):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
os.umask(0)
os.set_inheritable(os.open("/etc/hostname", os.O_RDONLY), True)
os.close(1)
spec = JobSpec(name="job", kind="trainer", command=("python", "-c", code), bounds=Bounds(1, 1), instances=1)
asyncio.run(LocalBackend(sys.argv[1]).submit(spec, token="mine", secrets={}))
"""


async def test_an_odd_caller_leaves_no_mark_on_instances(backend: LocalBackend, work_dir: Path) -> None:
    """Signal masks, ignored signals, descriptors and the umask of the caller stay with it."""
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, str(work_dir))
    assert await caller.wait() == 0
    assert (await ended(backend)).phase == "succeeded"
    found = [text for _, text in await lines(backend)]
    ignored = int(found.pop(2).removeprefix("SigIgn: "), 16)
    assert [number for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP) if ignored & 1 << number - 1] == []
    assert found == ["Umask: 0077", "SigBlk: 0000000000000000", "fds [0, 1, 2]", "stdin /dev/null"]


async def test_a_caller_killed_while_it_starts_a_job_leaves_one_job_or_none(
    backend: LocalBackend, work_dir: Path
) -> None:
    """The next try finds a job to adopt or starts one, and there is one supervisor in either case."""
    script = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from edl_runtime.backends.local.backend import LocalBackend
        from support.backends.local_processes import job
        work_dir = Path(sys.argv[1])
        spec = job("import time; print('up'); time.sleep(600)", work_dir)
        asyncio.run(LocalBackend(work_dir).submit(spec, token="first", secrets={}))
    """)
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(work_dir), env=environ)

    async def has_begun() -> bool:
        return bool(below(work_dir, "jobs/*") + below(work_dir, "jobs/.*"))

    await eventually(has_begun, "a start")
    caller.kill()
    await caller.wait()
    await backend.submit(job(WAITS, work_dir), token="second", secrets={})
    await wait_for_line(backend, "up")
    wait_until(lambda: len(processes(work_dir)) == 3)
    assert (await backend.get("job")).token == "second"
