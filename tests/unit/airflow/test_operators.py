"""Operators without a database: what they start and stop, and the two halves of a deferred task."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
import pytest
from airflow.sdk import DAG, BaseOperator
from airflow.sdk import serde as xcom
from airflow.sdk.definitions._internal.mixins import ResolveMixin
from airflow.sdk.exceptions import AirflowFailException
from airflow.serialization.serialized_objects import DagSerialization
from support.airflow.fakes import FakeClient, deferred_by, event_of, job_status, rendered, succeed
from support.airflow.templates import CONNECTION, STUDENT, TEACHER, distill

from edl_airflow.failures import TaskKilledError
from edl_airflow.identity import job_name, pool_name, try_token
from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.register_servers import EdlRegisterServersOperator
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.sensors.checkpoint import EdlCheckpointSensor
from edl_airflow.sensors.job import EdlJobSensor
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor
from edl_airflow.sensors.traffic import EdlTrafficSensor
from edl_runtime.backends.errors import JobFailedError
from edl_runtime.distill.errors import NoTeacherError
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.progress import Progress
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, Spec, TeacherSpec, TrainerSpec
from edl_runtime.store.errors import RegistryUnavailableError


def test_an_unknown_connection_fails_at_once(context: Any) -> None:
    """Trying again would not make it known."""
    with pytest.raises(AirflowFailException, match="elsewhere"):
        distill(edl_conn_id="elsewhere").execute(context)


def test_the_first_half_starts_the_pool_and_defers(context: Any, site: FakeClient) -> None:
    """Links are there already, and what goes to the triggerer is plain data without the password."""
    operator = rendered(distill(), context)
    deferred = deferred_by(operator, context)
    pool = pool_name(context["ti"])
    assert site.backend.calls == [("submit", pool)]
    assert deferred.timeout is None
    sent = json.dumps(deferred.trigger.serialize())
    assert "secret" not in sent
    assert context["ti"].xcoms == {
        "_link_StudentsLink": f"/edl/?conn=edl_default&job={job_name(context['ti'])}",
        "_link_TeacherPoolLink": f"/edl/?conn=edl_default&pool={pool}",
    }
    operator.on_kill()
    assert pool in site.backend.jobs, "what the trigger has taken over is no longer the worker's to kill"


@pytest.mark.parametrize(
    ("error", "ends", "left"), [(BrokenPipeError, True, 1), (BrokenPipeError, False, 0), (OSError, True, 0)]
)
def test_the_next_try_finds_the_work_of_a_lost_worker(
    context: Any, site: FakeClient, monkeypatch: pytest.MonkeyPatch, *, error: type[OSError], ends: bool, left: int
) -> None:
    """Its task can't write to it any more, some time before it has another parent. Other errors stop the work."""
    parents = chain([7] * 3, repeat(1 if ends else 7))
    monkeypatch.setattr("os.getppid", lambda: next(parents))
    monkeypatch.setattr("edl_airflow.operators.base.LOOK_AGAIN_S", 0)
    operator = rendered(distill(deferrable=False), context)

    def lose(*_: object) -> None:
        raise error

    monkeypatch.setattr("edl_airflow.runtime.runner.run", lose)
    with pytest.raises(error):
        operator.execute(context)
    assert len(site.backend.jobs) == left


@pytest.mark.parametrize("state", ["failed", "success", "restarting"])
def test_a_task_that_was_ended_meanwhile_does_not_defer(context: Any, site: FakeClient, state: str) -> None:
    """Airflow would refuse it, and no trigger would ever stop what was started."""
    context["ti"].state = state
    with pytest.raises(TaskKilledError):
        rendered(distill(), context).execute(context)
    assert site.backend.jobs == {}


def test_a_task_killed_before_it_began_starts_nothing(
    context: Any, site: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow lets `execute` go on after `on_kill`."""
    operator = rendered(distill(), context)
    monkeypatch.setattr("edl_airflow.operators.base.push_links", lambda *_: operator.on_kill())
    with pytest.raises(TaskKilledError):
        operator.execute(context)
    assert site.backend.calls == []


def test_the_second_half_runs_on_a_fresh_operator(context: Any, site: FakeClient) -> None:
    """It stops the pool and returns the typed result; the student goes once Airflow has recorded the success."""
    deferred = deferred_by(rendered(distill(), context), context)
    student, pool = job_name(context["ti"]), pool_name(context["ti"])
    site.backend.jobs[student] = job_status(student, try_token(context["ti"]), phase="succeeded")
    left = {"checkpoint": "/c", "metrics": {"accuracy": 0.9}, "not_finite": {"loss": 7}}
    event = event_of(
        deferred,
        TaskOutcome(
            ended="succeeded", name=student, result=left, progress=Progress(step=1, updated_at=1.0, answered={"a:1": 4})
        ),
    )
    operator = distill()
    result = operator.execute_complete(context, event)
    assert result == {"job": student, "pool": pool, **left, "answered": {"a:1": 4}}
    assert [*site.backend.jobs] == [student]
    (forget,) = operator.on_success_callback
    forget(context)
    assert [*site.backend.jobs] == [student], "nothing is recorded yet: the worker may be lost"
    succeed(operator, context)
    assert site.backend.jobs == {}


@pytest.mark.parametrize("cleared", [False, True])
def test_a_try_after_one_that_was_lost_at_its_end_takes_the_result(
    context: Any, site: FakeClient, *, cleared: bool
) -> None:
    """Of the student that has ended, and it starts no teachers; but who clears the task wants it trained again."""
    student, pool = job_name(context["ti"]), pool_name(context["ti"])
    deferred = deferred_by(rendered(distill(), context), context)
    site.backend.jobs[student] = msgspec.structs.replace(
        job_status(student, try_token(context["ti"]), phase="succeeded"),
        digest=deferred.trigger.spec.trainer_job.digest,
    )
    distill().execute_complete(context, event_of(deferred, TaskOutcome(ended="succeeded", name=student)))
    site.backend.calls.clear()
    context["ti"].id, context["ti"].max_tries = "try-2", int(cleared)
    if cleared:
        deferred_by(rendered(distill(), context), context)
        assert site.backend.calls == [("delete", student), ("submit", pool)]
    else:
        assert rendered(distill(), context).execute(context)["job"] == student
        assert site.backend.calls == [("submit", student)]


def test_a_student_that_left_nothing_is_warned_of(
    context: Any, site: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the task's log, also after a deferral; the task has succeeded all the same."""
    deferred = deferred_by(rendered(distill(), context), context)
    student = job_name(context["ti"])
    logged: list[str] = []
    operator = distill()
    monkeypatch.setattr(operator.log, "warning", logged.append)
    result = operator.execute_complete(context, event_of(deferred, TaskOutcome(ended="succeeded", name=student)))
    assert (result["checkpoint"], result["metrics"]) == ("", {})
    assert [line.partition(",")[0] for line in logged] == [f"'{student}' has succeeded and left nothing"]
    assert site.backend.jobs == {}


def test_a_failed_student_leaves_nothing_and_its_last_lines(
    context: Any, site: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's error has the script's last lines, also when the connection has been removed since."""
    deferred = deferred_by(rendered(distill(), context), context)
    monkeypatch.delenv("AIRFLOW_CONN_EDL_DEFAULT")
    event = event_of(deferred, TaskOutcome(ended="failed", name="job", reason="exit 1", last_lines=("KeyError: 'x'",)))
    with pytest.raises(JobFailedError, match="KeyError: 'x'"):
        distill().execute_complete(context, event)
    assert site.backend.jobs == {}


def test_a_job_that_a_person_stops_is_not_started_again(context: Any, site: FakeClient) -> None:
    """`edl stop` ends the task, too, whatever retries it has left, and what else it runs."""
    site.registered = ["127.0.0.1:1", "127.0.0.1:2"]
    site.backend.forget_after(job_name(context["ti"]), looks=5)
    with pytest.raises(AirflowFailException, match="stopped it while it was running, as by `edl stop`"):
        rendered(distill(deferrable=False), context).execute(context)
    assert site.backend.jobs == {}


def test_a_job_that_a_person_stops_before_a_triggerer_has_seen_it_is_not_started_again(
    context: Any, site: FakeClient
) -> None:
    """The task passes to the trigger that its work was started; how it ends fails the task without a retry."""
    deferred = deferred_by(rendered(train(deferrable=True), context), context)
    asyncio.run(site.backend.delete(job_name(context["ti"])))
    path, kwargs = json.loads(json.dumps(deferred.trigger.serialize()))

    async def event() -> Any:
        return await asyncio.wait_for(anext(resolve_name(path)(**kwargs).run()), timeout=60)

    with pytest.raises(AirflowFailException, match="stopped it while it was running, as by `edl stop`"):
        train().execute_complete(context, asyncio.run(event()).payload)
    assert [deed for deed, _ in site.backend.calls] == ["submit", "delete"]


start = partial(EdlTeacherPoolOperator, task_id="start", teacher_pool="digits", teacher=TEACHER, teachers="2:3")


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_pool_that_is_ready_is_neither_deferred_nor_killed(context: Any, site: FakeClient, deferrable: bool) -> None:  # noqa: FBT001
    """A trigger that fires at once would race with the scheduler; Airflow ends a finished process that lingers."""
    site.registered = ["127.0.0.1:1", "127.0.0.1:2"]
    operator = rendered(start(deferrable=deferrable), context)
    assert operator.execute(context) == {"pool": "digits", "teachers": site.registered}
    operator.on_kill()
    assert "digits" in site.backend.jobs


def test_only_the_servers_named_count_as_registered(context: Any, site: FakeClient) -> None:
    """The pool may have teachers of its own; the job that registers the servers has a name of its own."""
    triton, kserve = "oip+http://triton:8000/net", "oip+grpc://kserve:8081/net?input=x:FP32:-1.2"
    join = partial(
        EdlRegisterServersOperator,
        task_id="join",
        teacher_pool="digits",
        servers=["{{ params.triton }}", kserve],
        wait_timeout_s=0.05,
    )
    context["params"] = {"triton": triton, "low": 1}
    site.registered = ["127.0.0.1:1", triton]
    with pytest.raises(NoTeacherError, match="1 of 2 are registered"):
        rendered(join(), context).execute(context)
    found = rendered(join(at_least="{{ params.low }}"), context).execute(context)
    assert found == {"pool": "digits", "teachers": [triton]}
    assert list(site.backend.jobs) == ["digits-servers"]
    with pytest.raises(AirflowFailException, match="at_least: got 3, allowed is at most the number of servers, 2"):
        rendered(join(at_least=3), context).execute(context)
    with pytest.raises(AirflowFailException, match="teacher_pool with '-servers' behind it"):
        rendered(join(teacher_pool=50 * "a"), context).execute(context)


def test_a_pool_that_is_not_ready_in_time_is_stopped(context: Any, site: FakeClient) -> None:
    """A failed task leaves no pool behind."""
    with pytest.raises(NoTeacherError, match=r"'digits' after 0 s.*edl pools"):
        start(wait_timeout_s=0.05).execute(context)
    assert site.backend.jobs == {}


@pytest.mark.parametrize("trouble", ["bad params", "no redis"])
def test_a_try_that_can_not_begin_leaves_nothing_of_the_tries_before(
    context: Any, site: FakeClient, trouble: str
) -> None:
    """Nobody else would stop it, and what others own goes on."""
    before = try_token(context["ti"]).replace("try-1", "try-0")
    site.backend.jobs = {name: job_status(name, before) for name in (job_name(context["ti"]), pool_name(context["ti"]))}
    site.backend.jobs |= {"else": job_status("else", "other/1"), "made": job_status("made", "by-hand")}
    site.away = trouble == "no redis"
    context["params"] = {"low": 3, "high": 1 if trouble == "bad params" else 3}
    operator = rendered(distill(teachers="{{ params.low }}:{{ params.high }}"), context)
    with pytest.raises((AirflowFailException, RegistryUnavailableError)):
        operator.execute(context)
    assert list(site.backend.jobs) == ["else", "made"]


def test_a_kill_between_the_question_and_the_deferral_is_heeded(context: Any, site: FakeClient) -> None:
    """Airflow says that the task runs, and ends it while it says so."""
    operator = rendered(distill(), context)
    ask = context["ti"].get_task_states
    context["ti"].get_task_states = lambda **which: (operator.on_kill(), ask(**which))[1]
    with pytest.raises(TaskKilledError):
        operator.execute(context)
    assert site.backend.jobs == {}


def test_a_retry_with_another_teacher_does_not_adopt_the_student(context: Any) -> None:
    """What the old teacher has taught is not what the task shall return: it is another job, by its digest."""
    digests = {
        rendered(distill(teacher=TeacherSpec(model=model)), context).plan(context, CONNECTION).trainer_job.digest
        for model in ("models:add", "models:double")
    }
    assert len(digests) == 2


def test_students_may_be_elastic_trainers(context: Any) -> None:
    """Agents run each, which knows the pool and where its checkpoints are."""
    operator = rendered(distill(students="1:2", checkpoint="/ck", teacher_pool="digits"), context)
    job = operator.plan(context, CONNECTION).trainer_job
    settings = RuntimeSettings.from_env(job.env)
    assert (job.elastic, job.bounds, job.command[4:7]) == (True, Bounds(1, 2), ("agent", "--instances", "1:2"))
    assert (settings.pool, settings.checkpoint_spec()) == ("digits", Checkpoint(url="/ck"))


def test_all_jobs_of_a_task_have_its_priority_and_weight(context: Any) -> None:
    """The pool and the training of a task have the same; the defaults are 0 and 1."""
    sharing: dict[str, Any] = {"priority": 4, "weight": 0.5}
    made = [distill(students="1:2", **sharing), start(**sharing), train(**sharing), train()]
    specs = [rendered(operator, context).plan(context, CONNECTION) for operator in made]
    jobs = [job for spec in specs for job in (spec.pool_job, spec.trainer_job) if job]
    assert [(job.kind, job.priority, job.weight) for job in jobs] == [
        *(("pool", 4, 0.5), ("trainer", 4, 0.5), ("pool", 4, 0.5), ("trainer", 4, 0.5)),
        ("trainer", 0, 1.0),
    ]


train = partial(EdlTrainOperator, task_id="train", trainer=STUDENT)


def test_templates_inside_specs_are_rendered(context: Any) -> None:
    """Any text in a spec may hold one, and bounds may come from params."""
    operator = rendered(distill(teachers="{{ params.low }}:{{ params.high }}"), context)
    assert operator.teacher == TeacherSpec(model="/models/3", outputs=("logits",))
    assert operator.student == TrainerSpec(command=("python", "s.py", "manual__1"), env={"LOW": "1"})
    assert operator.plan(context, CONNECTION).pool_job.bounds == Bounds(1, 3)
    with DAG("d", schedule=None) as dag:
        distill()
    (plain,) = DagSerialization.to_dict(dag)["dag"]["tasks"]
    assert plain["__var"]["teacher"]["model"] == "/models/{{ params.high }}", "people can read them"


@pytest.mark.parametrize(
    ("operator", "mistake", "expected"),
    [
        (distill, {"teachers": "{{ params.high }}:{{ params.low }}"}, "teachers"),
        (distill, {"teachers": "{{ run_id }}"}, "teachers"),
        (distill, {"teachers": "{{ '' }}"}, "teachers"),
        (train, {"trainers": "{{ run_id }}"}, "trainers"),
        (train, {"ends_by": "{{ run_id }}"}, "ends_by"),
        (train, {"job": "{{ 'A b' }}"}, "job"),
    ],
)
def test_what_a_template_makes_is_checked_before_anything_starts(
    operator: Any, mistake: dict[str, Any], expected: str, context: Any, site: FakeClient
) -> None:
    """Bad params fail the task at once and leave nothing."""
    with pytest.raises(AirflowFailException, match=expected):
        rendered(operator(**mistake), context).execute(context)
    assert site.backend.calls == []


def test_templates_make_text_where_the_dag_makes_objects(context: Any) -> None:
    """`render_template_as_native_obj` would make a command's "24" a number."""
    with DAG("native", schedule=None, render_template_as_native_obj=True):
        student = TrainerSpec(command=("python", "s.py", "--epochs", "{{ params.high }}"), env={"N": "{{ 2 }}"})
        operator = rendered(distill(student=student, teacher_pool="{{ 20260101 }}", teachers="{{ 2 }}"), context)
        sensor = rendered(EdlTeacherPoolSensor(task_id="wait", teacher_pool="{{ 5 }}"), context)
    assert operator.student == TrainerSpec(command=("python", "s.py", "--epochs", "3"), env={"N": "2"})
    assert (operator.plan(context, CONNECTION).pool, sensor.teacher_pool) == ("20260101", "5")


SPECS = [
    (Bounds(1, 3), {"min": 1, "max": 3}),
    (TrainerSpec(command=["a"], pod=Pod(image="x:1")), {"command": ["a"], "pod": {"image": "x:1"}}),
    (TeacherSpec(model="m", outputs=["logits"], max_batch=2), {"model": "m", "outputs": ["logits"], "max_batch": 2}),
    (Checkpoint(url="s3://runs/a", every_steps=5), {"url": "s3://runs/a", "every_steps": 5}),
]


@pytest.mark.parametrize(("spec", "plain"), SPECS, ids=lambda one: type(one).__name__)
def test_a_task_may_return_a_spec(spec: Spec, plain: dict[str, Any]) -> None:
    """XCom gives the next task what this one has returned; what people see there is plain data."""
    kept = json.loads(json.dumps(xcom.serialize(spec)))
    assert plain.items() <= kept["__data__"].items() or "pod" in plain
    assert xcom.deserialize(kept) == spec


@pytest.mark.parametrize("of_upstream", [lambda spec: spec, lambda spec: json.loads(json.dumps(spec.serialize()))])
def test_specs_come_from_upstream_tasks_as_they_are_or_as_dicts(
    context: Any, of_upstream: Callable[[Spec], object]
) -> None:
    """Each of a mapped task, too; what is in braces there is no template, as in everything that comes from a task."""
    command = ("python", "s.py", "{{ run_id }}")
    specs = [TrainerSpec(command=command, not_finite="fail"), Checkpoint(url="/c", keep_last=2), Bounds(2, 4)]
    trainer, checkpoint, bounds = map(of_upstream, specs)
    with DAG("nightly", schedule=None):
        one = EdlTrainOperator(task_id="one", trainer=upstream(trainer), trainers=upstream(bounds))
        each: Any = EdlTrainOperator.partial(task_id="each", trainers=bounds).expand_kwargs(
            [{"trainer": trainer, "checkpoint": checkpoint}]
        )
    each = each.unmap({"trainer": trainer, "checkpoint": checkpoint})
    each._do_render_template_fields(
        each, each.template_fields, context, each.get_template_env(), {id(trainer), id(checkpoint)}
    )
    for operator in (rendered(one, context), each):
        job = operator.plan(context, CONNECTION).trainer_job
        assert job.command[-1] == "{{ run_id }}"
        assert job.bounds == Bounds(2, 4)
        assert job.env["EDL_NOT_FINITE"] == "fail"
    assert job.env["EDL_CHECKPOINT_KEEP_LAST"] == "2"


def test_a_dict_with_templates_is_a_spec(context: Any) -> None:
    """Its text stands for numbers, too."""
    teacher = {"model": "/models/{{ params.high }}", "max_batch": "{{ params.high }}", "gpu_ids": ["{{ 0 }}"]}
    operator = rendered(distill(teacher=teacher, students={"min": 1, "max": 2}), context)
    command = operator.plan(context, CONNECTION).pool_job.command
    assert command[command.index("--model") + 1] == "/models/3"
    assert command[command.index("--max-batch") + 1] == "3"


def test_a_path_is_a_place_for_checkpoints(context: Any) -> None:
    """With a template, too; and where an upstream task returns it."""
    for given in (Path("/c/{{ run_id }}"), upstream(Path("/c/manual__1"))):
        with DAG("nightly", schedule=None):
            operator = train(checkpoint=given)
        job = rendered(operator, context).plan(context, CONNECTION).trainer_job
        assert job.env["EDL_CHECKPOINT"] == "/c/manual__1"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"trainer": {"comand": ["a"]}}, "trainer: got 'comand', allowed is the fields of TrainerSpec: command, env"),
        ({"trainer": {"command": ["a"], "pod": {"images": "x"}}}, "trainer.pod: got 'images'"),
        ({"trainer": {"command": ["a"], "env": {"LR": 0.1}}}, "env['LR']: got 'float', allowed is text, as in '0.1'"),
        ({"trainer": {"command": "python s.py"}}, "command: got 'python s.py', allowed is a non-empty list of words"),
        ({"trainer": {}}, "missing required field"),
        ({"trainer": TEACHER}, "trainer: got TeacherSpec"),
        ({"trainer": "python s.py"}, "trainer: got 'python s.py', allowed is a TrainerSpec, or a dict of its fields"),
        ({"trainer": STUDENT, "checkpoint": 5}, "checkpoint: got 5"),
        ({"trainer": Path("/s.py")}, "trainer: got PosixPath('/s.py'), allowed is a TrainerSpec, or a dict"),
        ({"trainer": STUDENT, "trainers": Path("3")}, "trainers: got PosixPath('3'), allowed is Bounds, a dict of"),
        ({"trainer": STUDENT, "trainers": {"least": 1}}, "trainers: got 'least'"),
    ],
)
def test_what_is_no_spec_fails_where_it_is_known_first(
    given: dict[str, Any], expected: str, context: Any, site: FakeClient
) -> None:
    """The DAG file, where it stands there; the task, at once and without a retry, where an upstream task returns it."""
    with pytest.raises(SpecError, match=re.escape(expected)):
        EdlTrainOperator(task_id="train", **given)
    with DAG("nightly", schedule=None):
        operator = EdlTrainOperator(task_id="train", **{name: upstream(value) for name, value in given.items()})
    with pytest.raises(AirflowFailException, match=re.escape(expected)):
        rendered(operator, context).execute(context)
    assert site.backend.calls == []


def upstream(value: Any) -> Any:
    """What an upstream task has returned, before it is known."""
    return SimpleXComArg(value)


class SimpleXComArg(ResolveMixin):
    """An output whose value is there already."""

    def __init__(self, value: object) -> None:
        self.value = value

    def iter_references(self) -> Any:
        return iter(())

    def resolve(self, _: Any) -> object:
        return self.value


DAY = {"name": "day", "start": "08:00", "end": "20:00", "sizes": {"cluster": "50%"}}
WINDOWS = {"windows": [DAY], "default": {}}
MARS = {**WINDOWS, "time_zone": "Mars/Phobos"}

Mistakes = list[tuple[dict[str, Any], str]]

MISTAKES: list[tuple[Callable[..., Any], dict[str, Any], Mistakes]] = [
    (
        EdlTrainOperator,
        {"trainer": STUDENT, "trainers": "1:3"},
        [
            ({"trainers": "3:1"}, "trainers: got '3:1'"),
            ({"trainers": 0}, "trainers.min: got 0"),
            ({"gear": "fast"}, "gear"),
            ({"job": "No Name"}, "job"),
            ({"ends_by": "soon"}, "ends_by"),
            ({"stop_grace_s": 0}, "stop_grace_s"),
            ({"priority": 1.5}, "priority"),
            ({"weight": 0}, "weight"),
            ({"progress_every_s": "5"}, "progress_every_s"),
            ({"checkpoint": ""}, "checkpoint"),
        ],
    ),
    (
        EdlDistillOperator,
        {"student": STUDENT, "teacher": TEACHER, "teachers": "1:3"},
        [
            ({"teachers": "3:1"}, "teachers: got '3:1'"),
            ({"teachers": "0:1"}, "teachers.min: got 0"),
            ({"students": {"min": 0, "max": 2}}, "students.min: got 0"),
            ({"teachers": "few"}, "teachers: got 'few'"),
            ({"teacher_pool": "No Name"}, "teacher_pool"),
            ({"teacher": None}, "teacher_pool"),
            ({"wait_timeout_s": 0}, "wait_timeout_s"),
            ({"wait_timeout_s": "300"}, "wait_timeout_s"),
            ({"progress_every_s": -1}, "progress_every_s"),
            ({"priority": "high"}, "priority"),
            ({"weight": -1}, "weight"),
        ],
    ),
    (
        EdlTeacherPoolOperator,
        {"teacher_pool": "digits", "teacher": TEACHER, "teachers": 1},
        [
            ({"wait_timeout_s": float("nan")}, "wait_timeout_s"),
            ({"priority": "high"}, "priority"),
            ({"weight": -1}, "weight"),
        ],
    ),
    (
        EdlRegisterServersOperator,
        {"teacher_pool": "digits", "servers": ["oip+http://triton:8000/net"]},
        [
            ({"servers": []}, "servers: got [], allowed is a list of addresses"),
            ({"servers": "oip+http://triton:8000/net"}, "servers: got 'oip+http://triton:8000/net', allowed is a list"),
            ({"servers": ["oip+http://t:1/n", "oip+http://T:1/n/"]}, "these two are the same"),
            ({"servers": ["oip+http://t:1/n", "t:2"]}, "servers[1]: got 't:2', allowed is an address as in oip+http"),
            ({"at_least": 0}, "at_least"),
            ({"wait_timeout_s": 0}, "wait_timeout_s"),
        ],
    ),
    (
        EdlResizeOperator,
        {"job": "student"},
        [
            *(({"instances": count}, "instances") for count in (0, -1, "many", "1.5")),
            ({"instances": 1, "wait_timeout_s": float("inf")}, "wait_timeout_s"),
            ({"instances": 1, "job": None}, "teacher_pool, job"),
            ({"instances": 1, "teacher_pool": "digits"}, "teacher_pool, job"),
            ({"instances": 2, "windows": WINDOWS}, "instances, windows: got"),
            ({}, "instances, windows: got (None, None), allowed is a number or traffic windows, one of them"),
            ({"instances": 2, "window": "day"}, "window: got 'day', allowed is the name of one of `windows`"),
            ({"windows": WINDOWS, "window": "dya"}, "window: got 'dya', allowed is one of 'day', 'default'"),
            ({"windows": MARS}, "windows, time_zone: got 'Mars/Phobos'"),
        ],
    ),
    (
        EdlAutoscaleOperator,
        {},
        [
            ({"windows": MARS}, "Mars/Phobos"),
            ({"max_load": 1.5}, "max_load"),
            ({"max_load": "high"}, "max_load"),
            *(({"lead_s": seconds}, "lead_s") for seconds in (-1, "soon", None)),
            ({"lead_s": -1, "max_load": "{{ params.max_load }}"}, "lead_s"),
            ({"lead_s": -1, "windows": "variable:windows"}, "lead_s"),
            ({"max_load": 1.5, "windows": "{{ params.windows }}"}, "max_load"),
            ({"policy": "decide"}, "policy"),
            ({"policy": print}, "policy"),
            ({"dry_run": "perhaps"}, "dry_run"),
        ],
    ),
    (EdlTeacherPoolSensor, {"teacher_pool": "digits"}, [({"students": each}, "students") for each in (-1, "one")]),
    (
        EdlJobSensor,
        {"job": "student"},
        [({"job": "No Name"}, "job"), ({"phase": "failed"}, "phase"), ({"at_least": 0}, "at_least")],
    ),
    (
        EdlCheckpointSensor,
        {"stream": "s"},
        [
            ({"stream": ""}, "stream"),
            ({"stream": "a {b}"}, "stream"),
            ({"job": "No Name"}, "job"),
            ({"step": -1}, "step"),
            ({"epoch": "first"}, "epoch"),
            ({"metric": "accuracy"}, "metric"),
            *(({"max_age": age}, "max_age") for age in (0, timedelta(0), "1 h")),
        ],
    ),
    (
        EdlTrafficSensor,
        {"windows": WINDOWS},
        [
            ({}, "window, at_least: got None"),
            ({"window": "dya"}, "window: got 'dya', allowed is one of 'day', 'default'"),
            ({"at_least": {}}, "at_least: got {}"),
            ({"at_least": {"gpu": 0}}, "at_least.gpu: got 0"),
            ({"at_least": {"gpu": "four"}}, "at_least.gpu: got 'four'"),
            ({"at_least": 4}, "at_least: got 4"),
            ({"window": "day", "windows": MARS}, "windows, time_zone: got 'Mars/Phobos'"),
        ],
    ),
]


OTHERS = [(operator, given) for operator, given, _ in MISTAKES]
MISTAKES += [
    (
        operator,
        {**given, **({"instances": 1} if operator is EdlResizeOperator else {})},
        [
            *(
                ({"edl_conn_id": conn_id}, f"edl_conn_id: got {conn_id!r}, allowed is the id")
                for conn_id in (5, None, "")
            ),
            *([({"deferrable": "no"}, "deferrable: got 'no', allowed is True or False")] if defers else []),
            ({"retry_policy": 3}, "retry_policy: got 3, allowed is a RetryPolicy"),
        ],
    )
    for operator, given in OTHERS
    for defers in ["deferrable" in inspect.signature(operator).parameters]
]
T = "{{ run_id }}"
MISTAKES += [
    (
        EdlDistillOperator,
        {"student": STUDENT, "teacher": TEACHER, "students": "1:3"},
        [
            *(
                ({who: {"mn": 3, "max": T}}, f"{who}: got 'mn', allowed is the fields")
                for who in ("students", "teachers")
            ),
            (
                {"student": {"command": f"python {T}"}},
                f"command: got 'python {T}', allowed is a non-empty list of words",
            ),
            ({"student": {"command": ["python", T], "env": ["A"]}}, "env: got 'list', allowed is a dict of variables"),
            ({"student": {"command": ["python", T], "cwd": 5}}, "cwd: got 5, allowed is a folder's path as text"),
            ({"teacher": {"model": T, "outputs": "a"}}, "teacher.outputs: got 'a', allowed is a list of output names"),
            ({"teacher": {"model": T, "outputs": ["logits="]}}, "teacher.outputs: got 'logits=', allowed is an output"),
            ({"teacher": {"model": T, "outputs": ["=x"]}}, "teacher.outputs: got '=x', allowed is an output's name"),
            (
                {"teacher": {"model": T, "outputs": ["a=x", "a=y"]}},
                "teacher.outputs: got ['a=x', 'a=y'], allowed is each",
            ),
            ({"checkpoint": {"url": T, "keep_last": 0}}, "checkpoint.keep_last: got 0, allowed is a whole number"),
            ({"checkpoint": {"ulr": T}}, "checkpoint: got 'ulr', allowed is the fields of Checkpoint"),
        ],
    ),
]


@pytest.mark.parametrize(
    ("operator", "given", "expected"),
    [(operator, {**base, **mistake}, expected) for operator, base, found in MISTAKES for mistake, expected in found],
)
def test_the_dags_import_error_names_the_argument(
    operator: Callable[..., Any], given: dict[str, Any], expected: str
) -> None:
    """Before any run, also where other arguments are known only when the task runs."""
    with pytest.raises(SpecError) as caught:
        operator(task_id="t", **given)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("operator", "given"), OTHERS)
def test_without_the_mistake_there_is_none(operator: Callable[..., Any], given: dict[str, Any]) -> None:
    """What is beside each of them is good."""
    also = {EdlResizeOperator: {"instances": 1}, EdlTrafficSensor: {"window": "day"}}.get(operator, {})  # type: ignore[call-overload]
    assert operator(task_id="t", **given, **also)


@pytest.mark.parametrize("operator", [EdlStopTeacherPoolOperator, *(operator for operator, _, _ in MISTAKES)])
def test_our_arguments_are_not_airflows(operator: type[Any]) -> None:
    """`pool`, for one, is the name of Airflow's slot pool: a task of ours would never be scheduled."""
    ours, airflows = (set(inspect.signature(one).parameters) - {"kwargs"} for one in (operator, BaseOperator))
    assert {"pool", "queue"} <= airflows
    assert "edl_conn_id" in ours
    assert not ours & airflows
