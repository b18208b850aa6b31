"""Waits for a traffic window."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import conf

from edl_airflow.client import open_client
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlConnection, EdlHook
from edl_airflow.operators.templates import (
    check_connection,
    check_deferrable,
    dag_folder,
    has_template,
    task_deadline,
)
from edl_airflow.results import WindowResult
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.sensors.base import EdlSensor
from edl_airflow.traffic_windows import Windows, check_window, is_known_at_parse, load_windows, windows_field
from edl_airflow.waits.traffic import TrafficCondition, TrafficObservation
from edl_runtime.backends.interface import Capacity
from edl_runtime.errors import SpecError

clock = time.time
"""Unix seconds, by this machine's clock."""


class EdlTrafficSensor(EdlSensor[TrafficCondition]):
    """Succeed in a traffic window: the one with a name, or one that leaves enough to training, or both.

    Returns a `WindowResult`. It succeeds at any time within the window, by the clock of the machine that waits.
    Deferrable, it sleeps in the triggerer until the current window ends. Fails at once when no window leaves so much to
    training; see `EdlSensor` for what all sensors share. Declared windows count, not a learned source of traffic, which
    may leave less.

    :param windows: traffic windows, as a mapping, a Path of a YAML file (a relative one starts from the DAG's file), a
        text, or "variable:NAME" for an Airflow Variable, which is read when the task runs (templated)
    :param window: the name of a window, or "default" for the times between them (templated)
    :param at_least: how much the window has to leave to training, as {"gpu": 4}, of what the connection's cluster has
        at the first check; without it the sensor needs no connection (templated)
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
        self.windows = windows_field(windows, dag_folder(self))
        self.window = window
        self.at_least = at_least
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        if window is None and at_least is None:
            raise SpecError("window, at_least", None, "the name of a window, or resources as in {'gpu': 4}, or both")
        if window is not None and not has_template(window) and is_known_at_parse(self.windows):
            check_window(load_windows(self.windows), window)
        if at_least is not None and not has_template(at_least):
            _amounts(at_least)

    def new_condition(self, until: float) -> TrafficCondition:
        windows = load_windows(self.windows, folder=dag_folder(self))
        if self.window is not None:
            check_window(windows, self.window)
        at_least = _amounts(self.at_least) if self.at_least is not None else {}
        there = self._there(at_least) if at_least else Capacity(nodes=())
        return TrafficCondition(
            windows=windows,
            window=self.window or "",
            at_least=at_least,
            total=there.total,
            quota=there.quota_total,
            wait_timeout_s=self.timeout,
            until=until,
            deadline=task_deadline(self),
        )

    def observe(self, condition: TrafficCondition) -> TrafficObservation:
        return condition.view(clock())

    def result(self, outcome: TaskOutcome) -> WindowResult:
        assert outcome.window is not None  # noqa: S101 (the condition is true)
        return outcome.window

    def _there(self, at_least: Mapping[str, float]) -> Capacity:
        """Return the cluster's capacity. Raises SpecError for resources that it does not have."""
        there = asyncio.run(_capacity(EdlHook(self.edl_conn_id).edl_connection()))
        known = sorted(there.total)
        for resource in at_least:
            if resource not in known:
                raise SpecError("at_least", resource, f"what the cluster has: {', '.join(known)}")
        return there


async def _capacity(edl_connection: EdlConnection) -> Capacity:
    async with open_client(edl_connection) as client:
        return await client.backend.capacity()


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
