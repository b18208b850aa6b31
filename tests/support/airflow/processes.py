"""Processes of a running Airflow: to be killed, or to be found gone."""

from __future__ import annotations

import datetime as dt
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import psutil
from laptop.components import Component
from laptop.launcher import Laptop

ENDS_WITHIN_S = 300.0

_JOB_TYPES = {"scheduler": "SchedulerJob", "triggerer": "TriggererJob"}


def miss(laptop: Laptop, statement: str, *given: str) -> int:
    """Set heartbeats of what was killed to a day ago, so that Airflow misses it at once, and nobody who is only slow.

    The time comes before what else is `given`. Returns how many there were.
    """
    ago = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    with closing(sqlite3.connect(laptop.airflow_home / "airflow.db", timeout=60)) as database, database:
        return database.execute(statement, (ago.strftime("%Y-%m-%d %H:%M:%S.%f"), *given)).rowcount


@contextmanager
def halted_triggerer(laptop: Laptop) -> Iterator[None]:
    """Let the triggerer stand still until the end of the block, what it has started goes on."""
    processes = _airflow_below(_wrapper(_component(laptop, "triggerer")))
    try:
        _suspend(processes)
        while _is_locked(laptop):  # perhaps by one of them
            for process in processes:
                process.resume()
            time.sleep(0.1)
            _suspend(processes)
        yield
    finally:
        for process in processes:
            process.resume()


@contextmanager
def another_triggerer(laptop: Laptop) -> Iterator[None]:
    """Kill the triggerer, and start another one to stay.

    Until the end of the block, what the first has started lives on, as it does where no launcher cleans up behind it.
    """
    with _another(laptop, "triggerer", _airflow_below, psutil.Process.kill):
        yield


@contextmanager
def next_triggerer(laptop: Laptop) -> Iterator[None]:
    """Tell the triggerer to end, as an update of Airflow does, and start another one to stay once it has."""
    with _another(laptop, "triggerer", psutil.Process.children, _end):
        yield


@contextmanager
def another_scheduler(laptop: Laptop) -> Iterator[None]:
    """Kill the scheduler and start another one to stay; the first one's workers go on until the end of the block."""
    with _another(laptop, "scheduler", psutil.Process.children, psutil.Process.kill):
        yield


@contextmanager
def _another(
    laptop: Laptop,
    name: str,
    processes: Callable[[psutil.Process], list[psutil.Process]],
    end: Callable[[psutil.Process], None],
) -> Iterator[None]:
    first = _component(laptop, name)
    wrapper = _wrapper(first)
    *_, descriptors = wrapper.cmdline()[:5]
    wrapper.suspend()
    try:
        for process in processes(wrapper):
            end(process)
        if end is psutil.Process.kill:
            statement = "UPDATE job SET latest_heartbeat = ? WHERE state = 'running' AND job_type = ?"
            assert miss(laptop, statement, _JOB_TYPES[name]) > 0, "nobody had a heartbeat"
        laptop._components[laptop._components.index(first)] = Component(
            first.name,
            wrapper.cmdline()[5:],
            env=wrapper.environ(),
            log=first.log.with_name(f"another-{first.log.name}"),
            lock=int(descriptors.partition(",")[2]),
        )
        yield
    finally:
        wrapper.resume()
        first.cut()


def is_alive(pid: int) -> bool:
    """Whether the process still runs."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _suspend(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.suspend()


def _is_locked(laptop: Laptop) -> bool:
    """Whether Airflow's SQLite takes no change for some seconds."""
    with closing(sqlite3.connect(laptop.airflow_home / "airflow.db", timeout=10)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        database.rollback()
    return False


def _end(process: psutil.Process) -> None:
    """Tell a process to end, and wait until it has."""
    process.terminate()
    deadline = time.monotonic() + ENDS_WITHIN_S
    while is_alive(process.pid):
        assert time.monotonic() < deadline, f"{process} goes on"
        time.sleep(0.1)


def _component(laptop: Laptop, name: str) -> Component:
    return next(component for component in laptop._components if component.name == name)


def _wrapper(component: Component) -> psutil.Process:
    return psutil.Process(component._wrapper.pid)


def _airflow_below(wrapper: psutil.Process) -> list[psutil.Process]:
    """Return the component's own processes; those of jobs that it has started are there, too."""
    return [process for process in wrapper.children(recursive=True) if _is_airflow(process)]


def _is_airflow(process: psutil.Process) -> bool:
    return "EDL_JOB" not in process.environ() and not any("edl_runtime" in word for word in process.cmdline())
