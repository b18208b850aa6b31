"""`edl checkpoints`: list, verify, prune and request checkpoints."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
import msgspec

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.checkpoint.errors import UnfinishedCheckpointError, UnreadableCheckpointError
from edl_runtime.checkpoint.file_format import CheckpointInfo, position_of
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.cli import backends
from edl_runtime.cli.completion import job_names
from edl_runtime.cli.options import print_json, print_table, read_settings
from edl_runtime.elastic.errors import NoCheckpointError
from edl_runtime.elastic.rendezvous.group_status import group_status
from edl_runtime.elastic.rendezvous.redis_store import Event
from edl_runtime.elastic.rendezvous.requests import await_checkpoint, request_checkpoint
from edl_runtime.errors import SpecError
from edl_runtime.log import log_to_stderr
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint
from edl_runtime.store.redis_client import connect

Seen = CheckpointInfo | UnreadableCheckpointError
"""A checkpoint, or the error of a folder with the name of one."""

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_url = click.argument("url")


@click.group
def checkpoints() -> None:
    """Show, verify, remove and request a training's checkpoints.

    URL is where the training keeps them: a folder's path, or a URL as s3://bucket/job. For s3 the extra edl-airflow[s3]
    and the usual variables (AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID, ...) are needed. All print
    JSON with --json.
    """
    log_to_stderr()


@checkpoints.command
@_url
@_as_json
def ls(url: str, *, as_json: bool) -> None:
    """Show the checkpoints at URL, newest first, by their manifests.

    If a manifest can't be read, generation and step are those of the name, and PROBLEM has the error; it also says
    which weights have NaN or infinity. Files are only read by `edl checkpoints verify`.
    """
    store = CheckpointStore(Checkpoint(url=url))
    found = [(name, _seen(store.info, name)) for name in store.names()]
    if as_json:
        print_json([_plain(name, seen) for name, seen in found])
    elif found:
        headings = ["GENERATION", "STEP", "EPOCH", "INSTANCES", "CREATED", "MB", "METRICS", "NAME", "PROBLEM"]
        print_table(headings, [_row(name, seen) for name, seen in found])
    else:
        click.echo(f"no checkpoints at {url}")


@checkpoints.command
@_url
@_as_json
def verify(url: str, *, as_json: bool) -> None:
    """Read all checkpoints at URL and show which are whole.

    Exit status 1 if one is damaged or of an unknown format, or none is whole. A checkpoint without a manifest is being
    written or removed, or was never finished; it is listed, but not as damaged.
    """
    store = CheckpointStore(Checkpoint(url=url))
    found = [(name, _seen(store.verify, name)) for name in store.names()]
    states = [
        (name, "whole", seen.defect) if isinstance(seen, CheckpointInfo) else (name, seen.state, seen.problem)
        for name, seen in found
    ]
    if as_json:
        views = [{"name": name, "state": state, "problem": problem} for name, state, problem in states]
        print_json(views)
    elif found:
        print_table(["NAME", "STATE", "PROBLEM"], states)
    else:
        click.echo(f"no checkpoints at {url}")
    kinds = {type(seen) for _, seen in found}
    if CheckpointInfo not in kinds or not kinds <= {CheckpointInfo, UnfinishedCheckpointError}:
        sys.exit(1)


@checkpoints.command
@_url
@click.option("--keep-last", type=click.IntRange(1), default=3, show_default=True, help="How many of the newest stay.")
@click.option("--keep-every", type=click.IntRange(1), help="One of each so many steps stays for good.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@_as_json
def prune(url: str, *, keep_last: int, keep_every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove old checkpoints at URL, and those left unfinished for more than an hour.

    First the newest is read: while none is whole, all stay. A finished checkpoint with an unreadable manifest stays,
    too; `edl checkpoints ls` shows its problem.
    """
    store = CheckpointStore(Checkpoint(url=url, keep_last=keep_last, keep_every=keep_every))
    if not store.exists():
        raise SpecError("URL", url, "an existing folder or prefix with checkpoints")
    doomed = store.prune(dry_run=dry_run)
    if as_json:
        views = [{"name": name, "removed": not dry_run} for name in doomed]
        print_json(views)
        return
    for name in doomed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {name}")
    if not doomed:
        click.echo(f"nothing to remove at {url}")


@checkpoints.command
@click.argument("job", shell_complete=job_names)
@click.option("--no-wait", is_flag=True, help="Return once it is requested.")
@_as_json
def request(job: str, *, no_wait: bool, as_json: bool) -> None:
    """Let JOB write a checkpoint after its current step, and show which it was.

    All ranks train on meanwhile. A checkpoint that is being written is completed first. If an instance is lost or the
    job is resized, there is still one checkpoint for the request; requests that come before it begins share it.

    Uses the Redis of EDL_REDIS_URL and the namespace EDL_NAMESPACE. Ctrl-C stops waiting, not the request.
    """
    saved = asyncio.run(_request(read_settings(redis="the Redis of the job"), job, wait=not no_wait))
    if as_json:
        view = {"job": job, "requested": True}
        print_json({**view, **_position(saved)} if saved else view)
    elif saved:
        click.echo(f"checkpoint of step {saved.step}, epoch {saved.epoch}: {saved.url}")
    else:
        click.echo(f"{job} writes a checkpoint after its current step; `edl events {job} -f` shows it")


async def _request(settings: RuntimeSettings, job: str, *, wait: bool) -> Event | None:
    async with connect(settings.redis_url) as client:
        try:
            number = await request_checkpoint(client, settings.namespace, job)
        except NoCheckpointError:
            await _check_job(settings, job)
            raise
        return await await_checkpoint(client, settings.namespace, job, number) if wait else None


async def _check_job(settings: RuntimeSettings, job: str) -> None:
    """Raise a clearer error if the backend knows why a job writes none; agents by hand are unknown to it."""
    try:
        status = await backends.open_backend(settings).get(job)
    except UnknownJobError:
        async with connect(settings.redis_url) as client:
            if await group_status(client, settings.namespace, job) is None:
                raise
        return
    if status.has_ended:
        raise NoCheckpointError(job, f"it has ended ({status.phase})")
    if status.is_suspended:
        raise NoCheckpointError(job, f"it is suspended; `edl resize {job} N` resumes it")
    if not status.elastic:
        raise NoCheckpointError(job, "only elastic trainings write checkpoints on request, and it is none")


def _position(saved: Event) -> dict[str, Any]:
    return {"step": saved.step, "epoch": saved.epoch, "generation": saved.generation, "url": saved.url}


def _seen(read: Callable[[str], CheckpointInfo], name: str) -> Seen:
    try:
        return read(name)
    except UnreadableCheckpointError as error:
        return error


def _plain(name: str, seen: Seen) -> dict[str, Any]:
    if isinstance(seen, UnreadableCheckpointError):
        return {"url": seen.url, "name": name, **position_of(name)._asdict(), "problem": seen.problem}
    known = {"size_bytes": seen.size_bytes, **msgspec.to_builtins(seen.manifest)}
    return {"url": seen.url, "name": name, **known, "problem": seen.defect}


def _row(name: str, seen: Seen) -> list[str]:
    if isinstance(seen, UnreadableCheckpointError):
        return [*map(str, position_of(name)), "", "", "", "", "", name, seen.problem]
    manifest = seen.manifest
    created = datetime.fromtimestamp(manifest.created_at).astimezone()
    metrics = " ".join(f"{name}={value:g}" for name, value in manifest.metrics.items())
    numbers = [manifest.generation, manifest.step, manifest.epoch, manifest.world_size]
    size = f"{seen.size_bytes / 1e6:.1f}"
    return [*map(str, numbers), f"{created:%Y-%m-%d %H:%M:%S}", size, metrics, name, seen.defect]
