"""What a controller does where one of many namespaces, or one of many passes, fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.autoscale.backend import Jobs
from support.autoscale.jobs import NOON, capacity, job, node

from edl_runtime.autoscale import rescale
from edl_runtime.autoscale.cluster.snapshot import ClusterSnapshot
from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.backends.kubernetes.client import Manifest
from edl_runtime.controller import passes, run, windows
from edl_runtime.controller.passes import Passes, PassOptions
from edl_runtime.controller.vitals import Vitals
from edl_runtime.controller.windows import WindowsConfigMap
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds

HANGS_S = 60


async def test_a_namespace_that_fails_is_served_again_and_others_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's failure is no end of the controller of all."""
    served: list[str] = []
    again, both = asyncio.Event(), asyncio.Event()

    async def serve(_: Any, namespace: str) -> None:
        served.append(namespace)
        if served.count("evil") == 1:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(raise_(ValueError("of a tenant")))
        if served.count("evil") == 2:
            again.set()
        await both.wait()

    monkeypatch.setattr(run, "RETRY_S", 0.0)
    monkeypatch.setattr(run, "_serve", serve)
    with capture_logs() as logs:
        async with asyncio.timeout(HANGS_S):
            nobody: Any = None
            vitals = Vitals()
            given = run._Given(nobody, nobody, None, vitals)
            serving = [run._serve_always(given, name) for name in ("good", "evil")]
            tasks = [asyncio.create_task(one) for one in serving]
            await again.wait()
    assert served == ["good", "evil", "evil"]
    for task in tasks:
        task.cancel()
    (failed,) = [entry for entry in logs if entry["event"] == "namespace.failed"]
    assert vitals.failures == {"namespace.failed": 1}
    assert failed["cause"].startswith("namespace 'evil' can't be handled: ValueError: of a tenant (test_run.py:")


async def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("?"), SpecError("weight", 0, "above 0"), KeyError("a")], ids=repr)
async def test_passes_go_on_after_one_that_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the error: the next one is made when it is due."""
    made = asyncio.Event()
    tries: list[int] = []

    async def pass_(*_: object, **__: object) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise error
        made.set()
        await asyncio.Event().wait()

    async def wait_for_change(_: int) -> int:
        raise error

    monkeypatch.setattr(passes, "rescale", pass_)
    backend: Any = SimpleNamespace(wait_for_change=wait_for_change)
    client: Any = None
    vitals = Vitals()
    going = Passes(
        backend=backend,
        client=client,
        namespace="n",
        options=PassOptions(interval_s=0.0),
        windows=None,
        vitals=vitals,
    )
    with capture_logs() as logs:
        task = asyncio.create_task(going.run())
        async with asyncio.timeout(HANGS_S):
            await made.wait()
        task.cancel()
    (failed,) = [entry for entry in logs if entry["event"] == "rescaling.failed"]
    assert str(error) in failed["cause"]
    assert vitals.passes == {"failed": 1}


HOSTILE = {
    "memory": {"resources": {"cpu": 1.0, "memory": 2e14}},
    "weight": {"weight": float("nan")},
}


async def unrecorded(_: Mapping[str, float]) -> None:
    """Keep no times of resizes."""


@pytest.mark.parametrize("how", HOSTILE)
async def test_a_job_that_no_plan_can_be_made_with_is_left_out(how: str) -> None:
    """It is told as refused, and all others are resized."""
    hostile = job("evil", Bounds(1, 4), 1.0, 1, **HOSTILE[how])
    pool = job("pool", Bounds(1, 4), 1.0, 1, kind="pool", elastic=False)
    backend = Jobs(job("good", Bounds(1, 4), 1.0, 1), hostile, pool)
    there = capacity(node(total={"cpu": 40.0, "memory": 1e9}, used={"cpu": 3.0}))
    snapshot = ClusterSnapshot(at=NOON, jobs=(*backend.jobs.values(),), capacity=there, stuck={"pool": "?"})
    done = await rescale._carry_out(snapshot, RescalingRules(), decide, backend, unrecorded)
    assert backend.wanted == {"good": 4, "evil": 1, "pool": 1}
    assert done.refused.keys() == {"evil"}
    assert f"{how}" in done.refused["evil"]


async def test_an_error_of_the_policy_is_no_job_s() -> None:
    """If a plan can be made with none of them, who has made the policy has to know."""

    def policy(*_: object, **__: object) -> Any:
        raise ZeroDivisionError("mine")

    ended = job("c", Bounds(1, 4), 1.0, 1, phase="succeeded")
    backend = Jobs(job("a", Bounds(1, 4), 1.0, 1), job("b", Bounds(1, 4), 1.0, 1), ended)
    snapshot = ClusterSnapshot(at=NOON, jobs=(*backend.jobs.values(),), capacity=await backend.capacity())
    with pytest.raises(ZeroDivisionError, match="mine"):
        await rescale._carry_out(snapshot, RescalingRules(), policy, backend, unrecorded)


async def test_a_resize_that_fails_is_that_job_s_alone() -> None:
    """Also by an error that nobody expects."""

    def before(backend: Jobs) -> None:
        if backend.wanted["good"] == 1 and not backend.hang:
            backend.hang = ("evil",)
            raise KeyError("edl-airflow/bounds")

    backend = Jobs(job("a", Bounds(1, 4), 1.0, 1), job("good", Bounds(1, 4), 1.0, 1), before_resize=before)
    snapshot = ClusterSnapshot(at=NOON, jobs=(*backend.jobs.values(),), capacity=await backend.capacity())
    done = await rescale._carry_out(snapshot, RescalingRules(), decide, backend, unrecorded)
    assert sorted(backend.wanted.values()) == [1, 4]
    (refused,) = done.refused.values()
    assert "KeyError: 'edl-airflow/bounds'" in refused


async def test_windows_that_nobody_understands_are_told_as_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch goes on to the next ones."""
    read = windows.read_windows

    def reads(text: str) -> Any:
        if "evil" in text:
            raise RecursionError("too deep")
        return read(text)

    class Api:
        def __init__(self) -> None:
            self.events: list[Manifest] = []

        async def watch(self, *_: str, **__: str) -> Any:
            for text, problem in (("evil: yes", "not read yet"), ("default: {cluster: 50%}", "not valid")):
                assert problem in vitals.windows_problem
                about = {"name": "w", "namespace": "n", "uid": "u", "resourceVersion": "1"}
                yield {"w": {"kind": "ConfigMap", "metadata": about, "data": {"windows.yaml": text}}}
            await asyncio.Event().wait()

        async def create(self, manifest: Manifest) -> None:
            self.events.append(manifest)

    monkeypatch.setattr(windows, "read_windows", reads)
    api: Any = Api()
    vitals = Vitals()
    followed = WindowsConfigMap(api, "w", vitals)
    task = asyncio.create_task(followed.follow())
    async with asyncio.timeout(HANGS_S):
        await followed.newer_than(0)
    task.cancel()
    assert vitals.windows_problem == ""
    (event,) = api.events
    assert event["reason"] == "InvalidWindows"
    assert "RecursionError: too deep" in event["message"]
