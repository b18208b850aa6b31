"""Scripts that end while their group is open: in whatever way, the others know it, and the exit status is theirs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.elastic.fake_agent import Trainer, join

from edl_runtime.elastic.messages import Lost, Ready, Up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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
    if number == {step} and run.rank >= {first}:
        exec(ending)
    model(batch).mean().backward()
    run.step()
"""


def pair(out: Path, *, ending: str, step: int, first: int) -> list[Trainer]:
    """Return two trainers in a group, of which those from rank `first` on end so in that step."""
    out.mkdir()
    script = out / "ends.py"
    script.write_text(ENDS.format(ending=ending, step=step, first=first))
    both = [Trainer(out, script=script, warm=False) for _ in range(2)]
    for trainer in both:
        trainer.await_word(Ready)
    join(both, 1)
    for trainer in both:
        trainer.await_word(Up)
    return both


def end(both: list[Trainer]) -> None:
    for trainer in both:
        trainer.end()


@pytest.mark.parametrize(
    ("ending", "status"),
    [("raise ValueError('no')", 1), pytest.param("raise KeyboardInterrupt", -signal.SIGINT, marks=pytest.mark.deep)],
)
def test_a_group_is_closed_before_the_interpreter_ends(tmp_path: Path, ending: str, status: int) -> None:
    """The others notice it while the process that fails is still there."""
    both = pair(tmp_path / "out", ending=ending, step=2, first=1)
    try:
        both[0].await_word(Lost)
        assert both[1].process.poll() is None
        (tmp_path / "out" / "go").touch()
        assert both[1].wait() == status
    finally:
        end(both)


@pytest.mark.deep
def test_failing_trainers_end_by_their_status_and_by_no_signal(tmp_path: Path) -> None:
    """Twenty trainers, five pairs at a time, which fail in the same step: no thread ends them."""
    for turn in range(2):
        outs = [tmp_path / f"{turn}-{number}" for number in range(5)]
        pairs = [pair(out, ending="raise ValueError('no')", step=2, first=0) for out in outs]
        try:
            for out in outs:
                (out / "go").touch()
            assert [trainer.wait() for both in pairs for trainer in both] == [1] * 10
        finally:
            for both in pairs:
                end(both)
