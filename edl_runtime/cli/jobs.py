"""`edl jobs`, `edl resize` and `edl stop`: shows and changes jobs and pools."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any

import click
import msgspec

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import Backend, InstanceStatus, JobStatus
from edl_runtime.cli import backends
from edl_runtime.cli.completion import job_names
from edl_runtime.cli.options import print_json, print_table, read_settings
from edl_runtime.concurrency import all_completed, all_ended
from edl_runtime.errors import counted
from edl_runtime.monitor.reports import JobReport, format_duration, read_reports, unknown_reports
from edl_runtime.monitor.snapshot import JobLine, job_line
from edl_runtime.progress import MOST_POINTS, CurvePoint, read_curve
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect

CURVE_HEADINGS = ("STEP", "EPOCH", "AT", "LOSS", "SAMPLES/S", "INSTANCES", "METRICS")
CURVE_ROWS = 40


@click.command
@click.argument("name", required=False, shell_complete=job_names)
@click.option("--curve", is_flag=True, help="With NAME: show how its training has gone so far, step by step.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of jobs, or with NAME that job.")
def jobs(name: str | None, *, curve: bool, as_json: bool) -> None:
    """Show the jobs and pools of the work folder EDL_WORK_DIR, or of a cluster; with NAME, only that one.

    EDL_BACKEND=kubernetes reads the cluster of the kubeconfig; EDL_KUBE_CONTEXT and EDL_KUBE_NAMESPACE select context
    and namespace.

    Progress is shown when EDL_REDIS_URL is the Redis of the jobs, and which jobs are orphans: their Airflow task has
    ended without them, and they will be stopped. The curve of loss and speed is kept for a day after the last report;
    as a table it has at most 40 rows, as JSON all its points.
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
    lines = {status.name: job_line(status, reports.get(status.name)) for status in statuses}
    if as_json:
        views = [_plain(status, lines[status.name]) for status in statuses]
        print_json(views[0] if name else views)
    elif statuses:
        headings = ["NAME", "KIND", "STATE", "INSTANCES", "AGE", "PROGRESS OR REASON"]
        print_table(headings, [_row(status, lines[status.name]) for status in statuses])
    else:
        click.echo(f"no jobs in {backends.describe_location(settings)}")


async def _read(settings: RuntimeSettings, name: str | None) -> tuple[list[JobStatus], dict[str, JobReport]]:
    backend = backends.open_backend(settings)
    statuses = [await backend.get(name)] if name else await backend.list()
    if not settings.redis_url:
        return statuses, {}
    try:
        async with connect(settings.redis_url) as client:
            return statuses, await read_reports(client, settings.namespace, statuses)
    except RegistryUnavailableError as error:
        click.echo(f"edl: progress is unknown: {error}", err=True)
        return statuses, unknown_reports(statuses)


async def _read_curve(settings: RuntimeSettings, name: str, *, most: int) -> list[CurvePoint]:
    async with connect(settings.redis_url) as client:
        return await read_curve(client, settings.namespace, name, most=most)


def _curve_row(point: CurvePoint) -> list[str]:
    at = datetime.fromtimestamp(point.at).astimezone()
    loss = "" if point.loss is None else f"{point.loss:.4f}"
    metrics = " ".join(f"{name}={value:.4g}" for name, value in point.metrics.items())
    speed, instances = f"{point.samples_per_s:,.0f}", str(point.instances or "")
    return [str(point.step), str(point.epoch), f"{at:%Y-%m-%d %H:%M:%S}", loss, speed, instances, metrics]


def _plain(status: JobStatus, line: JobLine) -> dict[str, Any]:
    known = {**msgspec.to_builtins(line), **msgspec.to_builtins(status)}  # a job's `reason` is its status's
    return {**known, "age_s": time.time() - status.created_at}


def _row(status: JobStatus, line: JobLine) -> list[str]:
    report = line.progress
    age = format_duration(time.time() - status.created_at)
    saved = line.checkpoint
    checkpoint = f"checkpoint of step {saved.step}, {format_duration(time.time() - saved.at)} old" if saved else ""
    progress = " · ".join(filter(None, [report.line(), line.limit])) if report else ""
    orphan = line.trouble if line.orphan else ""
    what = orphan or status.why or " · ".join(filter(None, [line.trouble, progress, checkpoint]))
    return [status.name, status.kind, line.state, f"{line.running}/{status.wanted}", age, what]


@click.command(context_settings={"ignore_unknown_options": True})  # -1 is an invalid number, not an option
@click.argument("name", shell_complete=job_names)
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
        click.echo(f"{status.name} will have {counted(status.wanted, 'instance')}")


@click.command
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=job_names)
@click.option("--json", "as_json", is_flag=True, help="Print the last status as JSON; of several a list.")
def stop(names: tuple[str, ...], *, as_json: bool) -> None:
    """Stop and delete jobs and pools, whoever started them. Their output is kept.

    All instances get SIGTERM at once, and SIGKILL after their grace period. Elastic trainers write a last checkpoint in
    that time; if they can't, the error is shown, and this exits with 1 once all is stopped. Where one of the names is
    unknown, nothing is stopped.

    Returns when the last process has ended. The Airflow task that runs such a job fails without a retry. The job of a
    TrainingJob is made again until that is deleted.
    """
    stopped = asyncio.run(_stop_all(backends.open_backend(read_settings()), dict.fromkeys(names), quiet=as_json))
    if as_json:
        statuses = [status for status, _ in stopped]
        print_json(statuses if len(names) > 1 else statuses[0])
    if any(backends.is_unwritten(error) for _, errors in stopped for error in errors):
        sys.exit(1)


async def _stop_all(backend: Backend, names: Iterable[str], *, quiet: bool) -> list[tuple[JobStatus, list[str]]]:
    statuses = await all_completed(*(backend.get(name) for name in names))
    return await all_ended(*(_stop(backend, status, quiet=quiet) for status in statuses))


async def _stop(backend: Backend, status: JobStatus, *, quiet: bool) -> tuple[JobStatus, list[str]]:
    """Stop a job, and say so; return its last status, and the errors of its agents."""
    name = status.name
    await backend.delete(name)
    last: set[str] | None = None
    with suppress(UnknownJobError):
        last = {line.text async for line in backend.logs(name, tail=1)}
    ended_here = status.elastic and not status.has_ended
    errors = sorted(line for line in last or () if ended_here and line.startswith("edl: "))
    for error in errors:
        click.echo(error, err=True)
    if not quiet:
        click.echo(f"{name} is stopped; {_what_follows(status, backend, has_log=last is not None)}")
    return status, errors


def _what_follows(status: JobStatus, backend: Backend, *, has_log: bool) -> str:
    never_began = status.instances and not any(map(_has_begun, status.instances))
    output = "it has no output, as no instance had started" if never_began else "no output of it is kept"
    if has_log:
        output = f"`edl logs {status.name}` shows its output"
    if status.has_ended or not (training_job := status.training_job):
        return output
    delete = f"kubectl delete trainingjob {training_job} -n {backend.place}"
    return f"while there is a TrainingJob {training_job!r}, it is made again: end it by `{delete}`; {output}"


def _has_begun(instance: InstanceStatus) -> bool:
    return instance.phase != "pending" or instance.restarts + instance.disruptions > 0
