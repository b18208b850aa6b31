"""Servers and clients of other projects, each in an environment that `make interop` makes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.network.ports import free_ports
from support.paths import TESTS
from support.teachers.process import wait_until

from edl_runtime.external.connection import connect
from edl_runtime.protocol.errors import ProtocolError, TeacherError
from edl_runtime.settings import RuntimeSettings

INTEROP = TESTS / "interop"
SERVERS = INTEROP / "servers"
ENVIRONMENTS = TESTS.parent / ".interop"
DECLARED = "?input=image:FP32:-1.1.28.28&output=logits:FP32:-1.10"
KINDS = ("triton", "kserve", "mlserver", "paddle-serving")

START_S = 250.0
"""Longest time until a server is ready: some import a framework several times, on cores that other tests use."""

WEIGHTS = (np.arange(7840, dtype=np.float32) % 7 - 3).reshape(784, 10)
"""Of the model that all of them serve. Whole numbers, as the images are, so that answers are exact."""


def environment(kind: str) -> Path:
    """Return the environment's folder; skips the test where there is none."""
    folder = ENVIRONMENTS / kind
    if not (folder / "made-of").exists():
        reason = folder / "unavailable"
        pytest.skip(reason.read_text() if reason.exists() else "`make interop` makes what this needs")
    return folder


def run_client(kind: str, script: str, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Any:
    """Run a script of `interop/clients` in an environment; return what it prints, which is JSON."""
    command = [environment(kind) / "bin/python", INTEROP / "clients" / script, *arguments]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class Server:
    """A server with the model `net`, in a folder of its own whose name has to be short: Triton has sockets in it.

    `http` and `grpc` are its addresses, `url` the one that `edl register` takes.
    """

    def __init__(self, kind: str, folder: Path, *, max_batch: int = 16) -> None:
        self._environment = environment(kind)
        self._folder = folder / kind
        self._folder.mkdir(exist_ok=True)  # another try to start one that was too slow
        self._log = self._folder / "log"
        http, grpc, metrics = free_ports(3)
        protocol = "paddle-pipeline" if kind == "paddle-serving" else "oip"
        model = "net" if kind == "triton" else f"net{DECLARED}"
        self.http = f"{protocol}+http://127.0.0.1:{http}/{model}"
        self.grpc = f"{protocol}+grpc://127.0.0.1:{grpc}/{model}"
        self.url = f"http://127.0.0.1:{http}"
        self._command: list[object]
        if kind == "triton":
            self._command = ["python", SERVERS / "triton.py", http, grpc, metrics, max_batch]
        elif kind == "kserve":
            self._command = ["python", SERVERS / "kserve_net.py", http, grpc]
        elif kind == "paddle-serving":
            self._command = ["python", SERVERS / "paddle_pipeline.py", http, grpc]
        else:
            ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
            settings = {"host": "127.0.0.1", "parallel_workers": 0, **ports}
            model_settings = {"name": "net", "implementation": "mlserver_net.Net"}
            (self._folder / "settings.json").write_text(json.dumps(settings))
            (self._folder / "model-settings.json").write_text(json.dumps(model_settings))
            self._command = ["mlserver", "start", "."]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until its model is ready."""
        program, *arguments = map(str, self._command)
        env = {**os.environ, "PYTHONPATH": str(SERVERS), "VIRTUAL_ENV": str(self._environment)}
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(
                [self._environment / "bin" / program, *arguments],
                cwd=self._folder,
                env={**env, "HOME": str(self._folder)},
                stdout=log,
                stderr=log,
            )

        def is_ready() -> bool:
            assert process.poll() is None, self._log.read_text()[-3000:]
            for address in (self.http, self.grpc):
                connection = connect(address, RuntimeSettings(), timeout_s=1.0)
                try:
                    connection.ready()
                except (OSError, TeacherError, ProtocolError):
                    return False
                finally:
                    connection.close()
            return True

        wait_until(is_ready, START_S)

    def kill(self) -> None:
        """Kill all its processes."""
        if self._process is None:
            return
        processes = [psutil.Process(self._process.pid)]
        with suppress(psutil.NoSuchProcess):
            processes += processes[0].children(recursive=True)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(processes)
        self._process = None


StartServer = Callable[..., Server]


@contextmanager
def starting(folder: Path) -> Iterator[StartServer]:
    """Give what starts servers, which are killed at the end."""
    with ExitStack() as stack:

        def start(kind: str, **options: int) -> Server:
            server = Server(kind, folder, **options)
            stack.callback(server.kill)
            server.start()
            return server

        yield start
