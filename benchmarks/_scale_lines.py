"""One line of `benchmarks/scale.py`, in a process of its own: python _scale_lines.py LINE, with the variables of `edl`.

Prints a JSON list of `Figure`s. Requests and bytes are those of this process, counted at the client.
"""

from __future__ import annotations

import asyncio
import io
import os
import resource
import secrets
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import _scale_triggerers
import msgspec
from _scale_world import TEACHERS, TRAINERS, fake_pod, job_names, spec_of

from edl_runtime.autoscale import rescale
from edl_runtime.autoscale.history import RescaleOutcome
from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.backends.kubernetes import client as kubernetes_client
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.kubernetes.client import KubernetesClient
from edl_runtime.cli import autoscale, backends, jobs
from edl_runtime.cli.options import read_settings
from edl_runtime.monitor.snapshot import take_snapshot
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

SETTLES_S = 5.0
"""Between two looks of one process."""

IDLE_PASSES = 9
"""So many, because Python's garbage collector makes some decisions longer."""

STEADY_S = float(os.environ.get("EDL_SCALE_STEADY_S", "60"))
"""How long a follower of tasks is watched."""


class Figure(msgspec.Struct, kw_only=True):
    """What one thing has cost: seconds, own CPU seconds, requests by verb, megabytes read, resident megabytes.

    `extra`: the line's own figures, by name.
    """

    name: str
    wall_s: float = 0.0
    cpu_s: float = 0.0
    requests: dict[str, int] = {}
    read_mb: float = 0.0
    rss_mb: float = 0.0
    extra: dict[str, float] = {}


class _Counted:
    requests: ClassVar[Counter[str]] = Counter()
    bytes = 0


@contextmanager
def counting() -> Iterator[None]:
    """Count all requests to the API server."""
    send, decode = KubernetesClient._send, kubernetes_client._decode_body  # noqa: SLF001

    async def counted(self: KubernetesClient, request: Any) -> Any:
        verb = "WATCH" if "watch" in request.query else "LOG" if request.path.endswith("/log") else request.method
        _Counted.requests[f"{verb} (dry run)" if "dryRun" in request.query else verb] += 1
        return await send(self, request)

    def decoded(content: bytes, decoder: Any) -> Any:
        _Counted.bytes += len(content)
        return decode(content, decoder)

    with (
        mock.patch.object(KubernetesClient, "_send", counted),
        mock.patch.object(kubernetes_client, "_decode_body", decoded),
    ):
        yield


@contextmanager
def figure(name: str, found: list[Figure]) -> Iterator[Figure]:
    """Measure the block."""
    one = Figure(name=name, extra={})
    before, read = Counter(_Counted.requests), _Counted.bytes
    began, cpu = time.perf_counter(), time.process_time()
    yield one
    one.wall_s, one.cpu_s = time.perf_counter() - began, time.process_time() - cpu
    one.requests, one.read_mb = dict(_Counted.requests - before), (_Counted.bytes - read) / 1e6
    one.rss_mb = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    found.append(one)


def first_pass(_: RuntimeSettings, found: list[Figure]) -> None:
    """`edl autoscale`, once, from its start to its last patch."""
    told = io.TextIOWrapper(io.BytesIO())
    with figure("a pass with changes", found) as one, redirect_stdout(told):
        autoscale.autoscale.main(["--json"], standalone_mode=False)
    done = msgspec.json.decode(_text(told), type=RescaleOutcome)
    one.extra = {"changes": len(done.plan.changes), "refused": len(done.refused)}


def _text(told: io.TextIOWrapper) -> str:
    told.seek(0)
    return told.read()


async def idle_pass(settings: RuntimeSettings, found: list[Figure]) -> None:
    """Later passes of `edl autoscale --every` with nothing to do: one of them, and how long all take to decide."""
    decided: list[float] = []
    make_plan = rescale.make_plan

    def timed(*given: Any, **more: Any) -> Any:
        began = time.process_time()
        plan = make_plan(*given, **more)
        decided.append(time.process_time() - began)
        return plan

    async with backends.watch_backend(settings) as backend, connect(settings.redis_url) as client:
        await rescale.rescale(backend, client, settings.namespace, RescalingRules())
        await asyncio.sleep(SETTLES_S)
        with (
            figure("a pass with nothing to do", found) as one,
            mock.patch.object(rescale, "make_plan", timed),
        ):
            done = await rescale.rescale(backend, client, settings.namespace, RescalingRules())
        with mock.patch.object(rescale, "make_plan", timed):
            for _ in range(IDLE_PASSES - 1):
                await rescale.rescale(backend, client, settings.namespace, RescalingRules())
        one.extra = {
            "changes": len(done.plan.changes),
            "decide_ms": statistics.median(decided) * 1000,
            "worst_decide_ms": max(decided) * 1000,
        }


def list_jobs(_: RuntimeSettings, found: list[Figure]) -> None:
    """`edl jobs`."""
    told = io.TextIOWrapper(io.BytesIO())
    with figure("edl jobs", found) as one, redirect_stdout(told):
        jobs.jobs.main([], standalone_mode=False)
    one.extra = {"jobs": len(_text(told).splitlines()) - 1}


async def monitor(settings: RuntimeSettings, found: list[Figure]) -> None:
    """The looks of `edl monitor`."""
    async with backends.watch_backend(settings) as backend, connect(settings.redis_url) as client:
        for name in ("edl monitor, first look", "edl monitor, next look"):
            with figure(name, found):
                await take_snapshot(backend, client, settings.namespace)
            await asyncio.sleep(SETTLES_S)


async def one_job(settings: RuntimeSettings, found: list[Figure]) -> None:
    """Submit, resize and stop a training and a pool beside all others."""
    connecting, namespace = backends.kubernetes_place(settings)
    backend = KubernetesBackend(connecting, namespace=namespace, defaults=fake_pod())
    for kind, size in (("trainer", TRAINERS), ("pool", TEACHERS)):
        spec = msgspec.structs.replace(spec_of(f"one-{kind}-{secrets.token_hex(2)}", kind, grows=True))
        with figure(f"submit a {kind}", found):
            await backend.submit(spec, token="benchmark/1", secrets={"KEY": "value"})
        while [one.phase for one in (await backend.get(spec.name)).instances] != ["running"] * size:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        await asyncio.sleep(SETTLES_S)
        with figure(f"resize a {kind}", found):
            await backend.resize(spec.name, size + 1)
        await asyncio.sleep(SETTLES_S)
        with figure(f"stop a {kind}", found):
            await backend.delete(spec.name)


def _half_of_trainings() -> list[str]:
    """Return every second name. A triggerer does not list all jobs, and a list would leave its memory larger."""
    return job_names(int(os.environ["EDL_SCALE_JOBS"]))[::2]


async def follow(settings: RuntimeSettings, found: list[Figure]) -> None:
    """What a triggerer does for half of the trainings, as deferred tasks: the first look, and a minute after it."""
    from edl_airflow.client import open_client
    from edl_airflow.hooks.edl import EdlConnection
    from edl_airflow.runtime import runner
    from edl_airflow.runtime.spec import KubernetesBackendRef, TaskSpec

    place = KubernetesBackendRef(namespace=settings.kube_namespace, conn_id="cluster", pod=fake_pod())
    connection = EdlConnection(redis_url=settings.redis_url, namespace=settings.namespace, place=place)
    names = _half_of_trainings()
    looked: set[str] = set()
    all_looked = asyncio.Event()

    async def task(name: str) -> None:
        spec = TaskSpec(
            conn_id="edl", place=place, token="benchmark/0", trainer_job=spec_of(name, "trainer"), started=True
        )
        async with open_client(connection) as client:
            await client.backend.get(name)
            looked.add(name)
            if len(looked) == len(names):
                all_looked.set()
            await runner.run(spec, client, lambda _: None)

    async with asyncio.TaskGroup() as tasks:
        with figure("a triggerer, first look", found) as one:
            running = [tasks.create_task(task(name)) for name in names]
            await all_looked.wait()
        one.extra = {"tasks": len(names)}
        await asyncio.sleep(2 * SETTLES_S)
        with figure("a triggerer, later", found) as one:
            await asyncio.sleep(STEADY_S)
        one.extra = {
            "tasks": len(names),
            "requests_per_min": (sum(one.requests.values()) - one.requests.get("LOG", 0)) * 60 / one.wall_s,
            "logs_per_min": one.requests.get("LOG", 0) * 60 / one.wall_s,
            "core_share": one.cpu_s / one.wall_s,
            "open_files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        }
        for each in running:
            each.cancel()


async def lose_triggerer(settings: RuntimeSettings, found: list[Figure]) -> None:
    """A triggerer follows half of the trainings and is killed; another follows all of them, by their first look."""
    home = Path(os.environ["AIRFLOW_HOME"])
    os.environ |= _scale_triggerers.airflow_environment(settings, home)

    from edl_airflow.runtime.spec import KubernetesBackendRef, TaskSpec
    from edl_airflow.triggers.task import EdlTaskTrigger

    place = KubernetesBackendRef(namespace=settings.kube_namespace, conn_id="cluster", pod=fake_pod())
    names = _half_of_trainings()
    specs = (
        TaskSpec(conn_id="edl", place=place, token="benchmark/0", trainer_job=spec_of(name, "trainer"))
        for name in names
    )
    _scale_triggerers.defer({spec.name: EdlTaskTrigger(msgspec.to_builtins(spec)) for spec in specs}, home)
    looked = [keys.started_by(settings.namespace, name) for name in names]
    async with connect(settings.redis_url) as client:

        async def all_looked() -> None:
            while await client.exists(*looked) < len(looked):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

        await client.delete(*looked)
        with _scale_triggerers.triggerer(home / "first.log") as first:
            with figure("a triggerer, its start", found):
                await all_looked()
            with _scale_triggerers.triggerer(home / "second.log") as second:
                while _scale_triggerers.alive_triggerers() < 2:  # noqa: ASYNC110
                    await asyncio.sleep(1.0)
                await asyncio.sleep(SETTLES_S)
                await client.delete(*looked)
                _scale_triggerers.kill(first)
                with figure("a triggerer, after a death", found) as one:
                    await all_looked()
                await asyncio.sleep(2 * SETTLES_S)
                one.extra = {"tasks": len(names), **_scale_triggerers.memory_mb(second)}


LINES: dict[str, Callable[[RuntimeSettings, list[Figure]], Coroutine[Any, Any, None] | None]] = {
    line.__name__: line for line in (first_pass, idle_pass, list_jobs, monitor, one_job, follow, lose_triggerer)
}


def main() -> None:
    found: list[Figure] = []
    with counting():
        measuring = LINES[sys.argv[1]](read_settings(), found)
        if measuring:
            asyncio.run(measuring)
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
