"""Doing the work: what is taken over, what is waited for, what is stopped."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.airflow.fakes import POOL, STUDENT, FakeClient, job_status, saved, spec_of

from edl_airflow.failures import UserError, error_for
from edl_airflow.results import CheckpointResult
from edl_airflow.runtime import runner
from edl_airflow.runtime.decisions import REMOVED_REASON
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec, TrainingStatus
from edl_runtime.backends.errors import OwnedElsewhereError
from edl_runtime.progress import Progress
from edl_runtime.store.errors import RegistryUnavailableError

ALONE = spec_of(pool="", pool_job=None, stream="nightly/train", ends_at=1000.0, stop_grace_s=60.0)
ALONE_TODAY = msgspec.structs.replace(ALONE, ends_at=None)


async def test_progress_is_logged_as_it_is_reported(site: FakeClient) -> None:
    """Each report once, none of a former run, and the answers by teacher are in the outcome."""
    logged: list[str] = []
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
    outcome = await runner.run(spec_of(), site, logged.append)
    assert outcome.progress
    assert outcome.progress.answered == {"a": 7}
    assert [line.split(" · ")[0] for line in logged] == ["step 1", "step 2"]


async def test_its_instances_leave_nodes_that_are_about_to_go(site: FakeClient) -> None:
    """Those of its own jobs, as long as it follows them; the task's log says so."""
    logged: list[str] = []
    site.backend.jobs = {"student": job_status("student"), "another": job_status("another")}
    site.backend.moving = {"student", "another"}

    def log(line: str) -> None:
        logged.append(line)
        site.backend.jobs["student"] = job_status("student", phase="succeeded")

    assert (await runner.run(spec_of(), site, log)).ended == "succeeded"
    assert logged == ["student moves"]


async def test_a_result_that_nobody_fetched_is_fetched(site: FakeClient) -> None:
    """A student that ended while no worker looked is not trained again."""
    site.backend.jobs = {
        "student": job_status("student", "try-0", digest=STUDENT.digest, phase="succeeded", result={"checkpoint": "c"})
    }
    outcome = await runner.start(spec_of(), site)
    assert isinstance(outcome, TaskOutcome)
    assert outcome.ended == "succeeded"


@pytest.mark.parametrize("pool_is_left", [False, True])
async def test_no_pool_is_started_for_a_student_that_has_succeeded(site: FakeClient, *, pool_is_left: bool) -> None:
    """One that is left is adopted, so that the try ends it."""
    site.backend.jobs = {"student": job_status("student", "try-0", digest=STUDENT.digest, phase="succeeded")}
    if pool_is_left:
        site.backend.jobs["digits"] = job_status("digits", "try-0", digest=POOL.digest, kind="pool")
    await runner.start(spec_of(), site)
    assert {name: job.token for name, job in site.backend.jobs.items()} == (
        {"student": "try-1", "digits": "try-1"} if pool_is_left else {"student": "try-1"}
    )


async def test_a_running_student_is_adopted_without_redis(site: FakeClient) -> None:
    """It may ride the outage out, so the try that adopts it does as well."""
    site.backend.jobs = {"student": job_status("student", "try-0", digest=STUDENT.digest)}
    site.away = True
    spec = await runner.start(spec_of(), site)
    assert spec == spec_of(started=True)
    assert site.backend.jobs["student"].token == "try-1"
    assert ("delete", "student") not in site.backend.calls
    del site.backend.jobs["student"]
    outcome = await asyncio.wait_for(runner.run(spec, site, lambda _: None), timeout=60)
    assert (outcome.ended, outcome.reason, outcome.permanent) == ("failed", REMOVED_REASON, True)


async def test_a_training_that_a_person_has_stopped_is_not_started_again_by_who_looks_later(
    site: FakeClient,
) -> None:
    """It was started before the deferral: a triggerer's first look finds it gone, whatever Redis knows."""
    spec = await runner.start(ALONE_TODAY, site)
    assert isinstance(spec, TaskSpec)
    await site.backend.delete("student")
    site.away = True
    outcome = await asyncio.wait_for(runner.run(spec, site, lambda _: None), timeout=60)
    assert (outcome.ended, outcome.reason, outcome.permanent) == ("failed", REMOVED_REASON, True)
    assert site.backend.calls == [("submit", "student"), ("delete", "student")]


async def test_a_triggerer_that_restarts_does_not_start_again_what_a_person_has_stopped(site: FakeClient) -> None:
    """A student that waited for its teachers is started once in a try, by the triggerer; another try may again."""
    spec = await runner.start(spec_of(), site)
    assert spec == spec_of(), "nothing of the student is begun yet"
    site.registered = ["a", "b"]

    async def killed(_: str) -> None:
        if "student" in site.backend.jobs:
            raise InterruptedError

    site.progress = killed  # type: ignore[method-assign,assignment]
    with pytest.raises(InterruptedError):
        await runner.run(spec, site, lambda _: None)
    await site.backend.delete("student")
    outcome = await asyncio.wait_for(runner.run(spec, site, lambda _: None), timeout=60)
    assert (outcome.ended, outcome.reason, outcome.permanent) == ("failed", REMOVED_REASON, True)
    assert site.backend.calls == [("submit", "digits"), ("submit", "student"), ("delete", "student")]
    with pytest.raises(InterruptedError):
        await runner.run(await runner.start(spec_of(token="try-2"), site), site, lambda _: None)
    assert site.backend.jobs["student"].token == "try-2"


async def test_that_a_student_was_started_is_noted_when_redis_is_back(
    site: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has started it knows it all the while."""
    site.backend.jobs = {"student": job_status("student"), "digits": job_status("digits", kind="pool")}
    away = iter([True, True, False])
    keep = site.save_started_by

    async def flaky(job: str, token: str) -> None:
        if next(away):
            raise LOST
        await keep(job, token)
        site.backend.jobs["student"] = job_status("student", phase="succeeded")

    monkeypatch.setattr(site, "save_started_by", flaky)
    assert (await runner.run(spec_of(), site, lambda _: None)).ended == "succeeded"
    assert site.started == {"student": "try-1"}


async def test_a_pool_of_another_running_task_is_refused(site: FakeClient) -> None:
    """One of an earlier try is taken over, and so is one of another task that has ended."""
    spec = spec_of(token="mine/2", trainer_job=None)
    site.backend.jobs = {"digits": job_status("digits", "other/1", kind="pool")}
    with pytest.raises(OwnedElsewhereError, match="'digits' belongs to 'other'"):
        await runner.start(spec, site)
    assert site.backend.jobs["digits"].token == "other/1"
    for earlier in (job_status("digits", "mine/1"), job_status("digits", "other/1", phase="failed")):
        site.backend.jobs = {"digits": earlier}
        await runner.start(spec, site)
        assert site.backend.jobs["digits"].token == "mine/2"


@pytest.mark.parametrize("changes", [{"digest": "other"}, {"digest": STUDENT.digest, "phase": "failed"}])
async def test_an_earlier_student_of_no_use_goes_first(site: FakeClient, changes: dict[str, str]) -> None:
    """Another spec, or a failure of this one: it is gone before its pool is touched."""
    site.backend.jobs = {"student": job_status("student", "try-0", **changes)}
    assert isinstance(await runner.start(spec_of(), site), TaskSpec)
    assert site.backend.calls == [("delete", "student"), ("submit", "digits")]


@pytest.mark.parametrize(
    ("found", "counts"),
    [
        (saved(7, at=1100.0), 7),
        (saved(7, at=999.0), None),  # last night's, of the same name
        (saved(7, at=1100.0, job="other"), None),
    ],
)
async def test_only_what_this_run_of_the_job_has_left_counts(
    site: FakeClient, found: CheckpointResult, counts: int | None
) -> None:
    """One that is ended by force without a checkpoint of its own has failed."""
    site.saved = [found, saved(8, at=1100.0, job="beside")]
    site.backend.jobs = {"student": job_status("student", created_at=1000.0)}
    outcome = await runner.run(msgspec.structs.replace(ALONE, stop_grace_s=0.01), site, lambda _: None)
    assert outcome.ended == "stopped"
    assert (outcome.checkpoint["step"] if outcome.checkpoint else None) == counts
    assert isinstance(error_for(outcome, 5), UserError) is (counts is None)  # whose time is over: no retry


async def test_a_try_after_its_time_finds_what_the_try_before_has_left(site: FakeClient) -> None:
    """Since the run has started."""
    site.saved = [saved(7, at=500.0)]
    outcome = await runner.start(msgspec.structs.replace(ALONE, began_at=400.0), site)
    assert isinstance(outcome, TaskOutcome)
    assert (outcome.ended, outcome.checkpoint) == ("stopped", saved(7, at=500.0))
    outcome = await runner.start(msgspec.structs.replace(ALONE, began_at=600.0), site)
    assert isinstance(outcome, TaskOutcome)
    assert outcome.checkpoint is None


LOST = RegistryUnavailableError("nowhere:1", "refused")


@pytest.mark.parametrize(
    ("answers", "asked", "ended"),
    [([LOST, LOST, False, False, True], 5, "succeeded"), ([True, True], 2, "succeeded"), ([True] * 9, 3, "stopped")],
    ids=["Redis is away, then instances load", "the first who was asked is dead", "nobody ends"],
)
async def test_a_training_is_asked_to_end_until_its_grace_is_over(
    site: FakeClient, monkeypatch: pytest.MonkeyPatch, answers: list[bool | Exception], asked: int, ended: str
) -> None:
    """The grace begins when it is first asked, however late that is; it is logged once, when one was received."""
    now, logged = {"at": 5000.0}, list[str]()
    left, reasons = list(answers), list[str]()
    monkeypatch.setattr(runner, "clock", lambda: now["at"])
    site.backend.jobs = {"student": job_status("student")}

    async def ask(_: str, reason: str) -> bool:
        reasons.append(reason)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        now["at"] += 20 if answer else 0
        if not left:
            site.trainings["student"] = TrainingStatus(members=(0,), ended="stopped", reason=reason)
            site.saved = [saved(7)]
            site.backend.jobs = {"student": job_status("student", phase="succeeded")}
        return answer

    monkeypatch.setattr(site, "request_stop", ask)
    outcome = await runner.run(ALONE, site, logged.append)
    assert reasons == ["its time to train is over"] * asked
    assert len([line for line in logged if "asked to end" in line]) == 1
    assert outcome.ended == ended
    assert site.backend.calls == ([] if ended == "succeeded" else [("delete", "student")])
    if ended == "succeeded":
        assert outcome.checkpoint == saved(7)
        assert outcome.training
        assert outcome.training.ended == "stopped"
