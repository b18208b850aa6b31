"""Doing the work: what is taken over, what is waited for, what is stopped."""

from __future__ import annotations

from typing import Any

import pytest
from support.airflow.fakes import STUDENT, MadeUpSite, failed_status, job_status, short_of_one, work_of

from edl_airflow import conductor
from edl_runtime.errors import OwnedElsewhereError, RegistryUnavailableError
from edl_runtime.progress import Progress


async def test_a_pool_in_trouble_is_told_once_while_the_student_trains(site: MadeUpSite) -> None:
    """Progress goes on beside it."""
    said: list[str] = []
    site.backend.jobs = {"student": job_status("student"), "digits": short_of_one("instance 1 exited with 78")}
    site.reports["student"] = Progress(step=1, updated_at=101.0)

    def say(line: str) -> None:
        said.append(line)
        step = len(said)
        site.reports["student"] = Progress(step=step, updated_at=101.0 + step)
        if step == 4:
            site.backend.jobs["student"] = job_status("student", phase="succeeded")

    await conductor.conduct(work_of(), site, say)
    assert said[0] == "Pool 'digits': instance 1 exited with 78"
    assert all(line.startswith("step") for line in said[1:])


async def test_a_silent_redis_at_the_start_starts_nothing(site: MadeUpSite) -> None:
    """The error names the address, and there is nothing to clean up."""
    site.away = True
    with pytest.raises(RegistryUnavailableError, match="nowhere:1"):
        await conductor.begin(work_of(), site)
    assert site.backend.deeds == []


async def test_a_silent_redis_later_is_ridden_out(site: MadeUpSite) -> None:
    """The training goes on, the log says so once, and the backend tells the end."""
    said: list[str] = []
    site.backend.jobs = {"student": job_status("student")}
    site.away = True

    def say(line: str) -> None:
        said.append(line)
        site.backend.jobs["student"] = job_status("student", phase="succeeded", result={"checkpoint": "c"})

    outcome = await conductor.conduct(work_of(), site, say)
    assert (outcome.ended, outcome.result) == ("succeeded", {"checkpoint": "c"})
    assert len(said) == 1
    assert "The training goes on" in said[0]


async def test_progress_is_told_as_it_is_reported(site: MadeUpSite) -> None:
    """Each report once, none of a former run, and the answers by teacher are in the outcome."""
    said: list[str] = []
    site.backend.jobs = {"student": job_status("student", created_at=100.0)}
    former = Progress(step=99, updated_at=99.0)
    first, last = Progress(step=1, updated_at=100.0), Progress(step=2, updated_at=101.0, answered={"a": 7})
    looks = iter([former, first, first, last])

    async def progress(_: str) -> Progress | None:
        report = next(looks, last)
        if report is last:
            site.backend.jobs["student"] = job_status("student", phase="succeeded")
        return report

    site.progress = progress  # type: ignore[method-assign]
    outcome = await conductor.conduct(work_of(), site, said.append)
    assert outcome.progress
    assert outcome.progress.answered == {"a": 7}
    assert [line.split(" · ")[0] for line in said] == ["step 1", "step 2"]


async def test_a_try_after_a_lost_worker_adopts_the_student(site: MadeUpSite) -> None:
    """Same spec: nothing is stopped, and the new try owns it."""
    site.backend.jobs = {"student": job_status("student", "try-0", digest=STUDENT.digest)}
    assert await conductor.begin(work_of(), site) is None
    assert ("delete", "student") not in site.backend.deeds
    assert site.backend.jobs["student"].token == "try-1"


async def test_a_result_that_nobody_fetched_is_fetched(site: MadeUpSite) -> None:
    """A student that ended while no worker looked is not trained again."""
    site.backend.jobs = {
        "student": job_status("student", "try-0", digest=STUDENT.digest, phase="succeeded", result={"checkpoint": "c"})
    }
    outcome = await conductor.begin(work_of(), site)
    assert outcome
    assert outcome.ended == "succeeded"


async def test_a_running_student_is_adopted_without_redis(site: MadeUpSite) -> None:
    """It may ride the outage out, so the try that adopts it does as well."""
    site.backend.jobs = {"student": job_status("student", "try-0", digest=STUDENT.digest)}
    site.away = True
    assert await conductor.begin(work_of(), site) is None
    assert site.backend.jobs["student"].token == "try-1"


async def test_a_pool_of_another_running_task_is_refused(site: MadeUpSite) -> None:
    """One of an earlier try is taken over, and so is one of another task that has ended."""
    work = work_of(token="mine/2", trainer_job=None)
    site.backend.jobs = {"digits": job_status("digits", "other/1", kind="pool")}
    with pytest.raises(OwnedElsewhereError, match="'digits' belongs to 'other'"):
        await conductor.begin(work, site)
    assert site.backend.jobs["digits"].token == "other/1"
    for earlier in (job_status("digits", "mine/1"), job_status("digits", "other/1", phase="failed")):
        site.backend.jobs = {"digits": earlier}
        await conductor.begin(work, site)
        assert site.backend.jobs["digits"].token == "mine/2"


async def test_all_tries_of_a_task_can_be_stopped_and_no_other_task(site: MadeUpSite) -> None:
    """For a try that fails before it owns what an earlier one has left."""
    jobs = [
        job_status("s", "mine/1"),
        job_status("p", "mine/2"),
        job_status("t", "yours/1"),
        job_status("u", "by-hand"),
    ]
    site.backend.jobs = {job.name: job for job in jobs}
    await conductor.stop_all_tries("mine", site.backend)
    assert set(site.backend.jobs) == {"t", "u"}


@pytest.mark.parametrize(
    "earlier", [job_status("student", "try-0", digest="other"), failed_status("student", 1, token="try-0")]
)
async def test_an_earlier_student_of_no_use_goes_first(site: MadeUpSite, earlier: Any) -> None:
    """Another spec, or a failure: it is gone before its pool is touched."""
    site.backend.jobs = {"student": earlier}
    assert await conductor.begin(work_of(), site) is None
    assert site.backend.deeds == [("delete", "student"), ("submit", "digits")]


async def test_stopping_hits_only_what_carries_the_token(site: MadeUpSite) -> None:
    """The student that a later try adopted goes on."""
    site.backend.jobs = {"student": job_status("student", "try-2"), "digits": job_status("digits", kind="pool")}
    await conductor.stop(work_of(), site.backend)
    assert list(site.backend.jobs) == ["student"]
