"""Faults of a running Airflow's processes: killed, suspended and restarted components."""

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

LOCKED_S = 120.0
"""How long a process of Airflow may hold the lock of its SQLite."""

_JOB_TYPES = {"scheduler": "SchedulerJob", "triggerer": "TriggererJob"}


def expire_heartbeats(laptop: Laptop, statement: str, *given: str) -> int:
    """Set heartbeats of killed processes to a day ago, so that Airflow misses them at once, and no slow process.

    The statement's parameters are the time and `given`. Returns how many rows were changed.
    """
    ago = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    with closing(sqlite3.connect(laptop.airflow_home / "airflow.db", timeout=LOCKED_S)) as database, database:
        return database.execute(statement, (ago.strftime("%Y-%m-%d %H:%M:%S.%f"), *given)).rowcount


@contextmanager
def suspended_triggerer(laptop: Laptop) -> Iterator[None]:
    """Suspend the triggerer in the block; processes that it has started continue."""
    processes = _airflow_below(_wrapper(_component(laptop, "triggerer")))
    try:
        _suspend(processes)
        while _is_locked(laptop):  # a suspended one may hold the lock
            for process in processes:
                process.resume()
            time.sleep(0.1)
            _suspend(processes)
        yield
    finally:
        for process in processes:
            process.resume()


@contextmanager
def killed_triggerer(laptop: Laptop, *, is_missed: bool = True) -> Iterator[None]:
    """Kill the triggerer and start another one, which stays.

    In the block processes that the first has started continue, as without a launcher that would clean up. Unless the
    first `is_missed`, the other takes its triggers over only after `miss_triggerer`, as before a heartbeat expires.
    """
    with _replaced(laptop, "triggerer", _airflow_below, psutil.Process.kill, is_missed=is_missed):
        yield


def miss_triggerer(laptop: Laptop) -> None:
    """Let Airflow miss the triggerer that was killed."""
    _miss(laptop, "triggerer")


def has_trigger(laptop: Laptop, trigger_id: int) -> bool:
    """Whether Airflow still has this trigger."""
    with closing(sqlite3.connect(laptop.airflow_home / "airflow.db", timeout=LOCKED_S)) as database:
        return database.execute("SELECT 1 FROM trigger WHERE id = ?", (trigger_id,)).fetchone() is not None


@contextmanager
def restarted_triggerer(laptop: Laptop) -> Iterator[None]:
    """Send SIGTERM to the triggerer, as an update of Airflow does, and start another one, which stays."""
    with _replaced(laptop, "triggerer", psutil.Process.children, _end):
        yield


@contextmanager
def killed_scheduler(laptop: Laptop) -> Iterator[None]:
    """Kill the scheduler and start another one, which stays; in the block the first one's workers continue."""
    with _replaced(laptop, "scheduler", psutil.Process.children, psutil.Process.kill):
        yield


@contextmanager
def _replaced(
    laptop: Laptop,
    name: str,
    processes: Callable[[psutil.Process], list[psutil.Process]],
    end: Callable[[psutil.Process], None],
    *,
    is_missed: bool = True,
) -> Iterator[None]:
    first = _component(laptop, name)
    wrapper = _wrapper(first)
    *_, descriptors, _to = wrapper.cmdline()[:6]
    wrapper.suspend()
    try:
        for process in processes(wrapper):
            end(process)
        if end is psutil.Process.kill and is_missed:
            _miss(laptop, name)
        laptop._components[laptop._components.index(first)] = Component(
            first.name,
            wrapper.cmdline()[6:],
            env=wrapper.environ(),
            log=first.log.with_name(f"next-{first.log.name}"),
            lock=int(descriptors.partition(",")[2]),
        )
        yield
    finally:
        wrapper.resume()
        first.cut()


def _miss(laptop: Laptop, name: str) -> None:
    statement = "UPDATE job SET latest_heartbeat = ? WHERE state = 'running' AND job_type = ?"
    assert expire_heartbeats(laptop, statement, _JOB_TYPES[name]) > 0, "there was no heartbeat"


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
    """Send SIGTERM to a process and wait until it has ended."""
    process.terminate()
    deadline = time.monotonic() + ENDS_WITHIN_S
    while is_alive(process.pid):
        assert time.monotonic() < deadline, f"{process} still runs"
        time.sleep(0.1)


def _component(laptop: Laptop, name: str) -> Component:
    return next(component for component in laptop._components if component.name == name)


def _wrapper(component: Component) -> psutil.Process:
    return psutil.Process(component._wrapper.pid)


def _airflow_below(wrapper: psutil.Process) -> list[psutil.Process]:
    """Return the component's own processes, without those of jobs that it has started."""
    return [process for process in wrapper.children(recursive=True) if _is_airflow(process)]


def _is_airflow(process: psutil.Process) -> bool:
    try:
        return "EDL_JOB" not in process.environ() and not any("edl_runtime" in word for word in process.cmdline())
    except psutil.NoSuchProcess:  # it has just ended
        return False
