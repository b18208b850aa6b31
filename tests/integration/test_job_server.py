"""JobServer and JobClient as processes, with pods of small bash scripts, when things fail."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest
from support.backends.local_processes import processes, wait_until_gone
from support.demo.jobs import PATIENCE_S, Demo, eventually
from support.network.ports import free_ports
from support.paths import EXAMPLES
from support.teachers.process import is_gone

pytestmark = pytest.mark.timeout(300)

WAITS = 'echo "$PADDLE_POD_ID $CUDA_VISIBLE_DEVICES $PADDLE_JOB_ID $1"\n[[ $http_proxy ]] && exit 9\nsleep 1000\n'
"""A pod that says what it was given, and ends by SIGTERM."""


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    (port,) = free_ports(1)
    return Demo(tmp_path, port)


def pod_log(demo: Demo, pod: str) -> str:
    file = demo.folder / "pod_log" / f"pod_{pod}.log"
    return file.read_text() if file.exists() else ""


def test_pods_come_and_go_as_the_server_says(demo: Demo) -> None:
    """With their variables, without proxies, and with the script's arguments; all leave when the client is stopped."""
    demo.environ["http_proxy"] = "http://proxy"
    with demo.server() as server, demo.client(WAITS, "argument") as client:
        eventually(lambda: "argument" in pod_log(demo, "pod_1_0"), demo.client_log)
        server.send_signal(signal.SIGUSR1)
        eventually(demo.has_logged("pod.stopped"), demo.client_log)
        server.send_signal(signal.SIGUSR1)
        eventually(lambda: "argument" in pod_log(demo, "pod_1_1"), demo.client_log)
        assert pod_log(demo, "pod_0_0") == "pod_0_0 0 test_job_id_1234 argument\n"
        assert pod_log(demo, "pod_1_1") == "pod_1_1 1 test_job_id_1234 argument\n"
        with demo.client(WAITS) as second:
            assert second.wait(PATIENCE_S) == 78, "it would run the same pods in the same folders"
        client.terminate()
        assert client.wait(PATIENCE_S) == 0
    wait_until_gone(demo.folder)
    assert "pod.failed" not in demo.client_log.read_text()


def test_a_failed_pod_is_noticed_reported_and_started_again(demo: Demo) -> None:
    """And fails the client with the end of its log once it has failed five times in a row."""
    script = 'if [[ $PADDLE_POD_ID == pod_1_0 ]]; then echo "no luck"; exit 3; fi\nsleep 1000\n'
    with demo.server() as server, demo.client(script) as client:
        assert client.wait(PATIENCE_S) == 1
        assert [pod.running for pod in demo.pods().pods] == [False, False]
        assert server.poll() is None
    told = demo.client_log.read_text()
    assert told.count("pod.failed") == 4
    assert "edl: pod_1_0 ended 5 times in a row within 10 s of its start, the last time it exited with 3" in told
    assert "no luck" in told
    assert "pod.ended                      pod=pod_1_0" in demo.server_log.read_text()
    wait_until_gone(demo.folder)


def test_a_pod_that_can_never_work_fails_the_client_at_once(demo: Demo) -> None:
    """Exit status 78 says so; the client exits with it."""
    with demo.server(pods=1), demo.client("exit 78") as client:
        assert client.wait(PATIENCE_S) == 78
    assert "pod_0_0 exited with 78" in demo.client_log.read_text()


def test_a_pod_that_ignores_sigterm_is_killed(demo: Demo) -> None:
    """After the grace period, with what it has started."""
    script = "trap '' TERM\necho ignores\nwhile true; do sleep 1000; done\n"
    with demo.server(pods=1), demo.client(script, flags=["--grace_s", "0.5"]) as client:
        eventually(lambda: "ignores" in pod_log(demo, "pod_0_0"), demo.client_log)
        client.terminate()
        assert client.wait(PATIENCE_S) == 0
    wait_until_gone(demo.folder)
    assert "exit_code=-9" in demo.client_log.read_text()


def test_nothing_outlives_a_client_that_is_killed(demo: Demo) -> None:
    """Neither pods, nor what they have started in sessions of their own, nor the Redis."""
    with demo.server(pods=1) as server, demo.client("setsid sleep 1000 &\necho began\nwait\n") as client:
        eventually(lambda: "began" in pod_log(demo, "pod_0_0"), demo.client_log)
        assert len(processes(demo.folder)) > 4
        client.kill()
        eventually(lambda: [each.pid for each in processes(demo.folder)] == [server.pid], demo.client_log)


def test_a_pod_whose_wrapper_is_killed_does_not_run_on_beside_its_successor(demo: Demo) -> None:
    """As when memory is short: what is left of the pod is killed before it is started again; its Redis stays."""
    with demo.server(pods=1), demo.client('echo "began by $$"\nsleep 1000\n') as client:
        eventually(lambda: "began" in pod_log(demo, "pod_0_0"), demo.client_log)
        first = psutil.Process(int(pod_log(demo, "pod_0_0").split()[-1]))
        redis, wrapper = sorted(psutil.Process(client.pid).children(), key=lambda each: each == first.parent())
        wrapper.kill()
        eventually(lambda: pod_log(demo, "pod_0_0").count("began") == 2, demo.client_log)
        assert is_gone(first)
        assert not is_gone(redis)
        client.terminate()
        assert client.wait(PATIENCE_S) == 0
    wait_until_gone(demo.folder)


def test_pods_go_on_without_the_server_and_follow_it_when_it_is_back(demo: Demo) -> None:
    """They are not restarted while it is away."""
    with demo.server(pods=1) as server, demo.client(WAITS) as client:
        eventually(lambda: "pod_0_0" in pod_log(demo, "pod_0_0"), demo.client_log)
        server.kill()
        eventually(demo.has_logged("server.unavailable"), demo.client_log)
        with demo.server(pods=2):
            eventually(lambda: "pod_1_0" in pod_log(demo, "pod_1_0"), demo.client_log)
            assert client.poll() is None
    assert pod_log(demo, "pod_0_0").count("pod_0_0") == 1


@pytest.mark.parametrize(("variable", "why"), [("EDL_JOB_SERVER_TOKEN", "401"), ("PADDLE_JOB_ID", "404")])
def test_a_client_with_a_wrong_token_or_job_is_refused(demo: Demo, variable: str, why: str) -> None:
    """At once, with what to check; the right ones are taken, and never shown."""
    demo.environ["EDL_JOB_SERVER_TOKEN"] = "right-t0ken"
    with demo.server(pods=1):
        with demo.client("exit 0", **{variable: "wr0ng"}) as client:
            assert client.wait(PATIENCE_S) == 1
        assert f"answered {why}" in demo.client_log.read_text()
        with demo.client("exit 0") as client:
            assert client.wait(PATIENCE_S) == 0
        assert not demo.pods("right-t0ken").pods[0].running
    assert "t0ken" not in demo.client_log.read_text() + demo.server_log.read_text()


def test_other_machines_need_a_token(demo: Demo) -> None:
    """A server that they can reach does not start without."""
    with demo.server("--host 0.0.0.0") as server:
        assert server.wait(PATIENCE_S) == 78
    assert "unless EDL_JOB_SERVER_TOKEN holds a token" in demo.server_log.read_text()


def test_nodes_share_a_redis_that_is_named(demo: Demo) -> None:
    """A client whose job has pods elsewhere does not start one of its own."""
    with demo.server("--node_ips 127.0.0.1,192.0.2.1"), demo.client(WAITS) as client:
        assert client.wait(PATIENCE_S) == 78
    assert "EDL_REDIS_URL: got ''" in demo.client_log.read_text()


def test_a_pod_that_can_not_be_prepared_fails_the_client(demo: Demo) -> None:
    """With what the script said."""
    (demo.folder / "package.sh").write_text('echo "no room for $2"; exit 4')
    with demo.server(pods=1), demo.client(WAITS, flags=["--package_sh", "./package.sh"]) as client:
        assert client.wait(PATIENCE_S) == 1
    told = demo.client_log.read_text()
    assert "pod_0_0 could not be prepared: ./package.sh exited with 4" in told
    assert "no room for pod_0_0" in told


def test_the_example_s_script_prepares_the_folder_that_the_client_names(demo: Demo) -> None:
    """Whatever `--pod_path` is, as that of the original's own example; the pod's script runs there."""
    pictures = demo.folder / "pictures"
    pictures.mkdir()
    demo.environ["PADDLE_EDL_IMAGENET_PATH"] = str(pictures)
    example = EXAMPLES / "job_server" / "package.sh"
    (demo.folder / "package.sh").write_text(f'bash {example} "$@" && cp pod.sh "$EDL_POD_PATH"\n')
    flags = ["--package_sh", "./package.sh", "--pod_path", "./resnet50_pod"]
    with demo.server(pods=1), demo.client("pwd; ls\n", flags=flags) as client:
        assert client.wait(PATIENCE_S) == 0, demo.client_log.read_text()
    folder = demo.folder / "resnet50_pod" / "pod_0_0"
    assert pod_log(demo, "pod_0_0").split()[:2] == [str(folder), "ImageNet"]
    assert (folder / "ImageNet").readlink() == pictures
    assert not (demo.folder / "resnet_pod").exists()


def test_trainers_see_the_variables_of_the_original(demo: Demo) -> None:
    """An unchanged script in two pods of two trainers: ranks, endpoints, and no GPU where the machine has none."""
    (demo.folder / "train.py").write_text(
        "import os, sys, time\n"
        "rank, count = os.environ['PADDLE_TRAINER_ID'], os.environ['PADDLE_TRAINERS_NUM']\n"
        "while count != '4':  # it is started again when the others have come\n"
        "    time.sleep(1000)\n"
        "endpoints = os.environ['PADDLE_TRAINER_ENDPOINTS'].split(',')\n"
        "assert endpoints[int(rank)] == os.environ['PADDLE_CURRENT_ENDPOINT'] and len(set(endpoints)) == 4\n"
        "print('rank', rank, os.environ['PADDLE_POD_ID'], sys.argv[1], repr(os.environ['CUDA_VISIBLE_DEVICES']))\n"
    )
    script = 'python -m edl_runtime.demo.launch --log_dir log-$PADDLE_POD_ID train.py "$@"'
    with demo.server("--gpu_num_of_node 4"), demo.client(script, "--flag") as client:
        assert client.wait(PATIENCE_S) == 0, demo.client_log.read_text()
    printed = "".join(file.read_text() for file in demo.folder.glob("log-*/workerlog.*"))
    lines = {line for line in printed.splitlines() if line.startswith("rank")}
    assert {line.split()[1] for line in lines} == {"0", "1", "2", "3"}
    assert Counter(line.partition(" ")[2][2:] for line in lines) == {
        "pod_0_0 --flag ''": 2,
        "pod_1_0 --flag ''": 2,
    }


def test_a_launcher_outside_of_the_job_does_nothing(demo: Demo) -> None:
    """As a pod that was taken off the list before it could begin. It waits for a server that is away."""
    demo.environ |= {"PADDLE_JOBSERVER": demo.url, "PADDLE_JOB_ID": "test_job_id_1234", "PADDLE_POD_ID": "pod_9_9"}
    demo.environ["EDL_REDIS_URL"] = "redis://127.0.0.1:1"
    (demo.folder / "train.py").write_text("raise SystemExit(1)")
    command = ["python", "-m", "edl_runtime.demo.launch", "--use_paddlecloud", "train.py"]
    with demo.running(" ".join(command), demo.client_log) as launcher:
        eventually(demo.has_logged("server.unavailable"), demo.client_log, of=launcher)
        with demo.server():
            assert launcher.wait(PATIENCE_S) == 0
    with demo.server():
        flags = [*command[:3], "--hdfs_path", "/x", "train.py"]
        refused = subprocess.run(flags, cwd=demo.folder, env=demo.environ, capture_output=True, text=True, check=False)
    assert refused.returncode == 78
    assert "EDL_CHECKPOINT is the URL of checkpoints" in refused.stderr


def test_a_server_ends_by_a_signal(demo: Demo) -> None:
    with demo.server() as server:
        assert psutil.Process(server.pid).is_running()
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0
