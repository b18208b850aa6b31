"""Tasks on the real local backend, a real Redis and real teachers: what they return, and what they leave."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, AirflowTaskTimeout
from airflow.sdk.execution_time.task_runner import _run_execute_callable
from support.airflow.fakes import deferred_by
from support.airflow.world import (
    World,
    distill,
    fired,
    follow_until_started,
    registered,
    resume,
    run_task,
    trigger_of,
)
from support.external_servers import SERVERS
from support.teachers.process import running_teacher, wait_until

from edl_airflow.failures import TaskKilledError
from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_airflow.operators.register_servers import EdlRegisterServersOperator
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor
from edl_runtime.backends.errors import JobFailedError
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.specs import TrainerSpec
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_server import RedisServer


def _when_started(world: World, do: Callable[[], object]) -> threading.Thread:
    """Do something in a thread once the student has started."""

    def wait_and_do() -> None:
        wait_until(world.starts)
        do()

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    return thread


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Give SIGTERM back its handler."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize("deferrable", [False, True])
def test_the_whole_in_one_task(world: World, deferrable: bool) -> None:  # noqa: FBT001
    """A pool of real teachers comes, the student trains, its result is returned, and everything is gone."""
    operator = distill(world, teacher_pool=None, teacher=world.teacher(), teachers="1:2", deferrable=deferrable)
    context = world.context()
    result = run_task(operator, context)
    assert result["checkpoint"] == str(world.folder / "model")
    assert result["metrics"] == {"accuracy": 0.5}
    assert result["job"].startswith("nightly-distill-")
    assert result["job"] in context["xcoms"]["_link_StudentsLink"]
    assert world.jobs() == {}


@pytest.mark.slow
def test_a_pool_in_steps(world: World) -> None:
    """Start, wait, grow, shrink, stop: each returns the teachers that are registered.

    They start in the DAGs' folder, and no file there takes the place of a library.
    """
    for library in ("redis", "numpy", "json", "logging"):
        (world.folder / f"{library}.py").write_text("raise SystemExit('the wrong one')")
    context = world.context()
    start = EdlTeacherPoolOperator(
        task_id="start", dag=world.dag(), teacher_pool="digits", teacher=world.teacher(), teachers="1:2"
    )
    assert len(start.execute(context)["teachers"]) == 1
    grown = EdlResizeOperator(task_id="grow", teacher_pool="digits", instances="2", deferrable=True)
    assert len(run_task(grown, context)["teachers"]) == 2
    both = EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits", at_least=2, deferrable=True).execute(context)
    assert len(both["teachers"]) == 2
    shrunk = EdlResizeOperator(task_id="shrink", teacher_pool="digits", instances=1).execute(context)
    assert len(shrunk["teachers"]) == 1
    with pytest.raises(AirflowFailException, match="1 to 2"):
        EdlResizeOperator(task_id="beyond", teacher_pool="digits", instances=3).execute(context)
    EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits").execute(context)
    assert world.jobs() == {}
    with pytest.raises(AirflowSkipException, match="'digits' has ended"):
        EdlResizeOperator(task_id="late", teacher_pool="digits", instances=1).execute(context)


@pytest.mark.slow
def test_a_pool_in_two_places_is_one_for_its_students(world: World) -> None:
    """Each place starts, resizes and stops its own teachers, by its connection; all register under one name."""
    elsewhere = LocalBackend(world.folder / "elsewhere")
    world.connect_to(world.redis_url, "edl_burst", world.folder / "elsewhere")
    context = world.context()
    given: dict[str, Any] = {"dag": world.dag(), "teacher_pool": "digits", "teacher": world.teacher()}
    (home,) = EdlTeacherPoolOperator(task_id="start", teachers="1", **given).execute(context)["teachers"]
    EdlTeacherPoolOperator(task_id="burst", teachers="1:2", edl_conn_id="edl_burst", **given).execute(context)
    EdlResizeOperator(task_id="grow", teacher_pool="digits", instances=2, wait=False, edl_conn_id="edl_burst").execute(
        context
    )
    every = EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits", at_least=3).execute(context)["teachers"]
    assert home in every
    assert [(job.name, job.wanted) for job in asyncio.run(elsewhere.list())] == [("digits", 2)]
    assert [(job.name, job.wanted) for job in asyncio.run(world.backend.list())] == [("digits", 1)]
    passed = EdlAutoscaleOperator(task_id="rescale", edl_conn_id="edl_burst").execute(context)
    assert [(one["name"], one["instances"]) for one in passed["targets"]] == [("digits", 2)]
    EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits", edl_conn_id="edl_burst").execute(context)
    assert asyncio.run(elsewhere.list()) == []
    assert world.jobs() == {"digits": "running"}
    EdlStopTeacherPoolOperator(task_id="end", teacher_pool="digits").execute(context)
    assert world.jobs() == {}


@pytest.mark.slow
@pytest.mark.parametrize("deferrable", [False, True])
def test_servers_that_others_started_join_a_pool_of_ours(world: World, deferrable: bool) -> None:  # noqa: FBT001
    """The server answers beside our own teacher; stopping the pool ends both, and leaves the server running."""
    context = world.context()
    start = EdlTeacherPoolOperator(
        task_id="start", dag=world.dag(), teacher_pool="digits", teacher=world.teacher(), teachers="1"
    )
    (ours,) = start.execute(context)["teachers"]
    with running_teacher("answers:double", env={"PYTHONPATH": str(world.folder)}) as server:
        theirs = f"oip+http://{server.address}/teacher"
        join = EdlRegisterServersOperator(
            task_id="join", teacher_pool="digits", servers=[theirs], deferrable=deferrable, wait_timeout_s=1e6
        )
        assert run_task(join, context) == {"pool": "digits", "teachers": [theirs]}
        both = EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits", at_least=2).execute(context)
        assert set(both["teachers"]) == {ours, theirs}
        assert set(world.jobs()) == {"digits", "digits-servers"}
        EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits").execute(context)
        assert server.process.poll() is None
    assert world.jobs() == {}


@pytest.mark.slow
def test_a_server_that_can_not_be_a_teacher_fails_the_task_at_once(world: World) -> None:
    """With another model than the pool's, or with other inputs than the address says; and nothing is left."""
    context = world.context()
    start = EdlTeacherPoolOperator(
        task_id="start", dag=world.dag(), teacher_pool="digits", teacher=world.teacher(), teachers="1"
    )
    start.execute(context)
    wrong = "?input=x:INT64:-1.2&output=y:FP32:-1.2"
    with running_teacher("ours:net", env={"PYTHONPATH": str(SERVERS)}) as server:
        for given, reason in (("", r"differs from pool 'digits'"), (wrong, "answered 400: .*'x'")):
            join = EdlRegisterServersOperator(
                task_id="join",
                teacher_pool="digits",
                servers=[f"oip+http://{server.address}/teacher{given}"],
                wait_timeout_s=1e6,
            )
            with pytest.raises(AirflowFailException, match=reason):
                join.execute(context)
    assert set(world.jobs()) == {"digits"}
    EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits").execute(context)


@pytest.mark.slow
def test_a_bad_model_fails_the_task_at_once_in_the_teachers_words(world: World) -> None:
    """However long the wait limit is, with no retry, and nothing is left."""
    operator = distill(world, teacher_pool=None, teacher=world.teacher("no/such/folder"), wait_timeout_s=1e6)
    with pytest.raises(AirflowFailException, match="no/such/folder"):
        run_task(operator, world.context())
    assert world.jobs() == {}


def test_redis_down_at_the_start(world: World) -> None:
    """Infrastructure, so Airflow may retry; nothing was started, and the password is not in the message."""
    world.connect_to("redis://:top-secret@127.0.0.1:1/0")
    with pytest.raises(RegistryUnavailableError, match=r"127\.0\.0\.1:1") as caught:
        distill(world, teacher_pool=None, teacher=world.teacher()).execute(world.context())
    assert "top-secret" not in str(caught.value)
    assert world.jobs() == {}


def test_a_student_that_fails_says_why_in_the_tasks_error(world: World) -> None:
    """Its last lines are there, a retry is allowed, and nothing is left."""
    operator = distill(world, "fails")
    with registered(world, "digits", "a:1"), pytest.raises(JobFailedError, match="loss is not a number"):
        run_task(operator, world.context())
    assert world.jobs() == {}


def test_progress_is_in_the_log_and_answers_in_the_result(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """As the student has reported it."""
    script = TrainerSpec(command=("python", str(world.folder / "reports.py")))
    operator = distill(world, student=script, deferrable=True)
    with registered(world, "digits", "a:1"):
        result = run_task(operator, world.context())
    assert result["answered"] == {"a:1": 3}
    logged = capsys.readouterr().out
    assert "step 3/3 · loss 0.2500" in logged
    assert logged.count("the teachers are the limit: the student waits 38 % of the time") == 1
    assert logged.count("in quarantine: b:1 (timed out)") == 1


@pytest.mark.usefixtures("sigterm")
def test_a_killed_task_leaves_nothing(world: World) -> None:
    """SIGTERM while the student runs: `execute` ends only when the last process is gone."""
    operator = distill(world, "waits")
    signal.signal(signal.SIGTERM, lambda *_: operator.on_kill())  # as Airflow's task runner has it
    thread = _when_started(world, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with registered(world, "digits", "a:1"), pytest.raises(TaskKilledError):
        operator.execute(world.context())
    thread.join()
    assert world.jobs() == {}
    assert world.processes(supervisors=False) == []


def test_a_timed_out_task_leaves_nothing(world: World) -> None:
    """Airflow's own timer goes off, in Airflow's own runner."""
    operator = distill(world, "waits", execution_timeout=timedelta(hours=1))
    thread = _when_started(world, lambda: os.kill(os.getpid(), signal.SIGALRM))  # what that timer sends
    with registered(world, "digits", "a:1"), pytest.raises(AirflowTaskTimeout):
        _run_execute_callable(world.context(), operator.execute, operator)
    thread.join()
    assert len(world.starts()) == 1
    assert world.jobs() == {}


def test_a_deferred_task_times_out_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow has no timer for it, so the trigger has."""
    operator = distill(world, "waits", deferrable=True, execution_timeout=timedelta(hours=1))
    context = world.context()
    with registered(world, "digits", "a:1"):
        deferred = deferred_by(operator, context)
        thread = _when_started(
            world, lambda: monkeypatch.setattr("edl_airflow.runtime.runner.clock", lambda: time.time() + 3600)
        )
        event = asyncio.run(fired(trigger_of(deferred)))
    thread.join()
    with pytest.raises(AirflowTaskTimeout):
        resume(distill(world, "waits"), context, deferred, event)
    assert world.jobs() == {}


@pytest.mark.slow
def test_training_goes_on_while_redis_is_away(
    world: World, own_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trigger says so and rides it out, and the result arrives."""
    world.redis_url = own_redis.url
    world.connect_to(own_redis.url)
    operator, context = distill(world, "waits", deferrable=True, progress_every_s=0.1), world.context()
    with registered(world, "digits", "a:1"):
        deferred = deferred_by(operator, context)

        def lose_redis() -> None:
            own_redis.kill()
            wait_until(lambda: "The training continues" in capsys.readouterr().out)
            world.go()

        thread = _when_started(world, lose_redis)
        event = asyncio.run(fired(trigger_of(deferred)))
        thread.join()
    result = resume(distill(world, "waits"), context, deferred, event)
    assert result["metrics"] == {"accuracy": 0.5}
    assert world.jobs() == {}


def test_a_trigger_does_not_block_its_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other triggers share it: no socket makes it wait, and nothing sleeps in its thread."""
    blocks: list[str] = []

    def watch(owner: Any, name: str) -> None:
        do = getattr(owner, name)

        def watched(*given: Any) -> Any:
            waits = not (given and isinstance(given[0], socket.socket) and given[0].gettimeout() == 0)
            if waits and threading.current_thread() is threading.main_thread():
                blocks.append(name)
            return do(*given)

        monkeypatch.setattr(owner, name, watched)

    operator, context = distill(world, deferrable=True), world.context()
    with registered(world, "digits", "a:1"):
        deferred = deferred_by(operator, context)
        for name in ("connect", "send", "sendall", "recv", "recv_into"):
            watch(socket.socket, name)
        watch(time, "sleep")
        event = asyncio.run(fired(trigger_of(deferred)))
        assert blocks == []
        time.sleep(0)
        with socket.create_connection((urlsplit(world.redis_url).hostname, urlsplit(world.redis_url).port)):
            assert blocks == ["sleep", "connect"], "what watches is there"
    assert resume(operator, context, deferred, event)["metrics"] == {"accuracy": 0.5}


def test_clearing_a_deferred_task_spares_the_next_try(world: World) -> None:
    """Airflow runs try 2's execute before try 1's on_kill: try 2 has the student by then, the same process."""
    with registered(world, "digits", "a:1"):
        first = deferred_by(distill(world, "waits", deferrable=True), world.context("try-1"))

        asyncio.run(follow_until_started(world, first))
        context = world.context("try-2")
        second = deferred_by(distill(world, "waits", deferrable=True), context)
        asyncio.run(trigger_of(first).on_kill())
        assert set(world.jobs().values()) == {"running"}
        world.go()
        event = asyncio.run(fired(trigger_of(second)))
        result = resume(distill(world, "waits"), context, second, event)
    assert result["metrics"] == {"accuracy": 0.5}
    assert len(world.starts()) == 1
    assert world.jobs() == {}


@pytest.mark.slow
def test_a_deferred_task_that_is_marked_as_failed_leaves_nothing(world: World) -> None:
    """Neither the student nor the pool of its own: Airflow tells the trigger that a person has ended the task."""
    operator = distill(world, "waits", teacher_pool=None, teacher=world.teacher(), deferrable=True)
    deferred = deferred_by(operator, world.context())
    asyncio.run(follow_until_started(world, deferred))
    assert len(world.jobs()) == 2
    asyncio.run(trigger_of(deferred).on_kill())
    assert world.jobs() == {}


@pytest.mark.slow
def test_growing_by_another_model_fails_at_once_and_spares_the_teachers_there_are(world: World) -> None:
    """The model has changed on disk since the pool was started; the error says so, and the old teacher serves on."""
    context = world.context()
    start = EdlTeacherPoolOperator(
        task_id="start", dag=world.dag(), teacher_pool="digits", teacher=world.teacher(), teachers="1:2"
    )
    (before,) = start.execute(context)["teachers"]
    module = world.folder / "answers.py"
    module.write_text(module.read_text().replace("* 2", "* 3"))
    grow = EdlResizeOperator(task_id="grow", teacher_pool="digits", instances=2, wait_timeout_s=1e6, deferrable=True)
    with pytest.raises(AirflowFailException, match=r"differs from pool 'digits'"):
        run_task(grow, context)
    shrunk = EdlResizeOperator(task_id="shrink", teacher_pool="digits", instances=1).execute(context)
    assert shrunk["teachers"] == [before]
    EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits").execute(context)
