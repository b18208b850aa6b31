"""`edl jobs`, `edl resize` and `edl stop`: shows and changes jobs and pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click
import msgspec

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.cli import backends
from edl_runtime.cli.options import print_json, print_table, read_settings
from edl_runtime.progress import MOST_POINTS, CurvePoint, Progress, progress_of_run, read_curve, read_progress
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect

CURVE_HEADINGS = ("STEP", "EPOCH", "AT", "LOSS", "SAMPLES/S", "INSTANCES", "METRICS")
CURVE_ROWS = 40


@click.command
@click.argument("name", required=False)
@click.option("--curve", is_flag=True, help="With NAME: show how its training has gone so far, step by step.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of jobs, or with NAME that job.")
def jobs(name: str | None, *, curve: bool, as_json: bool) -> None:
    """Show the jobs and pools of the work folder EDL_WORK_DIR, or of a cluster; with NAME, only that one.

    EDL_BACKEND=kubernetes reads the cluster of the kubeconfig; EDL_KUBE_CONTEXT and EDL_KUBE_NAMESPACE select context
    and namespace.

    Progress is shown when EDL_REDIS_URL is the Redis of the jobs. The curve of loss and speed is kept for a day after
    the last report; as a table it has at most 40 rows, as JSON all its points.
    """
    settings = read_settings(redis="the Redis of the job" if curve else "")
    if curve:
        if not name:
            raise click.UsageError("Give NAME with --curve.")
        points = asyncio.run(_read_curve(settings, name, most=MOST_POINTS if as_json else CURVE_ROWS))
        if as_json:
            print_json(points)
        elif points:
            print_table(CURVE_HEADINGS, map(_curve_row, points))
        else:
            click.echo(f"edl: nothing is known of a training {name!r}; its first report comes after a step", err=True)
        return
    statuses, reports = asyncio.run(_read(settings, name))
    if as_json:
        views = [_plain(status, reports.get(status.name)) for status in statuses]
        print_json(views[0] if name else views)
    elif statuses:
        headings = ["NAME", "KIND", "PHASE", "INSTANCES", "AGE", "PROGRESS OR REASON"]
        print_table(headings, [_row(status, reports.get(status.name)) for status in statuses])
    else:
        click.echo(f"no jobs in {backends.describe_location(settings)}")


async def _read(settings: RuntimeSettings, name: str | None) -> tuple[list[JobStatus], dict[str, Progress]]:
    backend = backends.open_backend(settings)
    statuses = [await backend.get(name)] if name else await backend.list()
    try:
        return statuses, await _progress(settings, statuses)
    except RegistryUnavailableError as error:
        click.echo(f"edl: progress is unknown: {error}", err=True)
        return statuses, {}


async def _read_curve(settings: RuntimeSettings, name: str, *, most: int) -> list[CurvePoint]:
    async with connect(settings.redis_url) as client:
        return await read_curve(client, settings.namespace, name, most=most)


def _curve_row(point: CurvePoint) -> list[str]:
    at = datetime.fromtimestamp(point.at).astimezone()
    loss = "" if point.loss is None else f"{point.loss:.4f}"
    metrics = " ".join(f"{name}={value:.4g}" for name, value in point.metrics.items())
    speed, instances = f"{point.samples_per_s:,.0f}", str(point.instances or "")
    return [str(point.step), str(point.epoch), f"{at:%Y-%m-%d %H:%M:%S}", loss, speed, instances, metrics]


async def _progress(settings: RuntimeSettings, jobs: Sequence[JobStatus]) -> dict[str, Progress]:
    if not settings.redis_url or not jobs:
        return {}
    async with connect(settings.redis_url) as client:
        reports = {
            job.name: progress_of_run(await read_progress(client, settings.namespace, job.name), job.created_at)
            for job in jobs
        }
    return {name: report for name, report in reports.items() if report}


def _plain(status: JobStatus, report: Progress | None) -> dict[str, Any]:
    return {**msgspec.to_builtins(status), "age_s": time.time() - status.created_at, "progress": report}


def _row(status: JobStatus, report: Progress | None) -> list[str]:
    running = sum(instance.phase == "running" for instance in status.instances)
    age = _duration(time.time() - status.created_at)
    progress = " · ".join(filter(None, [report.line(), report.verdict()])) if report else ""
    return [status.name, status.kind, status.phase, f"{running}/{status.wanted}", age, status.reason or progress]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s"))
    first = next((place for place, (number, _) in enumerate(parts) if number), 3)
    return " ".join(f"{number}{unit}" for number, unit in parts[first : first + 2])


@click.command(context_settings={"ignore_unknown_options": True})  # -1 is an invalid number, not an option
@click.argument("name")
@click.argument("instances", type=int)
@click.option("--json", "as_json", is_flag=True, help="Print the job's status as JSON.")
def resize(name: str, instances: int, *, as_json: bool) -> None:
    """Resize job or pool NAME to so many INSTANCES, within its bounds; 0 suspends it.

    A suspended job continues when it is resized again: elastic trainers from the checkpoint that they wrote when they
    were suspended, others from the beginning.

    Returns when the request is recorded; the instance with the highest number leaves first.
    """
    status = asyncio.run(backends.open_backend(read_settings()).resize(name, instances))
    if as_json:
        print_json(status)
    elif status.is_suspended:
        click.echo(f"{status.name} is suspended; `edl resize {status.name} N` or a rescaling resumes it")
    else:
        click.echo(f"{status.name} will have {status.wanted} instance{'' if status.wanted == 1 else 's'}")


@click.command
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print its last status as JSON.")
def stop(name: str, *, as_json: bool) -> None:
    """Stop and delete job or pool NAME, whoever started it. Its output is kept.

    All instances get SIGTERM at once, and SIGKILL after their grace period. Elastic trainers write a last checkpoint in
    that time; if they can't, the error is shown.

    Returns when its last process has ended. The Airflow task that runs it fails without a retry.
    """
    status, errors, has_log = asyncio.run(_stop(backends.open_backend(read_settings()), name))
    for error in errors:
        click.echo(error, err=True)
    if as_json:
        print_json(status)
    else:
        log = f"`edl logs {name}` shows its output" if has_log else "its output could not be kept"
        click.echo(f"{name} is stopped; {log}")


async def _stop(backend: Backend, name: str) -> tuple[JobStatus, list[str], bool]:
    """Return its last status, the errors of its agents, and whether its log is kept."""
    status = await backend.get(name)
    await backend.delete(name)
    try:
        last = {line.text async for line in backend.logs(name, tail=1)}
    except UnknownJobError:
        return status, [], False
    ended_here = status.elastic and not status.has_ended
    return status, sorted(line for line in last if ended_here and line.startswith("edl: ")), True
