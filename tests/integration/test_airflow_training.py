"""Elastic training in tasks: real agents on the real local backend, with a real Redis."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowSkipException, TaskDeferred
from support.airflow.asset_watcher import AssetStates, watching
from support.airflow.fakes import deferred_by
from support.airflow.world import World, distill, fired, resume, run_task, trigger_of
from support.depth import examples
from support.object_store import SECRET, files
from support.paths import DAGS
from support.teachers.process import PATIENCE_S, wait_until

from edl_airflow.failures import UserError
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.runtime import runner
from edl_airflow.sensors.checkpoint import EdlCheckpointSensor
from edl_airflow.sensors.job import EdlJobSensor
from edl_airflow.triggers.checkpoint import EdlCheckpointTrigger
from edl_runtime.backends.interface import SUSPENDED
from edl_runtime.checkpoint import checkpoint_events
from edl_runtime.checkpoint.checkpoint_events import SavedCheckpoint
from edl_runtime.checkpoint.file_format import MANIFEST
from edl_runtime.specs import Checkpoint, TrainerSpec
from edl_runtime.store.redis_client import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NIGHTLY = DAGS / "edl_nightly_elastic_training.py"
STREAM = "nightly/distill"

TRAINS = """
# As many epochs as the first argument says; a step takes as many seconds as the second says, none once the file `go` is
# there, and has no end while `halt` is: then it leaves `halted`. The first instance waits while `late` is there, until
# the other trains.
import os, sys, time
from pathlib import Path
import numpy as np
import paddle
from edl_runtime import elastic

samples = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
go, halt = Path(__file__).with_name("go"), Path(__file__).with_name("halt")
late = go.with_name("late")
while late.exists() and os.environ["EDL_INSTANCE"] == "0":
    time.sleep(0.02)
run = elastic.init()
model = paddle.nn.Linear(2, 1)
model, optimizer = run.wrap(model, paddle.optimizer.SGD(0.01, parameters=model.parameters()))
for batch in run.data(list(samples), global_batch=8, epochs=int(sys.argv[1])):
    late.unlink(missing_ok=True)
    ends = time.monotonic() + float(sys.argv[2])
    while halt.exists() or (not go.exists() and time.monotonic() < ends):
        if halt.exists():
            halt.with_name("halted").touch()
        time.sleep(0.02)
    loss = (model(batch) ** 2).mean()
    loss.backward()
    run.metrics(accuracy=run.step_number / 1000)
    run.step(loss=loss)
    if run.rank == 0:
        print(f"stepped {run.step_number}\\n", end="", flush=True)  # in one piece: logs come beside it
"""


DISTILS = """
# With the answers of teachers; what each instance has stepped on is in `seen-INSTANCE`. The first waits after an epoch
# for the second one's script, takes its time until the file `go` is there, and then none.
import os, sys, time
from pathlib import Path
import numpy as np
import paddle
from edl_runtime import elastic
from edl_runtime.distill import DistillReader

samples = [(np.array([number, 1], "float32"), np.int64(number)) for number in range(64)]
folder, instance = Path(__file__).parent, os.environ["EDL_INSTANCE"]
go, second = folder / "go", folder / "came-1"
(folder / f"came-{instance}").touch()
run = elastic.init()
model = paddle.nn.Linear(2, 2)
model, optimizer = run.wrap(model, paddle.optimizer.SGD(1e-6, parameters=model.parameters()))
data = run.data(samples, global_batch=8, epochs=int(sys.argv[1]))
with DistillReader(data.local, inputs=["x", None], outputs=["y"], teacher_batch_size=4) as reader:
    for inputs, numbers, answers in data.through(reader):
        assert (answers == 2 * inputs).all()
        time.sleep(0 if go.exists() else 0.3)
        while run.step_number == 8 and not (second.exists() or go.exists()):
            time.sleep(0.02)
        loss = ((model(paddle.to_tensor(inputs)) - paddle.to_tensor(answers)) ** 2).mean()
        loss.backward()
        run.step(loss=loss)
        with (folder / f"seen-{instance}").open("a") as file:
            print(*numbers, sep="\\n", file=file)
"""


@pytest.fixture
def trains(world: World) -> World:
    """A world with training scripts, whose folder is that of the DAG."""
    (world.folder / "trains.py").write_text(TRAINS)
    (world.folder / "distils.py").write_text(DISTILS)
    return world


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> AssetStates:
    """What Airflow keeps with each asset."""
    return AssetStates(monkeypatch)


def _train(world: World, epochs: int, *, step_s: float = 0.02, **changes: Any) -> EdlTrainOperator:
    command = ("python", str(world.folder / "trains.py"), str(epochs), str(step_s))
    given: dict[str, Any] = {"task_id": "distill", "dag": world.dag(), "trainers": "1:2", "progress_every_s": 0.5}
    given |= {"trainer": TrainerSpec(command=command), "checkpoint": Checkpoint(url="checkpoints", every_steps=4)}
    return EdlTrainOperator(**{**given, "job": "digits", **changes})


def _newest(world: World, stream: str = STREAM) -> SavedCheckpoint | None:
    async def look() -> SavedCheckpoint | None:
        async with connect(world.redis_url) as client:
            return await checkpoint_events.newest(client, world.namespace, stream)

    return asyncio.run(look())


def _step(world: World, stream: str = STREAM) -> int:
    found = _newest(world, stream)
    return found.step if found else 0


def _steps_shown(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"\] stepped (\d+)", log)]  # of a rank, or when ranks are gone


def test_a_training_that_is_ended_by_force_returns_what_it_left_in_the_end(
    trains: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only checkpoint is the one that its instance writes when it leaves, at the end of a long step."""
    halt, began, late_s = trains.folder / "halt", time.time(), {"by": 0.0}
    stop = runner.stop

    async def ends_its_step(*given: Any) -> None:
        halt.unlink(missing_ok=True)
        await stop(*given)

    monkeypatch.setattr(runner, "clock", lambda: time.time() + late_s["by"])
    monkeypatch.setattr(runner, "stop", ends_its_step)
    never = Checkpoint(url="checkpoints", every_steps=1_000_000)
    operator = _train(trains, 10_000, checkpoint=never, ends_by=timedelta(hours=1), stop_grace_s=0.2)
    run = SimpleNamespace(start_date=datetime.fromtimestamp(began, UTC), run_type="manual")

    def trained() -> None:
        try:
            wait_until(lambda: asyncio.run(_progress(trains)) > 0, 100)
            halt.touch()
            wait_until((trains.folder / "halted").exists)
        finally:
            late_s["by"] = 3600.0

    watching = threading.Thread(target=trained)
    watching.start()
    result = operator.execute({**trains.context(), "dag_run": run})
    watching.join()
    assert (result["stopped"], result["instances"]) == (True, 1)
    assert "did not end by itself" in result["reason"]
    assert result["step"] == _step(trains) > 0
    assert trains.jobs() == {}


def test_a_training_where_another_job_keeps_its_checkpoints_fails_at_once(trains: World) -> None:
    """Another run of the same DAG, say: the error says whose the folder is, and Airflow does not try again."""
    deferred_by(_train(trains, 10_000, job="first", deferrable=True), trains.context())
    wait_until(lambda: asyncio.run(_progress(trains)) > 0)
    with pytest.raises(UserError, match=r"job 'first' \(of the Airflow task 'nightly/distill', in namespace "):
        _train(trains, 1, job="second").execute(trains.context(map_index=1))
    assert list(trains.jobs()) == ["first"]
    asyncio.run(trains.backend.delete("first"))


@contextmanager
def _triggerer(deferred: TaskDeferred) -> Iterator[None]:
    """Follow the second half of a task in a thread, as a triggerer does that ends before the task."""
    loop = asyncio.new_event_loop()
    following = loop.create_task(fired(trigger_of(deferred)))

    def follow() -> None:
        loop.run_until_complete(asyncio.gather(following, return_exceptions=True))

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(following.cancel)
        thread.join()
        loop.close()


def _end_of(operator: Any, context: Any, deferred: TaskDeferred) -> Any:
    """Follow a task that has deferred to its end."""
    return resume(operator, context, deferred, asyncio.run(fired(trigger_of(deferred))))


def test_a_training_grows_is_suspended_and_goes_on_in_the_same_task(
    trains: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """As windows say, and sensors see it. Each step is done, and told of, once, also by the next triggerer."""
    epochs, context = 60, trains.context()
    running = EdlJobSensor(task_id="wait", job="digits", at_least=1, timeout=200, deferrable=True)
    waits_for = {"stream": STREAM, "job": "digits", "step": 3, "metric": "accuracy>=0.002"}
    landing = EdlCheckpointSensor(task_id="reached", timeout=200, deferrable=True, **waits_for)
    runs, lands = deferred_by(running, context), deferred_by(landing, context)  # long before the job is there
    windows = {
        "windows": [{"name": "rush", "start": "07:00", "end": "22:00", "sizes": {"jobs": {"digits": 0}}}],
        "default": {"jobs": {"digits": 2}},
    }
    follow: dict[str, Any] = {"job": "digits", "windows": windows, "deferrable": True}
    quiet = EdlResizeOperator(task_id="grow", window="default", **follow)
    rush = EdlResizeOperator(task_id="shut", window="rush", **follow)
    training = _train(trains, epochs, step_s=0.5, deferrable=True)
    deferred = deferred_by(training, context)
    output = ""

    def tells_that_it_waits() -> bool:
        nonlocal output
        output += capsys.readouterr().out
        return SUSPENDED in output

    with _triggerer(deferred):
        assert _end_of(running, context, runs) == {"job": "digits", "instances": 1}
        found = _end_of(landing, context, lands)
        assert (found["step"] >= 3, found["job"]) == (True, "digits")
        logged = {"job": "digits", "instances": 2, "reason": "window 'default' has 2 for it"}
        assert run_task(quiet, context) == logged
        reason = "window 'rush' has 0 for it, and its minimum is 1: it waits until there is more"
        assert run_task(rush, context) == {"job": "digits", "instances": 0, "reason": reason}
        (job,) = asyncio.run(trains.backend.list())
        assert (job.is_suspended, job.instances) == (True, ())
        assert not running.poke(context)
        wait_until(tells_that_it_waits)
    at = _step(trains)
    assert 3 <= at < 8 * epochs
    (trains.folder / "late").touch()  # so that the second instance is rank 0
    assert run_task(quiet, context) == logged
    (trains.folder / "go").touch()
    result = _end_of(_train(trains, epochs), context, deferred)
    assert (result["step"], result["stopped"]) == (8 * epochs, False)
    output += capsys.readouterr().out
    assert output.count(f"'digits': {SUSPENDED}") == 1
    stepped = _steps_shown(output)
    assert [step for step, times in Counter(stepped).items() if times > 1] == [], "done, or told of, twice"
    assert max(stepped) == 8 * epochs
    assert set(re.findall(r"\[(\d) rank 0\] stepped", output)) == {"0", "1"}
    with pytest.raises(AirflowSkipException, match="'digits' has ended"):
        EdlResizeOperator(task_id="late", job="digits", instances=1).execute(context)


def test_a_training_goes_on_from_an_object_store(
    bucket: str, trains: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run goes on from the last one's checkpoint; what opens the store is in no spec, trigger, file or log."""
    connection = json.loads(os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    connection["extra"]["pass_on"] = "AWS_*"  # from the worker's environment
    monkeypatch.setenv("AIRFLOW_CONN_EDL_DEFAULT", json.dumps(connection))
    given: dict[str, Any] = {"checkpoint": Checkpoint(url=bucket, every_steps=10), "deferrable": True}

    def written() -> bytes:
        return b"".join(file.read_bytes() for file in trains.work_dir.rglob("*") if file.is_file())

    context = trains.context("night-1")
    deferred = deferred_by(_train(trains, 3, **given), context)
    event = asyncio.run(fired(trigger_of(deferred)))
    kept = written()
    result = resume(_train(trains, 3, **given), context, deferred, event)
    assert (result["job"], result["step"]) == ("digits", 24)
    assert result["checkpoint"].startswith(f"{bucket}/step-000000024-")
    assert (result["stopped"], result["reason"], result["instances"], result["generations"]) == (False, "", 1, 1)
    assert result["metrics"]["accuracy"] == pytest.approx(0.023)
    newest = _newest(trains)
    assert newest
    assert (newest.url, newest.step, newest.job) == (result["checkpoint"], 24, "digits")
    assert files().exists(f"{result['checkpoint']}/{MANIFEST}")
    shown = capsys.readouterr().out
    assert _steps_shown(shown) == list(range(1, 25))

    assert run_task(_train(trains, 5, **given), trains.context("night-2"))["step"] == 40
    shown_again = capsys.readouterr().out
    assert _steps_shown(shown_again) == list(range(25, 41))

    assert b"digits" in kept
    output = json.dumps([deferred.trigger.serialize(), event, result, context["xcoms"]])
    assert SECRET not in output + shown + shown_again
    assert SECRET.encode() not in kept + written()
    assert trains.jobs() == {}


def test_students_come_while_they_distil(trains: World) -> None:
    """Each of several has its own reader, one joins meanwhile, and each sample counts exactly once an epoch."""
    epochs = 12
    operator = distill(
        trains,
        student=TrainerSpec(command=("python", str(trains.folder / "distils.py"), str(epochs))),
        students="1:2",
        checkpoint="checkpoints",
        job="student",
        deferrable=True,
        teacher_pool=None,
        teacher=trains.teacher(),
    )
    context = trains.context()
    deferred = deferred_by(operator, context)
    events: list[dict[str, Any]] = []
    following = threading.Thread(target=lambda: events.append(asyncio.run(fired(trigger_of(deferred)))))
    following.start()
    try:
        run_task(EdlJobSensor(task_id="wait", job="student", timeout=200, deferrable=True), context)
        grow = EdlResizeOperator(task_id="grow", job="student", instances=2, deferrable=True)
        assert run_task(grow, context) == {"job": "student", "instances": 2}
        wait_until((trains.folder / "seen-1").exists, 100)
    finally:
        (trains.folder / "go").touch()
        following.join()
    result = resume(operator, context, deferred, events[0])
    seen = [(trains.folder / f"seen-{instance}").read_text().split() for instance in (0, 1)]
    assert all(seen)
    assert Counter(seen[0] + seen[1]) == {str(number): epochs for number in range(64)}
    assert Path(result["checkpoint"]).is_relative_to(trains.folder / "checkpoints")
    assert sum(result["answered"].values()) > 0
    assert trains.jobs() == {}


async def _land(world: World, *steps: int, stream: str = STREAM) -> None:
    async with connect(world.redis_url) as client:
        for step in steps:
            checkpoint = SavedCheckpoint(
                job="j", step=step, epoch=1, generation=1, url=f"/c/{step}", at=1.5, metrics={"a": 0.5}
            )
            await checkpoint_events.publish(client, world.namespace, stream, checkpoint)


def _watch(stream: str = STREAM) -> EdlCheckpointTrigger:
    trigger = trigger_of(SimpleNamespace(trigger=EdlCheckpointTrigger(stream=stream)))  # type: ignore[arg-type]
    assert isinstance(trigger, EdlCheckpointTrigger)
    return trigger


async def _soon(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (what others keep has no events)
            await asyncio.sleep(0.01)


async def test_checkpoints_that_land_are_events(world: World, states: AssetStates) -> None:
    """From when it was first watched on, also those that were saved while no triggerer watched."""
    await _land(world, 1)
    async with watching(_watch()) as first:
        await _soon(lambda: states.values)
        await _land(world, 2)
        (second,) = await first.fired(1)
        expected = {"stream": STREAM, "job": "j", "checkpoint": "/c/2", "step": 2, "epoch": 1}
        assert json.loads(json.dumps(second)) == {**expected, "metrics": {"a": 0.5}, "at": 1.5}
        before = dict(states.values)
        first.store(1)
        await _land(world, 3)  # Airflow looks at what is stored when the next one comes
        await _soon(lambda: states.values != before)
    await _land(world, 4)
    async with watching(_watch()) as later:
        assert [event["step"] for event in await later.fired(2)] == [3, 4]


async def test_an_event_that_was_lost_with_its_triggerer_is_made_again(world: World, states: AssetStates) -> None:
    """A triggerer that fires many and stores few goes on after those few."""
    async with watching(_watch()) as first:
        await _soon(lambda: states.values)
        await _land(world, *range(1, 101))
        before = dict(states.values)
        await first.fired(60)
        first.store(10)
        await _soon(lambda: states.values != before)
    async with watching(_watch()) as second:
        assert [event["step"] for event in await second.fired(50)][:50] == list(range(11, 61))
        second.store(50)
        assert [event["step"] for event in await second.fired(40)] == list(range(61, 101))


@pytest.mark.parametrize("ends", ["triggerer", "trigger"])
async def test_an_event_that_is_on_its_way_as_its_trigger_ends_is_made_again(
    world: World, states: AssetStates, ends: str
) -> None:
    """Airflow then reports as stored what it has not taken yet, before it ends the stream."""
    async with watching(_watch()) as first:
        await _soon(lambda: states.values)
        await _land(world, 1)
        await first.fired(1)
        first.store(1)
        reached, goes_on = first.hold_next()
        await _land(world, 2)
        await reached.wait()
        if ends == "trigger":
            await first.cancel()
        goes_on.set()
    async with watching(_watch()) as second:
        assert [event["step"] for event in await second.fired(1)] == [2]


async def test_two_assets_may_watch_one_stream(world: World, states: AssetStates) -> None:
    """Airflow has one trigger for both; one that begins to watch later goes on where the first one is."""
    async with watching(_watch(), ["digits"]):
        await _soon(lambda: states.values)
    await _land(world, 1)
    async with watching(_watch(), ["digits", "letters"]) as both:
        assert [event["step"] for event in await both.fired(1)] == [1]
        both.store(1)
        await _soon(lambda: len(states.values) == 2)
    await _land(world, 2)
    async with watching(_watch(), ["letters"]) as second:
        assert [event["step"] for event in await second.fired(1)] == [2]


async def test_an_asset_may_watch_two_streams(world: World, states: AssetStates) -> None:
    """Each has a place of its own, from which it goes on."""
    one, other = f"{STREAM}/0", f"{STREAM}/1"
    await _land(world, 1, stream=other)
    async with watching(_watch(one)):
        await _soon(lambda: states.values)
    async with watching(_watch(other)) as watched:
        await _soon(lambda: len(states.values) == 2)
        await _land(world, 2, stream=other)
        assert [event["step"] for event in await watched.fired(1)] == [2]


def test_nights_of_the_nightly_dag(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins in the evening, goes on from the last night's checkpoint, and ends at seven with one of its own."""
    monkeypatch.setenv("AIRFLOW_HOME", str(world.folder))
    nights: list[dict[str, Any]] = []
    for night in range(examples(2, 3)):
        evening = datetime(2026, 11, 21 + night, 22, tzinfo=UTC)
        made = runpy.run_path(str(NIGHTLY))
        train, began = made["train"], time.time()
        now = {"at": evening.timestamp()}
        monkeypatch.setattr(
            "edl_airflow.runtime.runner.clock", lambda now=now, began=began: now["at"] + time.time() - began
        )
        params = {name: param.value for name, param in made["PARAMS"].items()} | {"pause_s": 0.01}
        context = world.context(try_id=f"night-{night}")
        run = SimpleNamespace(start_date=evening, run_after=evening, run_type="scheduled")
        context |= {"params": params, "dag_run": run, "data_interval_end": evening + timedelta(hours=9)}
        context["ti"].run_id = f"scheduled__{night}"
        train.render_template_fields(context)
        before = _step(world)
        watching = threading.Thread(target=_seven_o_clock, args=[world, before, now, evening])
        watching.start()
        nights.append(run_task(train, context))
        watching.join()
        assert (nights[-1]["stopped"], nights[-1]["reason"]) == (True, "its time to train is over")
        assert _step(world) == nights[-1]["step"] > before
        assert now["at"] == evening.timestamp() + 9 * 3600
        assert world.jobs() == {}
    assert len({night["job"] for night in nights}) == len(nights)
    assert len({Path(night["checkpoint"]).parent for night in nights}) == 1


def _seven_o_clock(world: World, before: int, now: dict[str, float], evening: datetime) -> None:
    """Let the night be over once it has trained some steps."""

    def has_trained() -> bool:
        progress = asyncio.run(_progress(world))
        return progress > before + 20

    try:
        wait_until(has_trained, 250)
    finally:
        now["at"] = evening.timestamp() + 9 * 3600  # else the night has no end


async def _progress(world: World) -> int:
    from edl_runtime import progress

    jobs = await world.backend.list()
    async with connect(world.redis_url) as client:
        reports = [await progress.read_progress(client, world.namespace, job.name) for job in jobs]
    return max((report.step for report in reports if report), default=0)
