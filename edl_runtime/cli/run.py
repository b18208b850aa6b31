"""`edl run`: an elastic training on this machine."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import sys
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
from edl_runtime.cli.backends import is_unwritten, remove_ended_job, warn_of_eviction
from edl_runtime.cli.options import priority_option, read_settings, tell, weight_option
from edl_runtime.elastic.agent.entrypoint import elastic_job, parse_entrypoint
from edl_runtime.elastic.comm.agent_protocol import GEARS, Gear
from edl_runtime.elastic.rendezvous import redis_store
from edl_runtime.elastic.rendezvous.requests import request_stop
from edl_runtime.errors import EX_CONFIG, SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, JobSpec, name_from
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import own_redis

if TYPE_CHECKING:
    from redis.asyncio import Redis

SHOWN = frozenset({"forming", "resumed", "failed", "late", "waiting", "saved", "note", "straggler", "stop", "ended"})
"""Events that are shown among the log lines."""

RETRY_AFTER_S = 1.0
"""Pause before events are read again while Redis is down."""


class _Seconds(click.FloatRange):
    """A range of finite numbers."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is no number of seconds", param, ctx)
        return number


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--instances", required=True, metavar="MIN:MAX", help="Minimum and maximum of instances, as in 1:4.")
@click.option("--start", type=int, help="Instances at the start; by default the minimum.")
@click.option("--gear", type=click.Choice(GEARS), default="live", show_default=True, help="As in `edl agent`.")
@click.option("--name", default="", help="Name of the job; by default the script's.")
@click.option("--checkpoint", default="", metavar="URL", help="Where checkpoints are kept; EDL_CHECKPOINT by default.")
@click.option("--every-steps", type=click.IntRange(1), help="Steps between checkpoints.")
@click.option("--every-s", type=_Seconds(0, min_open=True), help="Seconds between checkpoints.")
@click.option(
    "--grace-s",
    type=_Seconds(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds from SIGTERM, as by `edl stop`, to SIGKILL; Ctrl-C waits a minute for the end of a step.",
)
@priority_option
@weight_option
@click.option("--detach", is_flag=True, help="Return once the job is started; needs EDL_REDIS_URL.")
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
    """Train COMMAND, a script with its arguments, with several instances; `edl resize` changes how many.

    Shows output and events until the job ends. Ctrl-C stops it with a checkpoint, a second Ctrl-C at once. Closing the
    terminal stops it with a checkpoint, too, unless it runs under nohup. Without EDL_REDIS_URL a Redis is started
    for as long as this command runs.

    Scripts see the environment of this command. Exits with 0 when the training is done or was stopped, with 1 if it
    was stopped without its last checkpoint.
    """
    if command[0].startswith("-"):  # an unknown option, which click takes for the command
        raise click.NoSuchOption(command[0].partition("=")[0])
    bounds = Bounds.parse(instances, "--instances")
    settings = read_settings(redis="with --detach, a Redis that outlives this command" if detach else "")
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
    parse_entrypoint(command)  # raises SpecError for what each agent would refuse
    if keeping:
        _check_folder(keeping)
    sys.exit(asyncio.run(_run(spec, settings, detach=detach, as_json=as_json)))


def _checkpoint(settings: RuntimeSettings, **options: str | float | None) -> Checkpoint | None:
    """Return the checkpoint settings of the environment, overridden by these options."""
    given = {f"checkpoint_{name}".removesuffix("_checkpoint"): value for name, value in options.items() if value}
    spec = msgspec.structs.replace(settings, **given).checkpoint_spec()
    if given and not spec:
        raise SpecError("--checkpoint", "", "a path or URL for checkpoints, or EDL_CHECKPOINT in its place")
    return spec


def _check_folder(spec: Checkpoint) -> None:
    """Raise SpecError for a folder that can't be written to. Trainers check other storage themselves."""
    storage = storage_at(spec.url)
    if isinstance(storage, LocalStorage):
        try:
            storage.check()
        except OSError as error:
            raise SpecError("--checkpoint", spec.url, f"a folder that can be written to ({error.strerror})") from None


def _name_of(command: tuple[str, ...]) -> str:
    script = next((word for word in command if word.endswith(".py")), command[0])
    name = name_from(Path(script).stem)
    if not name:
        raise SpecError("--name", "", f"a name for the job, as in --name train: {script!r} has none of a-z and 0-9")
    return name


async def _run(spec: JobSpec, settings: RuntimeSettings, *, detach: bool, as_json: bool) -> int:
    backend = LocalBackend(settings.work_dir)
    token = f"edl-run-{secrets.token_hex(8)}/0"  # unique, so that no other command takes over the job
    await remove_ended_job(backend, spec.name)
    async with AsyncExitStack() as stack:
        url = settings.redis_url or await stack.enter_async_context(own_redis())
        client = await stack.enter_async_context(connect(url))
        after = "0-0"
        if settings.redis_url:
            with suppress(RegistryUnavailableError):  # down: the agents wait for it
                after = await redis_store.last_event_id(client, settings.namespace, spec.name)
                await warn_of_eviction(client)
        else:
            await stack.enter_async_context(_delete_on_error(backend, spec.name, token))
        shell = _shell(os.environ, without=spec.env)
        status = await backend.submit(spec, token=token, secrets={**shell, "EDL_REDIS_URL": url})
        if detach:
            started = f"{spec.name} is started; `edl logs -f {spec.name}` follows its output"
            click.echo(msgspec.json.encode(status) if as_json else started)
            return 0
        view = _JobView(backend, client, settings.namespace, spec.name, token=token, after=after, as_json=as_json)
        return await view.run()


def _shell(environ: Mapping[str, str], *, without: Collection[str] = ()) -> dict[str, str]:
    """Return the environment for scripts, without these variables and those that are not UTF-8."""
    return {name: value for name, value in environ.items() if name not in without and _is_utf8(name + value)}


def _is_utf8(text: str) -> bool:
    return text.encode(errors="ignore").decode() == text


@asynccontextmanager
async def _delete_on_error(backend: LocalBackend, name: str, token: str) -> AsyncIterator[None]:
    """Delete the job after an error or interrupt, because its Redis ends with this command."""
    try:
        yield
    except BaseException:
        await backend.delete(name, token=token)
        raise


class _JobView:
    """Shows a running job, and stops it on Ctrl-C. `after`: the id of the last event of earlier runs of that name."""

    def __init__(
        self,
        backend: LocalBackend,
        client: Redis,
        namespace: str,
        name: str,
        *,
        token: str,
        after: str,
        as_json: bool,
    ) -> None:
        self._backend = backend
        self._client = client
        self._namespace = namespace
        self._name = name
        self._token = token
        self._after = after
        self._as_json = as_json
        self._ranks: dict[int, int] = {}
        self._last: dict[int, str] = {}
        self._interrupts = 0
        self._deleted = False
        self._stopping: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Show the job until it ends and return its exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            why = "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {number.name}"
            loop.add_signal_handler(number, self._interrupted, why)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
            loop.add_signal_handler(signal.SIGHUP, self._output_closed)
        events_task = asyncio.create_task(self._show_events())
        try:
            async for line in self._backend.logs(self._name, follow=True):
                self._last[line.instance] = line.text
                text = f"{self._prefix(line.instance)} {line.text}"
                self._echo(msgspec.json.encode(line) if self._as_json else text)
            if self._stopping:
                await asyncio.wait(self._stopping)
        finally:
            events_task.cancel()
        try:
            return _exit_status(await self._backend.get(self._name))
        except UnknownJobError:  # the second Ctrl-C, or `edl stop` from elsewhere
            stopped = f"edl: {self._name} was stopped {'at once' if self._deleted else 'by `edl stop`'}"
            unwritten = sorted({text.removeprefix("edl: ") for text in self._last.values() if is_unwritten(text)})
            click.echo("; ".join([stopped, *unwritten]), err=True)
            return int(self._deleted or bool(unwritten))

    def _prefix(self, instance: int) -> str:
        rank = self._ranks.get(instance)
        return f"[{instance}]" if rank is None else f"[{instance} rank {rank}]"

    async def _show_events(self) -> None:
        last = self._after
        while True:
            try:
                async for event in redis_store.follow_events(self._client, self._namespace, self._name, after=last):
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
            tell(text, err=err)
        except OSError:
            _discard(sys.stderr if err else sys.stdout)
            self._output_closed()

    def _output_closed(self) -> None:
        """Stop the job: the terminal, or the reader of the output, is gone."""
        if not self._interrupts:
            self._interrupted("output closed")

    def _interrupted(self, why: str) -> None:
        self._interrupts += 1
        self._stopping.add(asyncio.create_task(self._stop(why) if self._interrupts == 1 else self._delete()))

    async def _stop(self, why: str) -> None:
        self._echo("edl: stopping with a checkpoint; press Ctrl-C again to stop at once", err=True)
        try:
            requested = await request_stop(self._client, self._namespace, self._name, why)
        except RegistryUnavailableError:
            requested = False
        if not requested:
            await self._delete()

    async def _delete(self) -> None:
        self._deleted = True
        await self._backend.delete(self._name, token=self._token)


def _discard(stream: TextIO) -> None:
    """Discard further output, so that flushing it at exit raises no error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _exit_status(status: JobStatus) -> int:
    if status.phase == "succeeded":
        return 0
    click.echo(f"edl: {status.name} failed: {status.why}", err=True)
    return EX_CONFIG if status.failed_permanently else 1
