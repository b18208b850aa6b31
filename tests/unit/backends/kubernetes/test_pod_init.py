"""The first process of a pod, as a real process with real children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import edl_runtime
from edl_runtime.backends.kubernetes import pod_template

START = """
import sys
from edl_runtime.backends.kubernetes import pod_init
pod_init.TERMINATION_MESSAGE = sys.argv[1]
sys.exit(pod_init.main(sys.argv[2:]))
"""


class Pod:
    """Starts commands as a pod's first process would; `message`: what it leaves as its last."""

    def __init__(self, folder: Path) -> None:
        self.result = folder / "result.json"
        self.message = folder / "termination-log"
        self.before = ""

    def start(self, *command: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "EDL_RESULT_FILE": str(self.result)}
        words = [sys.executable, "-I", "-c", f"import sys\n{self.before}{START}", str(self.message), *command]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env=environ, stdout=pipe, stderr=pipe, text=True)

    def run(self, *command: str) -> tuple[int, str, str]:
        """Return the exit status and what was written to either stream."""
        with self.start(*command) as process:
            out, err = process.communicate(timeout=100)
        return process.returncode, out, err


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


@pytest.mark.parametrize("status", [0, 78, 255])
def test_it_ends_as_its_command_does(pod: Pod, status: int) -> None:
    """With the same exit status, and nothing said."""
    assert pod.run("sh", "-c", f"exit {status}") == (status, "", "")
    assert not pod.message.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_becomes_an_exit_status(pod: Pod, number: signal.Signals) -> None:
    """As shells have it: a first process can't be killed by most signals itself."""
    assert pod.run("sh", "-c", f"kill -{int(number)} $$")[0] == 128 + number


def test_a_command_that_is_not_there_is_said_to_be(pod: Pod) -> None:
    """With the exit status that shells have for it."""
    status, _, err = pod.run("no-such-program")
    assert status == 127
    assert "can't run 'no-such-program'" in err


@pytest.mark.parametrize(("exits", "status"), [(0, 128 + signal.SIGTERM), (3, 3)])
def test_who_is_told_to_go_has_not_done_all_work(pod: Pod, exits: int, status: int) -> None:
    """A Job takes an exit status of 0 for success, also that of a pod which is evicted."""
    with pod.start("sh", "-c", f"trap 'exit {exits}' TERM; echo up; while :; do sleep 0.05; done") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
    assert process.returncode == status


def test_it_passes_sigterm_on_to_the_command_alone(pod: Pod) -> None:
    """The command decides how it ends, and has its time for it; its children hear nothing."""
    script = """
sh -c 'trap "echo child told" TERM; while :; do sleep 0.05; done' &
trap 'echo told; exit 5' TERM
echo ready
while :; do sleep 0.05; done
"""
    with pod.start("sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "told\n"
    assert process.returncode == 5


def test_a_sigterm_that_comes_before_the_command_is_passed_on(pod: Pod) -> None:
    """A pod may be told to go while it begins."""
    pod.before = """
import os, signal
sys.addaudithook(lambda event, _: event == "os.posix_spawn" and os.kill(os.getpid(), signal.SIGTERM))
"""
    assert pod.run("sleep", "300")[0] == 128 + signal.SIGTERM


def test_it_imports_little_before_it_hears_signals(pod: Pod) -> None:
    """A first process is deaf until it has a handler: nothing of the backend, and nothing that others have written."""
    pod.before = """
import os
sys.addaudithook(lambda event, _: event == "os.posix_spawn" and print(*sys.modules))
"""
    status, out, _ = pod.run("true")
    loaded = set(out.split())
    assert status == 0
    assert {name for name in loaded if name.startswith("edl_runtime")} == {
        "edl_runtime",
        "edl_runtime.backends",
        "edl_runtime.backends.kubernetes",
        "edl_runtime.backends.kubernetes.pod_init",
        "edl_runtime.backends.local",
        "edl_runtime.backends.local.instance_wrapper",
    }
    roots = {name.partition(".")[0] for name in loaded}
    assert not roots & {"aiohttp", "asyncio", "kubernetes_asyncio", "msgspec", "numpy", "redis", "shutil", "structlog"}


def test_what_the_command_leaves_behind_is_killed(pod: Pod) -> None:
    """Also what has left its session: a pod with a process is not over."""
    script = "setsid sleep 300 & setsid sh -c 'sleep 301 & wait' & sleep 302 & echo started; exit 3"
    assert pod.run("sh", "-c", script)[:2] == (3, "started\n")  # reads to the end, so nobody holds the pipe


@pytest.mark.parametrize(("status", "end"), [(0, "exit 0"), (4, "exit 4"), (137, "kill -9 $$")])
def test_the_result_becomes_the_last_message(pod: Pod, status: int, end: str) -> None:
    """However the command ends."""
    assert pod.run("sh", "-c", f'printf %s \'{{"metrics": {{}}}}\' > "$EDL_RESULT_FILE"; {end}')[0] == status
    assert pod.message.read_text() == '{"metrics": {}}'


def test_a_result_that_cannot_be_handed_over_changes_no_ending(pod: Pod) -> None:
    """A training that has succeeded has; the log says what is missing."""
    pod.message.mkdir()
    status, _, err = pod.run("sh", "-c", 'echo {} > "$EDL_RESULT_FILE"')
    assert status == 0
    assert "can't copy the result" in err


def test_an_image_of_another_version_says_which(tmp_path: Path) -> None:
    """One that lacks what pods are started by; one without any says that it has none."""
    older = tmp_path / "edl_runtime"
    older.mkdir()
    (older / "__init__.py").write_text('__version__ = "0.0.7"\n')
    words = [sys.executable, "-S", "-P", "-c", pod_template.START, "true"]
    done = subprocess.run(words, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    missing = "No module named 'edl_runtime.backends'"
    assert done.stderr == f"edl: edl-airflow 0.0.7 can't run a job of {edl_runtime.__version__} ({missing})\n"
    done = subprocess.run(words, env={"PYTHONPATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No module named 'edl_runtime'\n" in done.stderr


def test_it_is_run_as_manifests_have_it(pod: Pod) -> None:
    """Not from the folder it starts in, in which a script may have any name."""
    (pod.result.parent / "shutil.py").write_text("raise SystemExit('the wrong one')")
    words = [sys.executable, "-P", "-c", pod_template.START, "sh", "-c", "exit 6"]
    environ = {**os.environ, "EDL_RESULT_FILE": str(pod.result)}
    done = subprocess.run(words, env=environ, cwd=pod.result.parent, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (6, b"")
