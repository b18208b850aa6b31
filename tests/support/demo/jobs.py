"""A JobServer and JobClients as processes, and the example of `examples/job_server` by its page's commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from support.paths import EXAMPLES

from edl_runtime.demo.pod_sets import DEFAULT_JOB, PodSet
from edl_runtime.demo.rest import QUERY_PODS

EXAMPLE = EXAMPLES / "job_server"
SERVER, CLIENT = re.findall(r"```sh\n(.*?)\n```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
"""The page's commands."""

PATIENCE_S = 150.0
NEVER = "86400"


def eventually(holds: Callable[[], object], *logs: Path, of: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until it holds; the test fails with the end of these logs, at once when the process that it is `of` ends."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        # asked before: what the process does last comes before its end
        is_late = time.monotonic() > deadline or (of is not None and of.poll() is not None)
        if holds():
            return
        assert not is_late, "\n".join(log.read_text()[-3000:] for log in logs if log.exists())
        time.sleep(0.05)


class Demo:
    """The processes of one test, in a folder with their logs."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self.server_log, self.client_log = folder / "server.log", folder / "client.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "PADDLE_"))}
        self.environ = clean | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "STARTED_BY_TEST_IN": str(folder),
            "GLOG_minloglevel": "2",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "EDL_LEASE_TTL_S": "30",
        }

    @contextmanager
    def server(self, *flags: str, pods: int = 2) -> Iterator[subprocess.Popen[bytes]]:
        """Run a JobServer that changes its pods by SIGUSR1 alone, and wait until it listens."""
        command = SERVER.replace(" 2", f" {pods}").replace("900", NEVER)
        port = self.url.rpartition(":")[2]
        with self.running(f"{command} --server_port {port} {' '.join(flags)}", self.server_log) as process:
            eventually(lambda: process.poll() is not None or "ready on" in self.server_log.read_text(), self.server_log)
            yield process

    @contextmanager
    def client(
        self, script: str, *arguments: str, flags: Sequence[str] = (), **environ: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a JobClient for a bash script."""
        job = {"PADDLE_JOBSERVER": self.url, "PADDLE_JOB_ID": DEFAULT_JOB, "PADDLE_RUNING_ENV": "PADDLE_EDL"}
        (self.folder / "pod.sh").write_text(script)
        command = ["python -u -m edl_runtime.demo.job_client", *flags, "pod.sh", *arguments]
        with self.running(" ".join(command), self.client_log, **job | environ) as process:
            yield process

    @contextmanager
    def example(self, *flags: str, data: Path) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
        """Run the page's client with other pictures and flags, beside the example's files; yield server and client."""
        for file in EXAMPLE.iterdir():
            if file.suffix in {".py", ".sh"}:
                (self.folder / file.name).symlink_to(file)
        command = re.sub(r"--rows=.*", " ".join(flags), CLIENT).replace("http://127.0.0.1:8180", self.url)
        command = command.replace("$PWD/../../.datasets/fashion", str(data))
        with self.server() as server, self.running(command, self.client_log) as client:
            yield server, client

    def trainer_logs(self) -> str:
        """Return what all trainers of the example have printed."""
        return "".join(file.read_text() for file in sorted(self.folder.glob("resnet_pod/*/log/workerlog.0")))

    @contextmanager
    def running(self, command: str, log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run bash's last command in its place; it is killed at the end."""
        head, _, last = command.rpartition("\n\n")
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"{head}\nexec {last}"],
                cwd=self.folder,
                env=self.environ | environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def pods(self, token: str = "") -> PodSet:
        """Return what the server answers."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with httpx.Client(trust_env=False, timeout=PATIENCE_S, headers=headers) as client:
            answer = client.get(self.url + QUERY_PODS, params={"job_id": DEFAULT_JOB})
        return msgspec.json.decode(answer.raise_for_status().content, type=PodSet)

    def has_logged(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.client_log.read_text()
