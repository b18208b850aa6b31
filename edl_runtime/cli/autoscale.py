"""`edl autoscale`: give each job and pool the instances that the policy says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from edl_runtime.autoscale.errors import NoSamplesError, RescalingError, SourceError
from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.policy.decide import STARVATION_S, decide
from edl_runtime.autoscale.policy.wrappers import Policy, import_policy
from edl_runtime.autoscale.rescale import RescaleOutcome, rescale
from edl_runtime.autoscale.traffic.capacity import LEAD_S
from edl_runtime.autoscale.traffic.schema import read_windows
from edl_runtime.autoscale.traffic.sources.learner import check_source
from edl_runtime.autoscale.traffic.windows import TrafficWindows
from edl_runtime.cli import backends
from edl_runtime.cli.options import print_table
from edl_runtime.errors import BackendError, SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect

PASSING = (BackendError, RegistryUnavailableError, RescalingError)
"""What is over some time, so that the next pass is made as if it had not been."""


@click.command
@click.option(
    "--windows",
    "file",
    type=click.Path(path_type=Path),
    help="Traffic windows, a file of YAML or JSON; none by default.",
)
@click.option(
    "--max-load",
    type=float,
    default=1.0,
    show_default=True,
    help="The share of each resource that everything on the nodes together may reserve.",
)
@click.option(
    "--policy",
    "policy_name",
    help="One's own, as package.module:function, which may be in this folder; ours by default.",
)
@click.option("--every", "every_s", type=float, help="Go on, with a pass each so many seconds, until SIGTERM.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each pass.")
def autoscale(
    *,
    file: Path | None,
    max_load: float,
    policy_name: str | None,
    every_s: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Resize all jobs and pools: those that wait get room, and what is free is shared out.

    Within what traffic windows leave to training; in the order of priorities, each job at least its minimum or
    nothing, the rest by weight. A job that is given nothing is suspended, with a checkpoint, until there is room again.
    Shows of each job how many instances it had, how many it gets, and why. Jobs shrink by the last pass that is
    made a minute or more before a window that leaves less to training.

    Asks the Redis of EDL_REDIS_URL about the namespace EDL_NAMESPACE; passes of several commands, or of Airflow, come
    one after the other.
    """
    settings = RuntimeSettings.from_env(os.environ)
    if not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", "the Redis of the jobs, as redis://127.0.0.1:6379/0")
    if every_s is not None and not 0 < every_s < STARVATION_S - LEAD_S:
        raise SpecError("--every", every_s, f"seconds above 0, less than {STARVATION_S - LEAD_S:g}")
    windows = None if file is None else _windows(file)
    rules = RescalingRules(windows=windows, max_load=max_load, lead_s=LEAD_S + (every_s or 0.0))
    policy = _policy(policy_name) if policy_name is not None else decide
    show = _show_json if as_json else _show_table if every_s is None else _Changes().show
    asyncio.run(_passes(settings, rules, policy, every_s, show, dry_run=dry_run))


async def _passes(
    settings: RuntimeSettings,
    rules: RescalingRules,
    policy: Policy,
    every_s: float | None,
    show: Callable[[RescaleOutcome], None],
    *,
    dry_run: bool,
) -> None:
    ends = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ends.set)
    backend = backends.open_backend(settings)
    async with connect(settings.redis_url) as client:
        if rules.windows and rules.windows.traffic:
            try:
                await check_source(rules.windows.traffic, client, now_s=time.time())
            except (SourceError, RegistryUnavailableError) as error:
                if every_s is None and isinstance(error, NoSamplesError):  # as of a query that returns nothing
                    raise
                click.echo(f"edl: {error}; what windows say holds meanwhile", err=True)
        while True:
            try:
                show(await rescale(backend, client, settings.namespace, rules, dry_run=dry_run, policy=policy))
            except PASSING as error:
                if every_s is None:
                    raise
                click.echo(f"edl: {error}; tries again in {every_s:g} s", err=True)
            if every_s is None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ends.wait(), every_s)
            if ends.is_set():
                return


def _policy(name: str) -> Policy:
    """Return a policy of one's own, from the folder that the command was called in or any that Python looks in."""
    sys.path.append(str(Path.cwd()))
    return import_policy(name)


def _windows(file: Path) -> TrafficWindows:
    try:
        return read_windows(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("--windows", str(file), f"a file of YAML or JSON ({error})") from None
    except SpecError as error:
        raise SpecError(f"{file}, {error.field}", error.given, error.allowed) from None


def _show_json(done: RescaleOutcome) -> None:
    click.echo(msgspec.json.encode(done))


def _show_table(done: RescaleOutcome) -> None:
    if done.plan.why:
        click.echo(done.plan.why)
    rows = [
        (one.name, one.kind, str(one.instances), str(one.target), done.refused.get(one.name) or one.reason)
        for one in done.plan.targets
    ]
    if rows:
        print_table(["NAME", "KIND", "NOW", "TARGET", "REASON"], rows)
    else:
        click.echo("no job or pool that can be resized is there")
    for note in done.plan.notes:
        click.echo(f"edl: {note}", err=True)


class _Changes:
    """Shows what passes have changed, what they could not, and why training may use something else than before."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def show(self, done: RescaleOutcome) -> None:
        now = time.strftime("%H:%M:%S", time.localtime(done.plan.at))
        refused = (f"{name}: {why}" for name, why in done.refused.items())
        news = {done.plan.why, *done.plan.notes, *refused} - {""}
        for line in sorted(news - self._said):
            click.echo(f"{now} {line}")
        self._said = news
        for one in done.plan.changes:
            if one.name not in done.refused:
                click.echo(f"{now} {one.name}: {one.reason}")
