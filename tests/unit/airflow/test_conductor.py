"""Doing the work: what is taken over, what is waited for, what is stopped."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.airflow.fakes import STUDENT, MadeUpSite, job_status, landed, short_of_one, work_of

from edl_airflow import conductor
from edl_airflow.failures import failure_of
from edl_airflow.work import LandedCheckpoint, Training
from edl_runtime.errors import JobFailedError, OwnedElsewhereError, RegistryUnavailableError
from edl_runtime.progress import Progress

ALONE = work_of(pool="", pool_job=None, stream="nightly/train", ends_at=1000.0, stop_grace_s=60.0)


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


@pytest.mark.parametrize("changes", [{"digest": "other"}, {"digest": STUDENT.digest, "phase": "failed"}])
async def test_an_earlier_student_of_no_use_goes_first(site: MadeUpSite, changes: dict[str, str]) -> None:
    """Another spec, or a failure of this one: it is gone before its pool is touched."""
    site.backend.jobs = {"student": job_status("student", "try-0", **changes)}
    assert await conductor.begin(work_of(), site) is None
    assert site.backend.deeds == [("delete", "student"), ("submit", "digits")]


async def test_stopping_hits_only_what_carries_the_token(site: MadeUpSite) -> None:
    """The student that a later try adopted goes on."""
    site.backend.jobs = {"student": job_status("student", "try-2"), "digits": job_status("digits", kind="pool")}
    await conductor.stop(work_of(), site.backend)
    assert list(site.backend.jobs) == ["student"]


@pytest.mark.parametrize(
    ("found", "counts"),
    [
        (landed(7, at=1100.0), 7),
        (landed(7, at=999.0), None),  # last night's, of the same name
        (landed(7, at=1100.0, job="other"), None),
    ],
)
async def test_only_what_this_run_of_the_job_has_left_counts(
    site: MadeUpSite, found: LandedCheckpoint, counts: int | None
) -> None:
    """One that is ended by force without a checkpoint of its own has failed."""
    site.landed = [found, landed(8, at=1100.0, job="beside")]
    site.backend.jobs = {"student": job_status("student", created_at=1000.0)}
    outcome = await conductor.conduct(msgspec.structs.replace(ALONE, stop_grace_s=0.01), site, lambda _: None)
    assert outcome.ended == "stopped"
    assert (outcome.landed["step"] if outcome.landed else None) == counts
    assert isinstance(failure_of(outcome, 5), JobFailedError) is (counts is None)


async def test_a_try_after_its_time_finds_what_the_try_before_has_left(site: MadeUpSite) -> None:
    """Since the run has started."""
    site.landed = [landed(7, at=500.0)]
    outcome = await conductor.begin(msgspec.structs.replace(ALONE, began_at=400.0), site)
    assert outcome
    assert (outcome.ended, outcome.landed) == ("stopped", landed(7, at=500.0))
    outcome = await conductor.begin(msgspec.structs.replace(ALONE, began_at=600.0), site)
    assert outcome
    assert outcome.landed is None


async def test_a_checkpoint_that_is_written_when_instances_leave_is_the_last(
    site: MadeUpSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave when the training is ended by force; what counts is known after that."""
    site.backend.jobs, site.landed = {"student": job_status("student")}, [landed(7)]
    delete = site.backend.delete

    async def leave(name: str, *, token: str | None = None) -> bool:
        site.landed.append(landed(9))
        deleted: bool = await delete(name, token=token)
        return deleted

    monkeypatch.setattr(site.backend, "delete", leave)
    outcome = await conductor.conduct(msgspec.structs.replace(ALONE, stop_grace_s=0.01), site, lambda _: None)
    assert (outcome.ended, outcome.landed) == ("stopped", landed(9))


async def test_it_is_asked_once_as_soon_as_somebody_hears(site: MadeUpSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may be away when the time comes, and the instances may still load."""
    now = {"at": 1000.0}
    monkeypatch.setattr(conductor, "clock", lambda: now["at"])
    site.backend.jobs = {"student": job_status("student")}
    site.away = True
    said: list[str] = []
    looks = iter(range(100))

    async def training(job: str) -> Training | None:  # noqa: ARG001
        return site.trainings.get("student")

    async def ask(job: str, reason: str) -> bool:
        look = next(looks)
        if look < 2:
            raise RegistryUnavailableError("nowhere:1", "refused")
        if look < 4:
            return False
        site.asked.append((job, reason))
        site.away = False
        site.trainings["student"] = Training(members=(0,), ended="stopped", reason=reason)
        site.landed = [landed(7)]
        site.backend.jobs = {"student": job_status("student", phase="succeeded")}
        return True

    monkeypatch.setattr(site, "ask_to_end", ask)
    monkeypatch.setattr(site, "training", training)
    outcome = await conductor.conduct(ALONE, site, said.append)
    assert site.asked == [("student", "its time to train is over")]
    assert (outcome.ended, outcome.landed) == ("succeeded", landed(7))
    assert outcome.training
    assert outcome.training.ended == "stopped"
    assert len([line for line in said if "asked to end" in line]) == 1


async def test_a_training_is_asked_to_end_until_its_grace_is_over(
    site: MadeUpSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace begins when it is first asked, however late that is; whoever was asked before may be dead by now."""
    for ends_at_ask in (None, 2):
        now, said = {"at": 5000.0}, list[str]()
        monkeypatch.setattr(conductor, "clock", lambda now=now: now["at"])
        site.backend.jobs, site.asked, site.backend.deeds = {"student": job_status("student")}, [], []

        async def ask(job: str, reason: str, now: Any = now, ends_at_ask: int | None = ends_at_ask) -> bool:
            site.asked.append((job, reason))
            now["at"] += 20
            if len(site.asked) in (ends_at_ask, 10):
                site.backend.jobs = {"student": job_status("student", phase="succeeded")}
            return True

        monkeypatch.setattr(site, "ask_to_end", ask)
        outcome = await conductor.conduct(ALONE, site, said.append)
        assert site.asked == [("student", "its time to train is over")] * (ends_at_ask or 3)
        assert outcome.ended == ("succeeded" if ends_at_ask else "stopped")
        assert site.backend.deeds == ([] if ends_at_ask else [("delete", "student")])
        assert len([line for line in said if "asked to end" in line]) == 1
