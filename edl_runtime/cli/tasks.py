"""`edl tasks`: the tasks of a job's readers, and putting failed ones back."""

from __future__ import annotations

import asyncio

import click

from edl_runtime.cli.completion import job_names
from edl_runtime.cli.options import print_json, print_table, read_settings
from edl_runtime.errors import SpecError, counted
from edl_runtime.settings import RuntimeSettings
from edl_runtime.shards.tasks import TaskQueue, TasksReport
from edl_runtime.store.redis_client import connect


@click.command
@click.argument("job", shell_complete=job_names)
@click.option("--requeue", metavar="ID|failed", help="Put this failed task back, or all that have failed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tasks(job: str, *, requeue: str | None, as_json: bool) -> None:
    """Show the tasks that the readers of JOB share, in the current pass: those of `cloud_reader`.

    A task is todo, pending while a reader holds it, done, or failed after too many failures. Pending and failed ones
    are listed, with their shards.

    Uses the Redis of EDL_REDIS_URL and the namespace EDL_NAMESPACE.
    """
    settings = read_settings(redis="the Redis that has the job's tasks")
    report = asyncio.run(_read(settings, job, requeue))
    if as_json:
        print_json(report)
    else:
        _print(report)


async def _read(settings: RuntimeSettings, job: str, requeue: str | None) -> TasksReport:
    async with connect(settings.redis_url) as client:
        queue = TaskQueue(client, settings.namespace, job, worker="")
        if requeue is not None:
            await _requeue(queue, requeue)
        return await queue.report()


async def _requeue(queue: TaskQueue, which: str) -> None:
    if which != "failed" and not which.isdecimal():
        raise SpecError("--requeue", which, "the ID of a failed task, or failed")
    count = await queue.requeue(None if which == "failed" else int(which))
    if not count and which != "failed":
        failed = ", ".join(str(task.number) for task in (await queue.report()).failed)
        raise SpecError(
            "--requeue", which, f"the ID of a task that has failed in this pass: {failed or 'there is none'}"
        )
    click.echo(f"put back {counted(count, 'task')}", err=True)


def _print(report: TasksReport) -> None:
    counts = [report.pass_number, report.tasks, report.todo, len(report.pending), report.done, len(report.failed)]
    print_table(["PASS", "TASKS", "TODO", "PENDING", "DONE", "FAILED"], [list(map(str, counts))])
    if report.pending:
        click.echo()
        rows = [
            [str(task.number), task.worker, f"{task.held_s:.0f} s ago", f"in {task.left_s:.0f} s", _lines(task.shards)]
            for task in report.pending
        ]
        print_table(["PENDING", "WORKER", "SINCE", "UNTIL", "SHARDS"], rows)
    if report.failed:
        click.echo()
        failed = [[str(task.number), _lines(task.reasons), _lines(task.shards)] for task in report.failed]
        print_table(["FAILED", "WHY", "SHARDS"], failed)


def _lines(texts: tuple[str, ...]) -> str:
    return "\n".join(texts)
