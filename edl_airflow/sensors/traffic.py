"""Waits for a traffic window."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from airflow.sdk import conf

from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlHook, Surroundings
from edl_airflow.operators.base import task_deadline
from edl_airflow.operators.templates import (
    check_connection,
    check_deferrable,
    dag_folder,
    has_template,
)
from edl_airflow.sensors.base import EdlSensor
from edl_airflow.site import open_site
from edl_airflow.traffic_wait import TrafficView, TrafficWait
from edl_airflow.windows import Windows, as_field, as_windows, check_window, is_known
from edl_airflow.work import Outcome, WindowNow
from edl_runtime.backends.base import Capacity
from edl_runtime.errors import SpecError

if TYPE_CHECKING:
    from edl_airflow.triggers.traffic import EdlTrafficTrigger


clock = time.time
"""Unix seconds, by this machine's clock."""


class EdlTrafficSensor(EdlSensor[TrafficWait]):
    """Succeed when a traffic window holds: the one that is named, or one that leaves training enough, or both.

    Returns a `WindowNow`: its name, start, end and sizes. It succeeds at any time within the window, by the clock of
    the machine that waits. Deferrable, it sleeps in the triggerer until the window that holds is over. Fails at once
    when no window leaves training so much; see `EdlSensor` for what all sensors share. What windows declare counts, not
    what a source of traffic says that the web needs, which may leave less.

    :param windows: traffic windows, as a mapping, a Path of a YAML file (a relative one starts from the DAG's file), a
        text, or "variable:NAME" for an Airflow Variable, which is read when the task runs (templated)
    :param window: the name of a window, or "default" for the times between them (templated)
    :param at_least: how much of resources training has to be left, as {"gpu": 4}, of what the connection's cluster has
        when the sensor first looks; so it needs the connection, and without this the sensor needs none (templated)
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("windows", "window", "at_least", "edl_conn_id")
    ui_color = "#ead1dc"

    def __init__(
        self,
        *,
        windows: Windows,
        window: str | None = None,
        at_least: Mapping[str, float | str] | None = None,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.windows = as_field(windows, dag_folder(self))
        self.window = window
        self.at_least = at_least
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        if window is None and at_least is None:
            raise SpecError("window, at_least", None, "the name of a window, or resources as in {'gpu': 4}, or both")
        if window is not None and not has_template(window) and is_known(self.windows):
            check_window(as_windows(self.windows), window)
        if at_least is not None and not has_template(at_least):
            _amounts(at_least)

    def new_wait(self, until: float) -> TrafficWait:
        windows = as_windows(self.windows, folder=dag_folder(self))
        if self.window is not None:
            check_window(windows, self.window)
        at_least = _amounts(self.at_least) if self.at_least is not None else {}
        there = self._there(at_least) if at_least else Capacity(nodes=())
        return TrafficWait(
            windows=windows,
            window=self.window or "",
            at_least=at_least,
            total=there.total,
            quota=there.quota_total,
            waits_s=self.timeout,
            until=until,
            deadline=task_deadline(self),
        )

    def look(self, wait: TrafficWait) -> TrafficView:
        return wait.view(clock())

    def trigger(self, wait: TrafficWait) -> EdlTrafficTrigger:
        from edl_airflow.triggers.traffic import EdlTrafficTrigger

        return EdlTrafficTrigger(wait=msgspec.to_builtins(wait))

    def result(self, outcome: Outcome) -> WindowNow:
        assert outcome.window is not None  # noqa: S101 (that is what was waited for)
        return outcome.window

    def _there(self, at_least: Mapping[str, float]) -> Capacity:
        """Return what there is for instances. Raises SpecError for resources that the cluster knows nothing of."""
        there = asyncio.run(_capacity(EdlHook(self.edl_conn_id).surroundings()))
        known = sorted(there.total)
        for resource in at_least:
            if resource not in known:
                raise SpecError("at_least", resource, f"what the cluster has: {', '.join(known)}")
        return there


async def _capacity(surroundings: Surroundings) -> Capacity:
    async with open_site(surroundings) as site:
        return await site.backend.capacity()


def _amounts(given: object) -> dict[str, float]:
    allowed = "how much of each resource, above 0, as in {'gpu': 4}"
    if not isinstance(given, Mapping) or not given:
        raise SpecError("at_least", given, allowed)
    amounts = {}
    for name, amount in given.items():
        try:
            amounts[str(name)] = float(amount)
        except (TypeError, ValueError):
            amounts[str(name)] = math.nan
        if not 0 < amounts[str(name)] < math.inf or isinstance(amount, bool):
            raise SpecError(f"at_least.{name}", amount, allowed)
    return amounts
