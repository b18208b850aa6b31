"""Steps of one model each within a batch, as in the usual loop of a GAN: what they train, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.elastic.local_run import SAMPLES, arrays_of, begin, paddle

from edl_runtime.elastic.api import Run
from edl_runtime.elastic.comm.process_group import ProcessGroup
from edl_runtime.elastic.errors import GroupLostError, StepError
from edl_runtime.elastic.training.model_steps import ALL_MODELS, NEXT_BATCH, check_same
from edl_runtime.errors import SpecError

pytestmark = pytest.mark.usefixtures("nothing_at_exit")

BATCHES: dict[str, Any] = {"global_batch": 4, "epochs": 2, "shuffle": False}  # six batches
Pair = tuple[Any, Any]


def pairs() -> tuple[Pair, Pair]:
    """Return a generator with a schedule and a critic, with their optimizers."""
    paddle.seed(5)
    generator, critic = paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 1)
    decay = paddle.optimizer.lr.ExponentialDecay(0.1, 0.5)
    return (generator, paddle.optimizer.Adam(decay, parameters=generator.parameters())), (
        critic,
        paddle.optimizer.Momentum(0.02, parameters=critic.parameters()),
    )


def losses(generator: Any, critic: Any, inputs: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what computes the critic's loss and the generator's, on what it makes now."""
    made = generator(inputs)
    return lambda: (critic(made.detach()) ** 2).mean() - critic(inputs).mean(), lambda: -(critic(made) ** 2).mean()


def by_hand(every: int) -> list[dict[str, np.ndarray]]:
    """Return what the usual loop makes of both without us, where each `every`-th batch trains the generator."""
    (generator, one), (critic, other) = pairs()
    batches = [SAMPLES[start : start + 4] for start in (0, 4, 8)] * 2
    for number, batch in enumerate(batches):
        of_critic, of_generator = losses(generator, critic, paddle.to_tensor(np.stack([x for x, _ in batch])))
        of_critic().backward()
        other.step()
        other.clear_grad()
        if number % every == every - 1:
            of_generator().backward()
            one.step()
            one._learning_rate.step()
            one.clear_grad()
            other.clear_grad()
    return [arrays_of(generator), arrays_of(critic)]


def train(run: Run, models: tuple[Any, Any], data: Any, *, every: int = 1, after_first: Any = None) -> None:
    """Do as `by_hand`. `after_first` is called after the critic's step of each batch."""
    generator, critic = models
    for inputs, _ in data:
        of_critic, of_generator = losses(generator, critic, inputs)
        loss = of_critic()
        loss.backward()
        assert run.step(loss, of=critic)
        if after_first:
            after_first()
        if run.step_number % every == every - 1:
            loss = of_generator()
            loss.backward()
            assert run.step(loss, of=generator)
        assert run.mean_loss == pytest.approx(float(loss))


def begin_both(folder: Path | None = None, **options: Any) -> tuple[Run, Any, Any, Any]:
    run, link = begin(folder)
    (generator, _), (critic, _) = run.wrap(*pairs(), **options)
    return run, link, generator, critic


def assert_same(found: list[dict[str, np.ndarray]], wanted: list[dict[str, np.ndarray]]) -> None:
    for mine, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("every", [1, 3])
def test_the_usual_loop_of_a_gan_trains_as_without_us(every: int) -> None:
    """Each step trains its model alone, with its own schedule; batches are counted, and not steps of models."""
    run, _, generator, critic = begin_both()
    train(run, (generator, critic), run.data(SAMPLES, **BATCHES), every=every)
    assert (run.step_number, run.epoch) == (6, 2)
    assert_same([arrays_of(generator), arrays_of(critic)], by_hand(every))


@pytest.mark.parametrize(("every", "at"), [(1, 2), (3, 2), (3, 1)])
def test_a_checkpoint_has_whole_batches_only(tmp_path: Path, every: int, at: int) -> None:
    """Told to leave between the two steps of a batch, a script makes the second one, too, if it makes it at all."""
    run, link, generator, critic = begin_both(tmp_path)
    with pytest.raises(SystemExit):
        train(
            run,
            (generator, critic),
            run.data(SAMPLES, **BATCHES),
            every=every,
            after_first=lambda: link.stop() if run.step_number == at else None,
        )
    assert run.step_number == at + 1
    later, _, generator, critic = begin_both(tmp_path)
    assert later.step_number == at + 1
    train(later, (generator, critic), later.data(SAMPLES, **BATCHES), every=every)
    assert_same([arrays_of(generator), arrays_of(critic)], by_hand(every))


def test_a_script_may_end_after_the_step_of_one_model(tmp_path: Path) -> None:
    """Its batch counts."""
    run, _, generator, critic = begin_both(tmp_path)
    for inputs, _ in run.data(SAMPLES, **BATCHES):
        losses(generator, critic, inputs)[0]().backward()
        run.step(of=critic)
        break
    run.finish()
    assert run.step_number == 1
    assert begin_both(tmp_path)[0].step_number == 1


def test_steps_that_can_t_be_in_one_batch_are_refused() -> None:
    """What was stepped, what was not, and what to do; `run.mean` has its place, too."""
    run, _, generator, critic = begin_both()
    batches = iter(run.data(SAMPLES, **BATCHES))
    inputs, _ = next(batches)
    with pytest.raises(SpecError, match=r"run\.step\(of=…\): got 'Linear', allowed is a model, as run\.wrap"):
        run.step(of=paddle.nn.Linear(1, 1))
    generator(inputs).mean().backward()
    with pytest.raises(StepError, match="no parameter has a gradient"):
        run.step(of=critic)
    critic(inputs).mean().backward()
    run.step(of=critic)
    assert all(each.grad is None for model in (generator, critic) for each in model.parameters())
    critic(inputs).mean().backward()
    with pytest.raises(StepError, match="a second time for one model of a batch; call it once for each model"):
        run.step(of=critic)
    with pytest.raises(StepError, match=r"without of= after one of a single model; give of= in each, or in none"):
        run.step()
    with pytest.raises(StepError, match=r"run\.mean was called after the step of one model, before its batch was over"):
        run.mean(1.0)
    generator(inputs).mean().backward()
    run.step(of=generator)
    assert run.mean(1.0) == 1.0
    with pytest.raises(StepError, match="a second time for one batch"):
        run.step(of=critic)
    run, _, generator, critic = begin_both()
    inputs, _ = next(iter(run.data(SAMPLES, **BATCHES, micro_batch=2)))
    critic(inputs).mean().backward()
    with pytest.raises(SpecError, match=r"run\.step\(of=…\): got 'a micro batch', allowed is whole batches"):
        run.step(of=critic)


def test_ranks_that_step_different_models_learn_which() -> None:
    """A rank without a batch, which does nothing of its own, is none of them."""
    check_same([ALL_MODELS, None, ALL_MODELS], 3)
    check_same([None, None], 3)
    for does, told in (
        ([2, 1, 2], r"model 1 on ranks \[1\]; model 2 on ranks \[0, 2\]; step the same models in the same order"),
        ([1, NEXT_BATCH], r"after step 3 .* none, but another batch on ranks \[1\]; model 1 on ranks \[0\]"),
        ([ALL_MODELS, 1], r"all models on ranks \[0\]; model 1 on ranks \[1\]"),
    ):
        with pytest.raises(StepError, match=told):
            check_same(does, 3)


class OtherModel(ProcessGroup):
    """Rank 0 of two; the other one steps the first model."""

    world_size = 2

    def all_reduce_counts(self, counts: np.ndarray) -> np.ndarray:
        theirs = np.zeros_like(counts)
        theirs[1], theirs[7] = 2, 1 + 2  # its samples, and what it does
        return counts + theirs


def test_a_script_that_steps_another_model_than_others_fails() -> None:
    """Before anything of it is applied; also where it goes on to its next batch."""
    run, _, _, critic = begin_both()
    batches = iter(run.data(SAMPLES, **BATCHES))
    inputs, _ = next(batches)
    before = arrays_of(critic)
    critic(inputs).mean().backward()
    run._session.group = OtherModel()
    with pytest.raises(StepError, match=r"model 1 on ranks \[1\]; model 2 on ranks \[0\]"):
        run.step(of=critic)
    assert_same([arrays_of(critic)], [before])
    run, _, _, critic = begin_both()
    batches = iter(run.data(SAMPLES, **BATCHES))
    critic(next(batches)[0]).mean().backward()
    run.step(of=critic)
    run._session.group = OtherModel()
    with pytest.raises(StepError, match=r"none, but another batch on ranks \[0\]; model 1 on ranks \[1\]"):
        next(batches)


class LostLater(ProcessGroup):
    """Rank 0 of two, of which the other one does nothing and is lost after so many `exchanges`."""

    world_size = 2

    def __init__(self, exchanges: int) -> None:
        self._left = exchanges

    def all_reduce_counts(self, counts: np.ndarray) -> np.ndarray:
        if not self._left:
            raise GroupLostError(1, "the test")
        self._left -= 1
        counts[0], counts[5] = 2, 1  # all have been told of the next generation; the other one idles
        return counts


@pytest.fixture(name="scaler", params=[False, True])
def _scaler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """None, or a GradScaler, which moves on at each step; it works on the CPU here."""
    from paddle.amp import grad_scaler

    tracer = type("Tracer", (), {"_expected_place": type("Place", (), {"is_gpu_place": staticmethod(lambda: True)})})
    monkeypatch.setattr(grad_scaler, "_dygraph_tracer", lambda: tracer)
    monkeypatch.setattr(grad_scaler, "amp_global_state", lambda: type("Amp", (), {"amp_dtype": "float16"}))
    return paddle.amp.GradScaler(init_loss_scaling=8.0, incr_every_n_steps=1) if request.param else None


def test_what_a_batch_s_first_steps_have_changed_is_put_back_when_its_last_is_lost(scaler: Any) -> None:
    """Weights, moments, rates that the script has set, and a scaler; what it does after it belongs to the batch."""
    run, link = begin()
    counts = run.register("counts", {"after": 0})
    (generator, _), (critic, other), (third, _) = run.wrap(*pairs(), pairs()[0], scaler=scaler)
    scale = (lambda loss: loss) if scaler is None else scaler.scale
    batches = iter(run.data(SAMPLES, **BATCHES))
    training = run._wrapped
    assert training is not None

    def state() -> str:
        parts = training.train_state.state.states().items()
        kept = {name: ({key: each.tolist() for key, each in part.arrays.items()}, part.values) for name, part in parts}
        return json.dumps(kept)

    before = state()
    inputs, numbers = next(batches)
    run._session.group = LostLater(2)
    link._generation = 2
    other.set_lr(0.01)
    scale(losses(generator, critic, inputs)[0]()).backward()
    assert run.step(of=critic)
    scale(losses(generator, critic, inputs)[1]()).backward()
    assert run.step(of=generator)
    assert state() != before
    scale(third(inputs).mean()).backward()
    assert run.step(of=third) is False
    assert state() == before
    critic(inputs).mean().backward()
    assert run.step(of=critic) is False  # of the same batch
    assert all(each.grad is None for each in critic.parameters())
    counts["after"] += 1
    inputs, again = next(batches)
    assert (again.tolist(), counts["after"], run.step_number, run.generation) == (numbers.tolist(), 0, 0, 2)
    assert state() == before


def test_a_batch_that_is_over_for_its_script_counts_though_another_rank_is_lost_then() -> None:
    """Others may have less of it, and get it from this rank. It enters the generation that was due, and no other."""
    run, link, _, critic = begin_both()
    training = run._wrapped
    assert training is not None
    batches = iter(run.data(SAMPLES, **BATCHES))
    inputs, numbers = next(batches)
    run._session.group = LostLater(1)
    link._generation = 2
    critic(inputs).mean().backward()
    assert run.step(of=critic)
    assert run.step_number == 0
    training.check_stepped()
    assert not training._regroup_due
    _, others = next(batches)
    assert (run.step_number, run.generation) == (1, 2)
    assert not set(others.tolist()) & set(numbers.tolist())
