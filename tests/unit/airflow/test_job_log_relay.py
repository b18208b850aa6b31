"""A job's lines in its task's log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest
from support.airflow.fakes import FakeClient, job_status

from edl_airflow.runtime.log import MAX_LINE_CHARS, MAX_LINES, JobLogRelay
from edl_airflow.runtime.spec import TrainingStatus
from edl_runtime.backends.errors import ClusterError
from edl_runtime.backends.interface import InstanceStatus, JobStatus, LogLine

JOB = job_status("student")


def _lines(count: int, instance: int = 0) -> list[LogLine]:
    return [LogLine(instance, f"line {number}") for number in range(count)]


def _training(members: tuple[int, ...]) -> TrainingStatus:
    """The state of this run's agents."""
    return TrainingStatus(members=members, heard_at=JOB.created_at)


async def _counted(site: FakeClient, *looks: JobStatus, all_logs: bool = True) -> list[str]:
    """What somebody says who looks so often, and follows the job from now on to its end."""
    output: list[str] = []
    site.backend.ended = {"student"}
    log = JobLogRelay(JOB, site, output.append, 0.0, all_logs=all_logs)
    for look in looks or (JOB,):
        await log.look(look)
    await log.finish(is_over=True)
    await log.close()
    return output


async def _shown(site: FakeClient, written: Sequence[LogLine]) -> list[str]:
    """What somebody says who follows it when this has been written."""
    site.backend.written = list(written)
    return await _counted(site)


async def test_lines_stand_behind_instance_and_rank(site: FakeClient) -> None:
    """The rank is that of the generation that is up; one that is not in it has none."""
    site.trainings["student"] = _training((2, 0))
    written = [LogLine(0, "a"), LogLine(2, "b"), LogLine(1, "c")]
    assert await _shown(site, written) == ["[0 rank 1] a", "[2 rank 0] b", "[1] c"]


async def test_whoever_goes_on_shows_what_has_not_been_shown(site: FakeClient) -> None:
    """By instance; but all of another run of the job."""
    assert await _shown(site, [*_lines(2), *_lines(1, instance=1)]) == ["[0] line 0", "[0] line 1", "[1] line 0"]
    assert await _shown(site, [*_lines(3), *_lines(2, instance=1)]) == ["[0] line 2", "[1] line 1"]
    position = site.positions["student"]
    assert position.lines == {"0": 3, "1": 2}
    site.positions["student"] = type(position)(created_at=JOB.created_at - 1, lines={"0": 1})
    assert await _shown(site, _lines(1)) == ["[0] line 0"]


async def _follow(log: JobLogRelay, output: list[str], count: int) -> None:
    """Look until so many lines are shown."""
    while len(output) < count:
        await log.look(JOB)
        await log.flush_when_due()
        await asyncio.sleep(0.001)


async def test_the_first_instance_s_output_is_shown_until_one_has_failed(site: FakeClient) -> None:
    """Then that of all: the others' from its start, and of the first what has not been shown."""
    site.backend.jobs["student"] = JOB
    site.backend.written = [LogLine(0, "a"), LogLine(1, "b"), LogLine(0, "c")]
    output: list[str] = []
    log = JobLogRelay(JOB, site, output.append, 0.0)
    await _follow(log, output, 2)
    assert output == ["[0] a", "[0] c"]
    site.backend.written += [LogLine(1, "why"), LogLine(0, "d")]
    failed = InstanceStatus(index=1, phase="failed", started_at=100.0, exit_code=1)
    site.backend.ended.add(site.backend.jobs.pop("student").name)
    await log.look(job_status("student", instances=(failed,)))
    await log.finish(is_over=True)
    await log.close()
    assert sorted(output[2:]) == ["[0] d", "[1] b", "[1] why"]
    assert site.positions["student"].lines == {"0": 3, "1": 2}


async def test_the_output_is_that_of_whoever_is_rank_0(site: FakeClient) -> None:
    """One after the other, each line once: of the next all that it has written, of the last what was not read yet."""
    site.backend.jobs["student"] = JOB
    site.backend.written = [LogLine(0, "a"), LogLine(1, "b")]
    output: list[str] = []
    log = JobLogRelay(JOB, site, output.append, 0.0)
    await _follow(log, output, 1)
    for number, members in enumerate(((1, 0), (), (0, 1), (1, 0))):  # one of them has yet to form
        site.backend.written += [LogLine(0, f"a{number}"), LogLine(1, f"b{number}")]
        site.trainings["student"] = _training(members)
        await log.look(JOB)
    site.backend.ended.add(site.backend.jobs.pop("student").name)
    await log.finish(is_over=True)
    await log.close()
    texts = [line.partition("] ")[2] for line in output]
    assert [text for text in texts if text[0] == "a"] == ["a", "a0", "a1", "a2", "a3"]
    assert [text for text in texts if text[0] == "b"] == ["b", "b0", "b1", "b2", "b3"]
    assert len(texts) == 10


async def test_whoever_goes_on_shows_what_the_last_rank_0_had_yet_to_say(site: FakeClient) -> None:
    """And then follows the present one; of others nothing."""
    site.backend.written = [LogLine(0, "a"), LogLine(1, "b"), LogLine(2, "c")]
    site.trainings["student"] = _training((1, 0, 2))
    assert await _counted(site, all_logs=False) == ["[0 rank 1] a", "[1 rank 0] b"]
    site.backend.written += [LogLine(0, "d"), LogLine(1, "e"), LogLine(2, "f")]
    site.trainings["student"] = _training((2, 0))
    assert await _counted(site, all_logs=False) == ["[1] e", "[2 rank 0] c", "[2 rank 0] f"]
    site.away = True
    site.backend.written.append(LogLine(2, "g"))
    assert await _counted(site, job_status("student", elastic=False), all_logs=False) == ["[0] a", "[0] d"]


async def test_who_was_rank_0_of_an_earlier_run_is_not_followed(site: FakeClient) -> None:
    """Its state is in Redis until the agents of this run are there."""
    site.backend.written = [LogLine(0, "a"), LogLine(1, "b")]
    site.trainings["student"] = TrainingStatus(members=(1, 0), heard_at=JOB.created_at - 1)
    assert await _counted(site, all_logs=False) == ["[0] a"]


async def test_another_pod_of_an_instance_has_a_log_of_its_own(site: FakeClient) -> None:
    """As after a suspension, which removes the pods with their logs."""
    site.backend.written = [LogLine(0, "a", "p"), LogLine(0, "b", "p")]
    assert await _counted(site, all_logs=False) == ["[0] a", "[0] b"]
    site.backend.written = [LogLine(0, "c", "q")]
    assert await _counted(site, all_logs=False) == ["[0] c"]
    assert site.positions["student"].lines == {"p": 2, "q": 1}


async def test_a_student_s_own_lines_of_progress_are_left_out(site: FakeClient) -> None:
    """The task's log has them from Redis already. They count as shown, and what only looks like one is shown."""
    logged = [
        "2026-11-23 20:00:00 [info     ] job.progress                   job=student progress='step 7 · 81 samples/s'",
        '{"job": "student", "verdict": "the student is the limit: teachers are idle", "event": "job.limit"}',
    ]
    others = ["step 7", "job.progress is what I do", "student, step 8"]
    written = [LogLine(0, text) for text in (*logged, *others)]
    assert await _shown(site, written) == [f"[0] {text}" for text in others]
    assert site.positions["student"].lines == {"0": 5}


async def test_of_many_lines_the_newest_are_shown_and_it_is_said_how_many_are_not(site: FakeClient) -> None:
    """So that a script which writes much fills no disk of Airflow's."""
    output = await _shown(site, _lines(MAX_LINES + 1960))
    assert output[0] == "(1,960 lines left out; `edl logs student` has them all)"
    assert output[1:] == [f"[0] line {number}" for number in range(1960, MAX_LINES + 1960)]
    (long,) = await _shown(site, [*_lines(MAX_LINES + 1960), LogLine(0, "x" * (MAX_LINE_CHARS + 7))])
    assert long == f"[0] {'x' * MAX_LINE_CHARS} … (7 letters more)"


async def test_without_redis_lines_and_disruptions_are_shown_all_the_same(site: FakeClient) -> None:
    """Only nobody will know which."""
    site.away = True
    assert await _shown(site, _lines(2)) == ["[0] line 0", "[0] line 1"]
    assert len(await _counted(site, _hit(1), _hit(1))) == 3, "a disruption once by each who looks, and both lines"


@pytest.mark.parametrize(
    "error",
    [ValueError("it is no text"), ClusterError(403, "Forbidden", 'User "w" cannot get resource "pods/log"')],
    ids=["unreadable", "forbidden"],
)
async def test_a_log_that_can_not_be_shown_is_missed_aloud(
    site: FakeClient, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever the cause: the training goes on, and nobody must think that it is silent."""

    async def broken(*_: object, **__: object) -> AsyncGenerator[LogLine, None]:
        raise error
        yield LogLine(0, "never")

    monkeypatch.setattr(site.backend, "logs", broken)
    assert await _shown(site, _lines(1)) == [f"The log of 'student' can't be shown any more: {error}"]


def _hit(*counts: int, going: bool = False) -> JobStatus:
    """The job, whose instances the cluster has ended so often; `going`: the last time is now."""
    instances = tuple(
        InstanceStatus(
            index=index,
            phase="running",
            started_at=100.0,
            disruptions=count,
            disrupted=going,
            reason=f"instance {index} was ended by the cluster (evicting) and is replaced: {count} of at most 5"
            if going
            else "",
        )
        for index, count in enumerate(counts)
    )
    return job_status("student", instances=instances, most_disruptions=5)


async def test_each_time_that_the_cluster_ends_an_instance_is_counted_once(site: FakeClient) -> None:
    """With its reason if somebody has looked while it was going."""
    looks = [_hit(0, 0), _hit(0, 1, going=True), _hit(0, 1, going=True), _hit(0, 1), _hit(2, 1)]
    assert await _counted(site, *looks) == [
        "'student': instance 1 was ended by the cluster (evicting) and is replaced: 1 of at most 5",
        "'student': instance 0 was evicted, preempted or lost with its node: 1 of at most 5",
        "'student': instance 0 was evicted, preempted or lost with its node: 2 of at most 5",
    ]


async def test_whoever_goes_on_counts_from_there(site: FakeClient) -> None:
    """Nothing is lost of what was shown of lines; an instance that comes back after a resize begins at 0."""
    site.backend.written = _lines(2)
    assert len(await _counted(site, _hit(2, 1))) == 5
    assert site.positions["student"].disruptions == {0: 2, 1: 1}
    assert await _counted(site, _hit(2, 1)) == []
    (line,) = await _counted(site, _hit(3, 0), _hit(3, 0))
    assert line.endswith("instance 0 was evicted, preempted or lost with its node: 3 of at most 5")
    assert (await _counted(site, _hit(3, 1)))[0].endswith(
        "instance 1 was evicted, preempted or lost with its node: 1 of at most 5"
    )
    assert site.positions["student"].lines == {"0": 2}


@pytest.mark.parametrize("between", [[_hit(0)], [_hit(0, 0)], [_hit(0), _hit(0, 0)]])
async def test_an_instance_that_has_left_and_come_back_is_counted_from_one(
    site: FakeClient, between: list[JobStatus]
) -> None:
    """Also by whoever goes on."""
    first = [line[-14:] for line in await _counted(site, _hit(0, 3), *between)]
    assert first == ["1 of at most 5", "2 of at most 5", "3 of at most 5"]
    again = [line[-14:] for line in await _counted(site, _hit(0, 1), _hit(0, 2))]
    assert again == ["1 of at most 5", "2 of at most 5"]


async def test_lines_come_in_bunches(site: FakeClient) -> None:
    """The first at once, and the next not before it is time."""
    output: list[str] = []
    site.backend.jobs = {"student": JOB}
    site.backend.written = _lines(1)
    log = JobLogRelay(JOB, site, output.append, 60.0)
    await log.look(JOB)
    while not output:
        await log.flush_when_due()
        await asyncio.sleep(0.01)
    site.backend.written = _lines(2)
    await asyncio.sleep(0.05)
    await log.flush_when_due()
    assert output == ["[0] line 0"]
    site.backend.jobs = {}
    await log.finish(is_over=True)
    assert output == ["[0] line 0", "[0] line 1"]
    await log.close()
