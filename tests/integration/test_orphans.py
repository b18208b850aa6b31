"""Jobs whose tasks have left them end: a real Airflow database, the real local backend and a real Redis."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.variable import Variable
from airflow.sdk.execution_time.comms import GetTaskStates, GetVariable, PutVariable
from airflow.utils.session import create_session
from sqlalchemy import delete, insert, select, update
from structlog.testing import capture_logs
from support.airflow.answering import AnsweringSupervisor, answering
from support.airflow.fakes import deferred_by, succeed
from support.airflow.page import Api, overview
from support.airflow.world import World, distill, fired, resume, trigger_of
from support.edl_command import Edl, edl_command
from support.teachers.process import wait_until

from edl_airflow import orphans
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.identity import owner
from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_airflow.orphans import look, origin_of
from edl_airflow.plugin.airflow_state import TaskKey
from edl_runtime.backends.interface import Origin
from edl_runtime.orphans import GRACE_S
from edl_runtime.specs import Bounds, JobSpec

TASK = TaskKey(dag_id="nightly", run_id="manual__1", task_id="train")
WHY = "task nightly.train of run manual__1"
WAITS = ("python", "-c", "import time; time.sleep(600)")
ENDS = ("python", "-c", "")


class Tasks:
    """Task instances in Airflow's database, and jobs that they have started."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.late_s = 0.0
        """Seconds by which the clock of who looks, which stands still otherwise, is ahead."""

    def add(self, state: str | None, task: TaskKey = TASK) -> None:
        values = {"id": uuid.uuid4(), "state": state, "pool": "default_pool", "pool_slots": 1, "try_number": 1}
        key = {name: getattr(task, name) for name in task.__struct_fields__}
        with create_session() as session:
            if not session.scalar(select(DagRun).where(DagRun.run_id == task.run_id)):
                session.add(DagRun(dag_id=task.dag_id, run_id=task.run_id, run_type="manual", state="running"))
            session.execute(insert(TaskInstance).values(**key, **values))

    def mark(self, state: str | None) -> None:
        with create_session() as session:
            session.execute(update(TaskInstance).values(state=state))

    def delete_run(self) -> None:
        with create_session() as session:
            for model in (TaskInstance, DagRun):
                session.execute(delete(model))

    def submit(self, name: str = "job", task: TaskKey = TASK, *, number: int = 1, **more: Any) -> None:
        """Start a job, or adopt it as the try of that number."""
        outlives = more.pop("outlives_task", False)
        changes = more.pop("origin", {})
        given: dict[str, Any] = {"kind": "trainer", "command": WAITS, "bounds": Bounds(1, 1), "instances": 1, **more}
        spec = JobSpec(name=name, env={"EDL_NAMESPACE": self._world.namespace}, **given)
        origin = msgspec.structs.replace(origin_of(task, outlives_task=outlives), **changes)
        token = f"{owner(task)}/{number}"
        asyncio.run(self._world.backend.submit(spec, token=token, secrets={}, origin=origin))

    def look(self, *, late_s: float = 0.0, known: bool = True) -> None:
        """Look, with a clock that is `late_s` seconds further; check whether it is `known` then what is left over."""
        self.late_s += late_s
        cause = asyncio.run(look(EdlHook().edl_connection()))
        assert (cause == "") == known, cause


@pytest.fixture
def supervisor(airflow_database: Any, monkeypatch: pytest.MonkeyPatch) -> AnsweringSupervisor:
    """What answers this process's questions to Airflow."""
    return answering(airflow_database, monkeypatch)


@pytest.fixture
def tasks(world: World, supervisor: AnsweringSupervisor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tasks]:  # noqa: ARG001
    """An Airflow without task instances; none are left, and no jobs."""
    tasks, now = Tasks(world), orphans.clock()
    monkeypatch.setattr(orphans, "clock", lambda: now + tasks.late_s)
    monkeypatch.setattr(orphans, "LOOK_EVERY_S", 0.001)
    orphans._known_id.cache_clear()
    yield tasks
    tasks.delete_run()
    with create_session() as session:
        session.execute(delete(Variable))
    for name in world.jobs():
        asyncio.run(world.backend.delete(name))


@pytest.fixture
def run_edl(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Edl]:
    """The `edl` command, with the Redis and the work folder of the world's jobs."""
    with edl_command(monkeypatch, capsys) as run:
        monkeypatch.setenv("EDL_REDIS_URL", world.redis_url)
        monkeypatch.setenv("EDL_NAMESPACE", world.namespace)
        monkeypatch.setenv("EDL_WORK_DIR", str(world.work_dir))
        yield run


@pytest.mark.parametrize("state", ["failed", "upstream_failed", "the run was deleted"])
def test_a_job_ends_some_time_after_its_task_was_ended(tasks: Tasks, world: World, run_edl: Edl, state: str) -> None:
    """With its pool, also if it has finished; until then `edl jobs` calls it an orphan. The events say both."""
    tasks.add("deferred")
    tasks.submit()
    tasks.submit("pool", kind="pool")
    tasks.submit("finished", command=ENDS)
    wait_until(lambda: world.jobs()["finished"] == "succeeded")
    tasks.look()
    assert "orphan: " not in run_edl("jobs")[1]
    if state == "the run was deleted":
        tasks.delete_run()
        why = f"{WHY} exists no more"
    else:
        tasks.mark(state)
        why = f"{WHY} is {state}"
    with capture_logs() as logged:
        tasks.look()
    assert [line["why"] for line in logged if line["event"] == "orphan.found"] == [why] * 3
    assert run_edl("jobs")[1].count(f"orphan: {why}") == 3
    tasks.look(late_s=GRACE_S - 1)
    assert set(world.jobs()) == {"job", "pool", "finished"}
    with capture_logs() as logged:
        tasks.look(late_s=1)
    assert {line["job"] for line in logged if line["event"] == "orphan.stopped"} == {"job", "pool", "finished"}
    assert world.jobs() == {}
    told = run_edl("events", "job")[1].splitlines()
    assert [line.partition("orphan")[2].strip() for line in told] == [why, f"stopped, as {why}"]


def test_only_jobs_that_their_own_tasks_have_left_are_ended(tasks: Tasks, world: World) -> None:
    """Not those of other mapped tasks, other Airflows, nobody's, nor pools that outlive their task."""
    third, fourth = (msgspec.structs.replace(TASK, map_index=index) for index in (3, 4))
    tasks.add("failed", third)
    tasks.add("running", fourth)
    tasks.add("running", msgspec.structs.replace(TASK, task_id="train_3"))
    pools, gone = (msgspec.structs.replace(TASK, task_id=task_id) for task_id in ("start", "gone"))
    tasks.add("success", pools)
    tasks.submit("left", third)
    tasks.submit("mapped", fourth)
    tasks.submit("named-alike", msgspec.structs.replace(TASK, task_id="train_3"))
    tasks.submit("of-another-airflow", third, origin={"airflow": str(uuid.uuid4())})
    tasks.submit("of-an-unknown-airflow", third, origin={"airflow": ""})
    for name, task in (("started", pools), ("of-a-deleted-run", gone)):
        tasks.submit(name, task, kind="pool", outlives_task=True)
    there = set(world.jobs())
    tasks.look()
    tasks.look(late_s=GRACE_S)
    assert there - set(world.jobs()) == {"left"}


def test_a_task_that_is_cleared_keeps_its_job(tasks: Tasks, world: World, run_edl: Edl) -> None:
    """It is no orphan then, before the next try has adopted it, nor after."""
    tasks.add("failed")
    tasks.submit()
    tasks.look()
    tasks.mark(None)
    tasks.look(late_s=GRACE_S)
    assert "orphan: " not in run_edl("jobs")[1]
    tasks.mark("failed")
    tasks.look()
    tasks.submit(number=2)
    assert "orphan: " not in run_edl("jobs")[1], "the note was about the try before"
    tasks.look(late_s=GRACE_S)
    assert set(world.jobs()) == {"job"}


def test_a_try_that_adopts_the_job_as_it_is_ended_keeps_it(
    tasks: Tasks, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks ends the job of the try that it has judged."""
    tasks.add("failed")
    tasks.submit()
    tasks.look()
    ask = orphans.task_states

    def ask_and_adopt(origins: set[Origin]) -> Any:
        found = ask(origins)
        tasks.submit(number=2)
        return found

    monkeypatch.setattr(orphans, "task_states", ask_and_adopt)
    tasks.look(late_s=GRACE_S)
    assert set(world.jobs()) == {"job"}


@pytest.mark.parametrize("away", [(GetTaskStates,), (GetTaskStates, GetVariable, PutVariable)])
def test_nothing_is_ended_while_airflow_can_not_be_asked(
    tasks: Tasks, world: World, supervisor: AnsweringSupervisor, away: tuple[type, ...]
) -> None:
    """It is ended once Airflow answers; nobody judges the jobs of a task that could not ask which Airflow this is."""
    tasks.add("failed")
    tasks.submit()
    tasks.look()
    supervisor.away = away
    orphans._known_id.cache_clear()  # as in another process
    tasks.look(late_s=GRACE_S, known=False)
    tasks.submit("later")
    assert set(world.jobs()) == {"job", "later"}
    supervisor.away = ()
    tasks.look()
    tasks.look(late_s=GRACE_S)
    assert set(world.jobs()) == ({"later"} if GetVariable in away else set())


def test_all_who_follow_jobs_ask_airflow_once_in_a_while(
    tasks: Tasks, supervisor: AnsweringSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of tasks may follow jobs of one connection."""
    monkeypatch.setattr(orphans, "LOOK_EVERY_S", 3600.0)
    tasks.add("running")
    tasks.submit()
    for _ in range(3):
        tasks.look()
    assert supervisor.asked.count(GetTaskStates) == 1


def test_a_trigger_looks_after_the_jobs_of_other_tasks(
    tasks: Tasks, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends one whose task was failed while no triggerer ran, and goes on with its own."""
    monkeypatch.setattr(orphans, "LOOK_EVERY_S", 0.1)
    tasks.add("failed")
    own = TaskKey(dag_id="nightly", run_id="manual__1", task_id="distill")
    tasks.add("deferred", own)
    tasks.submit()
    operator = distill(world, "waits", teacher_pool=None, teacher=world.teacher(), deferrable=True)
    context = world.context()
    deferred = deferred_by(operator, context)

    async def follow() -> dict[str, Any]:
        firing = asyncio.create_task(fired(trigger_of(deferred)))
        await asyncio.to_thread(wait_until, world.starts)
        tasks.late_s = GRACE_S
        await asyncio.to_thread(wait_until, lambda: "job" not in _names(world))
        world.go()
        return await firing

    assert resume(operator, context, deferred, asyncio.run(follow()))["metrics"] == {"accuracy": 0.5}
    assert world.jobs() == {}


@pytest.mark.parametrize("worker_is_lost", [False, True])
def test_the_teachers_of_a_paused_dag_end_with_their_student(
    tasks: Tasks, world: World, monkeypatch: pytest.MonkeyPatch, *, worker_is_lost: bool
) -> None:
    """Nobody resumes its task until the DAG goes on; then it has the result, as has the next try of a lost worker."""
    monkeypatch.setattr("edl_airflow.triggers.task.STORED_AGAIN_S", 0.1)
    tasks.add("deferred", msgspec.structs.replace(TASK, task_id="distill"))
    operator = distill(world, teacher_pool=None, teacher=world.teacher(), deferrable=True)
    context = world.context()
    deferred = deferred_by(operator, context)

    async def fire() -> dict[str, Any]:
        event = await fired(trigger_of(deferred))
        assert len(_names(world)) == 2, "Airflow has yet to store the event"
        await asyncio.to_thread(tasks.mark, "scheduled")
        await asyncio.to_thread(wait_until, lambda: len(_names(world)) == 1)
        return event

    event = asyncio.run(fire())
    assert set(world.jobs().values()) == {"succeeded"}
    if worker_is_lost:
        context = world.context("try-2")
        result = operator.execute(context)
        succeed(operator, context)
    else:
        result = resume(operator, context, deferred, event)
    assert result["metrics"] == {"accuracy": 0.5}
    assert len(world.starts()) == 1
    assert world.jobs() == {}


def test_a_rescaling_pass_looks_after_jobs(tasks: Tasks, world: World) -> None:
    """A pass notes an orphan and a later one ends it; a dry run does neither."""
    tasks.add("failed")
    tasks.submit()
    for dry_run in (False, True):
        EdlAutoscaleOperator(task_id="rescale", dry_run=dry_run).execute(world.context())
        tasks.late_s = GRACE_S
    assert set(world.jobs()) == {"job"}
    EdlAutoscaleOperator(task_id="rescale").execute(world.context())
    assert world.jobs() == {}


def test_the_page_calls_a_job_an_orphan(tasks: Tasks, api: Api) -> None:
    """With whose task it was."""
    tasks.add("failed")
    tasks.submit()
    tasks.look()
    (job,) = overview(api, "orphan")["jobs"]
    assert job["trouble"] == f"orphan: {WHY} is failed"


def _names(world: World) -> list[str]:
    folder = world.work_dir / "jobs"
    return [each.name for each in folder.iterdir() if not each.name.startswith(".")]
