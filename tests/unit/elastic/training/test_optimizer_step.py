"""What a script may do to its model and optimizer beside `run.step`, and what is an error."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.elastic.local_run import SAMPLES, arrays_of, begin, model_and_optimizer, paddle, train

from edl_runtime.elastic.api import Run
from edl_runtime.elastic.comm.agent_protocol import Note
from edl_runtime.elastic.comm.process_group import ProcessGroup
from edl_runtime.elastic.errors import NotFiniteError, StepError
from edl_runtime.elastic.training.learning_rate import encode_slots
from edl_runtime.errors import SpecError

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
        (
            lambda optimizer, _: optimizer._learning_rate.step(),
            r"LRScheduler; leave that line out.*'epoch' for a scheduler",
        ),
    ],
    ids=["step", "minimize", "set_state_dict", "load_state_dict", "set_lr_scheduler", "scheduler.step"],
)
def test_what_run_step_does_is_not_the_script_s_until_the_end(call: Any, message: str) -> None:
    """It would be done twice, or on one rank only. Once the training has ended, all is the script's again."""
    run, _ = begin()
    model, optimizer = run.wrap(*model_and_optimizer(rate=paddle.optimizer.lr.ExponentialDecay(0.1, 0.9)))
    loss = model(paddle.ones([1, 2])).mean()
    before = arrays_of(model)
    with pytest.raises(StepError, match=message) as refused:
        call(optimizer, loss)
    assert str(refused.value).endswith("After run.finish() the script may call it")
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
        (grouped, 3, lambda model: halve(model[0].weight)),
        (half, None, lambda model: halve(model[0].weight)),
        (plain, 3, lambda model: model.set_state_dict({name: each * 0 for name, each in arrays_of(model).items()})),
    ],
    ids=["by hand", "by hand below master weights", "loaded"],
)
def test_a_model_that_changes_beside_the_step_is_an_error(make: Any, micro: int | None, change: Any) -> None:
    """It is on one rank only, or overwritten by the next step."""
    run, _ = begin()
    model, _ = run.wrap(*make())
    with pytest.raises(StepError, match=r"parameters? '(first|0)\.weight'.* changed outside of run\.step"):
        loop(run, model, between=lambda: change(model), micro=micro)
    assert run.step_number == 0


def test_parameters_that_no_optimizer_has_are_watched_as_well() -> None:
    """Training a head alone is fine; changing the rest by hand is not."""
    run, _ = begin()
    model, _ = model_and_optimizer()
    run.wrap(model, paddle.optimizer.SGD(0.1, parameters=model[1].parameters()))
    with pytest.raises(StepError, match=r"parameter 'first\.weight' changed outside of run\.step"):
        loop(run, model, between=lambda: run.step_number and halve(model[0].weight))
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

    with pytest.raises(StepError, match=r"stop_gradient of parameter '(first|0)\.weight' has changed since run\.wrap"):
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


def stepped_by_hand(
    model: Any, optimizer: Any, scheduler: Any = None, scaler: Any = None, each: Callable[[int], object] | None = None
) -> None:
    """Train as the script did before it called `run.step`: six steps, in two epochs.

    `each` is done before each forward, and told how many steps there have been.
    """
    steps = itertools.count()
    for _ in range(2):
        for first in range(0, len(SAMPLES), 4):
            if each is not None:
                each(next(steps))
            inputs = paddle.to_tensor(np.stack([sample for sample, _ in SAMPLES[first : first + 4]]))
            loss = model(inputs).mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.clear_grad()
        if scheduler is not None:
            scheduler.step()


def assert_same(first: Any, second: Any) -> None:
    for name, value in arrays_of(first).items():
        np.testing.assert_allclose(arrays_of(second)[name], value, rtol=1e-5, atol=1e-6)


def test_a_scheduler_that_was_stepped_once_an_epoch_goes_on_so_as_the_advice_says() -> None:
    """Left out alone, it would be moved at each step: the advice names schedule='epoch'."""
    schedulers = [paddle.optimizer.lr.ExponentialDecay(0.01, 0.1) for _ in range(2)]
    (by_hand, optimizer), (model, other) = (model_and_optimizer(rate=each) for each in schedulers)
    stepped_by_hand(by_hand, optimizer, schedulers[0])
    run, _ = begin()
    run.wrap(model, other, schedule="epoch")
    with pytest.raises(StepError, match=r"leave that line out.*run\.wrap\(schedule=\.\.\.\).*'epoch' for a scheduler"):
        schedulers[1].step()
    train(run, model, run.data(SAMPLES, **BATCHES, shuffle=False))
    assert schedulers[1].get_lr() == schedulers[0].get_lr() == pytest.approx(1e-4)
    assert_same(by_hand, model)


Make = Callable[[], tuple[Any, Any]]


class LookingUp(paddle.nn.Layer):  # type: ignore[misc]
    """With gradients of the few rows that a batch names, or with whole ones."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.rows = paddle.nn.Embedding(10, 3, sparse=sparse)
        self.linear = paddle.nn.Linear(3, 1)

    def forward(self, inputs: Any) -> Any:
        return self.linear(self.rows(inputs[:, 0].astype("int64")))


def looking_up(*, sparse: bool = True, lazy: bool = False) -> tuple[Any, Any]:
    paddle.seed(7)
    model = LookingUp(sparse=sparse)
    return model, paddle.optimizer.Adam(0.1, parameters=model.parameters(), lazy_mode=lazy)


fresh_names = paddle.utils.unique_name.guard
"""As in a new process: it is by names that an optimizer finds its own in what it loads."""


def is_still(step: int) -> bool:
    return step in (2, 3)


def hold(model: Any, _optimizer: Any, step: int) -> None:
    model[0].weight.stop_gradient = is_still(step)


def drop_gradient(model: Any, _optimizer: Any, step: int) -> None:
    if is_still(step):
        model[0].weight.clear_gradient(False)


def set_scheduler(_model: Any, optimizer: Any, _step: int = 0) -> None:
    optimizer.set_lr_scheduler(paddle.optimizer.lr.ExponentialDecay(0.1, 0.5))


def move_scheduler(_model: Any, optimizer: Any, step: int) -> None:
    if step:
        optimizer._learning_rate.step()


@cache
def trained_before() -> tuple[Any, Any]:
    """Return what another training has come to: weights and moments."""
    with fresh_names():
        model, optimizer = plain()
        stepped_by_hand(model, optimizer)
    return model.state_dict(), optimizer.state_dict()


def load_by(way: str) -> Callable[..., None]:
    """Return what loads that, the moments by this method."""

    def load(model: Any, optimizer: Any, _step: int = 0) -> None:
        weights, moments = trained_before()
        getattr(optimizer, way)(moments)
        model.set_state_dict(weights)

    return load


def nothing(*_: Any) -> None:
    pass


class Advice(NamedTuple):
    """What a script did while Paddle alone trained, why it may not, and what it does instead.

    - `message`: of the error. `mistake`: makes the pair, `make` if it is None, and `wrong` is done between backward and
      step, where the error is raised.
    - `first`: what is done before `run.wrap`, or the loop. `instead`: between backward and step.
    - `alone`: makes the pair that Paddle trained, `make` if it is None. `once`: what was done there before each
      forward.
    """

    message: str
    make: Make
    mistake: Make | None = None
    wrong: Callable[[Any, Any, int], object] = nothing
    first: Callable[[Any, Any], object] = nothing
    instead: Callable[[Any, Any, int], object] = nothing
    alone: Make | None = None
    once: Callable[[Any, Any, int], object] = nothing


LOAD = r"load what a training is to begin with before run\.wrap"
ADVICE = {
    "hold still": Advice(
        r"drop its gradient on all ranks, by parameter\.clear_gradient\(False\) before run\.step",
        plain,
        wrong=hold,
        instead=drop_gradient,
        once=hold,
    ),
    "scheduler": Advice(
        r"give the optimizer its scheduler before run\.wrap",
        plain,
        wrong=set_scheduler,
        first=set_scheduler,
        once=move_scheduler,
    ),
    "set_state_dict": Advice(LOAD, plain, wrong=load_by("set_state_dict"), first=load_by("set_state_dict")),
    "load_state_dict": Advice(LOAD, plain, wrong=load_by("load_state_dict"), first=load_by("load_state_dict")),
    "lazy": Advice(
        r"allowed is lazy_mode=False: sparse gradients are added up over ranks as whole ones",
        looking_up,
        mistake=partial(looking_up, lazy=True),
        alone=partial(looking_up, sparse=False),
    ),
}


@pytest.mark.parametrize("advice", ADVICE.values(), ids=ADVICE)
def test_a_script_that_does_as_it_is_told_trains_as_before(advice: Advice) -> None:
    """What its error says comes to the same weights as what it did where Paddle alone trained."""
    with fresh_names():
        before, own = (advice.alone or advice.make)()
        advice.first(before, own)
        untrained = arrays_of(before)
        stepped_by_hand(before, own, each=lambda step: advice.once(before, own, step))
    assert all(not np.array_equal(value, untrained[name]) for name, value in arrays_of(before).items())

    run, _ = begin()
    with fresh_names(), pytest.raises((StepError, SpecError), match=advice.message):  # noqa: PT012 -- at wrap, or later
        model, optimizer = (advice.mistake or advice.make)()
        run.wrap(model, optimizer)
        loop(run, model, between=lambda: advice.wrong(model, optimizer, run.step_number))

    run, _ = begin()
    with fresh_names():
        model, optimizer = advice.make()
        advice.first(model, optimizer)
        run.wrap(model, optimizer)
        data = run.data(SAMPLES, **BATCHES, shuffle=False)
        train(run, model, data, between=lambda: advice.instead(model, optimizer, run.step_number))
    assert_same(before, model)


MakeScaler = Callable[[float], Any]


@pytest.fixture
def scaler_of(monkeypatch: pytest.MonkeyPatch) -> MakeScaler:
    """What makes GradScalers that work on the CPU and with float32, where Paddle switches them off."""
    from paddle.amp import grad_scaler

    place = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    monkeypatch.setattr(grad_scaler, "_dygraph_tracer", lambda: place)
    monkeypatch.setattr(grad_scaler, "amp_global_state", lambda: SimpleNamespace(amp_dtype="float16"))
    return lambda scale: paddle.amp.GradScaler(init_loss_scaling=scale, incr_every_n_steps=2, decr_every_n_nan_or_inf=2)


def train_scaled(run: Run, model: Any, scaler: Any, *, overflows_at: int = 0) -> None:
    for inputs, _ in run.data(SAMPLES, **BATCHES, shuffle=False, micro_batch=2):
        loss = model(inputs).mean() * (np.inf if run.step_number + 1 == overflows_at else 1.0)
        scaler.scale(loss).backward()
        run.step(loss=loss)


def test_a_scaler_s_step_is_done_by_run_step_as_the_advice_says(scaler_of: MakeScaler) -> None:
    """With gradients unscaled after they are added up, and the scale moved on. Paddle's own step is refused."""
    (by_hand, optimizer), (model, other) = (model_and_optimizer() for _ in range(2))
    scalers = [scaler_of(1024.0) for _ in range(2)]
    stepped_by_hand(by_hand, optimizer, scaler=scalers[0])
    run, _ = begin()
    run.wrap(model, other, scaler=scalers[1])
    with pytest.raises(StepError, match=r"scaler\.step\(\); leave that line out: run\.step does it"):
        scalers[1].step(other)
    train_scaled(run, model, scalers[1])
    assert scalers[1]._scale.item() == scalers[0]._scale.item() == 8192.0
    assert_same(by_hand, model)


def test_the_advice_for_an_optimizer_s_step_names_the_scaler(scaler_of: MakeScaler) -> None:
    """A scaler that run.wrap does not have calls the optimizer's step."""
    run, _ = begin()
    model, optimizer = run.wrap(*model_and_optimizer())
    scaler = scaler_of(2.0)
    scaler.scale(model(paddle.ones([1, 2])).mean()).backward()
    with pytest.raises(StepError, match=r"called optimizer\.step\(\); .*give it to run\.wrap\(scaler=scaler\)"):
        scaler.step(optimizer)


def test_a_step_that_overflows_is_left_out_and_the_scale_travels(tmp_path: Path, scaler_of: MakeScaler) -> None:
    """As a scaler does it alone: on all ranks alike, for what it looks at is the sum of their gradients."""
    run, _ = begin(tmp_path)
    model, optimizer = model_and_optimizer()
    scaler = scaler_of(1024.0)
    run.wrap(model, optimizer, scaler=scaler)
    train_scaled(run, model, scaler, overflows_at=6)
    assert all(np.isfinite(value).all() for value in arrays_of(model).values())
    assert scaler._scale.item() == 4096.0
    run, _ = begin(tmp_path)
    found = scaler_of(1.0)
    run.wrap(*model_and_optimizer(), scaler=found)
    assert found._scale.item() == 4096.0
    with pytest.raises(SpecError, match=r"scaler: got 'float', allowed is a paddle\.amp\.GradScaler"):
        begin()[0].wrap(*model_and_optimizer(), scaler=2.0)


def test_gradients_that_a_scaler_skips_are_no_failure(scaler_of: MakeScaler) -> None:
    """They are infinite now and then, while the scale is too large. A loss that is not finite is a failure."""
    run, link = begin()
    model, optimizer = model_and_optimizer()
    scaler = scaler_of(1024.0)
    run.wrap(model, optimizer, scaler=scaler, not_finite="fail")

    def train() -> None:
        for inputs, _ in run.data(SAMPLES, **BATCHES):
            loss = model(inputs).mean() * (math.nan if run.step_number == 3 else 1.0)
            scaler.scale(loss).backward()
            if run.step_number == 1:
                model.first.weight.grad = paddle.full([2, 3], math.inf)
            run.step(loss=loss)

    with pytest.raises(NotFiniteError, match="in the loss of step 4, which is not applied"):
        train()
    assert run.step_number == 3
    assert [message.text for message in link.sent if isinstance(message, Note)] == [
        "NaN or infinity in the loss of step 4: the job fails"
    ]


def test_an_optimizer_that_is_not_wrapped_may_not_step_until_the_end() -> None:
    """Whatever it trains would be another model on each rank, and in no checkpoint; one made later is refused, too."""
    for make in (lambda model: paddle.optimizer.AdamW(0.1, parameters=model.parameters()), plain_sgd):
        run, _ = begin()
        model, _ = run.wrap(*model_and_optimizer())
        critic = paddle.nn.Linear(2, 1)
        stranger = make(critic)
        before = arrays_of(critic)

        def train_critic(critic: Any = critic, stranger: Any = stranger) -> None:
            critic(paddle.ones([1, 2])).mean().backward()
            stranger.step()

        with pytest.raises(StepError, match=r"step of \w+, an optimizer that run\.wrap was not given; give run\.wrap"):
            loop(run, model, between=train_critic)
        for name, value in before.items():
            np.testing.assert_array_equal(arrays_of(critic)[name], value)
        run.finish()
        train_critic()
        assert not np.array_equal(arrays_of(critic)["weight"], before["weight"])


def plain_sgd(model: Any) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=model.parameters())


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::paddle.utils.deprecated.VisibleDeprecationWarning")
@pytest.mark.parametrize("way", ["apply_gradients", "optimizer", "incubate.optimizer"])
def test_an_optimizer_that_is_not_wrapped_may_not_step_in_another_way(way: str) -> None:
    """By given gradients, or as an LBFGS of Paddle's, which has a step of its own."""
    run, _ = begin()
    run.wrap(*model_and_optimizer())
    critic = paddle.nn.Linear(2, 1)
    before = arrays_of(critic)

    def closure() -> Any:
        loss = critic(paddle.ones([1, 2])).mean()
        loss.backward()
        return loss

    def step() -> None:
        if way == "apply_gradients":
            closure()
            plain_sgd(critic).apply_gradients([(each, each.grad) for each in critic.parameters()])
        else:
            attrgetter(f"{way}.LBFGS")(paddle)(parameters=critic.parameters()).step(closure)

    with pytest.raises(StepError, match=r"step of \w+, an optimizer that run\.wrap was not given"):
        step()
    for name, value in before.items():
        np.testing.assert_array_equal(arrays_of(critic)[name], value)
    run.finish()
    step()
    assert not np.array_equal(arrays_of(critic)["weight"], before["weight"])


def test_several_pairs_are_wrapped_together_and_an_optimizer_without_gradients_rests() -> None:
    """The first is trained at each step, the second at every other, and both are watched."""
    run, _ = begin()
    (first, _), (second, _other), (third, _) = run.wrap(
        model_and_optimizer(), model_and_optimizer(), model_and_optimizer()
    )
    seen: list[np.ndarray] = []

    def train_others() -> None:
        third(paddle.ones([1, 2])).mean().backward()
        if run.step_number % 2:
            second(paddle.ones([1, 2])).mean().backward()
        seen.append(arrays_of(second)["first.weight"])

    loop(run, first, between=train_others)
    changes = [not np.array_equal(*pair) for pair in itertools.pairwise([*seen, arrays_of(second)["first.weight"]])]
    assert changes == [False, True] * 3
    run, _ = begin()
    (first, _), (second, _) = run.wrap(model_and_optimizer(), model_and_optimizer())
    with pytest.raises(StepError, match=r"parameter 'model-2/first\.weight' changed outside of run\.step"):
        loop(run, first, between=lambda: halve(second[0].weight))


def test_pairs_that_can_t_be_are_refused() -> None:
    """A model without its optimizer, a parameter that two of them have."""
    model, optimizer = model_and_optimizer()
    with pytest.raises(SpecError, match=r"run\.wrap: got \['tuple', 'Sequential'\], allowed is a model and its"):
        begin()[0].wrap((model, optimizer), model)
    with pytest.raises(SpecError, match="allowed is each parameter in one optimizer only"):
        begin()[0].wrap((model, optimizer), (model, plain_sgd(model)))


def test_one_model_may_have_two_optimizers() -> None:
    """As for a head that learns faster; it is one part of the state."""
    run, _ = begin()
    model, _ = model_and_optimizer()
    run.wrap((model, plain_sgd(model[0])), (model, plain_sgd(model[1])))
    assert run._wrapped is not None
    assert run._wrapped.train_state.state.parts.keys() == {"model", "optimizer", "optimizer-2"}
    loop(run, model)
    assert run.step_number == STEPS


class OfWeights(ProcessGroup):
    """Rank 0 of two. `weight`: of the other one's part of the step, NaN without; its gradients are `theirs`."""

    world_size = 2

    def __init__(self, weight: float, theirs: float = 0.0) -> None:
        self._weight = weight
        self._theirs = theirs

    def all_reduce_counts(self, counts: np.ndarray) -> np.ndarray:
        theirs = np.zeros_like(counts)
        theirs[1] = 2  # samples
        theirs[-4:-2] = encode_slots(self._weight, 1, 2)
        return counts + theirs

    def all_reduce(self, values: Any) -> None:
        values[:-2] += self._weight * self._theirs
        values[-1] += self._weight * 5.0  # the loss


def weighing(theirs: ProcessGroup | None = None, micro: int | None = None) -> tuple[Run, Any, Any]:
    """Return a run, a weight of 0.0 that it trains at a rate of 1, and its first batch's iterator."""
    run, _ = begin()
    model = paddle.nn.Linear(1, 1, bias_attr=False)
    model.weight.set_value(paddle.zeros([1, 1]))
    run.wrap(model, paddle.optimizer.SGD(1.0, parameters=model.parameters()))
    batches = iter(run.data(SAMPLES, **BATCHES, micro_batch=micro))
    next(batches)
    if theirs is not None:
        run._session.group = theirs
    return run, model.weight, batches


@pytest.mark.parametrize(
    ("own", "other", "gradient", "loss"),
    [
        (3, 1, (3 * 2.0 + 1 * 6.0) / 4, (3 * 1.0 + 1 * 5.0) / 4),
        (0.1, 0.3, (0.1 * 2.0 + 0.3 * 6.0) / 0.4, (0.1 * 1.0 + 0.3 * 5.0) / 0.4),
        (0, 1, 6.0, 5.0),
        (paddle.to_tensor(2), 0.0, 2.0, 1.0),
    ],
)
def test_ranks_count_by_the_weight_that_they_give(own: Any, other: float, gradient: float, loss: float) -> None:
    """As numbers of tokens, or any others; one without any has no part in it."""
    run, weight, _ = weighing(OfWeights(other, theirs=6.0))
    (2.0 * weight.sum()).backward()
    assert run.step(loss=1.0, weight=own)
    assert weight.numpy().item() == pytest.approx(-gradient)
    assert run.mean_loss == pytest.approx(loss)


@pytest.mark.parametrize("group", [None, OfWeights(0.0)])
def test_a_step_without_any_weight_trains_nothing(group: Any) -> None:
    """Its gradients, as those of a mean over no token, are not numbers, and nothing warns. Its samples count."""
    run, weight, batches = weighing(group)
    (math.nan * weight.sum()).backward()
    assert run.step(loss=math.nan, weight=0)
    assert (weight.numpy().item(), run.step_number) == (0.0, 1)
    assert math.isnan(run.mean_loss)
    assert run._wrapped is not None
    assert run._wrapped.train_state.not_finite == {}
    run._session.group = ProcessGroup()
    next(batches)
    weight.sum().backward()
    run.step(loss=1.0, weight=7)
    assert (weight.numpy().item(), run.mean_loss) == (-1.0, 1.0)


def test_micro_batches_count_by_their_weights() -> None:
    """One without any needs no backward."""
    run, weight, batches = weighing(micro=1)
    for number, of_batch in enumerate((1, 0, 3, 4)):
        if of_batch:
            (float(number) * weight.sum()).backward()
        run.step(loss=number, weight=of_batch)
        next(batches)
    assert weight.numpy().item() == pytest.approx(-(0 * 1 + 2 * 3 + 3 * 4) / 8)
    assert run.mean_loss == pytest.approx((0 * 1 + 2 * 3 + 3 * 4) / 8)


@pytest.mark.parametrize(("own", "other"), [(None, 3.0), (3.0, math.nan)])
def test_a_weight_on_some_ranks_only_is_an_error_on_all(own: float | None, other: float) -> None:
    """Else tokens would be added to samples."""
    run, weight, _ = weighing(OfWeights(other))
    weight.sum().backward()
    with pytest.raises(StepError, match=r"got weight= on some ranks only; give it on all ranks in each step, or none"):
        run.step(weight=own)


def test_a_weight_with_some_micro_batches_only_is_an_error() -> None:
    run, weight, batches = weighing(micro=1)
    weight.sum().backward()
    run.step(weight=2)
    next(batches)
    weight.sum().backward()
    with pytest.raises(StepError, match=r"got weight= with some micro batches of a step only"):
        run.step()


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, "many", paddle.ones([2])])
def test_a_weight_is_a_finite_number(wrong: Any) -> None:
    run, weight, _ = weighing()
    weight.sum().backward()
    with pytest.raises(SpecError, match=r"(?s)run\.step\(weight=…\): got .*, allowed is a"):
        run.step(weight=wrong)
