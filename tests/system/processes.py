"""Processes of a running Airflow: to be killed, or to be found gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from edl_airflow.laptop.components import Component
from edl_airflow.laptop.launcher import Laptop


@contextmanager
def halted_triggerer(laptop: Laptop) -> Iterator[None]:
    """Let the triggerer stand still until the end of the block, what it has started goes on."""
    processes = _triggerer(_wrapper(_component(laptop)))
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@contextmanager
def another_triggerer(laptop: Laptop) -> Iterator[None]:
    """Kill the triggerer, and start another one to stay.

    Until the end of the block, what the first has started lives on, as it does where no launcher cleans up behind it.
    """
    first = _component(laptop)
    wrapper = _wrapper(first)
    *_, descriptors = wrapper.cmdline()[:5]
    wrapper.suspend()
    try:
        for process in _triggerer(wrapper):
            process.kill()
        laptop._components[laptop._components.index(first)] = Component(
            first.name,
            wrapper.cmdline()[5:],
            env=wrapper.environ(),
            log=first.log.with_name("another-triggerer.log"),
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


def _component(laptop: Laptop) -> Component:
    return next(component for component in laptop._components if component.name == "triggerer")


def _wrapper(component: Component) -> psutil.Process:
    return psutil.Process(component._wrapper.pid)


def _triggerer(wrapper: psutil.Process) -> list[psutil.Process]:
    """Return the triggerer's own processes; those of jobs that it has started are there, too."""
    return [process for process in wrapper.children(recursive=True) if _is_airflow(process)]


def _is_airflow(process: psutil.Process) -> bool:
    return "EDL_JOB" not in process.environ() and not any("edl_runtime" in word for word in process.cmdline())
