"""The state of models and optimizers, saved and loaded; and the sum of their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.elastic.local_run import arrays_of, model_and_optimizer, paddle

from edl_runtime.elastic.comm.process_group import ProcessGroup
from edl_runtime.elastic.errors import GroupLostError
from edl_runtime.elastic.training.batch_norm import RunningStatistics
from edl_runtime.elastic.training.optimizer_step import DeviceGradients, HostGradients, any_sparse
from edl_runtime.elastic.training.state_parts import PartState, StateParts, frozen_parts, running_statistics
from edl_runtime.elastic.training.train_state import arrays_of as arrays_by_part
from edl_runtime.elastic.training.train_state import share_state, state_receivers


def step(model: Any, optimizer: Any) -> None:
    (model(paddle.ones([3, 2])) ** 2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()


@pytest.mark.parametrize("kind", ["Momentum", "Adam", "AdamW", "Adagrad", "RMSProp", "Lamb", "SGD"])
def test_a_state_continues_in_another_process_s_model(kind: str) -> None:
    """Whatever the order of its layers, and before its optimizer has made a step."""
    models = [model_and_optimizer(order=order)[0] for order in (1, -1)]
    optimizers = [getattr(paddle.optimizer, kind)(0.05, parameters=model.parameters()) for model in models]
    first, second = (StateParts([pair]) for pair in zip(models, optimizers, strict=True))
    step(models[0], optimizers[0])
    second.load(first.states(), "the test's")
    for pair in zip(models, optimizers, strict=True):
        step(*pair)
    for name, value in arrays_of(models[0]).items():
        np.testing.assert_allclose(arrays_of(models[1])[name], value, rtol=1e-6)


def test_groups_of_parameters_and_half_precision_are_kept() -> None:
    """bfloat16 weights are sent as their bits, their float32 master weights as float32."""
    model, _ = model_and_optimizer()
    model.to(dtype="bfloat16")
    groups = [{"params": [each], "weight_decay": 0.1} for each in model.parameters()]
    optimizer = paddle.optimizer.AdamW(0.1, parameters=groups, multi_precision=True)
    arrays = arrays_by_part(StateParts([(model, optimizer)]).states())
    assert arrays["model"]["first.weight"].dtype == np.uint16
    assert arrays["optimizer"]["first.weight/master"].dtype == np.float32
    assert arrays["optimizer"]["first.weight/moment1"].shape == (2, 3)


def test_shapes_and_types_are_known_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for checkpoints is allocated, and a state compared, by them alone: on a GPU each look would copy all."""
    model, _ = model_and_optimizer()
    model.to(dtype="bfloat16")
    model.register_buffer("seen", paddle.zeros([], "bool"))
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), multi_precision=True)
    state = StateParts([(model, optimizer)])
    states = state.states()
    looked: list[Any] = []
    monkeypatch.setattr("edl_runtime.elastic.training.state_parts.host_view", looked.append)
    layout = state.layout()
    assert layout.keys() == states.keys()
    for name, (arrays, _) in states.items():
        assert {key: (each.shape, each.dtype) for key, each in layout[name].items()} == {
            key: (each.shape, each.dtype) for key, each in arrays.items()
        }
        assert not any(any(each.strides) for each in layout[name].values())
        assert list(state.parts[name].differences(states[name])) == []
        other = PartState({key: np.zeros(7) for key in arrays})
        assert len(list(state.parts[name].differences(other))) == len(arrays)
    assert looked == []


def test_what_is_frozen_is_in_the_model_and_not_in_the_gradients() -> None:
    """Buffers and running means are part of a model's state as well."""
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 3), paddle.nn.BatchNorm1D(3))
    model[0].bias.stop_gradient = True
    state = StateParts([(model, paddle.optimizer.Adam(0.1, parameters=model.parameters()))])
    arrays = arrays_by_part(state.states())
    assert {"0.weight", "0.bias", "1._mean", "1._variance"} <= arrays["model"].keys()
    assert "0.bias/moment1" not in arrays["optimizer"]
    assert len(state.parameters) == 3


def test_of_what_is_frozen_only_changes_are_sent() -> None:
    """A backbone stays where it is. The statistics of BatchNorm are each rank's own."""
    models = [
        paddle.nn.Sequential(paddle.nn.Linear(2, 3), paddle.nn.BatchNorm1D(3), paddle.nn.Linear(50, 70))
        for _ in range(2)
    ]
    for model in models:
        model[2].register_buffer("updates", paddle.zeros([1], "int64"))
        for each in model[2].parameters():
            each.stop_gradient = True
    first, second = (frozen_parts([(model, None)])["frozen/1"] for model in models)
    assert first.changes().arrays == {}
    first.note()
    models[0][1]._mean.set_value(paddle.ones([3]))
    models[0][2].bias.set_value(models[0][2].bias * 0.5 + 1)
    models[0][2].updates.set_value(paddle.ones([1], "int64"))
    changes = first.changes()
    assert changes.arrays.keys() == {"2.bias", "2.updates"}
    weight = models[1][2].weight.numpy()
    assert list(second.differences(changes)) == []
    second.load(changes)
    np.testing.assert_array_equal(models[1][2].bias.numpy(), models[0][2].bias.numpy())
    np.testing.assert_array_equal(models[1][2].weight.numpy(), weight)
    assert frozen_parts([(paddle.nn.Linear(2, 3), None)]) == {}


def test_without_running_statistics_nothing_is_sent() -> None:
    """And where there are, they are found in each kind of BatchNorm layer, on whatever level, once."""
    norms = [paddle.nn.BatchNorm2D(3), paddle.nn.SyncBatchNorm(3), paddle.nn.BatchNorm(3)]
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 3), paddle.nn.Sequential(*norms), norms[0])
    assert running_statistics(model).keys() == {
        f"1.{number}.{kind}" for number in range(3) for kind in ("_mean", "_variance")
    }
    RunningStatistics([paddle.nn.Linear(2, 3), paddle.nn.LayerNorm(3)]).average(Failing())
    with pytest.raises(GroupLostError):
        RunningStatistics([model]).average(Failing())


@pytest.mark.parametrize("kind", [HostGradients, DeviceGradients])
def test_gradients_are_weighted_means_and_none_stays_none(kind: Any) -> None:
    """A parameter without a gradient on any rank is not trained."""
    first, second, third = (paddle.create_parameter([2], "float32") for _ in range(3))
    gradients = kind([first, second, third])
    for _ in range(2):  # buffers are used again
        (first * paddle.to_tensor([1.0, 2.0])).sum().backward()
        gradients.add(3, 5.0)
        (first + 4 * second).sum().backward()
        gradients.add(1, 1.0)
        assert first.grad is None or not first.grad.numpy().any()
        for parameter in (first, second, third):
            parameter.clear_gradient(False)
        assert gradients.reduce(ProcessGroup(), 4) == (pytest.approx(4.0), True)
        np.testing.assert_allclose(first.grad.numpy(), [1.0, 1.75])
        np.testing.assert_allclose(second.grad.numpy(), [1.0, 1.0])
        assert third.grad is None
        first.clear_gradient(False)
        second.clear_gradient(False)
    gradients.add(1, 2.0)
    gradients.discard()
    assert gradients.reduce(ProcessGroup(), 1) == (0.0, True)
    assert first.grad is None


@pytest.mark.parametrize("kind", [HostGradients, DeviceGradients])
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38, 1.0])
def test_the_sums_say_whether_a_gradient_is_not_finite(kind: Any, value: float) -> None:
    """Of which rank it ever was; large ones are finite. A loss that one rank does not give is unknown to all."""
    parameters = [paddle.create_parameter([200, 500], "float32") for _ in range(2)]
    gradients = kind(parameters)
    factor = np.ones((200, 500), np.float32)
    factor[7, 77] = value
    (parameters[1] * paddle.to_tensor(factor)).sum().backward()
    gradients.add(1, 2.0)
    parameters[0].sum().backward()
    gradients.add(1, None)
    assert gradients.reduce(ProcessGroup(), 2) == (None, math.isfinite(value))
    factor[:] = value
    parameters[1].clear_gradient(False)
    (parameters[1] * paddle.to_tensor(factor)).sum().backward()
    assert gradients.own_finite() == math.isfinite(value)


@pytest.mark.parametrize("kind", [HostGradients, DeviceGradients])
def test_sparse_gradients_are_added_up(kind: Any) -> None:
    """Rows may differ between ranks, and may repeat."""
    sparse, dense = (paddle.nn.Embedding(5, 2, sparse=each) for each in (True, False))
    found = []
    for layer in (sparse, dense):
        gradients = kind([layer.weight])
        for rows, weight in (([1, 1, 3], 2), ([0, 3], 1)):
            (layer(paddle.to_tensor(rows)) * paddle.to_tensor([1.0, 2.0])).sum().backward()
            assert any_sparse([layer.weight]) == (layer is sparse)
            gradients.add(weight, 1.0)
        gradients.reduce(ProcessGroup(), 4)
        found.append(layer.weight.grad.numpy())
    np.testing.assert_array_equal(found[0], [[0.25, 0.5], [1.0, 2.0], [0.0, 0.0], [0.75, 1.5], [0.0, 0.0]])
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [HostGradients, DeviceGradients])
def test_a_batch_of_many_samples_overflows_nothing(kind: Any, dtype: str) -> None:
    """Their weighted sums are in 32 bits: 300 times 256 samples is more than float16 has."""
    parameter = paddle.create_parameter([2], dtype, default_initializer=paddle.nn.initializer.Constant(0.0))
    gradients = kind([parameter])
    for _ in range(2):
        parameter.grad = paddle.full([2], 300.0, dtype)
        gradients.add(256, 1.0)
    assert gradients.reduce(ProcessGroup(), 512) == (1.0, True)
    np.testing.assert_array_equal(parameter.grad.astype("float32").numpy(), [300.0, 300.0])


class Failing(ProcessGroup):
    """A group that is lost halfway through a sum."""

    world_size = 2

    def all_reduce(self, values: Any) -> None:
        values[...] = 9.0
        raise GroupLostError(1, "the test")


def test_the_result_of_a_failed_sum_is_not_used() -> None:
    """Also on a rank without a sample; and each step's gradients use the same memory."""
    parameter = paddle.create_parameter([2], "float32")
    gradients = HostGradients([parameter])
    parameter.sum().backward()
    gradients.add(1, math.nan)
    loss, is_finite = gradients.reduce(ProcessGroup(), 1)
    assert loss is not None
    assert math.isnan(loss)
    assert is_finite
    place = parameter.grad.data_ptr()
    parameter.clear_gradient(False)
    with pytest.raises(GroupLostError):
        gradients.reduce(Failing(), 1)
    gradients.discard()
    (2 * parameter).sum().backward()
    gradients.add(1, 3.0)
    assert gradients.reduce(ProcessGroup(), 1) == (3.0, True)
    np.testing.assert_array_equal(parameter.grad.numpy(), [2.0, 2.0])
    assert parameter.grad.data_ptr() == place


def test_ranks_that_are_not_ahead_get_a_state() -> None:
    """None does if all are at the same step; all but rank 0 do if none has any."""
    assert state_receivers([None]) == []
    assert state_receivers([None, None, None]) == [1, 2]
    assert state_receivers([4, 5, None, 5]) == [0, 2]
    assert state_receivers([5, 5]) == []
    with pytest.raises(AssertionError):
        share_state(ProcessGroup(), [], None)
