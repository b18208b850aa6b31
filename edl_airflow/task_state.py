"""Airflow's *Task State* panel: the progress of the task's job, while a worker runs the task.

A trigger can't write it, so while a task is deferred it shows the state at the deferral; the plugin's page goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from edl_runtime.progress import Progress


class StateStore(Protocol):
    """Airflow's `context["task_state_store"]`."""

    def set(self, key: str, value: Any) -> None: ...


class ShownState:
    """Writes what has changed; nothing where Airflow has no such store. A failure ends the writing, not the task."""

    def __init__(self, store: StateStore | None) -> None:
        self._store = store
        self._shown: dict[str, Any] = {}

    def job(self, name: str) -> None:
        """Show which job the task has."""
        self._show({"edl.job": name})

    def progress(self, progress: Progress) -> None:
        """Show how far the job is."""
        self._show(values_of(progress))

    def _show(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if self._store is not None and self._shown.get(key) != value:
                try:
                    self._store.set(key, value)
                except Exception:  # noqa: BLE001 - as without permission, or in a test of the DAG
                    self._store = None
                else:
                    self._shown[key] = value


def values_of(progress: Progress) -> dict[str, Any]:
    """Return the entries of a report: only values that Airflow can keep, and none that is unknown. Pure."""
    left = progress.time_left_s
    found = {
        "edl.progress": f"{progress.step}/{progress.total_steps}" if progress.total_steps else str(progress.step),
        "edl.percent": None if progress.share is None else round(100 * progress.share, 1),
        "edl.instances": progress.instances or None,
        "edl.rate": round(progress.samples_per_s, 1),
        "edl.eta": None if left is None else round(progress.updated_at + left),
        "edl.loss": None if progress.loss is None else float(f"{progress.loss:.6g}"),
        "edl.limit": progress.verdict() or None,
    }
    return {key: value for key, value in found.items() if value is not None}
