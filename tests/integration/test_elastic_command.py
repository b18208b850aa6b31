"""`edl run`: an elastic training on this machine, as a person starts, resizes and stops it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.backends.local_processes import wait_until_gone
from support.elastic.agent_group import SCRIPT

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.cli.run import _JobView, _name_of, _run, _shell, run
from edl_runtime.elastic.rendezvous.redis_store import Event, RendezvousStore
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

PATIENCE_S = 150.0

pytestmark = pytest.mark.timeout(300)


def edl(work_dir: Path, **environ: str) -> dict[str, str]:
    """Return the environment of an `edl` command without a Redis."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    options = json.dumps({"samples": 10**5, "global_batch": 24, "epochs": 1, "step_s": 0.05})
    quiet = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    ours = {"EDL_LEASE_TTL_S": "30", "EDL_WORK_DIR": str(work_dir), "SCRIPT_OPTIONS": options}
    return clean | quiet | ours | environ


def eventually(holds: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def waiting(folder: Path) -> Path:
    """Return a script that runs until there is a file "go" beside it."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(
        "import os, time\nprint('began', flush=True)\n"
        "while not os.path.exists('go'):\n    time.sleep(0.02)\nprint('trained')"
    )
    return script


NAMES_ITS_PLACE = """
import os, time
from edl_runtime import elastic
import paddle

run = elastic.init("kept")
model = paddle.nn.Linear(2, 1)
run.wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()))
print("trains", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""

EDL = [sys.executable, "-P", "-m", "edl_runtime.cli"]  # as the command that is installed: without the present folder


@contextmanager
def running(environ: dict[str, str], folder: Path, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `edl run` in a folder; what is left of it is ended afterwards."""
    command = [*EDL, "run", "--instances", "1:2", *words]
    with log.open("wb") as output:
        run = subprocess.Popen(command, env=environ, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield run
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            run.send_signal(signal.SIGINT)
            run.wait(PATIENCE_S)
        wait_until_gone(Path(environ["EDL_WORK_DIR"]))


def edl_run(work_dir: Path, folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `edl run` in a folder to its end, whatever that is."""
    return said(edl(work_dir, **environ), folder, "run", "--instances", "1:2", *words, check=False)


def said(environ: dict[str, str], folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run an `edl` command in a folder to its end."""
    return subprocess.run(
        [*EDL, *words], env=environ, cwd=folder, capture_output=True, text=True, check=check, timeout=PATIENCE_S
    )


@pytest.mark.parametrize(
    "shared", [pytest.param(False, marks=pytest.mark.deep), True], ids=["a Redis each", "one Redis"]
)
def test_a_job_of_that_name_that_runs_is_left_alone(
    tmp_path: Path, work_dir: Path, redis_url: str, *, shared: bool
) -> None:
    """The same command and another's of the same name are refused, with where that one runs and what to do."""
    script, log = waiting(tmp_path / "mine"), tmp_path / "log"
    other = waiting(tmp_path / "other")
    redis = {"EDL_REDIS_URL": redis_url} if shared else {}
    with running(edl(work_dir, **redis), script.parent, log, "train.py") as first:
        eventually(lambda: " began\n" in log.read_text(), log)
        for folder in (script.parent, other.parent):
            refused = edl_run(work_dir, folder, "train.py", **redis)
            assert refused.returncode == 1
            assert f"a job 'train' runs in {script.parent} since 20" in refused.stderr
            assert "`edl logs -f train`" in refused.stderr
            assert "`edl stop train`" in refused.stderr
        (other.parent / "go").touch()
        assert edl_run(work_dir, other.parent, "--name", "other", "train.py", **redis).returncode == 0
        assert first.poll() is None
        (script.parent / "go").touch()
        assert first.wait(PATIENCE_S) == 0
    assert "trained" in log.read_text()


@pytest.mark.parametrize("shared", [False, True], ids=["a Redis each", "one Redis"])
def test_a_job_where_another_one_keeps_its_checkpoints_is_refused(
    tmp_path: Path, work_dir: Path, redis_url: str, *, shared: bool
) -> None:
    """Before its script begins, with whose the folder is; once that job has ended, it is free."""
    script, log, other = waiting(tmp_path / "mine"), tmp_path / "log", waiting(tmp_path / "other")
    redis = {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": tmp_path.name} if shared else {}
    (tmp_path / "alias").symlink_to(tmp_path / "kept")
    words = ("--name", "other", "--checkpoint", "../alias", "train.py")
    with running(edl(work_dir, **redis), script.parent, log, "--checkpoint", "../kept", "train.py") as first:
        eventually(lambda: " began\n" in log.read_text(), log)
        refused = edl_run(work_dir, other.parent, *words, **redis)
        assert refused.returncode == 78
        assert "job 'train' (in namespace " in refused.stderr
        assert f"has used the checkpoint folder {tmp_path}/other/../alias since 20" in refused.stderr
        assert "`edl stop train`" in refused.stderr
        assert "began" not in refused.stdout
        assert first.poll() is None
        (script.parent / "go").touch()
        assert first.wait(PATIENCE_S) == 0
        (other.parent / "go").touch()
        assert edl_run(work_dir, other.parent, *words, **redis).returncode == 0


def test_a_folder_that_the_scripts_of_two_runs_name_is_one_runs(tmp_path: Path, work_dir: Path) -> None:
    """Two that share nothing, a Redis each: the second fails before it trains, and a script by hand does, too."""
    script = tmp_path / "train.py"
    script.write_text(NAMES_ITS_PLACE)
    environ = edl(work_dir)
    with running(environ, tmp_path, tmp_path / "log", "train.py") as first:
        eventually(lambda: " trains\n" in (tmp_path / "log").read_text(), tmp_path / "log")
        refused = edl_run(tmp_path / "other", tmp_path, "--name", "other", "train.py")
        assert refused.returncode == 78
        assert f"job 'train' (in namespace 'default') has used the checkpoint folder {tmp_path}/kept" in refused.stderr
        assert "trains" not in refused.stdout
        alone = subprocess.run(
            [sys.executable, "train.py"],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert "CheckpointHeldError: job 'train'" in alone.stderr
        assert first.poll() is None
        (tmp_path / "go").touch()
        first.wait(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("seen_by", ["a terminal", pytest.param("a program", marks=pytest.mark.deep)])
def test_a_training_that_nobody_sees_any_more_ends_with_a_checkpoint(
    tmp_path: Path, work_dir: Path, seen_by: str
) -> None:
    """The terminal is closed, or the program that read the output ends: nothing is left that has no Redis."""
    out, kept, log = tmp_path / "out", tmp_path / "kept", tmp_path / "log"
    out.mkdir()
    log.touch()
    is_terminal = seen_by == "a terminal"
    mine, theirs = os.openpty() if is_terminal else os.pipe()
    every = "1000" if is_terminal else "5"  # each is a line that the program would see
    words = ["--instances", "1:1", "--checkpoint", str(kept), "--every-steps", every, str(SCRIPT), str(out)]
    with log.open("wb") as output:
        run = subprocess.Popen(
            # the first terminal that a new session's leader opens is its own
            ["sh", "-c", 'exec "$@" < "$0"', os.ttyname(theirs) if is_terminal else os.devnull, *EDL, "run", *words],
            env=edl(work_dir),
            stdout=theirs,
            stderr=theirs if is_terminal else output,
            cwd=tmp_path,
            start_new_session=True,
        )
    os.close(theirs)
    try:
        eventually(lambda: any(file.stat().st_size for file in out.glob("stepped-*")), log)  # there is what to keep
        eventually(lambda: b"\n" in os.read(mine, 10_000), log)
        os.close(mine)
        assert run.wait(PATIENCE_S) == 0
        ended = said(edl(work_dir), tmp_path, "jobs", "--json")
        assert [job["phase"] for job in json.loads(ended.stdout)] == ["succeeded"]
    finally:
        said(edl(work_dir), tmp_path, "stop", "elastic-script", check=False)
        run.wait(PATIENCE_S)
        wait_until_gone(work_dir)
    assert list(kept.glob("step-*/manifest.json"))


def test_a_script_has_its_environment_its_modules_and_its_say(tmp_path: Path, work_dir: Path) -> None:
    """Options replace single settings of checkpoints, its own `redis` breaks no agent, and what it notes is shown."""
    (tmp_path / "redis.py").write_text("mine = 'its own redis'")
    (tmp_path / "beside.py").write_text(
        "import os\nfrom edl_runtime.elastic.comm.agent_protocol import Note, connect_to_agent\n"
        "connect_to_agent(os.environ).send(Note(text='shard 7 was set aside'))"
    )
    (tmp_path / "show.py").write_text(
        "import os\nimport redis\nimport beside\nprint(redis.mine)\n"
        "for name, value in os.environ.items():\n    if 'CHECKPOINT' in name:\n        print(name, value)"
    )
    environ = {
        "EDL_CHECKPOINT": "elsewhere",
        "EDL_CHECKPOINT_EVERY_STEPS": "7",
        "EDL_CHECKPOINT_EVERY_S": "60",
        "EDL_CHECKPOINT_KEEP_LAST": "20",
        "EDL_CHECKPOINT_KEEP_EVERY": "1000",
        "EDL_CHECKPOINT_STREAM": "nights",
    }
    try:
        ran = edl_run(work_dir, tmp_path, "--checkpoint", "here", "--every-steps", "5", "show.py", **environ)
    finally:
        wait_until_gone(work_dir)
    assert ran.returncode == 0, ran.stderr
    shown = dict(line.split()[-2:] for line in ran.stdout.splitlines() if "EDL_CHECKPOINT" in line)
    changed = {"EDL_CHECKPOINT": "here", "EDL_CHECKPOINT_EVERY_STEPS": "5", "EDL_CHECKPOINT_EVERY_S": "60.0"}
    assert shown == {**environ, **changed}
    assert "its own redis" in ran.stdout
    (note,) = [line for line in ran.stderr.splitlines() if "set aside" in line]
    assert " note " in note


async def test_an_error_leaves_no_training_without_its_redis(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an interrupt between the job's start and the first of its lines."""

    async def fail(*_: object) -> int:
        assert [job.phase for job in await LocalBackend(work_dir).list()] == ["running"]
        raise ZeroDivisionError

    monkeypatch.setattr(_JobView, "run", fail)
    command = ("python", "-c", "import time; time.sleep(600)")
    spec = JobSpec(name="job", kind="trainer", command=command, bounds=Bounds(1, 1), instances=1)
    with pytest.raises(ZeroDivisionError):
        await _run(spec, RuntimeSettings(work_dir=str(work_dir)), detach=False, as_json=False)
    assert await LocalBackend(work_dir).list() == []
    wait_until_gone(work_dir)


@pytest.mark.slow
def test_a_person_runs_resizes_and_stops_a_training(tmp_path: Path, work_dir: Path) -> None:
    """One command starts it with a Redis of its own; another shell resizes it; Ctrl-C ends it with a checkpoint."""
    out, kept, log = tmp_path / "out", tmp_path / "kept", tmp_path / "log"
    out.mkdir()
    words = ["--name", "digits", "--checkpoint", str(kept), "--every-steps", "1000", str(SCRIPT), str(out)]
    with running(edl(work_dir), tmp_path, log, *words) as run:
        eventually(lambda: "resumed     instances 0 " in log.read_text(), log)
        said(edl(work_dir), tmp_path, "resize", "digits", "2")
        eventually(lambda: "resumed     instances 0 1 " in log.read_text(), log)
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE_S) == 0
    shown = log.read_text()
    assert "[1 rank 1] " in shown
    assert "stopped by Ctrl-C" in shown
    assert len(list(kept.glob("step-*/manifest.json"))) == 1


def test_a_detached_training_goes_on_without_the_command(tmp_path: Path, work_dir: Path, redis_url: str) -> None:
    """The command returns once it is started, as important as it says; others see the job and its log until it ends."""
    script, environ = waiting(tmp_path / "mine"), edl(work_dir, EDL_REDIS_URL=redis_url)
    words = ("--name", "later", "--detach", "--json", "--priority", "7", "--weight", "2.5", script.name)
    told = json.loads(said(environ, script.parent, "run", "--instances", "1:2", *words).stdout)
    try:
        assert (told["phase"], told["scaling"]["priority"], told["scaling"]["weight"]) == ("running", 7, 2.5)
        (script.parent / "go").touch()
        assert "[0] trained" in said(environ, tmp_path, "logs", "-f", "later").stdout
        assert json.loads(said(environ, tmp_path, "jobs", "later", "--json").stdout)["phase"] == "succeeded"
    finally:
        said(environ, tmp_path, "stop", "later")
        wait_until_gone(work_dir)


@pytest.mark.slow
@pytest.mark.parametrize("writable", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_a_stopped_training_leaves_a_checkpoint_or_says_that_it_could_not(
    tmp_path: Path, work_dir: Path, redis_url: str, namespace: str, *, writable: bool
) -> None:
    """`edl stop` tells all instances at once to go, so that one writes what they have come to."""
    out, kept = tmp_path / "out", tmp_path / "kept"
    out.mkdir()
    environ = edl(work_dir, EDL_REDIS_URL=redis_url, EDL_NAMESPACE=namespace)
    flags = ["--instances", "2", "--name", "stopped", "--checkpoint", str(kept), "--detach"]
    said(environ, tmp_path, "run", *flags, str(SCRIPT), str(out))
    try:
        told = lambda: "".join(file.read_text() for file in out.glob("stepped-*.jsonl"))  # noqa: E731
        (run,) = (work_dir / "runs" / "stopped").iterdir()
        eventually(lambda: told().count("\n") > 5, run / "0.log")
        if not writable:
            kept.rename(tmp_path / "elsewhere")
            kept.write_text("no folder")
        stopped = said(environ, tmp_path, "stop", "stopped", check=False)
    finally:
        wait_until_gone(work_dir)
    assert stopped.returncode == (0 if writable else 1)
    assert "stopped is stopped" in stopped.stdout
    if writable:
        assert len(list(kept.glob("step-*/manifest.json"))) == 1
        assert stopped.stderr == ""
    else:
        assert "the last checkpoint is not written: " in stopped.stderr
        assert stopped.stderr.endswith("; there is no checkpoint\n")
        assert stopped.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_stop_that_leaves_no_last_checkpoint_is_a_failure_of_the_run(
    tmp_path: Path, work_dir: Path, redis_url: str, namespace: str
) -> None:
    """`edl stop` and `edl run` exit with 1 and name the last one saved, also where the worker's process is stopped."""
    out, kept, log = tmp_path / "out", tmp_path / "kept", tmp_path / "log"
    out.mkdir()
    environ = edl(work_dir, EDL_REDIS_URL=redis_url, EDL_NAMESPACE=namespace)
    words = ["--name", "digits", "--checkpoint", str(kept), "--every-steps", "5", str(SCRIPT), str(out)]
    with running(environ, tmp_path, log, *words) as run:
        eventually(lambda: " saved " in log.read_text(), log)
        (stepped,) = out.glob("stepped-*.jsonl")
        os.kill(int(stepped.stem.partition("-")[2]), signal.SIGSTOP)
        stopped = said(environ, tmp_path, "stop", "digits", check=False)
        status = run.wait(PATIENCE_S)
    assert stopped.returncode == 1
    assert "digits is stopped" in stopped.stdout
    (reason,) = stopped.stderr.splitlines()
    assert reason.startswith("edl: instance 0: the last checkpoint is not written: ")
    assert "its process is stopped" in reason
    assert "; the last checkpoint is of step " in reason
    assert status == 1
    last = log.read_text().splitlines()[-1]
    assert last == f"edl: digits was stopped by `edl stop`; {reason.removeprefix('edl: ')}"


def test_a_run_shows_no_events_of_earlier_runs_of_its_name(
    tmp_path: Path, work_dir: Path, redis_url: str, namespace: str
) -> None:
    """So that who reads its JSON does not take it for failed, as an earlier run in the same Redis was."""
    (tmp_path / "train.py").write_text("import os, sys\nsys.exit(0 if os.path.exists('go') else 65)")
    redis = {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace}

    def events() -> tuple[int, list[dict[str, Any]]]:
        ran = edl_run(work_dir, tmp_path, "--json", "train.py", **redis)
        lines = [json.loads(line) for line in ran.stdout.splitlines()]
        return ran.returncode, [line for line in lines if "kind" in line]

    try:
        status, earlier = events()
        assert status != 0
        assert [event["outcome"] for event in earlier if event["kind"] == "ended"] == ["failed"]
        (tmp_path / "go").touch()
        status, own = events()
    finally:
        wait_until_gone(work_dir)
    assert status == 0
    assert own[0]["kind"] == "registered"
    assert not {event["id"] for event in own} & {event["id"] for event in earlier}


async def test_each_event_is_shown_once_though_redis_is_lost(
    work_dir: Path,
    own_redis: RedisServer,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that were told before the connection broke do not come again when there is another."""
    monkeypatch.setattr("edl_runtime.cli.run.RETRY_AFTER_S", 0.01)
    shown: list[str] = []

    async def await_shown(text: str) -> None:
        while text not in "".join(shown):
            shown.append(capsys.readouterr().err)
            await asyncio.sleep(0.02)

    async with connect(own_redis.url) as client, connect(own_redis.url) as mine, asyncio.timeout(PATIENCE_S):
        job = RendezvousStore(mine, namespace, "job")
        show = _JobView(LocalBackend(str(work_dir)), client, namespace, "job", token="", after="0-0", as_json=False)
        showing = asyncio.create_task(show._show_events())
        for text in ("first", "second", "third"):
            await job.announce(Event(kind="note", reason=text))
            await await_shown(text)
            assert await mine.client_kill_filter(_type="normal", skipme=True)
        showing.cancel()
        await asyncio.wait([showing])
    lines = "".join(shown).splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["first", "second", "third"]


def test_scripts_see_the_shells_environment_that_can_be_told() -> None:
    """All that is text, but for what the command's options say."""
    environ = {"LR": "0.1", "NAME": "b\udcffd", "EDL_CHECKPOINT": "there"}
    assert _shell(environ) == {"LR": "0.1", "EDL_CHECKPOINT": "there"}
    assert _shell(environ, without={"EDL_CHECKPOINT": "here"}) == {"LR": "0.1"}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "-u", "My_Train.py", "--lr"), "my-train"),
        (("jobs/train.py",), "train"),
        (("x" * 60 + ".py",), "x" * 52),
    ],
)
def test_a_job_is_named_after_its_script(command: tuple[str, ...], name: str) -> None:
    """In letters that any backend takes."""
    assert _name_of(command) == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--instances", "4:1", "train.py"], "--instances: got '4:1'"),
        (["--instances", "0:1", "train.py"], "--instances.min: got 0"),
        (["--instances", "x", "train.py"], "--instances: got 'x'"),
        (["--grace-s", "inf", "train.py"], "'--grace-s': inf is no number of seconds"),
        (["--grace-s", "nan", "train.py"], "'--grace-s': nan is no number of seconds"),
        (["--every-s", "nan", "train.py"], "'--every-s': nan is no number of seconds"),
        (["--every-s", "0", "train.py"], "'--every-s': 0.0 is not in the range x>0"),
        (["nowhere.py"], "nowhere.py"),
        (["--every-step=5", "train.py"], "No such option '--every-step'"),
        (["--grace", "5", "train.py"], "No such option '--grace'"),
        (["no-such-program", "train.py"], "command: got 'no-such-program', allowed is a script"),
        (["./folder"], "command: got './folder', allowed is a script"),
        (["wrong.py"], 'wrong.py", line 1'),
        (["wrong.py"], "SyntaxError: '(' was never closed"),
        (["--start", "3", "train.py"], "instances: got 3, allowed is 1 to 2"),
        (["--every-steps", "5", "train.py"], "--checkpoint"),
        (["--detach", "train.py"], "EDL_REDIS_URL"),
        (["--weight", "0", "train.py"], "weight: got 0.0, allowed is a number above 0"),
        (["训练.py"], "--name: got '', allowed is a name for the job, as in --name train: '训练.py'"),
        (["--checkpoint", "/proc/x", "train.py"], "--checkpoint: got '/proc/x', allowed is a folder"),
        (["--checkpoint", "train.py/x", "train.py"], "can be written to (Not a directory)"),
        (["--gear", "hot", "train.py"], "'hot' is not one of 'live', 'warm', 'cold'"),
    ],
)
def test_what_can_not_be_run_is_refused_at_once(
    tmp_path: Path, work_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    """Before anything is started."""
    (tmp_path / "train.py").touch()
    (tmp_path / "训练.py").touch()
    (tmp_path / "wrong.py").write_text("print(1")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    environ = {"EDL_WORK_DIR": str(work_dir), "EDL_REDIS_URL": "", "EDL_CHECKPOINT": ""}
    ran = CliRunner().invoke(run, ["--instances", "1:2", *arguments], env=environ)
    assert isinstance(ran.exception, SpecError) or ran.exit_code == 2
    assert said in f"{ran.stderr} {ran.exception}"
    assert not work_dir.exists()
