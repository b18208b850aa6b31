"""`edl monitor`: what runs, what is pending and why, now and in the past."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edl_runtime.autoscale import history
from edl_runtime.cli import backends
from edl_runtime.cli.options import parse_duration, print_json_line, print_table, read_settings
from edl_runtime.concurrency import event_of_termination, unless_stopped
from edl_runtime.errors import EdlError, SpecError, isolated
from edl_runtime.monitor.snapshot import HEADINGS, MonitorSnapshot, summary_row, take_snapshot
from edl_runtime.monitor.terminal import live, print_picture
from edl_runtime.monitor.timeline import HISTORY_HEADINGS, history_rows, save_png
from edl_runtime.protocol.address import check_exposure
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis


@click.command
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to refresh.",
)
@click.option("--once", is_flag=True, help="Show one snapshot with all details.")
@click.option("--history", "past", metavar="TIME", help="Show this much of the past instead, as in 90m, 6h or 7d.")
@click.option(
    "--png", type=click.Path(dir_okay=False, path_type=Path), help="With --history: also draw it into this PNG file."
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve the same to Prometheus at /metrics of this port, by default on loopback; on another HOST clients need "
    "the bearer token EDL_MONITOR_TOKEN.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON object for each refresh; with --history, for each point."
)
def monitor(
    *, every: float, once: bool, past: str | None, png: Path | None, metrics: str | None, as_json: bool
) -> None:
    """Show submitted and pending jobs, running trainers and the reserved share of CPUs and GPUs.

    Runs until Ctrl-C or SIGTERM. On a terminal it also shows pools, and jobs with their targets and reasons; otherwise
    it prints a line of tab-separated columns for each refresh. A pending job has fewer running instances than its
    minimum. Jobs are those in the work folder EDL_WORK_DIR, or with EDL_BACKEND=kubernetes in the cluster of the
    kubeconfig.

    The members of pools, targets and the history are in the Redis of EDL_REDIS_URL, in the namespace EDL_NAMESPACE. The
    history is kept for a week.
    """
    settings = read_settings(redis="the Redis with the history" if past else "")
    if png and not past:
        raise SpecError("--png", str(png), "a file for the drawing, with --history 6h")
    if past:
        if once or metrics:
            raise SpecError("--history", past, "nothing beside --once or --metrics, which show the present")
        asyncio.run(_show_history(settings, parse_duration("--history", past), png, as_json=as_json))
    elif once:
        if metrics:
            raise SpecError("--metrics", metrics, "nothing beside --once, which ends before a scrape")
        asyncio.run(_show_once(settings, as_json=as_json))
    else:
        asyncio.run(_watch(settings, every, metrics, as_json=as_json))


async def _show_once(settings: RuntimeSettings, *, as_json: bool) -> None:
    async with _redis(settings) as client:
        seen = await take_snapshot(backends.open_backend(settings), client, settings.namespace)
    if as_json:
        print_json_line(seen)
    else:
        print_picture(seen)


async def _watch(settings: RuntimeSettings, every_s: float, metrics: str | None, *, as_json: bool) -> None:
    """Refresh until SIGTERM or SIGINT, also while the backend or Redis is down."""
    stop = event_of_termination()
    on_screen = sys.stdout.isatty() and not as_json
    complain = _Complaints()
    async with _redis(settings) as client, backends.watch_backend(settings) as backend:
        with ExitStack() as shown:
            server = _MetricsServer(metrics, settings.monitor_token, shown)
            show = shown.enter_context(live()) if on_screen else print_json_line if as_json else _lines()
            while not stop.is_set():
                try:
                    with isolated("this snapshot"):
                        seen = await unless_stopped(stop, take_snapshot(backend, client, settings.namespace))
                except EdlError as error:
                    complain((str(error),))
                else:
                    if seen is None:
                        return
                    server.update(seen)
                    show(seen)
                    complain(() if on_screen else seen.lacks)
                await unless_stopped(stop, asyncio.sleep(every_s))


async def _show_history(settings: RuntimeSettings, length_s: float, png: Path | None, *, as_json: bool) -> None:
    now = time.time()
    place = backends.open_backend(settings).place
    async with connect(settings.redis_url) as client:
        points = await history.read_points(client, settings.namespace, place, since=now - length_s)
    if as_json:
        for point in points:
            print_json_line(point)
    elif points:
        print_table(HISTORY_HEADINGS, history_rows(points, since=now - length_s, until=now))
    else:
        click.echo(
            "edl: nothing was recorded in that time; `edl monitor` and `edl autoscale` record the history", err=True
        )
    if png:
        await asyncio.to_thread(save_png, points, png, since=now - length_s, until=now)
        click.echo(f"edl: drawn into {png}", err=True)


def _redis(settings: RuntimeSettings) -> AbstractAsyncContextManager[Redis | None]:
    return connect(settings.redis_url) if settings.redis_url else nullcontext()


def _lines() -> Callable[[MonitorSnapshot], None]:
    """Print the headings, and return a function that prints a line."""
    click.echo("\t".join(HEADINGS))
    return lambda seen: click.echo("\t".join(summary_row(seen)))


class _Complaints:
    """Prints problems to stderr, each when it is new."""

    def __init__(self) -> None:
        self._before: tuple[str, ...] = ()

    def __call__(self, complaints: tuple[str, ...]) -> None:
        for complaint in complaints:
            if complaint not in self._before:
                click.echo(f"edl: {complaint}", err=True)
        self._before = complaints


class _MetricsServer:
    """Serves the last snapshot to Prometheus if an address is given, from the first one on, while `shown` is open."""

    def __init__(self, address: str | None, token: str, shown: ExitStack) -> None:
        """Raises SpecError for an invalid address, and for one off loopback without a token."""
        self._address = None
        if address is not None:
            from edl_runtime.monitor.exporter import parse_address

            self._address = parse_address(address)
            check_exposure(self._address[0], token, "EDL_MONITOR_TOKEN")
        self._token = token
        self._shown = shown
        self._last: MonitorSnapshot | None = None

    def update(self, seen: MonitorSnapshot) -> None:
        is_first, self._last = self._last is None, seen
        if self._address and is_first:
            from edl_runtime.monitor.exporter import serving

            url = self._shown.enter_context(serving(self._seen, *self._address, self._token))
            click.echo(f"edl: metrics at {url}", err=True)

    def _seen(self) -> MonitorSnapshot:
        assert self._last  # noqa: S101 - the server starts after the first update
        return self._last
