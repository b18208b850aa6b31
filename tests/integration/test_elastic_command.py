"""`edl run`: an elastic training on this machine, as a person starts, resizes and stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_group import SCRIPT
from integration.local_jobs import wait_until_gone

from edl_runtime.cli.run import _name_of, _shell

PATIENCE_S = 60.0


def edl(work_dir: Path, **environ: str) -> dict[str, str]:
    """Return the environment of an `edl` command without a Redis."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    options = json.dumps({"samples": 10**5, "global_batch": 24, "epochs": 1, "step_s": 0.05})
    quiet = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**clean, **quiet, "EDL_WORK_DIR": str(work_dir), "SCRIPT_OPTIONS": options, **environ}


def eventually(holds: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_person_runs_resizes_and_stops_a_training(tmp_path: Path, work_dir: Path) -> None:
    """One command starts it with a Redis of its own; another shell resizes it; Ctrl-C ends it with a checkpoint."""
    out, kept, log = tmp_path / "out", tmp_path / "kept", tmp_path / "log"
    out.mkdir()
    command = [sys.executable, "-m", "edl_runtime.cli"]
    flags = ["--instances", "1:2", "--name", "digits", "--checkpoint", str(kept), "--every-steps", "1000"]
    with log.open("wb") as output:
        run = subprocess.Popen(
            [*command, "run", *flags, str(SCRIPT), str(out)],
            env=edl(work_dir),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
        )
    try:
        eventually(lambda: "resumed     instances 0 " in log.read_text(), log)
        subprocess.run([*command, "resize", "digits", "2"], env=edl(work_dir), check=True, capture_output=True)
        eventually(lambda: "resumed     instances 0 1 " in log.read_text(), log)
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE_S) == 0
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            run.send_signal(signal.SIGINT)
            run.wait(PATIENCE_S)
        wait_until_gone(work_dir)
    shown = log.read_text()
    assert "[1 rank 1] " in shown
    assert "stopped by Ctrl-C" in shown
    assert len(list(kept.glob("step-*/manifest.json"))) == 1


def test_a_detached_training_goes_on_without_the_command(tmp_path: Path, work_dir: Path, redis_url: str) -> None:
    """The command returns once it is started; others see the job then, and what it writes until it ends."""
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.02)\nprint('trained')"
    )
    command, environ = [sys.executable, "-m", "edl_runtime.cli"], edl(work_dir, EDL_REDIS_URL=redis_url)

    def said(*arguments: str) -> str:
        ran = subprocess.run(
            [*command, *arguments], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
        )
        return ran.stdout

    told = said("run", "--instances", "1:2", "--name", "later", "--detach", "--json", str(script))
    try:
        assert json.loads(told)["phase"] == "running"
        go.touch()
        assert "[0] trained" in said("logs", "-f", "later")
        assert json.loads(said("jobs", "later", "--json"))["phase"] == "succeeded"
    finally:
        said("stop", "later")
        wait_until_gone(work_dir)


def test_what_a_trainer_notes_is_shown(tmp_path: Path, work_dir: Path) -> None:
    """Among the lines of the log, as when a shard was set aside: nobody has to ask for it."""
    (tmp_path / "beside.py").write_text(
        "import os\nfrom edl_runtime.elastic.link import connect\nfrom edl_runtime.elastic.messages import Note\n"
        "connect(os.environ).say(Note(text='shard 7 was set aside'))"
    )
    script = tmp_path / "train.py"
    script.write_text("import beside\nprint('trained')")
    script.chmod(0o755)
    command = [sys.executable, "-m", "edl_runtime.cli", "run", "--instances", "1:2", "train.py"]
    try:
        ran = subprocess.run(
            command, env=edl(work_dir), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
    finally:
        wait_until_gone(work_dir)
    assert ran.returncode == 0, ran.stderr
    assert "trained" in ran.stdout
    (line,) = [line for line in ran.stderr.splitlines() if "set aside" in line]
    assert " note " in line


def test_scripts_see_the_shells_environment_that_can_be_told() -> None:
    """All that is text; checkpoints by flags leave none of the variables' in between."""
    environ = {"LR": "0.1", "NAME": "b\udcffd", "EDL_CHECKPOINT_KEEP_LAST": "9"}
    assert _shell(environ, without="") == {"LR": "0.1", "EDL_CHECKPOINT_KEEP_LAST": "9"}
    assert _shell(environ, without="EDL_CHECKPOINT") == {"LR": "0.1"}


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
        (["--instances", "4:1", "train.py"], "bounds: got '4:1'"),
        (["--instances", "1:2", "nowhere.py"], "nowhere.py"),
        (["--instances", "1:2", "--start", "3", "train.py"], "instances: got 3, allowed is 1 to 2"),
        (["--instances", "1:2", "--every-steps", "5", "train.py"], "--checkpoint"),
        (["--instances", "1:2", "--detach", "train.py"], "EDL_REDIS_URL"),
        (["--instances", "1:2", "--gear", "hot", "train.py"], "'hot' is not one of 'live', 'warm', 'cold'"),
    ],
)
def test_what_can_not_be_run_is_refused_at_once(
    tmp_path: Path, work_dir: Path, arguments: list[str], said: str
) -> None:
    """Before anything is started."""
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-m", "edl_runtime.cli", "run", *arguments]
    ran = subprocess.run(command, env=edl(work_dir), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode in (2, 78)
    assert said in ran.stderr
    assert not work_dir.exists()
