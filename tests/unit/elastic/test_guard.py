"""What a script may do to its model and optimizer beside `run.step`, and what is an error."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from support.elastic.local_run import SAMPLES, arrays_of, begin, model_and_optimizer, paddle, train

from edl_runtime.elastic.run import Run
from edl_runtime.errors import StepError

pytestmark = pytest.mark.usefixtures("nothing_at_exit")

BATCHES: dict[str, Any] = {"global_batch": 4, "epochs": 2}
STEPS = 6


def loop(run: Run, model: Any, *, micro: int | None = None, **do: Any) -> None:
    train(run, model, run.data(SAMPLES, **BATCHES, micro_batch=micro), **do)


def grouped() -> tuple[Any, Any]:
    model, _ = model_and_optimizer()
    groups = [{"params": [each], "learning_rate": 0.5} for each in model.parameters()]
    return model, paddle.optimizer.AdamW(0.1, parameters=groups)


class Scaling(paddle.nn.Layer):  # type: ignore[misc]
    """What the CPU can do with bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([2], default_initializer=paddle.nn.initializer.Constant(1.0))

    def forward(self, inputs: Any) -> Any:
        return inputs * self.weight


def half() -> tuple[Any, Any]:
    """With master weights."""
    model = paddle.nn.Sequential(Scaling(), Scaling()).to(dtype="bfloat16")
    return model, paddle.optimizer.SGD(0.1, parameters=model.parameters(), multi_precision=True)


plain = model_and_optimizer
MICRO = pytest.mark.parametrize("micro", [None, 3])
PAIRS = pytest.mark.parametrize(("make", "micro"), [(plain, None), (grouped, 3), (half, None)])


@PAIRS
def test_gradients_may_be_cleared_before_the_forward(make: Any, micro: int | None) -> None:
    """A ported script may keep that line: it changes nothing of what is trained."""
    trained = []
    for clears in (False, True):
        run, _ = begin()
        model, optimizer = run.wrap(*make())
        loop(run, model, before=optimizer.clear_grad if clears else None, micro=micro)
        assert run.step_number == STEPS
        trained.append(arrays_of(model))
    for name, value in trained[0].items():
        np.testing.assert_array_equal(value, trained[1][name])


@pytest.mark.parametrize(
    ("make", "name"), [(plain, "clear_grad"), (grouped, "clear_gradients"), (half, "zero_grad"), (half, "clear_grad")]
)
def test_gradients_that_are_cleared_before_the_step_are_missed(make: Any, name: str) -> None:
    """Paddle leaves zeros in their place, on which a model would be trained in silence."""
    run, _ = begin()
    model, optimizer = run.wrap(*make())
    with pytest.raises(StepError, match="no parameter has a gradient, or not any more"):
        loop(run, model, between=getattr(optimizer, name))
    assert run.step_number == 0


@MICRO
def test_a_backward_that_is_left_out_later_is_noticed(micro: int | None) -> None:
    """A step leaves no gradients behind."""
    run, _ = begin()
    model, _ = run.wrap(*model_and_optimizer())
    batches = iter(run.data(SAMPLES, **BATCHES, micro_batch=micro))
    while run.step_number < 1:
        model(next(batches)[0]).mean().backward()
        run.step()
    next(batches)
    with pytest.raises(StepError, match="no parameter has a gradient"):
        run.step()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda optimizer, _: optimizer.step(), r"called optimizer\.step\(\); leave that line out"),
        (lambda optimizer, loss: optimizer.minimize(loss), r"called optimizer\.minimize\(\); leave that line out"),
        (lambda optimizer, _: optimizer.set_state_dict(optimizer.state_dict()), r"set_state_dict\(\); load what"),
        (lambda optimizer, _: optimizer.load_state_dict(optimizer.state_dict()), r"load_state_dict\(\); load what"),
        (
            lambda optimizer, _: optimizer.set_lr_scheduler(paddle.optimizer.lr.ExponentialDecay(0.1, 0.9)),
            r"set_lr_scheduler\(\); give the optimizer its scheduler before run\.wrap",
        ),
        (lambda optimizer, _: optimizer._learning_rate.step(), r"LRScheduler; leave that line out.*schedule=None"),
    ],
    ids=["step", "minimize", "set_state_dict", "load_state_dict", "set_lr_scheduler", "scheduler.step"],
)
def test_what_run_step_does_is_not_the_script_s_until_the_end(call: Any, message: str) -> None:
    """It would be done twice, or on one rank only. Once the training has ended, all is the script's again."""
    run, _ = begin()
    model, optimizer = run.wrap(*model_and_optimizer(rate=paddle.optimizer.lr.ExponentialDecay(0.1, 0.9)))
    loss = model(paddle.ones([1, 2])).mean()
    before = arrays_of(model)
    with pytest.raises(StepError, match=message):
        call(optimizer, loss)
    for name, value in before.items():
        np.testing.assert_array_equal(value, arrays_of(model)[name])
    train(run, model, run.data(SAMPLES, **BATCHES))
    loss = model(paddle.ones([1, 2])).mean()
    loss.backward()
    call(optimizer, loss)
    optimizer.clear_grad()
    assert not any(each.grad.numpy().any() for each in model.parameters())


def halve(weight: Any) -> None:
    weight.set_value((weight.astype("float32") * 0.5).astype(weight.dtype))


@pytest.mark.parametrize(
    ("make", "micro", "change"),
    [
        (plain, None, lambda model: paddle.optimizer.Adam(0.1, parameters=model.parameters()).step()),
        (grouped, 3, lambda model: halve(model[0].weight)),
        (half, None, lambda model: halve(model[0].weight)),
        (plain, 3, lambda model: model.set_state_dict({name: each * 0 for name, each in arrays_of(model).items()})),
    ],
    ids=["another optimizer", "by hand", "by hand below master weights", "loaded"],
)
def test_a_model_that_changes_beside_the_step_is_an_error(make: Any, micro: int | None, change: Any) -> None:
    """It is on one rank only, or overwritten by the next step."""
    run, _ = begin()
    model, _ = run.wrap(*make())
    with pytest.raises(StepError, match=r"parameters? '(first|0)\.weight'.* changed beside run\.step"):
        loop(run, model, between=lambda: change(model), micro=micro)
    assert run.step_number == 0


def test_parameters_that_no_optimizer_has_are_watched_as_well() -> None:
    """Training a head alone is fine; a second optimizer for the rest is not."""
    run, _ = begin()
    model, _ = model_and_optimizer()
    second = paddle.optimizer.SGD(0.1, parameters=model[0].parameters())
    run.wrap(model, paddle.optimizer.SGD(0.1, parameters=model[1].parameters()))
    with pytest.raises(StepError, match=r"parameters 'first\.weight', 'first\.bias' changed beside run\.step"):
        loop(run, model, between=lambda: run.step_number and second.step())
    assert run.step_number == 1


@pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")
def test_what_is_no_parameter_that_is_trained_may_change() -> None:
    """Statistics of BatchNorm, a momentum encoder that is frozen, averages of the model in a copy of it."""
    run, _ = begin()
    parts = [paddle.nn.Linear(2, 3), paddle.nn.BatchNorm1D(3), paddle.nn.Linear(3, 1)]
    model = paddle.nn.Sequential(*parts)
    slow = paddle.nn.Linear(2, 3)
    for each in slow.parameters():
        each.stop_gradient = True
    model.slow = slow
    model.forward = lambda inputs: parts[2](parts[1](parts[0](inputs)))
    run.wrap(model, paddle.optimizer.Adam(0.1, parameters=model.parameters()))
    average = copy.deepcopy(model)

    def move() -> None:
        slow.set_state_dict(parts[0].state_dict())
        for mine, its in zip(average.parameters(), model.parameters(), strict=True):
            mine.set_value(0.9 * mine + 0.1 * its)

    loop(run, model, between=move)
    assert run.step_number == STEPS
    assert model[1]._mean.numpy().any()


def test_a_model_may_change_for_a_moment() -> None:
    """As for an evaluation with averaged weights, or a second gradient beside the first, which is cleared."""
    run, _ = begin()
    model, optimizer = run.wrap(*model_and_optimizer())

    def look_around() -> None:
        kept = arrays_of(model)
        optimizer.clear_grad()
        with paddle.no_grad():
            for each in model.parameters():
                each.add_(paddle.full(each.shape, 0.01))
        (model(paddle.ones([3, 2])) ** 2).mean().backward()
        for name, each in model.named_parameters():
            each.set_value(kept[name])

    loop(run, model, between=look_around)
    assert run.step_number == STEPS


@pytest.mark.parametrize("kind", ["SGD", "Momentum", "Adam", "AdamW", "Adagrad", "RMSProp", "Lamb", "NAdam", "Rprop"])
def test_the_optimizer_s_own_step_is_no_change_beside_it(kind: str) -> None:
    """Whichever it is, and whatever order the script saves and looks at states in."""
    run, _ = begin()
    model, _ = model_and_optimizer()
    _, optimizer = run.wrap(model, getattr(paddle.optimizer, kind)(0.05, parameters=model.parameters()))
    loop(run, model, between=lambda: (model.state_dict(), optimizer.state_dict()))
    assert run.step_number == STEPS


@PAIRS
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_can_t_be_frozen_or_unfrozen_later(make: Any, micro: int | None, *, frozen: bool) -> None:
    """Newcomers and checkpoints would know nothing of it. The error names them."""
    run, _ = begin()
    model, optimizer = make()
    first = next(iter(model.parameters()))
    first.stop_gradient = not frozen
    run.wrap(model, optimizer)

    def turn() -> None:
        first.stop_gradient = frozen

    with pytest.raises(StepError, match=r"stop_gradient of parameter '(first|0)\.weight' is another than at run\.wrap"):
        loop(run, model, between=turn, micro=micro)


@MICRO
def test_a_parameter_that_a_step_does_not_use_stays_as_it_is(micro: int | None) -> None:
    """Whether it was used before or not: else a training that goes on from a checkpoint would be another."""
    run, _ = begin()
    parts = [paddle.nn.Linear(2, 1), paddle.nn.Linear(2, 1)]
    model = paddle.nn.Sequential(*parts)
    run.wrap(model, paddle.optimizer.Adam(0.1, parameters=model.parameters()))

    def forward(inputs: Any) -> Any:
        return parts[min(run.step_number, 1)](inputs)

    model.forward = forward
    seen: list[np.ndarray] = []
    loop(run, model, between=lambda: seen.append(parts[0].weight.numpy().copy()), micro=micro)
    changes = [not np.array_equal(*pair) for pair in itertools.pairwise([*seen, parts[0].weight.numpy()])]
    assert sum(changes) == 1


def test_a_clip_that_the_optimizer_has_is_of_the_whole_batch_s_gradient() -> None:
    """And not of each micro batch's."""
    trained = []
    for micro in (None, 1):
        run, _ = begin()
        model, _ = model_and_optimizer()
        clip = paddle.nn.ClipGradByGlobalNorm(0.01)
        run.wrap(model, paddle.optimizer.SGD(1.0, parameters=model.parameters(), grad_clip=clip))
        loop(run, model, micro=micro)
        trained.append(arrays_of(model))
    for name, value in trained[0].items():
        np.testing.assert_allclose(value, trained[1][name], rtol=1e-5, atol=1e-6)
