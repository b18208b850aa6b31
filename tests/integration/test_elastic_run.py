"""Trainers that come, go and die: real processes, real sockets, and a stand-in for their agents."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.elastic.fake_agent import SCRIPT, Trainer, batches_of, join, leave, open_gate, stepped, trainers, weights
from support.network.ports import free_ports
from support.teachers.process import wait_until

from edl_runtime.elastic.comm.agent_protocol import (
    AbortGeneration,
    GenerationEntered,
    GenerationLost,
    JoinGeneration,
    ScriptFailed,
    StepDone,
    WorkerFinished,
    WorkerReady,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EPOCHS = 12
ONCE = batches_of(150, 64, EPOCHS)
EARLY, LATE = 16, 28
"""Gates: of 36 steps."""

PATIENCE_S = 150.0
"""Before something is taken to hang; how long pauses are is for the benchmark to say."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The weights that one trainer gets to, which nothing disturbs."""
    out = tmp_path_factory.mktemp("undisturbed")
    with trainers(out, 1, epochs=EPOCHS) as (only,):
        join([only], 1)
        assert only.await_message(WorkerFinished).why == "done"
        assert only.wait() == 0
    assert stepped(out) == ONCE
    return weights(out)


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def test_instances_come_and_go_and_train_the_same_model(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    """One, then three, then two: the same steps, loss and weights, with uneven parts, and nobody who lost another."""
    options: dict[str, Any] = {"epochs": EPOCHS, "step_s": 0.03, "gates": [EARLY, LATE], "micro_batch": 10}
    with trainers(tmp_path, 3, **options) as [first, second, third]:
        assert all(trainer.received(WorkerReady)[0].live for trainer in (first, second, third))
        join([first], 1)
        first.await_message(StepDone)
        join([first, second, third], 2)
        open_gate(tmp_path, EARLY)
        for trainer in (first, second, third):
            up = trainer.await_message(GenerationEntered, lambda word: word.generation == 2)
            assert up.source == "peer"
            trainer.await_message(StepDone, lambda word: word.generation == 2)
        leave(second)
        join([first, third], 3)
        open_gate(tmp_path, LATE)
        last = [trainer.await_message(StepDone, lambda word: word.step == len(ONCE)) for trainer in (first, third)]
        assert [word.generation for word in last] == [3, 3]
        assert last[0].loss == last[1].loss
        assert last[0].samples == 150 * EPOCHS
        assert second.await_message(WorkerFinished).why == "left"
        assert [trainer.wait() for trainer in (first, second, third)] == [0, 0, 0]
        assert all(not trainer.received(GenerationLost) for trainer in (first, second, third))
    assert stepped(tmp_path) == ONCE
    assert_same(weights(tmp_path), undisturbed)


def loading(trainer: Trainer) -> list[psutil.Process]:
    """Return the processes that load samples for a trainer: its forks; those that have just ended are none."""
    parent = psutil.Process(trainer.process.pid)
    found = []
    for each in parent.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.cmdline() == parent.cmdline():
                found.append(each)
    return found


def test_samples_that_workers_load_count_once_while_instances_come_and_go(tmp_path: Path) -> None:
    """Each generation has workers of its own, none is left of those before, and none outlives the training."""
    options = {"samples": 65, "global_batch": 8, "micro_batch": 3, "num_workers": 2, "epochs": 6}
    with trainers(tmp_path, 3, **options, gates=[EARLY, LATE]) as [first, second, third]:
        join([first, second], 1)
        first.await_message(StepDone)
        seen = wait_until(lambda: found if len(found := loading(first)) == 2 else [])  # one may begin later
        join([first, second, third], 2)
        open_gate(tmp_path, EARLY)
        for trainer in (first, second, third):
            trainer.await_message(StepDone, lambda word: word.generation == 2)
        assert psutil.wait_procs(seen, timeout=PATIENCE_S)[1] == []
        seen += wait_until(  # there are none from one epoch to the next
            lambda: [worker for trainer in (first, second, third) for worker in loading(trainer)]
        )
        leave(second)
        leave(third)
        join([first], 3)
        open_gate(tmp_path, LATE)
        assert first.await_message(WorkerFinished).why == "done"
        assert [trainer.wait() for trainer in (first, second, third)] == [0, 0, 0]
    assert stepped(tmp_path) == batches_of(65, 8, 6)
    assert len(seen) > 2
    assert psutil.wait_procs(seen, timeout=PATIENCE_S)[1] == []


def test_workers_that_load_samples_die_with_their_trainer(tmp_path: Path) -> None:
    """However it dies: nobody else knows of them."""
    with trainers(tmp_path, 1, num_workers=2, epochs=EPOCHS, gates=[EARLY]) as (only,):
        join([only], 1)
        only.await_message(StepDone)
        wait_until(lambda: len(loading(only)) == 2)  # the second may take longer than a step
        workers = loading(only)
        only.process.kill()
        assert psutil.wait_procs(workers, timeout=PATIENCE_S)[1] == []


def test_the_killed_and_the_stopped_are_not_waited_for(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    """Survivors of a killed trainer, and who waits for a stopped one, go on at once; each sample counts once."""
    gates = [EARLY, LATE]
    with trainers(tmp_path, 3, epochs=EPOCHS, step_s=0.03, gates=gates, reader=True) as [first, second, third]:
        join([first, second, third], 1)
        second.await_message(StepDone, lambda word: word.step > 3)
        first.process.kill()
        open_gate(tmp_path, EARLY)
        for trainer in (second, third):
            assert trainer.await_message(GenerationLost).generation == 1
        join([second, third], 2)
        for trainer in (second, third):
            trainer.await_message(StepDone, lambda word: word.generation == 2)
        third.process.send_signal(signal.SIGSTOP)
        second.tell(AbortGeneration(generation=2))
        open_gate(tmp_path, LATE)
        second.await_message(GenerationLost)
        join([second], 3)
        assert second.await_message(WorkerFinished).why == "done"
        assert second.wait() == 0
    assert_same(weights(tmp_path), undisturbed)
    assert_all_but_the_dead_wrote(stepped(tmp_path))


def assert_all_but_the_dead_wrote(steps: dict[int, list[int]]) -> None:
    """A step that was applied counts, even where a trainer died before it wrote its part down; twice none does."""
    short = [step for step, samples in ONCE.items() if steps[step] != samples]
    assert steps.keys() == ONCE.keys()
    assert len(short) <= 2, short
    assert all(set(steps[step]) < set(ONCE[step]) for step in short)


def test_a_loop_that_one_rank_leaves_is_an_error(tmp_path: Path) -> None:
    """Who is left behind says which rank has gone, instead of waiting for it; and that one says so, too."""
    with trainers(tmp_path, 2, epochs=EPOCHS, leave_at={"1": 5}) as both:
        join(both, 1)
        assert "rank 1 of 2 left the loop over the data after step 5" in both[1].await_message(ScriptFailed).reason
        assert [trainer.wait() for trainer in both] == [1, 1]
    errors = "".join(file.read_text() for file in tmp_path.glob("stderr-*"))
    assert "EarlyEndError: rank 1 of 2 left the loop" in errors


def test_a_loop_that_all_ranks_leave_is_an_end(tmp_path: Path) -> None:
    """A script may stop early, by what all ranks know; a checkpoint is written then."""
    environ = {"EDL_CHECKPOINT": str(tmp_path / "kept")}
    with trainers(tmp_path, 2, epochs=EPOCHS, leave_at={"0": 5, "1": 5}, environ=environ) as both:
        join(both, 1)
        assert [trainer.await_message(WorkerFinished) for trainer in both] == [WorkerFinished(step=5, why="done")] * 2
        assert [trainer.wait() for trainer in both] == [0, 0]
    assert [path.name.startswith("step-") for path in (tmp_path / "kept").iterdir()] == [True]


def test_who_had_no_batch_in_the_last_step_ends_with_the_others(tmp_path: Path) -> None:
    """Its script can't know that the others' end there; it finds no other batch."""
    options: dict[str, Any] = {"samples": 65, "epochs": EPOCHS, "finish_at": 2}
    with trainers(tmp_path, 2, **options) as both:
        join(both, 1)
        assert [trainer.await_message(WorkerFinished) for trainer in both] == [WorkerFinished(step=2, why="done")] * 2
        assert [trainer.wait() for trainer in both] == [0, 0]
    assert stepped(tmp_path) == {step: batches_of(65, 64, 1)[step] for step in (1, 2)}


LEAVES_EARLY = """
import asyncio, errno, multiprocessing, os, sys

import fsspec, numpy, paddle
from fsspec.asyn import get_loop, sync
from fsspec.implementations.memory import MemoryFileSystem

from edl_runtime import elastic
from edl_runtime.elastic.training import checkpointing


async def resolve():
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)


class Far(MemoryFileSystem):
    protocol = "far"
    store = {}
    pseudo_dirs = [""]
    is_full = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("far://", "memory://"))

    def _open(self, *arguments, **options):
        sync(get_loop(), resolve)
        if self.is_full:
            raise OSError(errno.ENOSPC, "no room")
        return super()._open(*arguments, **options)


fsspec.register_implementation("far", Far)
run = elastic.init("far://bucket/job")
model = paddle.nn.Linear(2, 1)
run.wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()))
batches = iter(run.data(list(numpy.ones((64, 2), "float32")), global_batch=8))
for batch in batches:
    loss = model(batch).mean()
    loss.backward()
    run.step(loss=loss)
    if run.step_number == 2:
        break
helper = multiprocessing.get_context("fork").Process(target=int)
helper.start()
helper.join()
assert not os.path.exists(os.environ["EDL_RESULT_FILE"])
Far.is_full = sys.argv[1] == "full"
checkpointing.LAST_CHECKPOINT_WAIT_S = 1.0
"""


@pytest.mark.parametrize("place", ["free", pytest.param("full", marks=pytest.mark.deep)])
def test_a_loop_that_is_left_early_is_an_end_for_a_script_alone(tmp_path: Path, place: str) -> None:
    """Its last checkpoint is written, also where that takes a connection; else, once it was retried, it fails."""
    (tmp_path / "early.py").write_text(LEAVES_EARLY)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "early.py"), place]
    environ = {**os.environ, "GLOG_minloglevel": "2", "EDL_RESULT_FILE": str(tmp_path / "result.json")}
    done = subprocess.run(command, check=False, env=environ, capture_output=True, timeout=PATIENCE_S)
    if place == "full":
        assert done.returncode == 1
        assert "no room" in done.stderr.decode()
        return
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["checkpoint"].startswith("far://bucket/job/step-000000002-")


def test_a_checkpoint_is_read_before_the_ranks_meet(tmp_path: Path) -> None:
    """However long that takes, nobody waits meanwhile in what has a limit of its own."""
    environ = {"EDL_CHECKPOINT": str(tmp_path / "kept")}
    with trainers(tmp_path, 3, epochs=EPOCHS, gates=[LATE, "load"], environ=environ) as [first, *others]:
        join([first], 1)
        first.await_message(StepDone)
        leave(first, checkpoint=True)
        open_gate(tmp_path, LATE)
        step = first.await_message(WorkerFinished).step
        address = ("127.0.0.1", free_ports(1)[0])
        for rank, trainer in enumerate(others):
            store = f"{address[0]}:{address[1]}"
            trainer.tell(JoinGeneration(generation=2, rank=rank, world_size=2, store=store, instances=2))
        wait_until((tmp_path / "loads").exists)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        open_gate(tmp_path, "load")
        for trainer in others:
            assert trainer.await_message(GenerationEntered) == GenerationEntered(
                generation=2, step=step, source="checkpoint", live=True
            )


def alone(out: Path, environ: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Start the script as a person does."""
    out.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(out)],
        env={**os.environ, "GLOG_minloglevel": "2", "SCRIPT_OPTIONS": json.dumps(options), **environ},
    )


def test_a_script_alone_ends_at_sigterm_and_goes_on_later(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    """It finishes its step, writes a checkpoint and exits with 0; the next run trains what is left."""
    environ = {"EDL_CHECKPOINT": str(tmp_path / "kept"), "EDL_RESULT_FILE": str(tmp_path / "result.json")}
    first = alone(tmp_path / "out", environ, epochs=EPOCHS, step_s=0.05, gates=[LATE])
    wait_until(lambda: len(stepped(tmp_path / "out")) >= 3, PATIENCE_S)
    first.terminate()
    open_gate(tmp_path / "out", LATE)
    assert first.wait(PATIENCE_S) == 0
    done = len(stepped(tmp_path / "out"))
    assert 3 <= done < len(ONCE)
    assert Path(json.loads((tmp_path / "result.json").read_text())["checkpoint"]).name.startswith(f"step-{done:09d}-")
    assert alone(tmp_path / "out", environ, epochs=EPOCHS).wait(PATIENCE_S) == 0
    assert stepped(tmp_path / "out") == ONCE
    assert_same(weights(tmp_path / "out"), undisturbed)


ENDS = """
import atexit, pathlib, sys, time
out, ending = pathlib.Path(sys.argv[1]), {ending!r}

def linger():
    while not (out / "go").exists():
        time.sleep(0.01)

atexit.register(linger)  # what is registered first comes last

import paddle
from edl_runtime import elastic

run = elastic.init()
model = paddle.nn.Linear(4, 1)
run.wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()))
for number, batch in enumerate(run.data([[1.0] * 4] * 1000, global_batch=4, collate_fn=paddle.to_tensor)):
    if number == 2 and run.rank >= {first}:
        exec(ending)
    model(batch).mean().backward()
    run.step()
"""


@contextlib.contextmanager
def pair(out: Path, *, ending: str, first: int) -> Iterator[list[Trainer]]:
    """Yield two trainers in a group, of which those from rank `first` on end so in its third step."""
    out.mkdir()
    script = out / "ends.py"
    script.write_text(ENDS.format(ending=ending, first=first))
    with trainers(out, 2, script=script, warm=False) as both:
        join(both, 1)
        for trainer in both:
            trainer.await_message(GenerationEntered)
        yield both


@pytest.mark.parametrize(
    ("ending", "status"),
    [("raise ValueError('no')", 1), pytest.param("raise KeyboardInterrupt", -signal.SIGINT, marks=pytest.mark.deep)],
)
def test_a_group_is_closed_before_the_interpreter_ends(tmp_path: Path, ending: str, status: int) -> None:
    """The others notice it while the process that fails is still there."""
    with pair(tmp_path / "out", ending=ending, first=1) as both:
        both[0].await_message(GenerationLost)
        assert both[1].process.poll() is None
        (tmp_path / "out" / "go").touch()
        assert both[1].wait() == status


@pytest.mark.deep
def test_failing_trainers_end_by_their_status_and_by_no_signal(tmp_path: Path) -> None:
    """Twenty trainers, five pairs at a time, which fail in the same step: no thread ends them."""
    for turn in range(2):
        outs = [tmp_path / f"{turn}-{number}" for number in range(5)]
        with contextlib.ExitStack() as ends:
            pairs = [ends.enter_context(pair(out, ending="raise ValueError('no')", first=0)) for out in outs]
            for out in outs:
                (out / "go").touch()
            assert [trainer.wait() for both in pairs for trainer in both] == [1] * 10
