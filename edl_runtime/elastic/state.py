"""A training's whole state as arrays and JSON, and back: what checkpoints hold and what newcomers are given.

It has named parts, each of which gives its state and takes one over: models, optimizers with their learning rates, and
what a script has registered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from edl_runtime.checkpoint.snapshot import Arrays
from edl_runtime.elastic.rate import Held, Rate
from edl_runtime.elastic.step_hook import lbfgs_kinds
from edl_runtime.errors import OtherModelError, SpecError


class PartState(NamedTuple):
    """What a part holds: arrays by name, and all else as JSON, None for nothing."""

    arrays: Mapping[str, np.ndarray]
    values: Any = None


class Part(Protocol):
    """Something that travels: kept in checkpoints, and given to newcomers."""

    def state(self) -> PartState:
        """Return its state; on the CPU the arrays are views of what the next step changes."""
        ...

    def differences(self, there: PartState) -> Iterator[str]:
        """Yield why a state is not one of this part's, for people; nothing if it is."""
        ...

    def load(self, there: PartState) -> None:
        """Take over a state that has no differences."""
        ...


class TrainingState:
    """All that travels, by name.

    Of several pairs of a model and its optimizer the first are named "model" and "optimizer", the second "model-2" and
    "optimizer-2". A model that several optimizers train is one part. `others`: what else travels, by name.

    Raises SpecError for a model or an optimizer that can't be trained elastically.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any]], others: Mapping[str, Part] | None = None) -> None:
        self.parts: dict[str, Part] = {}
        self.parameters: list[Any] = []
        self.rates: list[Rate] = []
        models: set[int] = set()
        trained: set[str] = set()
        for number, (model, optimizer) in enumerate(pairs, 1):
            suffix = f"-{number}" if number > 1 else ""
            _check_pair(model, optimizer)
            part = OptimizerPart(model, optimizer)
            parameters = parameters_of(optimizer)
            if shared := sorted(trained & {each.name for each in parameters}):
                raise SpecError("optimizer", f"parameters {', '.join(shared)}", "each parameter in one optimizer only")
            trained |= {each.name for each in parameters}
            if id(model) not in models:
                self.parts[f"model{suffix}"] = ModelPart(model)
            models.add(id(model))
            self.parts[f"optimizer{suffix}"] = part
            self.parameters += [each for each in parameters if not each.stop_gradient]
            self.rates.append(part.rate)
        self.parts |= others or {}

    def states(self) -> dict[str, PartState]:
        """Return all by the name of the part; on the CPU arrays are views of what the next step changes."""
        return {name: part.state() for name, part in self.parts.items()}

    def load(self, states: Mapping[str, PartState], origin: str) -> None:
        """Take over such states. Raises OtherModelError that names `origin` and what differs, and changes nothing."""
        differences = [
            f"{name} {text}"
            for name, part in self.parts.items()
            for text in part.differences(states.get(name, PartState({})))
        ]
        differences += [f"{name}: there, not here" for name in sorted(states.keys() - self.parts.keys())]
        if differences:
            raise OtherModelError(origin, differences)
        for name, part in self.parts.items():
            part.load(states.get(name, PartState({})))

    def draw(self) -> None:
        """Note that the script gets the first batch of a step."""
        for rate in self.rates:
            rate.draw()

    @contextlib.contextmanager
    def lost(self) -> Iterator[None]:
        """Have all learning rates as before the lost step for what is done meanwhile; see `Rate.lost`."""
        with contextlib.ExitStack() as rates:
            for rate in self.rates:
                rates.enter_context(rate.lost())
            yield

    @contextlib.contextmanager
    def agreed(self, rates: Sequence[float], factor: float) -> Iterator[None]:
        """Let each optimizer take a step by its rate of all ranks; see `Rate.agreed`."""
        with contextlib.ExitStack() as stack:
            for rate, number in zip(self.rates, rates, strict=True):
                stack.enter_context(rate.agreed(number, factor))
            yield


class ModelPart:
    """What a Paddle model holds. Names are those of its structure: the order in which layers are made matters not."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state(self) -> PartState:
        return _arrays_of(self._tensors())

    def differences(self, there: PartState) -> Iterator[str]:
        return _differences(self._tensors(), there.arrays)

    def load(self, there: PartState) -> None:
        _copy(there.arrays, self._tensors())

    def _tensors(self) -> dict[str, Any]:
        return dict(self._model.state_dict())


class OptimizerPart:
    """What a Paddle optimizer holds, by the names of its model's parameters, and its learning rate.

    All is there from the start, with the values that Paddle gives it at its first step.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.rate = Rate(optimizer)
        self._optimizer = optimizer
        names = {parameter.name: name for name, parameter in model.named_parameters()}
        self._names = {parameter.name: names.get(parameter.name, "") for parameter in parameters_of(optimizer)}
        if strangers := [name for name, known in self._names.items() if not known]:
            raise SpecError("optimizer", f"parameters {', '.join(strangers)}", "parameters of the model only")
        _make_accumulators(optimizer)

    def state(self) -> PartState:
        held = self.rate.held()
        return PartState(_arrays_of(self._tensors()).arrays, {"rate": held.number, "scheduler": held.scheduler})

    def differences(self, there: PartState) -> Iterator[str]:
        return _differences(self._tensors(), there.arrays)

    def load(self, there: PartState) -> None:
        _copy(there.arrays, self._tensors())
        if there.values is not None:
            self.rate.put_back(Held(there.values["rate"], there.values["scheduler"]))

    def _tensors(self) -> dict[str, Any]:
        optimizer = self._optimizer
        held: dict[str, Any] = {}
        for kind, tensors in optimizer._accumulators.items():  # noqa: SLF001
            held |= {f"{self._names[name]}/{kind}": tensor for name, tensor in tensors.items() if name in self._names}
            # with master weights, they are what Paddle keeps the moments of
            masters = {master.name: self._names[name] for name, master in self._masters().items()}
            held |= {f"{masters[name]}/{kind}": tensor for name, tensor in tensors.items() if name in masters}
        held |= {f"{self._names[name]}/master": master for name, master in self._masters().items()}
        return held

    def _masters(self) -> Mapping[str, Any]:
        masters: Mapping[str, Any] = self._optimizer._master_weights  # noqa: SLF001
        return masters


def load_model(model: Any, arrays: Arrays, origin: str, part: str = "model") -> None:
    """Give a Paddle model what a checkpoint has of it, for use without a training.

    `part`: "model-2" for the second that `run.wrap` had. Raises as `TrainingState.load`.
    """
    there, mine = PartState(arrays.get(part, {})), ModelPart(model)
    if differences := [f"{part} {text}" for text in mine.differences(there)]:
        raise OtherModelError(origin, differences)
    mine.load(there)


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


def parameters_of(optimizer: Any) -> list[Any]:
    """Return all that an optimizer was given, of all groups."""
    listed: list[Any] = optimizer._parameter_list  # noqa: SLF001
    return [each for group in listed for each in (group["params"] if isinstance(group, dict) else [group])]


def _check_pair(model: Any, optimizer: Any) -> None:
    import paddle

    if not isinstance(model, paddle.nn.Layer) or isinstance(model, paddle.DataParallel):
        raise SpecError("model", type(model).__name__, "a paddle.nn.Layer that no paddle.DataParallel is around")
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        raise SpecError("optimizer", type(optimizer).__name__, "an optimizer of paddle.optimizer")
    if isinstance(optimizer, lbfgs_kinds()):
        raise SpecError("optimizer", "LBFGS", "an optimizer whose step needs nothing but gradients")
    if getattr(optimizer, "_lazy_mode", False):
        allowed = "lazy_mode=False: sparse gradients are added up over ranks as whole ones"
        raise SpecError("optimizer", "lazy_mode=True", allowed)
    if isinstance(Rate(optimizer).scheduler, paddle.optimizer.lr.ReduceOnPlateau):
        raise SpecError("optimizer", "ReduceOnPlateau", "a learning rate that follows from the number of steps")


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


def _arrays_of(tensors: Mapping[str, Any]) -> PartState:
    return PartState({name: host_view(tensor) for name, tensor in tensors.items()})


def _copy(arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if tensor.place.is_cpu_place():
            np.copyto(host_view(tensor), arrays[name])
        else:
            tensor.set_value(arrays[name])


def _differences(tensors: Mapping[str, Any], given: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Say what is not in both, or of another shape or type."""
    for name in sorted(tensors.keys() - given.keys()):
        yield f"{name!r}: {tuple(tensors[name].shape)} here, not there"
    for name in sorted(given.keys() - tensors.keys()):
        yield f"{name!r}: {given[name].shape} there, not here"
    for name in sorted(given.keys() & tensors.keys()):
        here, there = host_view(tensors[name]), given[name]
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            yield f"{name!r}: {here.dtype} {here.shape} here, {there.dtype} {there.shape} there"
