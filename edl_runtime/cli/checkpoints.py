"""`edl checkpoints`: which checkpoints there are, whether they are whole, and which may go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click
import msgspec
import structlog

from edl_runtime.checkpoint.manifest import CheckpointInfo
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.cli.tables import print_table
from edl_runtime.errors import DamagedCheckpointError, SpecError, UnfinishedCheckpointError
from edl_runtime.specs import Checkpoint

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_url = click.argument("url")


@click.group
def checkpoints() -> None:
    """Show, verify and remove a training's checkpoints.

    URL is where the training keeps them: a folder's path, or a URL as s3://bucket/job. For s3 the extra edl-airflow[s3]
    and the usual variables (AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID, ...) are needed. All print
    JSON with --json.
    """
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


@checkpoints.command
@_url
@_as_json
def ls(url: str, *, as_json: bool) -> None:
    """Show the checkpoints at URL, newest first, as their manifests have them."""
    infos = CheckpointStore(Checkpoint(url=url)).list()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode([_plain(info) for info in infos])))
    elif infos:
        headings = ["GENERATION", "STEP", "EPOCH", "INSTANCES", "CREATED", "MB", "METRICS", "NAME"]
        print_table(headings, [_row(info) for info in infos])
    else:
        click.echo(f"no checkpoints at {url}")


@checkpoints.command
@_url
@_as_json
def verify(url: str, *, as_json: bool) -> None:
    """Read all checkpoints at URL and say which are whole.

    Exit status 1 if one is damaged, or none is whole. One without a manifest is being written or removed, or was never
    finished: it is said, and is no damage.
    """
    store = CheckpointStore(Checkpoint(url=url))
    found = [(name, *_state(store, name)) for name in store.names()]
    if as_json:
        views = [{"name": name, "state": state, "damage": damage} for name, state, damage in found]
        click.echo(msgspec.json.format(msgspec.json.encode(views)))
    elif found:
        print_table(["NAME", "STATE", "DAMAGE"], [[name, state, "\n".join(damage)] for name, state, damage in found])
    else:
        click.echo(f"no checkpoints at {url}")
    states = {state for _, state, _ in found}
    if "damaged" in states or "whole" not in states:
        sys.exit(1)


@checkpoints.command
@_url
@click.option("--keep-last", type=click.IntRange(1), default=3, show_default=True, help="How many of the newest stay.")
@click.option("--keep-every", type=click.IntRange(1), help="One of each so many steps stays for good.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@_as_json
def prune(url: str, *, keep_last: int, keep_every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove old checkpoints at URL, and what was left unfinished more than an hour ago.

    The newest is read before anything is removed: while none is whole, all stay.
    """
    store = CheckpointStore(Checkpoint(url=url, keep_last=keep_last, keep_every=keep_every))
    if not store.exists():
        raise SpecError("URL", url, "a place where checkpoints are kept; there is none")
    doomed = store.prune(dry_run=dry_run)
    if as_json:
        views = [{"name": name, "removed": not dry_run} for name in doomed]
        click.echo(msgspec.json.format(msgspec.json.encode(views)))
        return
    for name in doomed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {name}")
    if not doomed:
        click.echo(f"nothing to remove at {url}")


def _state(store: CheckpointStore, name: str) -> tuple[str, Sequence[str]]:
    try:
        store.verify(name)
    except UnfinishedCheckpointError as error:
        return "unfinished", error.damage
    except DamagedCheckpointError as error:
        return "damaged", error.damage
    return "whole", ()


def _plain(info: CheckpointInfo) -> dict[str, Any]:
    return {"url": info.url, "name": info.name, "size_bytes": info.size_bytes, **msgspec.to_builtins(info.manifest)}


def _row(info: CheckpointInfo) -> list[str]:
    manifest = info.manifest
    created = datetime.fromtimestamp(manifest.created_at).astimezone()
    metrics = " ".join(f"{name}={value:g}" for name, value in manifest.metrics.items())
    numbers = [manifest.generation, manifest.step, manifest.epoch, manifest.world_size]
    return [*map(str, numbers), f"{created:%Y-%m-%d %H:%M:%S}", f"{info.size_bytes / 1e6:.1f}", metrics, info.name]
