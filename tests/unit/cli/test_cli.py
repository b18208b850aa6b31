"""The `edl` command on jobs of this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import click
import msgspec
import pytest
from support.edl_command import Edl, edl_command

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import InstanceStatus, JobStatus, LogLine, Phase
from edl_runtime.backends.kubernetes import kubeconfig
from edl_runtime.backends.kubernetes.kubeconfig import kubeconfig_namespace
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.cli import SUMMARIES, backends, logs
from edl_runtime.cli import edl as commands
from edl_runtime.errors import EX_CONFIG
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.specs import Bounds, JobKind, JobSpec
from edl_runtime.store.redis_client import connect

PRINTS = "import os; print('hello', os.environ['EDL_INSTANCE']); print('bye')"


@pytest.fixture
def edl(work_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Edl]:
    """Runs `edl` with the words given: its exit status, what it printed and what it complained of."""
    monkeypatch.setenv("EDL_WORK_DIR", str(work_dir))
    monkeypatch.setenv("COLUMNS", "200")
    with edl_command(monkeypatch, capsys) as run:
        yield run


@pytest.fixture
def pool(work_dir: Path) -> Iterator[JobStatus]:
    """A pool of two instances that run."""
    backend = LocalBackend(work_dir)
    yield submit(backend, "pool", "import time; time.sleep(600)")
    asyncio.run(backend.delete("pool"))


def submit(backend: LocalBackend, name: str, code: str) -> JobStatus:
    kind: JobKind = "pool" if name == "pool" else "trainer"
    command = ("python", "-c", code)
    spec = JobSpec(name=name, kind=kind, command=command, bounds=Bounds(1, 3), instances=2)

    async def start() -> JobStatus:
        status = await backend.submit(spec, token="mine", secrets={})
        while (kind == "trainer" and status.phase == "running") or len(status.instances) < 2:
            status = await backend.get(name)
            await asyncio.sleep(0.02)
        return status

    return asyncio.run(asyncio.wait_for(start(), timeout=100))


def test_help_loads_no_subcommand() -> None:
    """`edl --help` is quick because it imports nothing that a subcommand needs."""
    code = """
import sys
from edl_runtime.cli import main
try: main()
finally:
    heavy = {"redis", "numpy", "paddle", "rich", "structlog"}
    heavy |= {"edl_runtime.backends.local", "edl_runtime.teacher.service"}
    print("loaded", sorted(heavy & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "loaded []"
    assert all(name in run.stdout for name in SUMMARIES)


@pytest.mark.parametrize("command", SUMMARIES)
def test_every_subcommand_explains_itself(edl: Edl, command: str) -> None:
    """Each has a help page and a way to get JSON."""
    status, printed, _ = edl(command, "--help")
    assert (status, "--json" in printed) == (0, True)


@pytest.mark.parametrize(
    ("words", "mem_optim"),
    [
        (("--mem_optim", "True", "--gpu_ids", "0,1"), True),
        (("--mem_optim", "--gpu_ids=0,1"), True),
        (("--gpu-ids", "0,1", "--mem-optim"), True),
        (("--gpu_ids", "0,1", "--mem_optim=False"), False),
        (("--gpu-ids", "0,1"), False),
    ],
)
def test_flags_of_paddle_serving_are_taken_as_they_are(
    edl: Edl, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], *, mem_optim: bool
) -> None:
    """With underscores, and with a value where it had one."""
    serve = AsyncMock()
    monkeypatch.setattr("edl_runtime.teacher.service.serve", serve)
    assert edl("teacher", "--model", "/m", *words)[0] == 0
    options = serve.await_args.args[0]  # type: ignore[union-attr]  # it was awaited
    assert (options.model.mem_optim, options.gpu_ids) == (mem_optim, (0, 1))


def test_a_script_s_own_flags_keep_their_underscores() -> None:
    """Only those of `edl` are the same with hyphens, and no values are."""
    group = click.Context(commands, **commands.context_settings)
    command = commands.get_command(group, "run")
    assert command
    words = ["--instances", "1:2", "--every_s", "9", "my_script.py", "--batch_size", "3"]
    given = command.make_context("run", words, parent=group).params
    assert (given["every_s"], given["command"]) == (9, ("my_script.py", "--batch_size", "3"))


def test_the_module_is_the_command(work_dir: Path) -> None:
    """`python -m edl_runtime.cli` does the same, and an error is a message and an exit status, no traceback."""
    run = subprocess.run(
        [sys.executable, "-m", "edl_runtime.cli", "jobs", "nobody"],
        env={"EDL_WORK_DIR": str(work_dir)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.splitlines() == [
        "edl: no job or pool named 'nobody'; there are none",
        f"edl: looked in {work_dir}; EDL_WORK_DIR names another folder, and EDL_BACKEND=kubernetes searches a cluster",
    ]


@pytest.mark.parametrize("words", [("jobs",), ("logs",), ("resize", "1"), ("stop",)])
def test_an_error_of_an_unknown_name_shows_where_it_was_searched(
    edl: Edl, work_dir: Path, words: tuple[str, ...]
) -> None:
    """No command takes a job that is not there for one with nothing to show or to do."""
    command, *rest = words
    status, printed, complaint = edl(command, "nobody", *rest)
    assert (status, printed) == (1, "")
    assert "no job or pool named 'nobody'; there are none" in complaint
    assert f"looked in {work_dir}; EDL_WORK_DIR" in complaint


KUBECONFIG = """
current-context: a
contexts: [{name: a, context: {cluster: a, user: a}}]
clusters: [{name: a, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: a, user: {token: secret}}]
"""


def test_a_cluster_needs_a_kubeconfig(edl: Edl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, or with a context that is not in it, the error says what to set."""
    monkeypatch.setenv("EDL_BACKEND", "kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    status, printed, complaint = edl("jobs")
    assert (status, printed) == (EX_CONFIG, "")
    assert f"KUBECONFIG: got '{tmp_path / 'none'}', allowed is a kubeconfig" in complaint
    config = tmp_path / "config"
    config.write_text(KUBECONFIG)
    assert kubeconfig_namespace(str(config)) == "default"
    for name, value in (("KUBECONFIG", str(config)), ("EDL_KUBE_CONTEXT", "b"), ("EDL_KUBE_NAMESPACE", "ml")):
        monkeypatch.setenv(name, value)
    status, _, complaint = edl("jobs")
    assert (status, complaint) == (EX_CONFIG, "edl: EDL_KUBE_CONTEXT: got 'b', allowed is 'a'\n")


def test_a_pod_without_a_kubeconfig_uses_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As kubectl does: the namespace is the pod's. A kubeconfig comes first."""
    monkeypatch.setattr(kubeconfig, "DEFAULT_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    own = tmp_path / "namespace"
    own.write_text("team\n")
    monkeypatch.setattr(kubeconfig, "NAMESPACE_OF_POD", own)
    assert kubeconfig_namespace() == "team"
    config = tmp_path / "config"
    config.write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert kubeconfig_namespace() == "default"


def test_a_folder_that_cant_be_read_is_no_traceback(edl: Edl, work_dir: Path) -> None:
    """Somebody else's work folder is an error that names it."""
    (work_dir / "jobs").mkdir(parents=True)
    assert edl("jobs")[0] == 0
    work_dir.chmod(0)
    user = os.geteuid()
    if user == 0:  # who may read everything
        os.seteuid(65534)
    try:
        status, printed, complaint = edl("jobs")
    finally:
        os.seteuid(user)
        work_dir.chmod(0o700)
    assert (status, printed) == (1, "")
    assert complaint == f"edl: the work folder {work_dir} can't be read: Permission denied\n"


def test_no_jobs_are_no_error(edl: Edl) -> None:
    """A work folder that nobody has used is empty, for people and for programs."""
    status, printed, _ = edl("jobs")
    assert (status, printed.startswith("no jobs in")) == (0, True)
    assert edl("jobs", "--json")[1] == "[]\n"


@pytest.mark.usefixtures("pool")
def test_jobs_are_listed(edl: Edl) -> None:
    """The table shows what runs, the JSON all that is known."""
    status, table, _ = edl("jobs")
    assert status == 0
    assert all(word in table for word in ("pool", "running", "2/2"))
    [listed] = msgspec.json.decode(edl("jobs", "--json")[1])
    assert (listed["name"], listed["wanted"], listed["progress"]) == ("pool", 2, None)
    assert 0 <= listed["age_s"] < 3600
    assert msgspec.json.decode(edl("jobs", "pool", "--json")[1])["digest"] == listed["digest"]


@pytest.mark.usefixtures("pool")
def test_progress_comes_from_redis(edl: Edl, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Redis configured, jobs say how far they are, and who is the limit."""

    async def report(updated_at: float) -> None:
        async with connect(redis_url) as client:
            report = Progress(step=7, total_steps=9, updated_at=updated_at, limit="balanced", waiting=0.05, retries=2)
            await publish_progress(client, namespace, "pool", report)

    asyncio.run(report(time.time()))
    monkeypatch.setenv("EDL_REDIS_URL", redis_url)
    monkeypatch.setenv("EDL_NAMESPACE", namespace)
    table = edl("jobs")[1]
    assert "step 7/9" in table
    assert "2 retries · balanced: the student waits 5 %" in table
    told = msgspec.json.decode(edl("jobs", "pool", "--json")[1])["progress"]
    assert (told["step"], told["limit"], told["waiting"], told["retries"]) == (7, "balanced", 0.05, 2)
    asyncio.run(report(1.0))
    assert "step 7/9" not in edl("jobs")[1], "an earlier run's of a job of this name"


def test_a_curve_shows_how_a_training_has_gone(
    edl: Edl, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row for each point; no job of that name is needed, as with agents that were started by hand."""

    async def report() -> None:
        async with connect(redis_url) as client:
            for step in (10, 20):
                point = Progress(step=step, updated_at=1.0, loss=1 / step, samples_per_s=1234.5, metrics={"top1": 0.5})
                await publish_progress(client, namespace, "job", point)

    assert "EDL_REDIS_URL" in edl("jobs", "job", "--curve")[2]
    monkeypatch.setenv("EDL_REDIS_URL", redis_url)
    monkeypatch.setenv("EDL_NAMESPACE", namespace)
    assert edl("jobs", "--curve")[0] == 2
    assert "nothing is known of a training 'job'" in edl("jobs", "job", "--curve")[2]
    asyncio.run(report())
    first = edl("jobs", "job", "--curve")[1].splitlines()[1].split()
    assert [first[0], *first[4:]] == ["10", "0.1000", "1,234", "top1=0.5"]
    points = msgspec.json.decode(edl("jobs", "job", "--curve", "--json")[1])
    assert [point["step"] for point in points] == [10, 20]


@pytest.mark.usefixtures("pool")
def test_jobs_are_shown_without_their_redis(edl: Edl, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that does not answer costs the progress and a word about it, never the list."""
    monkeypatch.setenv("EDL_REDIS_URL", "redis://:a-password@127.0.0.1:9/0")
    status, table, complaint = edl("jobs")
    assert (status, "running" in table) == (0, True)
    assert "127.0.0.1:9" in complaint
    assert "a-password" not in complaint


def test_logs_say_who_wrote_what(edl: Edl, work_dir: Path) -> None:
    """Lines carry their instance, unless one was chosen."""
    submit(LocalBackend(work_dir), "job", PRINTS)
    everything = sorted(edl("logs", "job")[1].splitlines())
    assert everything == ["[0] bye", "[0] hello 0", "[1] bye", "[1] hello 1"]
    assert edl("logs", "job", "--instance", "1", "--tail", "1")[1] == "bye\n"
    [line] = edl("logs", "job", "--instance", "0", "--tail", "1", "--json")[1].splitlines()
    assert msgspec.json.decode(line) == {"instance": 0, "text": "bye"}
    assert edl("logs", "job", "--follow")[0] == 0
    asyncio.run(LocalBackend(work_dir).delete("job"))
    assert sorted(edl("logs", "job")[1].splitlines()) == everything


@pytest.mark.slow
def test_logs_end_quietly_when_nobody_reads_on(work_dir: Path) -> None:
    """As with `head`."""
    code = "import time; print('first'); time.sleep(0.5); [print('more') or time.sleep(0.05) for _ in range(200)]"
    submit(LocalBackend(work_dir), "pool", code)
    words = [sys.executable, "-m", "edl_runtime.cli", "logs", "-f", "pool"]
    env = {**os.environ, "EDL_WORK_DIR": str(work_dir)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline().endswith(b"] first\n")
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, b"")
    asyncio.run(LocalBackend(work_dir).delete("pool"))


def as_told(phase: Phase, reason: str = "", *, log: bool, **more: Any) -> SimpleNamespace:
    """Return a backend that knows one job, of which there is `more`; its log is silent for ever, or not there."""
    given = {"token": "", "reason": reason, "invalid_spec": True, **more}
    status = JobStatus(name="job", kind="trainer", phase=phase, digest="", wanted=1, created_at=1.0, **given)

    async def logs(*_: object, **__: object) -> AsyncIterator[LogLine]:
        if not log:
            raise UnknownJobError("job", [])
        await asyncio.Event().wait()
        yield LogLine(0, "never")

    get, delete = AsyncMock(return_value=status), AsyncMock(return_value=True)
    return SimpleNamespace(get=get, list=AsyncMock(return_value=[status]), delete=delete, logs=logs, place="ml")


def test_a_job_has_the_state_that_the_page_and_the_monitor_show(edl: Edl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below its minimum of running instances it is pending, as where no image can be pulled."""
    monkeypatch.setattr(backends, "open_backend", lambda _: as_told("running", "no image", log=False))
    heading, row = (line.split() for line in edl("jobs")[1].splitlines())
    assert (heading[2], row[2:4]) == ("STATE", ["pending", "0/1"])


def test_jobs_that_have_failed_say_why(edl: Edl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their output has the cause; an exit status alone says little."""
    told = as_told(
        "failed", "instance 0 exited with 1", log=False, last_lines=("edl: model 'm': there is no such folder",)
    )
    monkeypatch.setattr(backends, "open_backend", lambda _: told)
    assert "instance 0 exited with 1: model 'm': there is no such folder" in edl("jobs")[1]


def test_logs_of_instances_that_never_start_say_why_and_end(edl: Edl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever follows the log of a job that can't work is let go."""
    monkeypatch.setattr(logs, "LAST_LINES_S", 0.1)
    monkeypatch.setattr(backends, "open_backend", lambda _: as_told("failed", "no such image", log=True))
    assert edl("logs", "-f", "job") == (0, "", "edl: no such image\n")


WAITS = InstanceStatus(index=0, phase="pending", started_at=1.0)
DELETE = "while there is a TrainingJob 'job', it is made again: end it by `kubectl delete trainingjob job -n ml`; "
KEPT = "no output of it is kept"


@pytest.mark.parametrize(
    ("phase", "more", "told"),
    [
        ("running", {}, KEPT),
        ("running", {"instances": (WAITS,)}, "it has no output, as no instance had started"),
        ("running", {"instances": (msgspec.structs.replace(WAITS, restarts=1),)}, KEPT),
        ("running", {"token": "TrainingJob/job/8d2f/0a1b"}, f"{DELETE}{KEPT}"),
        ("failed", {"token": "TrainingJob/job/8d2f/0a1b"}, KEPT),
        ("running", {"token": "TrainingJob/job/0a1b"}, KEPT),
    ],
)
def test_a_stop_says_what_is_left(
    edl: Edl, monkeypatch: pytest.MonkeyPatch, phase: Phase, more: dict[str, Any], told: str
) -> None:
    """Of its output, and what would make the job again; a DAG may be called TrainingJob."""
    monkeypatch.setattr(backends, "open_backend", lambda _: as_told(phase, log=False, **more))
    assert edl("stop", "job") == (0, f"job is stopped; {told}\n", "")


def test_several_jobs_are_stopped_at_once(edl: Edl, work_dir: Path) -> None:
    """All or, where a name is not known, none."""
    backend = LocalBackend(work_dir)
    for name in ("a", "b"):
        submit(backend, name, PRINTS)
    status, printed, complaint = edl("stop", "a", "nobody", "b")
    assert (status, printed) == (1, "")
    assert "no job or pool named 'nobody'; there are: a, b" in complaint
    assert [status.name for status in asyncio.run(backend.list())] == ["a", "b"]
    status, printed, complaint = edl("stop", "b", "a", "b")
    assert (status, complaint) == (0, "")
    assert sorted(printed.splitlines()) == [f"{name} is stopped; `edl logs {name}` shows its output" for name in "ab"]
    for name in ("a", "b"):
        submit(backend, name, PRINTS)
    assert [one["name"] for one in msgspec.json.decode(edl("stop", "b", "a", "--json")[1])] == ["b", "a"]


def test_an_agent_that_cannot_begin_says_so_in_the_events(
    edl: Edl, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no group yet, and its pod may soon be gone."""
    given = {"REDIS_URL": redis_url, "NAMESPACE": namespace, "JOB": "job", "INSTANCE": "3"}
    for name, value in given.items():
        monkeypatch.setenv(f"EDL_{name}", value)
    why = "command: got 'nothere.py', allowed is a script that can be read (No such file or directory)"
    assert edl("agent", "--instances", "1:1", "--", "nothere.py") == (EX_CONFIG, "", f"edl: {why}\n")
    assert f"failed      instance 3 · {why}" in edl("events", "job")[1]
    monkeypatch.setenv("EDL_REDIS_URL", "redis://127.0.0.1:9/0")
    assert edl("agent", "--instances", "1:1", "--", "nothere.py") == (EX_CONFIG, "", f"edl: {why}\n")


@pytest.mark.usefixtures("pool")
def test_a_pool_is_resized_within_its_bounds_and_suspended(edl: Edl) -> None:
    """The wish is confirmed; 0 suspends, and the list says so; what is not allowed is a configuration error."""
    assert edl("resize", "pool", "3") == (0, "pool will have 3 instances\n", "")
    for number in ("4", "-1"):
        status, _, complaint = edl("resize", "pool", number)
        assert (status, complaint) == (EX_CONFIG, f"edl: instances: got {number}, allowed is 0, or 1 to 3\n")
    said = "pool is suspended; `edl resize pool N` or a rescaling resumes it\n"
    assert edl("resize", "pool", "0") == (0, said, "")
    _, table, _ = edl("jobs")
    for words in (" suspended ", "/0 ", "suspended: it resumes when it is resized to one or more instances"):
        assert words in table
    assert msgspec.json.decode(edl("resize", "pool", "1", "--json")[1])["wanted"] == 1


@pytest.mark.usefixtures("pool")
def test_a_job_is_stopped_by_hand_whatever_its_token(edl: Edl, work_dir: Path) -> None:
    """The command ends when the job is gone, and says where its output is; a second time there is nothing to stop."""
    assert edl("stop", "pool") == (0, "pool is stopped; `edl logs pool` shows its output\n", "")
    assert edl("jobs", "--json")[1] == "[]\n"
    assert edl("logs", "pool")[0] == 0
    assert edl("stop", "pool")[0] == 1
    submit(LocalBackend(work_dir), "pool", "import time; time.sleep(600)")
    stopped = msgspec.json.decode(edl("stop", "pool", "--json")[1])
    assert (stopped["name"], stopped["kind"], stopped["phase"]) == ("pool", "pool", "running")
