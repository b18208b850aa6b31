"""`edl autoscale`: resize jobs and pools by the policy."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from edl_runtime.autoscale.errors import NoSamplesError, SourceError
from edl_runtime.autoscale.history import RescaleOutcome, last_pass
from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.policy.decide import STARVATION_S, decide
from edl_runtime.autoscale.policy.interface import Policy, import_policy
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic.capacity import LEAD_S
from edl_runtime.autoscale.traffic.schema import read_windows
from edl_runtime.autoscale.traffic.sources.learner import check_source
from edl_runtime.autoscale.traffic.windows import TrafficWindows
from edl_runtime.cli import backends
from edl_runtime.cli.options import print_json_line, print_table, read_settings, tell, tell_json_line
from edl_runtime.concurrency import event_of_termination, wait_for_event
from edl_runtime.errors import EdlError, SpecError, isolated
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect

max_load_option = click.option(
    "--max-load",
    type=float,
    default=1.0,
    show_default=True,
    help="Highest share of CPU and memory that everything on the nodes together may reserve; devices count whole.",
)

policy_option = click.option(
    "--policy",
    "policy_name",
    help="Your own policy, as package.module:function, importable from here; by default EDL's.",
)


@click.command
@click.option(
    "--windows",
    "file",
    type=click.Path(path_type=Path),
    help="Traffic windows, a file of YAML or JSON; none by default.",
)
@max_load_option
@policy_option
@click.option("--every", "every_s", type=float, help="Repeat each so many seconds until SIGTERM.")
@click.option("--dry-run", is_flag=True, help="Show what would be done without doing it.")
@click.option("--last", is_flag=True, help="Show what the last pass has decided, whoever made it, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each pass.")
def autoscale(
    *,
    file: Path | None,
    max_load: float,
    policy_name: str | None,
    every_s: float | None,
    dry_run: bool,
    last: bool,
    as_json: bool,
) -> None:
    """Resize all jobs and pools: start pending ones, and share out what is free.

    Traffic windows limit what training may use. By priority each job gets its minimum or nothing, and the rest is
    shared by weight. A job that gets nothing is suspended, with a checkpoint, until there is room again. Shows for each
    job the instances it had, those it gets, and why. Jobs shrink at least a minute before a window with less for
    training begins.

    Uses the Redis of EDL_REDIS_URL and the namespace EDL_NAMESPACE. Passes of several commands, or of Airflow, wait for
    each other.
    """
    settings = read_settings(redis="the Redis of the jobs")
    if last:
        if file or policy_name or every_s or dry_run:
            raise click.UsageError("Give --last alone, or with --json: it shows a pass that was made before.")
        asyncio.run(_show_last(settings, as_json=as_json))
        return
    if every_s is not None and not 0 < every_s < STARVATION_S - LEAD_S:
        raise SpecError("--every", every_s, f"seconds above 0, less than {STARVATION_S - LEAD_S:g}")
    windows = None if file is None else _windows(file)
    rules = RescalingRules(windows=windows, max_load=max_load, lead_s=LEAD_S + (every_s or 0.0))
    policy = named_policy(policy_name) if policy_name is not None else decide
    if every_s is None:
        show = print_json_line if as_json else _show_table
    else:
        show = tell_json_line if as_json else Changes().show
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
    ends = event_of_termination()
    async with connect(settings.redis_url) as client, backends.watch_backend(settings) as backend:
        if rules.windows and rules.windows.traffic:
            try:
                await check_source(rules.windows.traffic, client, now_s=time.time())
            except (SourceError, RegistryUnavailableError) as error:
                if every_s is None and isinstance(error, NoSamplesError):  # as of a query that returns nothing
                    raise
                tell(f"edl: {error}; traffic windows decide meanwhile", err=True)
        while True:
            making = rescale(backend, client, settings.namespace, rules, dry_run=dry_run, policy=policy)
            if every_s is None:
                show(await making)
                return
            try:
                with isolated("this rescaling"):
                    show(await making)
            except EdlError as error:
                tell(f"edl: {error}; tries again in {every_s:g} s", err=True)
            if await wait_for_event(ends, every_s):
                return


async def _show_last(settings: RuntimeSettings, *, as_json: bool) -> None:
    async with connect(settings.redis_url) as client:
        done = await last_pass(client, settings.namespace, backends.open_backend(settings).place)
    if as_json:
        print_json_line(done)
    elif done is None:
        click.echo("edl: nothing has rescaled within a day", err=True)
    else:
        window = f", window {done.plan.window!r}" if done.plan.window else ""
        following = "".join(f", then {each.name!r} from {_time(each.start)}" for each in done.plan.following)
        click.echo(f"pass of {_time(done.plan.at)}{window}{following}")
        _show_table(done)


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def named_policy(name: str) -> Policy:
    """Import a policy; the current folder is searched, too."""
    sys.path.append(str(Path.cwd()))
    return import_policy(name)


def _windows(file: Path) -> TrafficWindows:
    try:
        return read_windows(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("--windows", str(file), f"a file of YAML or JSON ({error})") from None
    except SpecError as error:
        raise SpecError(f"{file}, {error.field}", error.given, error.allowed) from None


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
        click.echo("no resizable jobs or pools")
    for note in done.plan.notes:
        click.echo(f"edl: {note}", err=True)


class Changes:
    """Shows changes, failed resizes, and new reasons of the capacity; nothing twice in a row."""

    def __init__(self) -> None:
        self._last: set[str] = set()

    def show(self, done: RescaleOutcome) -> None:
        now = time.strftime("%H:%M:%S", time.localtime(done.plan.at))
        refused = (f"{name}: {why}" for name, why in done.refused.items())
        lines = {done.plan.why, *done.plan.notes, *refused} - {""}
        for line in sorted(lines - self._last):
            tell(f"{now} {line}")
        self._last = lines
        for one in done.plan.changes:
            if one.name not in done.refused:
                tell(f"{now} {one.name}: {one.reason}")
