"""`edl checkpoints`: list, verify and prune checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
import msgspec

from edl_runtime.checkpoint.errors import UnfinishedCheckpointError, UnreadableCheckpointError
from edl_runtime.checkpoint.file_format import CheckpointInfo, position_of
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.cli.options import log_to_stderr, print_json, print_table
from edl_runtime.errors import SpecError
from edl_runtime.specs import Checkpoint

Seen = CheckpointInfo | UnreadableCheckpointError
"""A checkpoint, or the error of a folder with the name of one."""

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_url = click.argument("url")


@click.group
def checkpoints() -> None:
    """Show, verify and remove a training's checkpoints.

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

    If a manifest can't be read, generation and step are those of the name, and PROBLEM has the error. Files are only
    read by `edl checkpoints verify`.
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
        (name, "whole", "") if isinstance(seen, CheckpointInfo) else (name, seen.state, seen.problem)
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


def _seen(read: Callable[[str], CheckpointInfo], name: str) -> Seen:
    try:
        return read(name)
    except UnreadableCheckpointError as error:
        return error


def _plain(name: str, seen: Seen) -> dict[str, Any]:
    if isinstance(seen, UnreadableCheckpointError):
        return {"url": seen.url, "name": name, **position_of(name)._asdict(), "problem": seen.problem}
    known = {"size_bytes": seen.size_bytes, **msgspec.to_builtins(seen.manifest)}
    return {"url": seen.url, "name": name, **known, "problem": ""}


def _row(name: str, seen: Seen) -> list[str]:
    if isinstance(seen, UnreadableCheckpointError):
        return [*map(str, position_of(name)), "", "", "", "", "", name, seen.problem]
    manifest = seen.manifest
    created = datetime.fromtimestamp(manifest.created_at).astimezone()
    metrics = " ".join(f"{name}={value:g}" for name, value in manifest.metrics.items())
    numbers = [manifest.generation, manifest.step, manifest.epoch, manifest.world_size]
    return [*map(str, numbers), f"{created:%Y-%m-%d %H:%M:%S}", f"{seen.size_bytes / 1e6:.1f}", metrics, name, ""]
