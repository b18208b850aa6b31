"""Which failures are tried again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException, AirflowTaskTimeout
from support.airflow.fakes import landed

from edl_airflow.failures import (
    GoneError,
    JobInterruptedError,
    NotInTimeError,
    UsersMistakeError,
    failing_clearly,
    failure_of,
)
from edl_airflow.work import Outcome
from edl_runtime.errors import (
    JobFailedError,
    ModelError,
    NoTeacherError,
    OwnedElsewhereError,
    PoolMismatchError,
    RegistryUnavailableError,
    SpecError,
    SubmitError,
)


@pytest.mark.parametrize(
    "mistake",
    [
        SpecError("bounds", "3:1", "min at most max"),
        PoolMismatchError("p", ["inputs"]),
        ModelError("m", "is no folder"),
        AirflowNotFoundException("no such connection"),
    ],
)
def test_the_users_mistakes_are_not_tried_again(mistake: Exception) -> None:
    """They fail at once, in their own words."""
    with pytest.raises(AirflowFailException) as caught, failing_clearly():
        raise mistake
    assert str(caught.value) == str(mistake)


@pytest.mark.parametrize(
    "trouble", [RegistryUnavailableError("a:1", "refused"), SubmitError("j", "no disk"), OSError()]
)
def test_infrastructure_is(trouble: Exception) -> None:
    """They pass as they are, and Airflow's retries apply."""
    with pytest.raises(type(trouble)) as caught, failing_clearly():
        raise trouble
    assert caught.value is trouble


@pytest.mark.parametrize(("kind", "argument"), [("pool", "teacher_pool"), ("trainer", "job")])
def test_whose_job_it_is_and_how_to_have_ones_own_is_said(kind: Any, argument: str) -> None:
    """In the words of a DAG's author."""
    with pytest.raises(AirflowFailException) as caught, failing_clearly():
        raise OwnedElsewhereError("digits", kind, "nightly-distill-0123")
    for part in ("'digits'", "'nightly-distill-0123'", "{{ ti.map_index }}", f"leave {argument} out"):
        assert part in str(caught.value)


def test_each_outcome_has_its_error() -> None:
    """What went well has none."""
    assert failure_of(Outcome(ended="ready", name="p"), 5) is None
    assert failure_of(Outcome(ended="succeeded", name="j"), 5) is None
    failed = Outcome(ended="failed", name="j", reason="exit 1", last_lines=("Traceback", "boom"))
    error = failure_of(failed, 5)
    assert isinstance(error, JobFailedError)
    assert "boom" in str(error)
    permanent = failure_of(Outcome(ended="failed", name="j", last_lines=("boom",), permanent=True), 5)
    assert isinstance(permanent, UsersMistakeError)
    assert "boom" in str(permanent)
    assert not isinstance(error, JobInterruptedError)
    passing = failure_of(Outcome(ended="failed", name="j", reason="evicted", last_lines=("boom",), passing=True), 5)
    assert isinstance(passing, JobInterruptedError)
    assert "boom" in str(passing)
    nobody = failure_of(Outcome(ended="no_teacher", name="p"), 5)
    assert isinstance(nobody, NoTeacherError)
    assert "'p' after 5 s" in str(nobody)
    assert isinstance(failure_of(Outcome(ended="timed_out", name="j"), 5), AirflowTaskTimeout)
    gone = failure_of(Outcome(ended="gone", name="p", reason="it was there"), 5)
    assert isinstance(gone, GoneError)
    assert "'p' has ended: it was there" in str(gone)
    never = failure_of(Outcome(ended="impossible", name="j", reason="it has no agents"), 5)
    assert isinstance(never, UsersMistakeError)
    assert str(never) == "'j': it has no agents"
    late = failure_of(Outcome(ended="not_yet", name="j", reason="it is still running"), 5)
    assert isinstance(late, NotInTimeError)
    assert "5 s for 'j': it is still running" in str(late)
    assert isinstance(failure_of(Outcome(ended="taken_over", name="j"), 5), JobFailedError)


def test_a_training_that_was_stopped_has_gone_well_if_it_has_left_something() -> None:
    """Else it has failed, and may be tried again."""
    stopped = Outcome(ended="stopped", name="student", reason="it did not end by itself", landed=landed(7))
    assert failure_of(stopped, 5) is None
    error = failure_of(msgspec.structs.replace(stopped, landed=None), 5)
    assert isinstance(error, JobFailedError)
    assert "left no checkpoint" in str(error)
