"""When jobs that their tasks have left are ended, for any states of these and any times of looking."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.autoscale.jobs import running_job

from edl_runtime.backends.interface import Origin
from edl_runtime.orphans import GONE, GRACE_S, OVER, Orphan, find_orphans

ORIGIN = Origin(airflow="a", dag_id="nightly", run_id="manual__1", task_id="train")
NEEDS = ("running", "deferred", "queued", "up_for_retry", "scheduled", None)

Look = tuple[float, str | None, int]
"""Seconds since the look before; the task's state, "unknown" if Airflow does not answer; the try that has the job."""


@st.composite
def looks(draw: st.DrawFn) -> list[Look]:
    states = st.sampled_from([*OVER, *NEEDS, "unknown"]) if draw(st.booleans()) else st.sampled_from([GONE, "failed"])
    each = st.tuples(st.sampled_from([0.0, 1.0, GRACE_S / 3, GRACE_S, 3 * GRACE_S]), states, st.integers(1, 2))
    return draw(st.lists(each, max_size=12))


@given(looks())
def test_a_job_is_ended_only_after_a_grace_in_which_nobody_needed_it(seen: list[Look]) -> None:
    """At each look of that time its task was over and the job of the same try; and the next look ends it then."""
    now, left_since = 1000.0, None
    noted: dict[str, Orphan] = {}
    token = ""
    for pause_s, state, number in seen:
        now += pause_s
        is_left = state in OVER
        is_same = token == f"nightly/x/{number}"
        token = f"nightly/x/{number}"
        left_since = None if not is_left else left_since if is_same and left_since is not None else now
        job = running_job("job", 1, token=token, origin=ORIGIN)
        noted = find_orphans([job], {} if state == "unknown" else {ORIGIN: state}, noted, now)
        assert bool(noted) == is_left
        assert any(orphan.is_over(now) for orphan in noted.values()) == (
            left_since is not None and now - left_since >= GRACE_S
        )
