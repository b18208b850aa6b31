"""`edl monitor`, as a person runs it, on jobs of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from prometheus_client.parser import text_string_to_metric_families
from support.backends.jobs import WAITS, reach

from edl_runtime.autoscale.plan import JobTarget, Plan
from edl_runtime.autoscale.rescale import keep
from edl_runtime.backends.local import LocalBackend
from edl_runtime.pods import Pod
from edl_runtime.pool_reports import TeacherReport
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.specs import Bounds, JobKind, JobSpec
from edl_runtime.store.client import connect
from edl_runtime.store.keys import Service
from edl_runtime.store.server import RedisServer

EDL = [sys.executable, "-m", "edl_runtime.cli", "monitor"]
JOBS: dict[str, tuple[JobKind, int]] = {
    "example": ("trainer", 3),
    "example1": ("trainer", 2),
    "example2": ("trainer", 1),
    "teachers": ("pool", 1),
}
MILLI = 50
"""Of a CPU, that each instance reserves."""

ROW = ["3", "1", "example:3|example1:2|example2:suspended"]


@pytest.fixture
def backend(work_dir: Path) -> Iterator[LocalBackend]:
    """Three jobs of processes, one of them suspended, and a pool."""
    backend = LocalBackend(work_dir)

    async def start() -> None:
        for name, (kind, instances) in JOBS.items():
            spec = JobSpec(
                name=name,
                kind=kind,
                command=("python", "-c", WAITS),
                bounds=Bounds(1, 4),
                instances=instances,
                pod=Pod(resources={"cpu": f"{MILLI}m"}),
                grace_s=2.0,
            )
            await backend.submit(spec, token="", secrets={})
        await backend.resize("example2", 0)
        await reach(backend, "example2", lambda status: not status.instances)
        for name, (_, instances) in JOBS.items():
            if name != "example2":
                await reach(backend, name, lambda status, count=instances: runs(status, count))  # type: ignore[misc]

    async def end() -> None:
        await asyncio.gather(*(backend.delete(name) for name in JOBS))

    asyncio.run(start())
    yield backend
    asyncio.run(end())


def runs(status: Any, instances: int) -> bool:
    return [instance.phase for instance in status.instances] == ["running"] * instances


@pytest.fixture
def env(work_dir: Path, redis_url: str, namespace: str) -> dict[str, str]:
    """The environment that finds these jobs, and a Redis."""
    given = {"EDL_WORK_DIR": str(work_dir), "EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "COLUMNS": "160"}
    return {**os.environ, **given}


def run(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*EDL, *words], env=env, capture_output=True, text=True, check=False, timeout=60)


@contextmanager
def running(env: dict[str, str], *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command until it is asked to end, which it does with 0."""
    process = subprocess.Popen([*EDL, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.communicate()


def plan_of(env: dict[str, str], plan: Plan) -> None:
    """Let somebody have rescaled."""

    async def write() -> None:
        async with connect(env["EDL_REDIS_URL"]) as client:
            await keep(client, env["EDL_NAMESPACE"], plan)

    asyncio.run(write())


def night(at: float) -> Plan:
    target = JobTarget(name="example", kind="trainer", instances=3, target=4, reason="grows to 4: room is left")
    return Plan(at=at, window="night", until=at + 3600, capacity={"cpu": 1.5}, targets=(target,), notes=("is odd",))


@pytest.mark.usefixtures("backend")
def test_a_look_shows_all_of_it(env: dict[str, str]) -> None:
    """The tutorial's columns first, then what nodes have, pools, and jobs with targets and reasons."""
    plan_of(env, night(time.time()))
    looked = run(env, "--once")
    assert (looked.returncode, looked.stderr) == (0, "")
    headings, row, *rest = looked.stdout.splitlines()
    assert headings.split() == ["SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS", "GPU-UTILS"]
    assert row.split()[:3] == ROW
    assert re.fullmatch(r"\d+\.\d\d%", row.split()[3])
    cells = {line.split()[0]: line.split() for line in rest if line}
    assert cells["cpu"][2:] == ["0.3", "1.5", f"{os.cpu_count()}"]
    assert "teachers 1/1 - - - -" in [" ".join(line.split()) for line in rest]
    assert " ".join(cells["example"]) == "example trainer running 3/3 4 grows to 4: room is left"
    assert cells["example2"][:5] == ["example2", "trainer", "suspended", "0/0", "-"]
    assert any(re.fullmatch(r"targets of \d\d:\d\d:\d\d, window 'night' until .*", line.rstrip()) for line in rest)
    assert "is odd" in looked.stdout


async def test_members_of_pools_come_from_redis(env: dict[str, str]) -> None:
    """Those registered, and how busy they say they are."""
    async with connect(env["EDL_REDIS_URL"]) as client, AsyncExitStack() as stack:
        service = Service(env["EDL_NAMESPACE"], "by-hand", "teachers")
        said = TeacherReport(busy=0.75, over_s=10.0)
        await stack.enter_async_context(
            hold_lease(client, service, Member(id="t", address="h:1"), ttl_s=3.0, says=lambda: said)
        )
        async with asyncio.timeout(20):
            while True:
                looked = await asyncio.to_thread(run, env, "--once", "--json")
                [pool] = json.loads(looked.stdout)["pools"]
                if pool["busy"] is not None:
                    break
    assert pool == {
        "name": "by-hand", "running": None, "wanted": None, "teachers": 1, "students": 0, "busy": 0.75, "waiting": None
    }  # fmt: skip


@pytest.mark.usefixtures("backend")
def test_json_has_it_all(env: dict[str, str]) -> None:
    """One object, with names where the columns have numbers."""
    began = time.time()
    plan_of(env, night(began))
    seen = json.loads(run(env, "--once", "--json").stdout)
    assert (seen["submitted"], seen["pending"]) == (["example", "example1", "example2"], ["example2"])
    assert (seen["suspended"], seen["trainers"]) == (["example2"], {"example": 3, "example1": 2, "example2": 0})
    cpu = seen["use"]["cpu"]
    assert (cpu["total"], cpu["allowed"], cpu["ours"]) == (os.cpu_count(), 1.5, 6 * MILLI / 1000)
    assert cpu["reserved"] == pytest.approx(6 * MILLI / 1000)
    assert (seen["window"], seen["planned_at"], seen["notes"], seen["lacks"]) == ("night", began, ["is odd"], [])
    assert seen["jobs"][0] == {
        "name": "example",
        "kind": "trainer",
        "state": "running",
        "running": 3,
        "wanted": 3,
        "target": 4,
        "reason": "grows to 4: room is left",
        "trouble": "",
    }
    assert began - 1 <= seen["at"] <= time.time()


def test_it_is_followed_through_a_pipe(env: dict[str, str], backend: LocalBackend) -> None:
    """The headings, then a line for each look, its columns apart by tabs; a resize is seen. Ctrl-C ends it, too."""
    with running(env, "--every", "0.2") as process:
        assert process.stdout
        assert process.stdout.readline().rstrip("\n").split("\t")[2:4] == ["RUNNING-TRAINERS", "CPU-UTILS"]
        for _ in range(3):
            assert process.stdout.readline().split("\t")[:3] == ROW
        asyncio.run(backend.resize("example1", 1))
        deadline = time.monotonic() + 20
        while "example1:1" not in process.stdout.readline():
            assert time.monotonic() < deadline
    with running(env, "--every", "0.2", "--json") as process:
        assert process.stdout
        assert [json.loads(process.stdout.readline())["submitted"] for _ in range(2)] == [[*JOBS][:3]] * 2
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


@pytest.mark.usefixtures("backend")
def test_it_is_followed_on_a_terminal(env: dict[str, str]) -> None:
    """The whole picture, in place of the one before; Ctrl-C ends it and leaves the last one."""
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*EDL, "--every", "0.2"], env={**env, "TERM": "xterm", "LINES": "50"}, stdin=terminal, stdout=terminal,
        stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    try:
        while shown.count(b"nobody rescales") < 3:
            shown += os.read(screen, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    for words in ("SUBMITTED-JOBS", ROW[2], "REASON", "teachers"):
        assert text.count(words) >= 3, text


@pytest.mark.usefixtures("backend")
def test_what_was_seen_is_drawn(env: dict[str, str], tmp_path: Path) -> None:
    """In the terminal, as a PNG, and as JSON, a point a line; looking twice at once leaves one point."""
    plan_of(env, night(time.time()))
    assert run(env, "--once").returncode == run(env, "--once").returncode == 0
    drawn = run(env, "--history", "10m", "--png", str(tmp_path / "past.png"))
    assert drawn.returncode == 0
    assert (
        drawn.stderr.splitlines()[-1] == f"edl: drawn into {tmp_path / 'past.png'}"
    )  # after a word of the first drawing
    assert re.search(r"^window +├", drawn.stdout, re.MULTILINE)
    assert re.search(r"^example +3│ +█+ +3$", drawn.stdout, re.MULTILINE)
    assert re.search(r"^example2 +0│ +z+ +0$", drawn.stdout, re.MULTILINE)
    picture = imread(tmp_path / "past.png")
    assert picture.shape[1] == 1440
    assert 0.5 < (picture[:, :, :3] > 0.99).mean() < 0.995
    [point] = map(json.loads, run(env, "--history", "10m", "--json").stdout.splitlines())
    assert point["jobs"]["example1"] == {"running": 2}
    assert point["jobs"]["example2"] == {"state": "suspended"}
    assert (point["window"], point["use"]["cpu"]["allowed"]) == ("night", 1.5)


def test_a_past_in_which_nobody_looked_says_so(env: dict[str, str]) -> None:
    """It is no empty drawing."""
    drawn = run(env, "--history", "1h")
    assert (drawn.returncode, drawn.stdout) == (0, "")
    assert "nobody looked" in drawn.stderr


@pytest.mark.usefixtures("backend")
def test_prometheus_is_shown_the_same(env: dict[str, str]) -> None:
    """As long as it runs, at an address that it tells."""
    plan_of(env, night(time.time()))
    with running(env, "--every", "0.2", "--metrics", "0") as process:
        assert process.stderr
        url = re.fullmatch(r"edl: metrics at (http://127\.0\.0\.1:\d+/metrics)\n", process.stderr.readline())
        assert url
        with urllib.request.urlopen(url[1]) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = {(sample.name, *sample.labels.values()): sample.value for each in families for sample in each.samples}
    assert found["edl_jobs", "running"] == 2
    assert found["edl_jobs", "suspended"] == 1
    assert found["edl_instances", "trainer", "example"] == 3
    assert found["edl_target_instances", "trainer", "example"] == 4
    assert found["edl_reserved", "cpu", "cores"] == pytest.approx(6 * MILLI / 1000)
    assert found["edl_training_capacity", "cpu", "cores"] == 1.5


@pytest.mark.usefixtures("backend")
def test_jobs_are_shown_without_redis(env: dict[str, str], own_redis: RedisServer) -> None:
    """Never set, or away: what the backend knows is shown, what lacks is said once, and nobody's password."""
    unset = run({**env, "EDL_REDIS_URL": ""}, "--once")
    assert unset.stdout.splitlines()[1].split()[:3] == ROW
    assert "EDL_REDIS_URL names no Redis: members of pools, targets and the past are unknown" in unset.stdout
    assert "nobody rescales" not in unset.stdout
    with running({**env, "EDL_REDIS_URL": own_redis.url}, "--every", "0.2") as process:
        assert process.stdout
        assert process.stderr
        rows = [process.stdout.readline() for _ in range(3)]
        own_redis.stop()
        complaint = process.stderr.readline()
        rows += [process.stdout.readline() for _ in range(3)]
    assert [row.split("\t")[:3] for row in rows[1:]] == [ROW] * 5
    assert "targets and the past are unknown" in complaint
    assert "127.0.0.1" in complaint
    assert all(part not in complaint for part in re.findall(r":([^:@/]+)@", own_redis.url))


@pytest.mark.usefixtures("backend")
def test_an_old_plan_is_none(env: dict[str, str]) -> None:
    """Who rescaled an hour ago does so no more; its window and targets are not taken for those of now."""
    plan_of(env, night(time.time() - 3600))
    seen = json.loads(run(env, "--once", "--json").stdout)
    assert (seen["planned_at"], seen["window"], seen["use"]["cpu"]["allowed"]) == (None, "", None)
    assert seen["lacks"] == ["the last rescaling was 60 min ago; its targets are not shown"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--history", "soon"), "--history: got 'soon', allowed is a time above 0, as in 30s, 90m, 6h or 7d"),
        (("--history", "0h"), "a time above 0"),
        (("--history", "1h", "--once"), "nothing beside --once or --metrics"),
        (("--png", "x.png"), "with --history 6h"),
        (("--once", "--metrics", "0"), "nothing beside --once"),
        (("--metrics", "here"), "PORT, or HOST:PORT"),
    ],
)
def test_what_makes_no_sense_is_an_error(env: dict[str, str], words: tuple[str, ...], complaint: str) -> None:
    """It names the flag, what was given and what is allowed, and exits as for all that a restart can't mend."""
    refused = run(env, *words)
    assert (refused.returncode, refused.stdout) == (78, "")
    assert complaint in refused.stderr


def test_the_past_needs_a_redis(env: dict[str, str]) -> None:
    """Nobody else remembers it."""
    refused = run({**env, "EDL_REDIS_URL": ""}, "--history", "1h")
    assert (refused.returncode, "EDL_REDIS_URL" in refused.stderr) == (78, True)
