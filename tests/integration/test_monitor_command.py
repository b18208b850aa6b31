"""`edl monitor`, on jobs of this machine."""

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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.backends.jobs import WAITS, eventually, job, reach
from support.edl_command import Edl, edl_command

from edl_runtime.autoscale.history import RescaleOutcome, save_pass
from edl_runtime.autoscale.planner import JobTarget, RescalingPlan
from edl_runtime.backends.errors import ClusterUnavailableError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.cli import backends
from edl_runtime.errors import EX_CONFIG, BackendError
from edl_runtime.monitor.reports import UNKNOWN
from edl_runtime.monitor.snapshot import PoolLine, TeacherLine, take_snapshot
from edl_runtime.pods import Pod
from edl_runtime.pool_reports import TeacherReport
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.specs import JobKind
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

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
HANGS_S = 100.0


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The work folder of three jobs of processes, one of them suspended, and a pool."""
    folder = tmp_path_factory.mktemp("work")
    backend = LocalBackend(folder)

    async def start() -> None:
        for name, (kind, instances) in JOBS.items():
            spec = job(WAITS, name=name, kind=kind, instances=instances)
            pod = Pod(resources={"cpu": f"{MILLI}m"})
            await backend.submit(msgspec.structs.replace(spec, pod=pod), token="", secrets={})
        await backend.resize("example2", 0)
        for name, (_, instances) in JOBS.items():
            await reach(backend, name, running(0 if name == "example2" else instances))

    async def end() -> None:
        await asyncio.gather(*(backend.delete(name) for name in JOBS))

    asyncio.run(start())
    yield folder
    asyncio.run(end())


def running(instances: int) -> Callable[[JobStatus], bool]:
    return lambda status: [instance.phase for instance in status.instances] == ["running"] * instances


@pytest.fixture
def environ(work_dir: Path, redis_url: str, namespace: str) -> dict[str, str]:
    """What leads the command to these jobs, and to a Redis."""
    given = {"EDL_WORK_DIR": str(work_dir), "EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace}
    return {**os.environ, **given, "COLUMNS": "160", "LINES": "50", "TERM": "xterm"}


@pytest.fixture
def edl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environ: dict[str, str]) -> Iterator[Edl]:
    """Runs `edl monitor` on these jobs."""
    with edl_command(monkeypatch, capsys, "monitor") as run:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        yield run


def plan_of(environ: Mapping[str, str], at: float) -> None:
    """Let somebody have rescaled."""
    target = JobTarget(name="example", kind="trainer", instances=3, target=4, reason="grows to 4: room is left")
    plan = RescalingPlan(
        at=at, window="night", until=at + 3600, capacity={"cpu": 1.5}, targets=(target,), notes=("is odd",)
    )

    async def write() -> None:
        async with connect(environ["EDL_REDIS_URL"]) as client:
            await save_pass(client, environ["EDL_NAMESPACE"], environ["EDL_WORK_DIR"], RescaleOutcome(plan=plan))

    asyncio.run(write())


def test_a_look_shows_all_of_it(edl: Edl, environ: dict[str, str]) -> None:
    """The tutorial's columns first, then what nodes have, pools, and jobs with targets and reasons."""
    plan_of(environ, time.time())
    status, printed, complaint = edl("--once")
    assert (status, complaint) == (0, "")
    headings, row, *rest = printed.splitlines()
    assert headings.split() == ["SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS", "GPU-UTILS"]
    assert row.split()[:3] == ROW
    assert re.fullmatch(r"\d+\.\d\d%", row.split()[3])
    cells = {line.split()[0]: line.split() for line in rest if line}
    assert cells["cpu"][2:] == ["0.3", "1.5", f"{os.cpu_count()}"]
    assert "teachers 1/1 - - - - -" in [" ".join(line.split()) for line in rest]
    assert " ".join(cells["example"]) == "example trainer running 3/3 1-4 4 grows to 4: room is left"
    assert cells["example2"][:4] == ["example2", "trainer", "suspended", "0/0"]
    assert any(re.fullmatch(r"targets of \d\d:\d\d:\d\d, window 'night' until .*", line.rstrip()) for line in rest)
    assert "is odd" in printed


async def test_members_of_pools_come_from_redis(
    work_dir: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those registered, and how busy they say they are."""
    monkeypatch.setattr("edl_runtime.registry.lease.RENEW_EVERY_S", 0.05)
    service, teacher = Service(namespace, "by-hand", "teachers"), Member(id="t", address="h:1")
    teachers = (TeacherLine(id="t", address="h:1", busy=0.75, answered=3),)
    busy = PoolLine(name="by-hand", teachers=1, students=0, busy=0.75, limit="it has no students", members=teachers)

    def says() -> TeacherReport:
        return TeacherReport(busy=0.75, over_s=10.0, answered=3)

    async with connect(redis_url) as client, hold_lease(client, service, teacher, ttl_s=HANGS_S, make_report=says):

        async def is_told() -> bool:
            return busy in (await take_snapshot(LocalBackend(work_dir), client, namespace)).pools

        await eventually(is_told, "what the teacher says")


def test_it_is_followed_through_a_pipe_and_by_prometheus(environ: dict[str, str], work_dir: Path) -> None:
    """The headings, then a line for each look, its columns apart by tabs; the last look at an address that it tells."""
    plan_of(environ, time.time())
    command = [*EDL, "--every", "0.2", "--metrics", "0"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    backend = LocalBackend(work_dir)
    try:
        assert process.stdout.readline().rstrip("\n").split("\t")[2:4] == ["RUNNING-TRAINERS", "CPU-UTILS"]
        url = re.fullmatch(r"edl: metrics at (http://127\.0\.0\.1:\d+/metrics)\n", process.stderr.readline())
        assert url
        with urllib.request.urlopen(url[1]) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        for _ in range(3):
            assert process.stdout.readline().split("\t")[:3] == ROW
        asyncio.run(backend.resize("example1", 1))
        while "example1:1" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 0
    finally:
        process.kill()
        process.communicate()
        asyncio.run(backend.resize("example1", 2))
        asyncio.run(reach(backend, "example1", running(2)))
    found = {
        (one.name, one.labels.get("name"), one.labels.get("kind")): one.value
        for each in families
        for one in each.samples
    }
    assert found["edl_target_instances", "example", "trainer"] == 4


def test_it_is_followed_on_a_terminal(environ: dict[str, str]) -> None:
    """The whole picture, in place of the one before; Ctrl-C ends it and leaves the last one."""
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*EDL, "--every", "0.2"], env=environ, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    shown = b""

    def text() -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))

    wanted = ("SUBMITTED-JOBS", ROW[2], "REASON", "teachers", "nothing rescales")
    try:
        while any(text().count(words) < 3 for words in wanted):
            shown += os.read(screen, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANGS_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def follow(monkeypatch: pytest.MonkeyPatch, work_dir: Path, does: Mapping[int, Callable[[], None]]) -> None:
    """Let the command follow the jobs, and do these things before the looks of these numbers."""
    looks = count(1)

    class Followed(LocalBackend):
        async def list(self) -> list[JobStatus]:
            does.get(next(looks), lambda: None)()
            return await super().list()

    @asynccontextmanager
    async def following(_: object) -> AsyncIterator[LocalBackend]:
        yield Followed(work_dir)

    monkeypatch.setattr(backends, "watch_backend", following)


def asks_to_end() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_json_is_an_object_for_each_look(
    edl: Edl, environ: dict[str, str], work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is told to end, with names where the columns have numbers."""
    began = time.time()
    plan_of(environ, began)
    follow(monkeypatch, work_dir, {3: asks_to_end})
    status, printed, _ = edl("--every", "0.1", "--json")
    assert status == 0
    for seen in map(json.loads, (lines := printed.splitlines())):
        assert (seen["submitted"], seen["pending"]) == (["example", "example1", "example2"], ["example2"])
        assert (seen["suspended"], seen["trainers"]) == (["example2"], {"example": 3, "example1": 2, "example2": 0})
        ours = pytest.approx(6 * MILLI / 1000)
        assert seen["use"]["cpu"] == {"total": os.cpu_count(), "reserved": ours, "ours": ours, "allowed": 1.5}
        assert (seen["window"], seen["planned_at"], seen["notes"], seen["lacks"]) == ("night", began, ["is odd"], [])
        says = {"name": "example", "kind": "trainer", "state": "running", "running": 3, "wanted": 3, "target": 4}
        says |= {"reason": "grows to 4: room is left", "trouble": "", "bounds": {"min": 1, "max": 4}}
        assert {name: seen["jobs"][0][name] for name in says} == says
    assert len(lines) == 2


def test_a_backend_that_is_away_is_waited_for(edl: Edl, work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong or unknown is said once for each outage, and there is a line for each look that found something."""
    monkeypatch.setattr(LocalBackend, "capacity", AsyncMock(side_effect=BackendError("nodes may not be seen")))
    away = ClusterUnavailableError("https://cluster:6443", "it is silent")

    def breaks() -> None:
        raise away

    follow(monkeypatch, work_dir, {2: breaks, 3: breaks, 4: breaks, 6: breaks, 7: asks_to_end})
    status, printed, complaint = edl("--every", "0.1")
    assert status == 0
    assert [line.split("\t")[:3] for line in printed.splitlines()[1:]] == [ROW] * 2
    assert complaint.splitlines() == ["edl: what nodes have is unknown: nodes may not be seen", f"edl: {away}"] * 2


def test_jobs_are_shown_while_redis_is_away(
    edl: Edl, work_dir: Path, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the backend knows is shown, what lacks is said once in the same words, and nobody's password."""
    monkeypatch.setenv("EDL_REDIS_URL", own_redis.url)
    follow(monkeypatch, work_dir, {3: own_redis.stop, 6: asks_to_end})
    status, printed, complaint = edl("--every", "0.1")
    assert status == 0
    assert [line.split("\t")[:3] for line in printed.splitlines()[1:]] == [ROW] * 5
    complaints = complaint.splitlines()
    assert complaints
    assert len(set(complaints)) == len(complaints), "once that it breaks off, and once that it can't be reached"
    assert all("targets and the past are unknown" in one and "127.0.0.1" in one for one in complaints)
    assert all(part not in complaint for part in re.findall(r":([^:@/]+)@", own_redis.url))


def test_who_can_not_reach_redis_is_told_that_progress_is_unknown(
    edl: Edl, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside each training, so that none looks healthy; a pool has no progress."""
    own_redis.stop()
    with edl_command(monkeypatch, capsys, "jobs") as jobs:
        monkeypatch.setenv("EDL_REDIS_URL", own_redis.url)
        _, printed, _ = edl("--once")
        _, listed, complaint = jobs()
    assert "127.0.0.1" in complaint
    for table in (printed, listed):
        told = {line.split()[0] for line in table.splitlines() if line.rstrip().endswith(UNKNOWN)}
        assert told == {"example", "example1"}


def test_without_a_redis_jobs_are_shown_and_no_past(edl: Edl, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lacks is said; nobody else remembers the past, so to ask for it is an error."""
    monkeypatch.setenv("EDL_REDIS_URL", "")
    _, printed, _ = edl("--once")
    assert printed.splitlines()[1].split()[:3] == ROW
    assert "EDL_REDIS_URL names no Redis: progress, members of pools, targets and the past are unknown" in printed
    assert "nothing rescales" not in printed
    status, _, complaint = edl("--history", "1h")
    assert status == EX_CONFIG
    assert "EDL_REDIS_URL" in complaint


def test_history_is_shown(edl: Edl, environ: dict[str, str], tmp_path: Path) -> None:
    """As a table, as a PNG, and as JSON, a point a line; looking twice at once leaves one point."""
    plan_of(environ, time.time())
    assert edl("--once")[0] == edl("--once")[0] == 0
    file = tmp_path / "past.png"
    status, printed, complaint = edl("--history", "10m", "--png", file)
    assert status == 0
    assert complaint.splitlines()[-1] == f"edl: drawn into {file}"  # after a word of the first drawing
    assert re.search(r"^20.* night .* example:3\|example1:2\|example2:suspended", printed, re.MULTILINE)
    assert file.read_bytes().startswith(b"\x89PNG")
    [point] = map(json.loads, edl("--history", "10m", "--json")[1].splitlines())
    assert point["jobs"]["example1"] == {"running": 2}
    assert point["jobs"]["example2"] == {"state": "suspended"}
    assert (point["window"], point["use"]["cpu"]["allowed"]) == ("night", 1.5)


def test_an_empty_history_is_reported(edl: Edl) -> None:
    """It is no empty drawing."""
    status, printed, complaint = edl("--history", "1h")
    assert (status, printed) == (0, "")
    assert "nothing was recorded" in complaint


def test_an_old_plan_is_none(edl: Edl, environ: dict[str, str]) -> None:
    """Who rescaled an hour ago does so no more; its window and targets are not taken for those of now."""
    plan_of(environ, time.time() - 3600)
    seen = json.loads(edl("--once", "--json")[1])
    assert (seen["planned_at"], seen["window"], seen["use"]["cpu"]["allowed"]) == (None, "", None)
    assert seen["lacks"] == ["the last rescaling was 60 min ago; its targets are not shown"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--history", "soon"), "--history: got 'soon', allowed is a time above 0, as in 30s, 90m, 6h or 7d"),
        (("--history", "1h", "--once"), "nothing beside --once or --metrics"),
        (("--png", "x.png"), "with --history 6h"),
        (("--once", "--metrics", "0"), "nothing beside --once"),
        (("--metrics", "here"), "PORT, or HOST:PORT"),
    ],
)
def test_what_makes_no_sense_is_an_error(edl: Edl, words: tuple[str, ...], complaint: str) -> None:
    """It names the flag, what was given and what is allowed, and exits as for all that a restart can't mend."""
    status, printed, said = edl(*words)
    assert (status, printed) == (EX_CONFIG, "")
    assert complaint in said
