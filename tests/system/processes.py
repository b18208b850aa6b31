"""Processes of a running Airflow: to be killed, or to be found gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from edl_airflow.laptop.components import Component
from edl_airflow.laptop.launcher import Laptop


@contextmanager
def another_triggerer(laptop: Laptop) -> Iterator[None]:
    """Kill the triggerer, and start another one to stay.

    Until the end of the block, what the first has started lives on, as it does where no launcher cleans up behind it.
    """
    first = next(component for component in laptop._components if component.name == "triggerer")
    wrapper = psutil.Process(first._wrapper.pid)
    *_, descriptors = wrapper.cmdline()[:5]
    wrapper.suspend()
    try:
        for process in [child for child in wrapper.children(recursive=True) if _is_airflow(child)]:
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


def _is_airflow(process: psutil.Process) -> bool:
    return "EDL_JOB" not in process.environ() and not any("edl_runtime" in word for word in process.cmdline())
