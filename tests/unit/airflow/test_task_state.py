"""The entries of Airflow's Task State panel."""

from __future__ import annotations

from typing import Any

from edl_airflow.task_state import ShownState, values_of
from edl_runtime.progress import Progress

REPORT = Progress(
    step=7, total_steps=14, updated_at=100.0, samples_per_s=12.345, time_left_s=20.0, instances=2, loss=0.5
)


class Store:
    def __init__(self) -> None:
        self.written: list[tuple[str, Any]] = []
        self.fails = False

    def set(self, key: str, value: Any) -> None:
        if self.fails:
            raise RuntimeError
        self.written.append((key, value))


def test_the_panel_has_the_numbers_of_the_page() -> None:
    """What is unknown is left out: Airflow keeps no None."""
    assert values_of(REPORT) == {
        "edl.progress": "7/14", "edl.percent": 50.0, "edl.instances": 2, "edl.rate": 12.3, "edl.eta": 120,
        "edl.loss": 0.5,
    }  # fmt: skip
    assert values_of(Progress(step=3, updated_at=1.0)) == {"edl.progress": "3", "edl.rate": 0.0}


def test_only_changes_are_written() -> None:
    """Each is a request to Airflow."""
    store = Store()
    shown = ShownState(store)
    shown.job("night")
    shown.progress(REPORT)
    written = len(store.written)
    shown.progress(REPORT)
    shown.job("night")
    assert len(store.written) == written == 7


def test_a_panel_that_can_t_be_written_hurts_no_task() -> None:
    """Neither one that fails nor one that is not there."""
    store = Store()
    store.fails = True
    shown = ShownState(store)
    shown.job("night")
    store.fails = False
    shown.progress(REPORT)
    assert store.written == []
    ShownState(None).progress(REPORT)
