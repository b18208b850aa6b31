"""`edl agent`: one instance of an elastic training."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click
import msgspec

from edl_runtime.cli.options import tell
from edl_runtime.elastic.comm.agent_protocol import GEARS, Gear
from edl_runtime.errors import SpecError
from edl_runtime.log import log_to_stderr
from edl_runtime.settings import RuntimeSettings, count_gpus
from edl_runtime.specs import Bounds, check_name

if TYPE_CHECKING:
    from edl_runtime.elastic.agent.agent import AgentExit


@click.command
@click.option("--instances", required=True, metavar="MIN:MAX", help="Minimum and maximum of instances, as in 1:4.")
@click.option(
    "--gear",
    type=click.Choice(GEARS),
    default="live",
    show_default=True,
    help="Fastest allowed way to resize: live keeps the process, warm uses a standby process, cold starts one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the exit status and reason as a JSON object.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def agent(*, instances: str, gear: Gear, as_json: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND, a training script, as one instance of the job EDL_JOB; put -- before it.

    All agents of a job that use the same Redis, EDL_REDIS_URL, train together, each as the instance EDL_INSTANCE.
    EDL_HOST is the address at which the others reach this one.

    SIGTERM removes this instance from the training at the end of a step. Exits with 0 when the training is done.
    """
    log_to_stderr()
    bounds = Bounds.parse(instances, "--instances")
    settings = RuntimeSettings.from_env(os.environ)
    if not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", "the Redis of the job's agents, as redis://127.0.0.1:6379/0")
    check_name("EDL_JOB", settings.job)
    ending = asyncio.run(_run(command, settings, bounds, gear))
    if as_json:
        tell(msgspec.json.encode(ending))
    if ending.reason:
        tell(f"edl: {ending.reason}", err=True)
    if ending.status < 0:
        signal.signal(-ending.status, signal.SIG_DFL)
        os.kill(os.getpid(), -ending.status)
    sys.exit(ending.status)


async def _run(command: tuple[str, ...], settings: RuntimeSettings, bounds: Bounds, gear: Gear) -> AgentExit:
    from edl_runtime.elastic.agent.agent import Agent
    from edl_runtime.elastic.agent.entrypoint import parse_entrypoint
    from edl_runtime.elastic.rendezvous.redis_store import Event, announce
    from edl_runtime.store.errors import RegistryUnavailableError
    from edl_runtime.store.redis_client import connect

    async with connect(settings.redis_url) as client:
        try:
            script = parse_entrypoint(command)
        except SpecError as error:  # it is in no group that could tell
            event = Event(kind="failed", instance=settings.instance, reason=str(error))
            with suppress(RegistryUnavailableError):
                await announce(client, settings.namespace, settings.job, event)
            raise
        agent = Agent(script, settings, client, bounds=bounds, gear=gear, gpu=count_gpus(os.environ) > 0)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.leave, number)
        return await agent.run(os.environ)
