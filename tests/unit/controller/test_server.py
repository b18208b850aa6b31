"""What a controller tells of itself over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest

from edl_runtime.controller import server
from edl_runtime.controller.server import build_app
from edl_runtime.controller.vitals import SILENT_S, Vitals
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect


def asked(
    vitals: Vitals, *, token: str = "", has_metrics: bool = True, redis: Exception | None = None
) -> httpx.AsyncClient:
    async def ping() -> bool:
        if redis:
            raise redis
        return True

    client: Any = connect("redis://localhost:6379/0")
    client.ping = ping
    app = build_app(vitals, client, token=token, has_metrics=has_metrics)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def healthy(now: float = 100.0) -> Vitals:
    vitals = Vitals()
    vitals.answered_at = now
    return vitals


async def test_a_controller_is_ready_once_server_redis_and_windows_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it leads or waits; it lives all the time."""
    monkeypatch.setattr(server, "clock", lambda: 100.0)
    silent, invalid = healthy(100.0 - SILENT_S - 1), healthy()
    invalid.windows_problem = "the traffic windows are not valid"
    cases = (
        (asked(Vitals()), "the Kubernetes API does not answer"),
        (asked(silent), "the Kubernetes API does not answer"),
        (asked(invalid), "the traffic windows are not valid"),
        (asked(healthy(), redis=ConnectionError("refused")), "Redis is unavailable"),
        (asked(healthy()), ""),
    )
    for client, problem in cases:
        assert (await client.get("/v1/health/live")).json() == {"live": True}
        answer = await client.get("/v1/health/ready")
        assert (answer.status_code, answer.json().get("error", "")) == (503 if problem else 200, problem)


async def test_metrics_tell_who_leads_and_what_has_failed() -> None:
    """In Prometheus's format, with the token where there is one."""
    vitals = healthy()
    vitals.leads, vitals.last_pass_at = True, 5.0
    vitals.passes.update({"done": 3, "failed": 1})
    vitals.failures["trainingjob.step_failed"] += 2
    shown = (await asked(vitals).get("/metrics")).text
    for line in (
        "edl_controller_leads 1.0",
        "edl_controller_windows_valid 1.0",
        "edl_controller_last_pass_timestamp_seconds 5.0",
        'edl_controller_passes_total{result="done"} 3.0',
        'edl_controller_passes_total{result="failed"} 1.0',
        'edl_controller_failures_total{event="trainingjob.step_failed"} 2.0',
    ):
        assert f"\n{line}\n" in shown
    guarded = asked(vitals, token="sesame")
    assert (await guarded.get("/metrics")).status_code == 401
    assert (await guarded.get("/metrics", headers={"Authorization": "Bearer sesame"})).text == shown
    assert (await guarded.get("/v1/health/live")).status_code == 200


async def test_other_machines_see_no_metrics_without_a_token() -> None:
    """The kubelet asks for health at the pod's address, and so can anybody."""
    assert (await asked(healthy(), has_metrics=False).get("/metrics")).status_code == 404
    for host, token, told in (("127.0.0.1", "", True), ("0.0.0.0", "", False), ("0.0.0.0", "sesame", True)):
        assert server._may_tell(host, RuntimeSettings(monitor_token=token)) is told


KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
}


def test_the_command_serves_them_where_it_is_told_to(tmp_path: Path) -> None:
    """From the beginning, also while no API server answers; SIGTERM is an end in order."""
    (tmp_path / "config").write_text(json.dumps(KUBECONFIG))
    environ = {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "EDL_REDIS_URL": "redis://127.0.0.1:1/0"}
    words = [sys.executable, "-m", "edl_runtime.cli", "controller", "--port", "0"]
    with subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            told = process.stderr.readline()
            assert told.startswith("edl: health and metrics at http://127.0.0.1:")
            url = told.split()[-1]
            with urllib.request.urlopen(f"{url}/v1/health/live") as answer:
                assert json.load(answer) == {"live": True}
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{url}/v1/health/ready")
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                assert b"\nedl_controller_leads 0.0\n" in answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
