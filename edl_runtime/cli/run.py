"""`edl run`: an elastic training on this machine."""

from __future__ import annotations

import asyncio
import math
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.checkpoint.storage import LocalStorage, storage_at
from edl_runtime.cli.backends import remove_ended_job, warn_of_eviction
from edl_runtime.cli.options import priority_option, weight_option
from edl_runtime.elastic.agent.launch import elastic_job, parse_entrypoint
from edl_runtime.elastic.comm.agent_protocol import GEARS, Gear
from edl_runtime.elastic.errors import InitNotCalledError
from edl_runtime.elastic.rendezvous import events
from edl_runtime.elastic.rendezvous.redis_store import request_stop
from edl_runtime.errors import EX_CONFIG, SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import NAME_LIMIT, Bounds, Checkpoint, JobSpec
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

SHOWN = frozenset({"forming", "resumed", "failed", "late", "waiting", "saved", "note", "stop", "ended"})
"""Events that stand among the lines of the log."""

RETRY_AFTER_S = 1.0
"""How long events are left alone while Redis is away."""


class _Seconds(click.FloatRange):
    """A range of numbers that are finite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is no number of seconds", param, ctx)
        return number


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--instances", required=True, metavar="MIN:MAX", help="Fewest and most that train together, as in 1:4.")
@click.option("--start", type=int, help="Instances to begin with; by default the fewest.")
@click.option("--gear", type=click.Choice(GEARS), default="live", show_default=True, help="As in `edl agent`.")
@click.option("--name", default="", help="Of the job; by default that of the script.")
@click.option("--checkpoint", default="", metavar="URL", help="Where checkpoints are kept; EDL_CHECKPOINT by default.")
@click.option("--every-steps", type=click.IntRange(1), help="A checkpoint each so many steps.")
@click.option("--every-s", type=_Seconds(0, min_open=True), help="A checkpoint each so many seconds.")
@click.option("--grace-s", type=_Seconds(0, min_open=True), default=30.0, show_default=True, help="To leave in.")
@priority_option
@weight_option
@click.option("--detach", is_flag=True, help="Return once it is started; needs EDL_REDIS_URL.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON objects: lines with instance and text, and events.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    *,
    instances: str,
    start: int | None,
    gear: Gear,
    name: str,
    checkpoint: str,
    every_steps: int | None,
    every_s: float | None,
    grace_s: float,
    priority: int,
    weight: float,
    detach: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Train COMMAND, a script with its arguments, by as many instances as wanted; `edl resize` changes how many.

    Shows what they write and what becomes of them until the job ends. Ctrl-C stops it with a checkpoint, a second one
    at once; closing the terminal stops it with a checkpoint, too, but for nohup. Without EDL_REDIS_URL a Redis is
    started that lives as long as this command.

    Scripts see the environment of this command. Exits with 0 when all is trained or the job was stopped.
    """
    if command[0].startswith("-"):  # which click has left for the command
        raise click.NoSuchOption(command[0].partition("=")[0])
    bounds = Bounds.parse(instances, "--instances")
    settings = RuntimeSettings.from_env(os.environ)
    if detach and not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", "the Redis by which the instances agree, for it has to outlive --detach")
    keeping = _checkpoint(settings, checkpoint=checkpoint, every_steps=every_steps, every_s=every_s)
    script = JobSpec(
        name=name or _name_of(command),
        kind="trainer",
        command=command,
        bounds=Bounds(1, 1),
        instances=1,
        env=keeping.to_env() if keeping else {},
        cwd=str(Path.cwd()),
        priority=priority,
        weight=weight,
    )
    spec = elastic_job(script, bounds, gear=gear, start=start, grace_s=grace_s)
    if parse_entrypoint(command).never_calls_init and bounds.max > 1:
        raise InitNotCalledError
    if keeping:
        _check_place(keeping)
    sys.exit(asyncio.run(_run(spec, settings, detach=detach, as_json=as_json)))


def _checkpoint(settings: RuntimeSettings, **options: str | float | None) -> Checkpoint | None:
    """Return what the environment says of checkpoints, with these options in place of single settings."""
    given = {f"checkpoint_{name}".removesuffix("_checkpoint"): value for name, value in options.items() if value}
    spec = msgspec.structs.replace(settings, **given).checkpoint_spec()
    if given and not spec:
        raise SpecError("--checkpoint", "", "where checkpoints are kept, a path or URL, or EDL_CHECKPOINT in its place")
    return spec


def _check_place(spec: Checkpoint) -> None:
    """Raise SpecError for a folder that can't be written to; who may use another place is for the trainers to find."""
    place = storage_at(spec.url)
    if isinstance(place, LocalStorage):
        try:
            place.check()
        except OSError as error:
            raise SpecError("--checkpoint", spec.url, f"a folder that can be written to ({error.strerror})") from None


def _name_of(command: tuple[str, ...]) -> str:
    script = next((word for word in command if word.endswith(".py")), command[0])
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:NAME_LIMIT].rstrip("-")
    if not name:
        raise SpecError("--name", "", f"a name for the job, as in --name train: {script!r} has none of a-z and 0-9")
    return name


async def _run(spec: JobSpec, settings: RuntimeSettings, *, detach: bool, as_json: bool) -> int:
    backend = LocalBackend(settings.work_dir)
    token = f"edl-run-{secrets.token_hex(8)}/0"  # of this command alone: no other may take its job over
    await remove_ended_job(backend, spec.name)
    async with AsyncExitStack() as stack:
        url = settings.redis_url or await stack.enter_async_context(_own_redis())
        client = await stack.enter_async_context(connect(url))
        if settings.redis_url:
            with suppress(RegistryUnavailableError):  # the agents wait for it
                await warn_of_eviction(client)
        else:
            await stack.enter_async_context(_none_left(backend, spec.name, token))
        shell = _shell(os.environ, without=spec.env)
        status = await backend.submit(spec, token=token, secrets={**shell, "EDL_REDIS_URL": url})
        if detach:
            told = f"{spec.name} is started; `edl logs -f {spec.name}` shows what it writes"
            click.echo(msgspec.json.encode(status) if as_json else told)
            return 0
        return await _Show(backend, client, settings.namespace, spec.name, token=token, as_json=as_json).run()


def _shell(environ: Mapping[str, str], *, without: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that scripts see, but for these and those that are no text."""
    shown = {name: value for name, value in environ.items() if name not in without}
    return {name: value for name, value in shown.items() if _is_text(name) and _is_text(value)}


def _is_text(value: str) -> bool:
    """Whether it is UTF-8, which names of files need not be."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@asynccontextmanager
async def _own_redis() -> AsyncIterator[str]:
    from edl_runtime.store.redis_server import RedisServer

    with tempfile.TemporaryDirectory(prefix="edl-run-") as folder:  # gone once it has started: it keeps nothing
        server = RedisServer(Path(folder))
        await asyncio.to_thread(server.start)
    try:
        yield server.url
    finally:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def _none_left(backend: LocalBackend, name: str, token: str) -> AsyncIterator[None]:
    """After an error or an interrupt, leave no job behind that would be without its Redis."""
    try:
        yield
    except BaseException:
        await backend.delete(name, token=token)
        raise


class _Show:
    """What a person sees of a running job, and what Ctrl-C does to it."""

    def __init__(
        self, backend: LocalBackend, client: Redis, namespace: str, name: str, *, token: str, as_json: bool
    ) -> None:
        self._backend = backend
        self._client = client
        self._namespace = namespace
        self._name = name
        self._token = token
        self._as_json = as_json
        self._ranks: dict[int, int] = {}
        self._interrupts = 0
        self._deleted = False
        self._stopping: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Show the job until it ends and return its exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            why = "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {number.name}"
            loop.add_signal_handler(number, self._interrupted, why)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
            loop.add_signal_handler(signal.SIGHUP, self._unseen)
        told = asyncio.create_task(self._show_events())
        try:
            async for line in self._backend.logs(self._name, follow=True):
                text = f"{self._prefix(line.instance)} {line.text}"
                self._echo(msgspec.json.encode(line) if self._as_json else text)
            if self._stopping:
                await asyncio.wait(self._stopping)
        finally:
            told.cancel()
        try:
            return _exit_status(await self._backend.get(self._name))
        except UnknownJobError:  # the second Ctrl-C, or `edl stop` from elsewhere
            click.echo(f"edl: {self._name} was stopped {'at once' if self._deleted else 'by `edl stop`'}", err=True)
            return int(self._deleted)

    def _prefix(self, instance: int) -> str:
        rank = self._ranks.get(instance)
        return f"[{instance}]" if rank is None else f"[{instance} rank {rank}]"

    async def _show_events(self) -> None:
        last = "0-0"
        while True:
            try:
                async for event in events.follow(self._client, self._namespace, self._name, after=last):
                    last = event.id
                    if event.kind == "forming":
                        self._ranks = {instance: rank for rank, instance in enumerate(event.members)}
                    if self._as_json:
                        self._echo(msgspec.json.encode(event))
                    elif event.kind in SHOWN:
                        self._echo(f"edl: {event.line()}", err=True)
            except RegistryUnavailableError:
                await asyncio.sleep(RETRY_AFTER_S)

    def _echo(self, text: str | bytes, *, err: bool = False) -> None:
        try:
            click.echo(text, err=err)
        except OSError:
            _forget(sys.stderr if err else sys.stdout)
            self._unseen()

    def _unseen(self) -> None:
        """The terminal has been closed, or whatever read the output has ended."""
        if not self._interrupts:
            self._interrupted("nobody sees it any more")

    def _interrupted(self, why: str) -> None:
        self._interrupts += 1
        self._stopping.add(asyncio.create_task(self._stop(why) if self._interrupts == 1 else self._delete()))

    async def _stop(self, why: str) -> None:
        self._echo("edl: stopping with a checkpoint; press Ctrl-C again to stop at once", err=True)
        try:
            asked = await request_stop(self._client, self._namespace, self._name, why)
        except RegistryUnavailableError:
            asked = False
        if not asked:
            await self._delete()

    async def _delete(self) -> None:
        self._deleted = True
        await self._backend.delete(self._name, token=self._token)


def _forget(stream: TextIO) -> None:
    """Let all that is still written there go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _exit_status(status: JobStatus) -> int:
    if status.phase == "succeeded":
        return 0
    click.echo(f"edl: {status.name} failed: {status.reason}", err=True)
    return EX_CONFIG if status.failed_permanently else 1
