"""A loss, gradients or metrics that become NaN or infinite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs
from support.elastic.local_run import SAMPLES, RecordingClient, arrays_of, begin, model_and_optimizer, paddle

from edl_runtime.checkpoint.finite import not_finite_since
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.elastic.api import Run
from edl_runtime.elastic.comm.agent_protocol import Note, ScriptFailed
from edl_runtime.elastic.errors import NotFiniteError
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint

pytestmark = pytest.mark.usefixtures("nothing_at_exit")

BATCHES: dict[str, Any] = {"global_batch": 4, "epochs": 2}
STEPS = 6
MICRO = pytest.mark.parametrize("micro", [None, 2])


class _Broken(paddle.autograd.PyLayer):  # type: ignore[misc]
    """The same value, with a gradient that is infinite."""

    @staticmethod
    def forward(_context: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(_context: Any, gradient: Any) -> Any:
        return gradient * math.inf


def train(
    run: Run, model: Any, *, loss_at: int = 99, gradients_at: int = 99, micro: int | None = None, gives: bool = True
) -> None:
    """Train, with a loss or gradients that are not finite from these steps on."""
    for inputs, _ in run.data(SAMPLES, **BATCHES, micro_batch=micro):
        loss = model(inputs).mean()
        if run.step_number + 1 >= loss_at:
            loss = loss * math.nan
        (_Broken.apply(loss) if run.step_number + 1 >= gradients_at else loss).backward()
        run.step(loss=loss if gives else None)


def notes(link: RecordingClient) -> list[str]:
    return [message.text for message in link.sent if isinstance(message, Note)]


def test_what_is_not_finite_is_known_since_its_first_step() -> None:
    """Until it is finite again; what a step says nothing of stays as it was."""
    since = not_finite_since({}, {"loss": True, "gradients": False}, 3)
    since = not_finite_since(since, {"loss": False, "gradients": False}, 4)
    assert since == {"loss": 4, "gradients": 3}
    assert not_finite_since(since, {"gradients": True}, 5) == {"loss": 4}


@MICRO
def test_the_first_loss_that_is_not_finite_is_an_event(tmp_path: Path, micro: int | None) -> None:
    """One only, and a warning in the log. The result says since when, and keeps the other metrics."""
    run, link = begin(result=tmp_path / "result.json")
    model, _ = run.wrap(*model_and_optimizer())
    run.metrics(accuracy=0.5)
    with capture_logs() as logs:
        train(run, model, loss_at=3, micro=micro)
    (note,) = notes(link)
    assert note == (
        "NaN or infinity in the loss and the gradients of step 3: training continues, and checkpoints with such "
        "weights are marked"
    )
    assert [line["step"] for line in logs if line["event"] == "step.not_finite"] == [3]
    result = msgspec.json.decode((tmp_path / "result.json").read_bytes())
    assert result == {"checkpoint": "", "metrics": {"accuracy": 0.5}, "not_finite": {"loss": 3, "gradients": 3}}


@MICRO
@pytest.mark.parametrize("gives", [True, False])
def test_gradients_that_are_not_finite_are_noticed_before_the_loss_is(micro: int | None, *, gives: bool) -> None:
    """Also where the script does not give its loss, which is no NaN then."""
    run, link = begin()
    model, _ = run.wrap(*model_and_optimizer())
    train(run, model, gradients_at=3, micro=micro, gives=gives)
    (note,) = notes(link)
    assert note.startswith("NaN or infinity in the gradients of step 3: training continues")


@MICRO
@pytest.mark.parametrize("gives", [True, False])
def test_a_training_without_nan_says_nothing_of_it(tmp_path: Path, micro: int | None, *, gives: bool) -> None:
    """Neither event nor field in the result."""
    run, link = begin(result=tmp_path / "result.json")
    model, _ = run.wrap(*model_and_optimizer(), not_finite="fail")
    train(run, model, micro=micro, gives=gives)
    assert notes(link) == []
    assert msgspec.json.decode((tmp_path / "result.json").read_bytes()).keys() == {"checkpoint", "metrics"}


@MICRO
@pytest.mark.parametrize("where", ["loss_at", "gradients_at"])
def test_a_training_may_fail_with_the_first(tmp_path: Path, where: str, micro: int | None) -> None:
    """Before that step is applied. The checkpoint before stays, no other is written, and no restart is tried."""
    run, link = begin(tmp_path, every_steps=2)
    model, _ = run.wrap(*model_and_optimizer(), not_finite="fail")
    with pytest.raises(NotFiniteError, match=r"of step 4, which is not applied") as failed:
        train(run, model, **{where: 4}, micro=micro)
    assert ScriptFailed.of(failed.value).final
    assert run.step_number == 3
    assert all(np.isfinite(value).all() for value in arrays_of(model).values())
    run.finish()
    run._checkpoints.close()
    assert [info.manifest.step for info in CheckpointStore(Checkpoint(url=str(tmp_path))).list()] == [2]
    (note,) = notes(link)
    assert note.endswith("of step 4: the job fails")


@MICRO
def test_a_scaler_that_is_off_skips_no_step(micro: int | None) -> None:
    """It applies what it gets, so gradients count as without one."""
    run, link = begin()
    scaler = paddle.amp.GradScaler(enable=False)
    model, _ = run.wrap(*model_and_optimizer(), scaler=scaler, not_finite="fail")
    with pytest.raises(NotFiniteError, match="the gradients of step 4, which is not applied"):
        train(run, model, gradients_at=4, micro=micro)
    assert all(np.isfinite(value).all() for value in arrays_of(model).values())
    (note,) = notes(link)
    assert note == "NaN or infinity in the gradients of step 4: the job fails"


def test_the_environment_says_so_where_the_script_does_not() -> None:
    """By EDL_NOT_FINITE; what the script gives counts more."""
    settings = RuntimeSettings.from_env({"EDL_NOT_FINITE": "fail"})
    for given, fails in ((None, True), ("warn", False)):
        run, _ = begin()
        run._settings = settings
        model, _ = run.wrap(*model_and_optimizer(), not_finite=given)  # type: ignore[typeddict-item]
        if fails:
            with pytest.raises(NotFiniteError):
                train(run, model, loss_at=2)
        else:
            train(run, model, loss_at=2)
    with pytest.raises(SpecError, match="not_finite: got 'stop', allowed is 'warn' or 'fail'"):
        begin()[0].wrap(*model_and_optimizer(), not_finite="stop")  # type: ignore[call-overload]


def test_a_run_passes_over_checkpoints_with_nan(tmp_path: Path) -> None:
    """They are marked, by an event, too; the event of the run that passes over them says why."""
    run, link = begin(tmp_path, every_steps=2)
    model, _ = run.wrap(*model_and_optimizer())
    wait = run._checkpoints._writer.wait  # type: ignore[union-attr]
    for inputs, _ in run.data(SAMPLES, **BATCHES):
        wait()
        loss = model(inputs).mean() * (math.nan if run.step_number >= 3 else 1.0)
        loss.backward()
        run.step(loss=loss)
    newest, middle, finite = CheckpointStore(Checkpoint(url=str(tmp_path))).list()
    assert [each.manifest.step for each in (newest, middle, finite)] == [6, 4, 2]
    assert {"model/first.weight", "optimizer/first.weight/moment1"} < set(newest.manifest.not_finite)
    assert newest.manifest.not_finite == middle.manifest.not_finite
    assert finite.manifest.not_finite == []
    (marked,) = [text for text in notes(link) if "it is marked" in text]
    assert marked.startswith(f"{middle.name} has NaN or infinity in model/first.weight, ")

    run, link = begin(tmp_path)
    model, _ = run.wrap(*model_and_optimizer())
    assert run.step_number == 2
    assert all(np.isfinite(value).all() for value in arrays_of(model).values())
    (note,) = notes(link)
    assert note.startswith(f"training goes back to step 2: checkpoint {newest.url} is not finite: NaN or infinity in")
    assert f"checkpoint {middle.url} is not finite" in note


def test_a_metric_that_is_not_finite_does_not_disappear_in_silence(tmp_path: Path) -> None:
    """JSON can't hold it, so its name is in the result, with its step, until it is finite again."""
    run, _ = begin(result=tmp_path / "result.json")
    model, _ = run.wrap(*model_and_optimizer())
    with capture_logs() as logs:
        for inputs, _ in run.data(SAMPLES, **BATCHES):
            loss = model(inputs).mean()
            loss.backward()
            run.step(loss=loss)
            step = run.step_number
            run.metrics(accuracy=math.nan if step >= 4 else 0.5, error=math.inf if step < 2 else 1.0)
    assert run.metrics().keys() == {"error", "loss"}
    warned = [(line["names"], line["step"]) for line in logs if line["event"] == "metric.not_finite"]
    assert warned == [(["error"], 1), (["accuracy"], 4)]
    assert msgspec.json.decode((tmp_path / "result.json").read_bytes())["not_finite"] == {"accuracy": 4}
