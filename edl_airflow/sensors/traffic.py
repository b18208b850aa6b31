"""Waits for a traffic window, by the clock alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from airflow.sdk import conf

from edl_airflow.client import open_client
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlConnection, EdlHook
from edl_airflow.operators.templates import (
    Arguments,
    Maybe,
    check_connection,
    check_deferrable,
    dag_folder,
    has_template,
)
from edl_airflow.results import WindowResult
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.sensors.base import EdlSensor
from edl_airflow.traffic_windows import (
    Windows,
    capacity_in_window,
    check_window,
    describe_sizes,
    is_known_at_parse,
    load_windows,
    sizes_by_name,
    to_window_result,
    windows_field,
)
from edl_airflow.waits import Condition, Observation
from edl_runtime.autoscale.traffic.windows import FARTHEST, Sizes, TrafficWindows, WindowSpan
from edl_runtime.backends.interface import Capacity
from edl_runtime.errors import SpecError
from edl_runtime.pods import format_amount

LOOK_AGAIN_S = 60.0
"""The longest sleep in seconds: clocks may be set and machines suspended, and a long sleep would not notice."""

LOOK_SOON_S = 0.1
"""The shortest sleep in seconds: sleeps may end a little early."""


class TrafficObservation(Observation, frozen=True, kw_only=True):
    """The window that holds at a moment."""

    span: WindowSpan


class TrafficCondition(Condition[TrafficObservation], frozen=True, kw_only=True):
    """The window of the name `window`, if one is given, that leaves `at_least` so much to training.

    `total` is the cluster's capacity by resource, `quota` what all instances together may use of it.
    """

    needs_client = False

    windows: TrafficWindows
    window: str = ""
    at_least: Mapping[str, float] = {}
    total: Mapping[str, float] = {}
    quota: Mapping[str, float] = {}
    conn_id: str = ""

    @property
    def about(self) -> str:
        room = [f"{format_amount(amount, resource)} {resource}" for resource, amount in sorted(self.at_least.items())]
        named = f"window {self.window!r}" if self.window else ""
        return " with ".join(filter(None, (named or "a window", f"at least {' and '.join(room)}" if room else "")))

    async def observe(self, client: object, now: float) -> TrafficObservation:  # noqa: ARG002 (by the clock alone)
        return TrafficObservation(span=self.windows.at(datetime.fromtimestamp(now, UTC)))

    def pause_s(self, view: TrafficObservation, now: float) -> float:
        ends = (view.span.end.timestamp() if view.span.end else None, self.until, self.deadline)
        pause = min(end for end in ends if end is not None) - now
        return min(max(pause, LOOK_SOON_S), LOOK_AGAIN_S)

    def check(self, view: TrafficObservation) -> TaskOutcome | None:
        if self._fits(view.span.name, view.span.sizes):
            return TaskOutcome(ended="ready", name=self.about, window=to_window_result(view.span))
        if view.span.end is None:
            reason = f"{view.span.name!r} holds, and does not end within {FARTHEST.days} days"
            return TaskOutcome(ended="impossible", name=self.about, reason=reason)
        sizes = sizes_by_name(self.windows)
        if not any(self._fits(name, each) for name, each in sizes.items()):
            known = ", ".join(f"{name} ({describe_sizes(each)})" for name, each in sizes.items())
            has = ", ".join(f"{format_amount(amount, name)} {name}" for name, amount in sorted(self.total.items()))
            return TaskOutcome(ended="impossible", name=self.about, reason=f"no window is that: {known}; of {has}")
        return None

    def missing(self, view: TrafficObservation) -> str:
        until = f" until {view.span.end.isoformat()}" if view.span.end else ""
        return f"{view.span.name!r} holds{until}"

    def _fits(self, name: str, sizes: Sizes) -> bool:
        has = capacity_in_window(sizes, self.total, self.quota)
        enough = all(has.get(resource, 0.0) >= amount for resource, amount in self.at_least.items())
        return enough and self.window in ("", name)


def as_amounts(field: str, given: object) -> dict[str, float]:
    """Return how much of each resource is wanted. Raises SpecError."""
    allowed = "how much of each resource, above 0, as in {'gpu': 4}"
    if not isinstance(given, Mapping) or not given:
        raise SpecError(field, given, allowed)
    amounts = {}
    for name, amount in given.items():
        try:
            amounts[str(name)] = float(amount)
        except (TypeError, ValueError):
            amounts[str(name)] = math.nan
        if not 0 < amounts[str(name)] < math.inf or isinstance(amount, bool):
            raise SpecError(f"{field}.{name}", amount, allowed)
    return amounts


class EdlTrafficSensor(EdlSensor):
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
    arguments: ClassVar[Arguments] = {"at_least": Maybe(as_amounts)}
    condition = TrafficCondition

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
        self.check_arguments()

    def condition_fields(self) -> dict[str, Any]:
        windows = load_windows(self.windows, folder=dag_folder(self))
        if self.window is not None:
            check_window(windows, self.window)
        at_least = self.argument("at_least")
        there = self._there(at_least) if at_least else Capacity(nodes=())
        given = {"windows": windows, "window": self.window, "at_least": at_least}
        return {**given, "total": there.total, "quota": there.quota_total}

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
