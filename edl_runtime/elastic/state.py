"""A training's whole state as arrays and JSON, and back: what checkpoints hold and what newcomers are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from edl_runtime.checkpoint.snapshot import Arrays
from edl_runtime.elastic.rate import Rate
from edl_runtime.errors import OtherModelError, SpecError


class TrainingState:
    """What a Paddle model and its optimizer hold.

    Names are those of the model's structure, so that the order in which a script makes its layers does not matter. The
    optimizer's state is there from the start, with the values that Paddle gives it at its first step.

    Raises SpecError for a model or an optimizer that can't be trained elastically.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        import paddle

        if not isinstance(model, paddle.nn.Layer) or isinstance(model, paddle.DataParallel):
            raise SpecError("model", type(model).__name__, "a paddle.nn.Layer that no paddle.DataParallel is around")
        if not isinstance(optimizer, paddle.optimizer.Optimizer):
            raise SpecError("optimizer", type(optimizer).__name__, "an optimizer of paddle.optimizer")
        if isinstance(optimizer, paddle.optimizer.LBFGS):
            raise SpecError("optimizer", "LBFGS", "an optimizer whose step needs nothing but gradients")
        self.rate = Rate(optimizer)
        if isinstance(self.rate.scheduler, paddle.optimizer.lr.ReduceOnPlateau):
            raise SpecError("optimizer", "ReduceOnPlateau", "a learning rate that follows from the number of steps")
        self._model = model
        self._optimizer = optimizer
        names = {parameter.name: name for name, parameter in model.named_parameters()}
        self._names = {parameter.name: names.get(parameter.name, "") for parameter in parameters_of(optimizer)}
        if strangers := [name for name, known in self._names.items() if not known]:
            raise SpecError("optimizer", f"parameters {', '.join(strangers)}", "parameters of the model only")
        self.parameters = [each for each in parameters_of(optimizer) if not each.stop_gradient]
        _make_accumulators(optimizer)

    def arrays(self) -> dict[str, dict[str, np.ndarray]]:
        """Return all by group and name; on the CPU these are views of what the next step changes."""
        return {
            group: {name: host_view(tensor) for name, tensor in tensors.items()}
            for group, tensors in self._tensors().items()
        }

    def load(self, arrays: Arrays, origin: str) -> None:
        """Take over such arrays. Raises OtherModelError that names `origin` and what differs, and changes nothing."""
        _take(self._tensors(), arrays, origin)

    def _tensors(self) -> dict[str, dict[str, Any]]:
        optimizer = self._optimizer
        held: dict[str, Any] = {}
        for kind, tensors in optimizer._accumulators.items():  # noqa: SLF001
            held |= {f"{self._names[name]}/{kind}": tensor for name, tensor in tensors.items() if name in self._names}
            # with master weights, they are what Paddle keeps the moments of
            masters = {master.name: self._names[name] for name, master in self._masters().items()}
            held |= {f"{masters[name]}/{kind}": tensor for name, tensor in tensors.items() if name in masters}
        held |= {f"{self._names[name]}/master": master for name, master in self._masters().items()}
        return {"model": dict(self._model.state_dict()), "optimizer": held}

    def _masters(self) -> Mapping[str, Any]:
        masters: Mapping[str, Any] = self._optimizer._master_weights  # noqa: SLF001
        return masters


def load_model(model: Any, arrays: Arrays, origin: str) -> None:
    """Give a Paddle model what a checkpoint has of it, for use without a training. Raises as `TrainingState.load`."""
    _take({"model": dict(model.state_dict())}, {"model": arrays.get("model", {})}, origin)


def host_view(tensor: Any) -> np.ndarray:
    """Return a tensor as an array: its own memory if that is on the CPU, else a copy. bfloat16 comes as uint16."""
    import paddle

    if not tensor.place.is_cpu_place():
        copied: np.ndarray = tensor.numpy()
        return copied
    plain = tensor.detach()
    if plain.dtype == paddle.bfloat16:
        plain = plain.view(paddle.uint16)
    return np.from_dlpack(plain)


def _take(mine: Mapping[str, Mapping[str, Any]], arrays: Arrays, origin: str) -> None:
    if differences := list(_differences(mine, arrays)):
        raise OtherModelError(origin, differences)
    for group, tensors in mine.items():
        for name, tensor in tensors.items():
            if tensor.place.is_cpu_place():
                np.copyto(host_view(tensor), arrays[group][name])
            else:
                tensor.set_value(arrays[group][name])


def parameters_of(optimizer: Any) -> list[Any]:
    """Return all that an optimizer was given, of all groups."""
    listed: list[Any] = optimizer._parameter_list  # noqa: SLF001
    return [each for group in listed for each in (group["params"] if isinstance(group, dict) else [group])]


def _make_accumulators(optimizer: Any) -> None:
    """Let the optimizer make now what it else makes at its first step."""
    from paddle.base.framework import default_main_program

    block = default_main_program().global_block()  # type: ignore[no-untyped-call]
    groups = optimizer._param_groups  # noqa: SLF001
    if groups and isinstance(groups[0], dict):
        for group in groups:
            trained = [each for each in group["params"] if not each.stop_gradient]
            optimizer._create_accumulators(block, {**group, "params": trained})  # noqa: SLF001
    else:
        trained = [each for each in parameters_of(optimizer) if not each.stop_gradient]
        optimizer._create_accumulators(block, trained)  # noqa: SLF001


def _differences(mine: Mapping[str, Mapping[str, Any]], arrays: Arrays) -> Iterator[str]:
    """Say what is not in both, or of another shape or type. The model's come first: the optimizer's follow from it."""
    for group, tensors in mine.items():
        given = arrays.get(group, {})
        for name in sorted(tensors.keys() - given.keys()):
            yield f"{group} {name!r}: {tuple(tensors[name].shape)} here, not there"
        for name in sorted(given.keys() - tensors.keys()):
            yield f"{group} {name!r}: {given[name].shape} there, not here"
        for name in sorted(given.keys() & tensors.keys()):
            here, there = host_view(tensors[name]), given[name]
            if (here.shape, here.dtype) != (there.shape, there.dtype):
                yield f"{group} {name!r}: {here.dtype} {here.shape} here, {there.dtype} {there.shape} there"
