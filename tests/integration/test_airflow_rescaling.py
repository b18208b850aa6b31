"""Rescaling tasks on the real local backend and a real Redis: what they change, say and return."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskAwaitingInput
from structlog.testing import capture_logs
from support.airflow.human_questions import ShownQuestions
from support.airflow.rescaling_task import context, supervisor
from support.airflow.world import World, until
from support.backends.jobs import WAITS
from support.paths import SUPPORT

from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.model import Node, Target, Workload
from edl_runtime.autoscale.rescale import last_plan
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

TASK = SUPPORT / "airflow" / "rescaling_task.py"
LITTLE = "1m"
"""The CPU that an instance reserves: rules leave a few thousandths."""


class Jobs:
    """Jobs of real processes that may have between one and nine instances."""

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, **sizes: int) -> None:
        """Start jobs with so many instances each, and wait until these run."""
        for name, instances in sizes.items():
            asyncio.run(self._world.backend.submit(self._spec(name, instances), token="test/1", secrets={}))
        until(lambda: self._running() == {**self._running(), **sizes})

    def wanted(self) -> dict[str, int]:
        return {job.name: job.wanted for job in asyncio.run(self._world.backend.list())}

    def load_of(self, instances: int) -> float:
        """Return the highest load under which so many instances have room."""
        (node,) = asyncio.run(self._world.backend.capacity()).nodes
        return (instances + 0.5) * 0.001 / node.total["cpu"]

    def _spec(self, name: str, instances: int) -> JobSpec:
        return JobSpec(
            name=name,
            kind="trainer",
            command=("python", "-c", WAITS),
            bounds=Bounds(1, 9),
            instances=instances,
            elastic=True,
            env={"EDL_NAMESPACE": self._world.namespace},
            pod=Pod(resources={"cpu": LITTLE}),
        )

    def _running(self) -> dict[str, int]:
        found = asyncio.run(self._world.backend.list())
        return {job.name: sum(one.phase == "running" for one in job.instances) for job in found}


@pytest.fixture
def jobs(world: World) -> Iterator[Jobs]:
    """None are left when the test is over."""
    yield Jobs(world)
    for name in world.jobs():
        asyncio.run(world.backend.delete(name))


def _task(world: World, **given: Any) -> EdlAutoscaleOperator:
    return EdlAutoscaleOperator(task_id="rescale", dag=world.dag(), **given)


def _begun(world: World, **given: Any) -> subprocess.Popen[str]:
    """Start the task in a process of its own."""
    environ = {**os.environ, "PYTHONPATH": str(TASK.parent), "EDL_WORK": str(world.work_dir), "EDL_HALTED": "second"}
    words = [sys.executable, str(TASK), json.dumps(given)]
    return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)


def _targets(result: Mapping[str, Any]) -> dict[str, int]:
    return {one["name"]: one["target"] for one in result["targets"]}


def test_a_pass_resizes_jobs_and_says_why(
    world: World, jobs: Jobs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A dry run says the same and changes nothing; the result is plain data, and the page shows the plan."""
    jobs.submit(first=5, second=1)
    load = jobs.load_of(6)
    windows = {"windows": [{"name": "day", "start": "00:00", "end": "24:00", "sizes": {"jobs": {"thrid": 1}}}]}
    dry = _task(world, max_load=str(load), windows=windows, dry_run="True").execute(context())
    assert jobs.wanted() == {"first": 5, "second": 1}
    assert (dry["dry_run"], dry["window"], _targets(dry)) == (True, "day", {"first": 3, "second": 3})

    made = _task(world, max_load=load, windows=windows)
    operator_context = context()
    result = made.execute(operator_context)
    assert jobs.wanted() == {"first": 3, "second": 3}
    assert json.loads(json.dumps(result)) == result
    assert {**result, "at": dry["at"], "dry_run": True} == dry
    assert (result["refused"], result["waiting"]) == ({}, [])
    said = caplog.text + capsys.readouterr().out
    assert "NAME    NOW  TARGET  REASON" in said
    assert "first     5       3  shrinks from 5 to 3" in said
    assert "second    1       3  grows from 1 to 3" in said
    assert "has a size for job 'thrid'" in said
    assert "A dry run: nothing is changed" in said

    async def kept() -> dict[str, int]:
        async with connect(world.redis_url) as client:
            plan = await last_plan(client, world.namespace)
            return {one.name: one.target for one in plan.targets} if plan else {}

    assert asyncio.run(kept()) == _targets(result)


@pytest.mark.deep
@pytest.mark.slow
def test_a_pass_that_is_killed_half_way_is_completed_by_the_next(world: World, jobs: Jobs) -> None:
    """The task's process is killed when it has resized the first job: the next run reaches what the first meant to."""
    jobs.submit(first=4, second=4, third=1)
    load = jobs.load_of(6)
    meant = _targets(_task(world, max_load=load, dry_run=True).execute(context()))
    assert meant == {"first": 2, "second": 2, "third": 2}
    killed = _begun(world, max_load=load, policy="rescaling_task:halts_one")
    try:
        until(lambda: jobs.wanted()["first"] == 2, timeout_s=60)
        assert jobs.wanted() == {"first": 2, "second": 4, "third": 1}
    finally:
        killed.kill()
        killed.communicate()
        os.kill(supervisor(world.work_dir, "second"), signal.SIGCONT)
    assert jobs.wanted()["third"] == 1
    asyncio.run(_let_time_pass(world, keys.rescaling(world.namespace), most_s=65))
    result = _task(world, max_load=load).execute(context())
    assert _targets(result) == meant
    assert jobs.wanted() == meant
    settled = _task(world, max_load=load).execute(context())["targets"]
    assert all(one["instances"] == one["target"] for one in settled)


async def _let_time_pass(world: World, key: str, *, most_s: int) -> None:
    """Let the time be over for which something is kept, which is no longer than that."""
    async with connect(world.redis_url) as client:
        assert 0 < await client.pttl(key) <= most_s * 1000
        await client.delete(key)


_meanwhile: Callable[[], None] = print


def is_slow(
    given: Sequence[Workload], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
) -> Mapping[str, Target]:
    """Decide, and let something happen before anybody is resized."""
    _meanwhile()
    return decide(given, nodes, capacity, now_s=now_s, pause_s=pause_s)


def _slowly(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> str:
    """Return the name of a policy during whose decision this happens."""
    monkeypatch.setattr(sys.modules[__name__], "_meanwhile", meanwhile)
    return f"{__name__}:is_slow"


def test_two_runs_at_once_come_one_after_the_other(world: World, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both reach the same targets: one resizes, and the other finds all as it should be."""
    jobs.submit(first=5, second=1)
    results: list[dict[str, Any]] = []
    other = threading.Thread(target=lambda: results.append(_task(world, **given).execute(context())))

    def waits() -> list[Any]:
        return [line for line in said if line["event"] == "rescaling.waits"]

    def another_begins() -> None:
        if not other.ident:
            other.start()
            until(lambda: waits() or not other.is_alive())

    given = {"max_load": jobs.load_of(6), "policy": _slowly(monkeypatch, another_begins)}
    with capture_logs() as said:
        results.append(_task(world, **given).execute(context()))
        other.join()
    assert len(waits()) == 1
    earlier, later = sorted(results, key=lambda result: float(result["at"]))
    assert _targets(earlier) == _targets(later) == {"first": 3, "second": 3}
    assert [one["instances"] for one in (*earlier["targets"], *later["targets"])] == [5, 1, 3, 3]
    assert jobs.wanted() == {"first": 3, "second": 3}


def test_a_job_that_ends_meanwhile_is_told_and_keeps_nobody(
    world: World, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task succeeds, and the others are resized."""
    jobs.submit(first=5, second=1)

    def first_ends() -> None:
        ending = threading.Thread(target=asyncio.run, args=[world.backend.delete("first")])
        ending.start()
        ending.join()

    result = _task(world, max_load=jobs.load_of(6), policy=_slowly(monkeypatch, first_ends)).execute(context())
    assert jobs.wanted() == {"second": 3}
    assert list(result["refused"]) == ["first"]
    assert "no job or pool named 'first'" in result["refused"]["first"]


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> ShownQuestions:
    """What tasks ask a person, as Airflow shows it."""
    return ShownQuestions(monkeypatch)


def _asked(task: EdlAutoscaleOperator, given: Any = None) -> TaskAwaitingInput:
    """Return the question of a run."""
    with pytest.raises(TaskAwaitingInput) as caught:
        task.execute(given or context())
    return caught.value


def _answer(option: str, name: str = "ada") -> dict[str, Any]:
    return {"chosen_options": [option], "params_input": {}, "responded_by_user": {"id": "1", "name": name}}


def test_shrinks_wait_for_a_person_and_growth_does_not(world: World, jobs: Jobs, questions: ShownQuestions) -> None:
    """After the approval the pass is made by what is then; those shrink that were asked about, and no further."""
    jobs.submit(first=6, second=1)
    given: dict[str, Any] = {"max_load": jobs.load_of(8), "approve_shrinks": True, "approval_timeout_s": 60}
    waiting = _asked(_task(world, **given))
    assert jobs.wanted() == {"first": 6, "second": 2}
    (question,) = questions.asked
    assert question["subject"] == "Shrink first from 6 to 4?"
    assert "| first | 6 | 4 | " in question["body"]
    assert (question["options"], question["defaults"]) == (["Approve", "Reject"], ["Reject"])
    assert (waiting.method_name, waiting.kwargs) == ("go_on", {"targets": {"first": 4}})
    assert waiting.timeout
    assert waiting.timeout.total_seconds() == 60

    jobs.submit(third=4)  # by then it is too many
    result = _task(world, **given).go_on(context(), **waiting.kwargs, event=_answer("Approve"))
    assert jobs.wanted() == {"first": 4, "second": 2, "third": 4}
    assert {"first", "third"} <= {*result["waiting"]}


def test_an_approval_is_for_the_number_that_was_shown(
    world: World, jobs: Jobs, questions: ShownQuestions, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is to have still less by then, or later, shrinks so far, and a question is due for the rest."""
    jobs.submit(first=4)
    given: dict[str, Any] = {"approve_shrinks": True, "approval_timeout_s": 60}
    waiting = _asked(_task(world, **given, max_load=jobs.load_of(3)))
    result = _task(world, **given, max_load=jobs.load_of(1)).go_on(
        context(), **waiting.kwargs, event=_answer("Approve")
    )
    assert jobs.wanted() == {"first": 3}
    assert result["waiting"] == ["first"]
    assert "the next run asks whether these shrink: first to 1" in capsys.readouterr().out
    waiting = _asked(_task(world, **given, max_load=jobs.load_of(1)))
    assert [question["subject"] for question in questions.asked] == [
        "Shrink first from 4 to 3?",
        "Shrink first from 3 to 1?",
    ]
    assert waiting.kwargs == {"targets": {"first": 1}}
    assert jobs.wanted() == {"first": 3}


def test_a_task_that_is_tried_again_goes_by_the_question_that_is_shown(
    world: World, jobs: Jobs, questions: ShownQuestions, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is the first try's: what a later one would ask about nobody has seen, and keeps what it has."""
    jobs.submit(first=4, second=4)
    given: dict[str, Any] = {"approve_shrinks": True, "approval_timeout_s": 60}
    task_instance = context()
    sizes = {"default": {"jobs": {"first": 3, "second": 4}}, "windows": []}
    _asked(_task(world, **given, windows=sizes), task_instance)
    sizes = {"default": {"jobs": {"first": 1, "second": 1}}, "windows": []}
    again = _task(world, **given, windows=sizes)
    waiting = _asked(again, task_instance)
    assert questions.asked[-1]["subject"] == "Shrink 2 jobs and pools?"
    assert (
        "Airflow still asks what the task's first try has asked, and only that: first to 3" in capsys.readouterr().out
    )
    again.go_on(task_instance, **waiting.kwargs, event=_answer("Approve"))
    assert jobs.wanted() == {"first": 3, "second": 4}


def test_who_was_refused_is_not_asked_about_again_for_a_while(
    world: World, jobs: Jobs, questions: ShownQuestions
) -> None:
    """And nothing shrinks; where nobody has answered, the next run asks again, or shrinks if that was wanted."""
    jobs.submit(first=5)
    given: dict[str, Any] = {"max_load": jobs.load_of(3), "approve_shrinks": "true", "approval_timeout_s": 600}
    task = _task(world, **given)
    waiting = _asked(task)
    nobody = {**_answer("Reject"), "responded_by_user": None, "timedout": True}
    task.go_on(context(), **waiting.kwargs, event=nobody)
    waiting = _asked(task)
    result = task.go_on(context(), **waiting.kwargs, event=_answer("Reject"))
    assert result["waiting"] == ["first"]
    assert task.execute(context())["waiting"] == ["first"]
    assert len(questions.asked) == 2
    assert jobs.wanted() == {"first": 5}
    asyncio.run(_let_time_pass(world, keys.shrink_approval(world.namespace, "first"), most_s=600))
    waiting = _asked(task)
    willing = _task(world, **given, unanswered="shrink")
    assert _asked(willing).method_name == "go_on"
    assert questions.asked[-1]["defaults"] == ["Approve"]
    willing.go_on(context(), **waiting.kwargs, event={**nobody, "chosen_options": ["Approve"]})
    assert jobs.wanted() == {"first": 3}


def test_one_question_at_a_time(
    world: World, jobs: Jobs, questions: ShownQuestions, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a run waits for an answer the others make their pass, and say about whom they would ask.

    A dry run asks nobody ever. Questions of other tasks, which are about other connections, keep none from asking.
    """
    jobs.submit(first=5)
    given: dict[str, Any] = {"max_load": jobs.load_of(3), "approve_shrinks": True}
    other = context(("rescale", "rescale", -1))
    assert _task(world, **given).execute(other)["waiting"] == ["first"]
    assert "until then nobody is asked whether these shrink: first to 3" in capsys.readouterr().out
    assert _targets(_task(world, **given, dry_run=True).execute(context())) == {"first": 3}
    assert questions.asked == []
    assert jobs.wanted() == {"first": 5}
    others = (("rescale", "rescale", 0), ("rescale", "other", -1), ("other", "rescale", -1))
    _asked(_task(world, **given), context(*others))
    assert len(questions.asked) == 1


@pytest.mark.parametrize("option", ["Approve", "Reject"])
def test_of_two_questions_the_one_that_a_person_answers_counts(
    world: World, jobs: Jobs, questions: ShownQuestions, option: str
) -> None:
    """Two runs at once have asked both: the end of the second's time says nothing about what was answered."""
    jobs.submit(first=5)
    unanswered = "shrink" if option == "Reject" else "keep"
    task = _task(world, max_load=jobs.load_of(3), approve_shrinks=True, unanswered=unanswered)
    first, second = (_asked(task, context()) for _ in range(2))
    assert len(questions.asked) == 2
    task.go_on(context(), **first.kwargs, event=_answer(option))
    default = questions.asked[1]["defaults"][0]
    nobody = {**_answer(default), "responded_by_user": None, "timedout": True}
    assert default != option
    task.go_on(context(), **second.kwargs, event=nobody)
    assert jobs.wanted() == {"first": 3 if option == "Approve" else 5}
