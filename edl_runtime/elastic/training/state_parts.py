"""The parts of a training's state as arrays and JSON: models, optimizers, and what a script registers. Never pickle.

Checkpoints hold them and joining ranks receive them.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from edl_runtime.checkpoint.file_format import Arrays, check_types
from edl_runtime.elastic.errors import OtherModelError
from edl_runtime.elastic.training.learning_rate import LearningRate
from edl_runtime.errors import SpecError


class PartState(NamedTuple):
    """What a part holds: arrays by name, and everything else as JSON."""

    arrays: Mapping[str, np.ndarray]
    values: Any = None


class TrainedModel(NamedTuple):
    """A model of `run.wrap`, what its optimizers train of it, their rates, and the parts of all of them, by name."""

    model: Any
    parameters: list[Any]
    rates: list[LearningRate]
    parts: dict[str, Part]


class StateParts:
    """All parts, by name, and all models.

    Of several pairs of a model and its optimizer the first are named "model" and "optimizer", the second "model-2" and
    "optimizer-2". A model that several optimizers train is one part. `others`: further parts, by name.

    Raises SpecError for a model or an optimizer that can't be trained elastically.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any]], others: Mapping[str, Part] | None = None) -> None:
        self.parts: dict[str, Part] = {}
        models: dict[int, TrainedModel] = {}
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
                models[id(model)] = TrainedModel(model, [], [], {f"model{suffix}": ModelPart(model)})
            trained_model = models[id(model)]
            trained_model.parameters.extend(each for each in parameters if not each.stop_gradient)
            trained_model.rates.append(part.rate)
            trained_model.parts[f"optimizer{suffix}"] = part
        self.models = list(models.values())
        self.parameters = [each for model in self.models for each in model.parameters]
        self.rates = [each for model in self.models for each in model.rates]
        for each in self.models:
            self.parts |= each.parts
        self.parts |= others or {}

    def states(self) -> dict[str, PartState]:
        """Return the states of all parts; on the CPU the next step changes the arrays."""
        return {name: part.state() for name, part in self.parts.items()}

    def layout(self) -> Arrays:
        """Return arrays of the shapes and types of `states`, without their values: nothing is copied."""
        layouts = {name: part.layout() for name, part in self.parts.items()}
        return {name: arrays for name, arrays in layouts.items() if arrays}

    def trained(self) -> dict[str, list[str]]:
        """Return, by part, the names of the arrays that training changes: trained parameters and their accumulators."""
        return {name: part.trained() for name, part in self.parts.items() if isinstance(part, ModelPart)}

    def load(self, states: Mapping[str, PartState], origin: str) -> None:
        """Load states. Raises OtherModelError with `origin` and what differs, and changes nothing then."""
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


class ModelPart:
    """A Paddle model, with the names of its structure: the order in which layers are built does not matter."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state(self) -> PartState:
        """Return its state; on the CPU the next step changes the arrays."""
        return PartState({name: host_view(tensor) for name, tensor in self._tensors().items()})

    def layout(self) -> Mapping[str, np.ndarray]:
        """Return as `StateParts.layout`."""
        return {
            name: np.broadcast_to(np.empty((), _host_dtype(tensor)), tensor.shape)
            for name, tensor in self._tensors().items()
        }

    def kept(self, room: PartState) -> PartState:
        """Return its state for a later `load`, in the memory of `room`, an earlier one or an empty one.

        On a GPU it stays there.
        """
        return PartState({name: _copied(tensor, room.arrays.get(name)) for name, tensor in self._tensors().items()})

    def trained(self) -> list[str]:
        """Return the names of its trained parameters."""
        return [name for name, each in self._model.named_parameters() if not each.stop_gradient]

    def differences(self, there: PartState) -> Iterator[str]:
        """Yield, for people, what this part or a state lacks, or has in another shape or type."""
        return _differences(self._tensors(), there.arrays)

    def load(self, there: PartState) -> None:
        """Load a state without differences."""
        load_tensors(self._tensors(), there.arrays)

    def _tensors(self) -> dict[str, Any]:
        return dict(self._model.state_dict())


class OptimizerPart(ModelPart):
    """A Paddle optimizer's accumulators, by the names of its model's parameters, and its learning rate.

    The accumulators are made here, not at the first step, so that all ranks have them.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__(model)
        self.rate = LearningRate(optimizer)
        self._optimizer = optimizer
        names = {parameter.name: name for name, parameter in model.named_parameters()}
        self._names = {parameter.name: names.get(parameter.name, "") for parameter in parameters_of(optimizer)}
        if unknown := [name for name, known in self._names.items() if not known]:
            raise SpecError("optimizer", f"parameters {', '.join(unknown)}", "parameters of the model only")
        _make_accumulators(optimizer)

    def state(self) -> PartState:
        return super().state()._replace(values=self.rate.state())

    def kept(self, room: PartState) -> PartState:
        return super().kept(room)._replace(values=self.rate.state())

    def trained(self) -> list[str]:
        """Return the names of all its accumulators."""
        return list(self._tensors())

    def load(self, there: PartState) -> None:
        super().load(there)
        if there.values is not None:
            self.rate.load(there.values)

    def _tensors(self) -> dict[str, Any]:
        masters: Mapping[str, Any] = self._optimizer._master_weights  # noqa: SLF001
        # with master weights, Paddle keeps the moments by their names
        names = self._names | {master.name: self._names[name] for name, master in masters.items()}
        held = {
            f"{names[name]}/{kind}": tensor
            for kind, tensors in self._optimizer._accumulators.items()  # noqa: SLF001
            for name, tensor in tensors.items()
            if name in names
        }
        return held | {f"{names[name]}/master": master for name, master in masters.items()}


SAMPLES = 1000
"""How many values of each frozen tensor are compared."""


class FrozenPart(ModelPart):
    """What of a model its optimizers do not train: frozen parameters and buffers.

    Scripts change some of them after each step, as an average of the weights or a target network: what such a script
    changes belongs to its step, like registered state. Others may be large, and never change.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        trained = set(self.trained())
        self._names = [name for name in model.state_dict() if name not in trained]
        self._own = set(running_statistics(model))  # of each rank
        self.note()

    def note(self) -> None:
        """Take the present values as those that all ranks have."""
        self._noted = self._samples()

    def changes(self) -> PartState:
        """Return what has changed since `note`, by some values of each, without the statistics of BatchNorm."""
        now, tensors = self._samples(), self._tensors()
        changed = [name for name, some in now.items() if not np.array_equal(some, self._noted[name])]
        return PartState({name: host_view(tensors[name]) for name in changed if name not in self._own})

    def differences(self, there: PartState) -> Iterator[str]:
        """Yield as `ModelPart.differences`, of what a state has."""
        tensors = self._tensors()
        yield from _differences({name: tensors[name] for name in there.arrays if name in tensors}, there.arrays)

    def load(self, there: PartState) -> None:
        """Load what a state has."""
        load_tensors({name: each for name, each in self._tensors().items() if name in there.arrays}, there.arrays)

    def _tensors(self) -> dict[str, Any]:
        held = super()._tensors()
        return {name: held[name] for name in self._names}

    def _samples(self) -> dict[str, np.ndarray]:
        return {name: as_bits(_sample(tensor)) for name, tensor in self._tensors().items()}


def frozen_parts(pairs: Sequence[tuple[Any, Any]]) -> dict[str, FrozenPart]:
    """Return what all models have besides what is trained, by part; not those that have nothing."""
    models = {id(model): model for model, _ in pairs}.values()
    parts = {f"frozen/{number}": FrozenPart(model) for number, model in enumerate(models, 1)}
    return {name: part for name, part in parts.items() if part.layout()}


def running_statistics(model: Any) -> dict[str, Any]:
    """Return the tensors of BatchNorm layers that follow the mean and the variance of the batches that a rank sees."""
    from paddle.nn import BatchNorm
    from paddle.nn.layer.norm import _BatchNormBase

    layers = [
        (f"{name}." if name else "", layer)
        for name, layer in model.named_sublayers(include_self=True)
        if isinstance(layer, (BatchNorm, _BatchNormBase))
    ]
    return {prefix + kind: getattr(layer, kind) for prefix, layer in layers for kind in ("_mean", "_variance")}


Part: TypeAlias = "ModelPart | RegisteredState"


def load_model(model: Any, arrays: Arrays, origin: str, part: str = "model") -> None:
    """Load a checkpoint's weights into a Paddle model, for use without a training.

    `part`: "model-2" for the second model of `run.wrap`. Raises OtherModelError.
    """
    there, mine = PartState(arrays.get(part, {})), ModelPart(model)
    if differences := [f"{part} {text}" for text in mine.differences(there)]:
        raise OtherModelError(origin, differences)
    mine.load(there)


def _differences(tensors: Mapping[str, Any], given: Mapping[str, np.ndarray]) -> Iterator[str]:
    for name in sorted(tensors.keys() - given.keys()):
        yield f"{name!r}: {tuple(tensors[name].shape)} here, not there"
    for name in sorted(given.keys() - tensors.keys()):
        yield f"{name!r}: {given[name].shape} there, not here"
    for name in sorted(given.keys() & tensors.keys()):
        shape, dtype, other = tuple(tensors[name].shape), _host_dtype(tensors[name]), given[name]
        if (shape, dtype) != (other.shape, other.dtype):
            yield f"{name!r}: {dtype} {shape} here, {other.dtype} {other.shape} there"


Key = TypeVar("Key")


def load_tensors(tensors: Mapping[Key, Any], given: Mapping[Key, np.ndarray]) -> None:
    """Set the values of each tensor."""
    for name, tensor in tensors.items():
        if tensor.place.is_cpu_place():
            np.copyto(host_view(tensor), given[name])
        else:
            tensor.set_value(given[name])


def _copied(tensor: Any, room: Any) -> Any:
    """Return a copy, in `room` if that is an array: new memory takes twice as long."""
    if not tensor.place.is_cpu_place():
        return tensor.detach().clone()
    if room is None:
        return np.array(host_view(tensor))
    np.copyto(room, host_view(tensor))
    return room


def some_of(flat: Any, count: int) -> Any:
    """Return some `count` values of an array or a tensor of one axis, spread over it."""
    return flat[:: max(1, flat.shape[0] // count) | 1]  # odd, so that it does not stay in one column


def as_bits(values: np.ndarray) -> np.ndarray:
    """Return a view that can be compared, NaN included."""
    return values.view(f"u{values.itemsize}") if values.itemsize <= 8 else values


def _sample(tensor: Any) -> np.ndarray:
    """Return a copy of some values."""
    if tensor.place.is_cpu_place():
        return np.array(some_of(host_view(tensor).reshape(-1), SAMPLES))
    return host_view(some_of(tensor.flatten(), SAMPLES))


def _host_dtype(tensor: Any) -> np.dtype[Any]:
    """Return the type of `host_view`, without a copy."""
    name = str(tensor.dtype).rpartition(".")[2]
    return np.dtype("uint16" if name == "bfloat16" else name)


def host_view(tensor: Any) -> np.ndarray:
    """Return a tensor as an array: its own memory on the CPU, else a copy. bfloat16 comes as uint16."""
    import paddle

    if not tensor.place.is_cpu_place():
        copied: np.ndarray = tensor.numpy()
        return copied
    plain = tensor.detach()
    if plain.dtype == paddle.bfloat16:
        plain = plain.view(paddle.uint16)
    return np.from_dlpack(plain)


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups."""
    listed: list[Any] = optimizer._parameter_list  # noqa: SLF001
    return [each for group in listed for each in (group["params"] if isinstance(group, dict) else [group])]


def lbfgs_kinds() -> tuple[type, ...]:
    """Return Paddle's LBFGS classes, which have steps of their own; the deprecated one is wrapped."""
    import paddle

    places = (paddle.optimizer, paddle.incubate.optimizer)
    return tuple(inspect.unwrap(place.LBFGS) for place in places if hasattr(place, "LBFGS"))


def _check_pair(model: Any, optimizer: Any) -> None:
    import paddle

    if not isinstance(model, paddle.nn.Layer) or isinstance(model, paddle.DataParallel):
        raise SpecError("model", type(model).__name__, "a paddle.nn.Layer, not wrapped in paddle.DataParallel")
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        raise SpecError("optimizer", type(optimizer).__name__, "an optimizer of paddle.optimizer")
    if isinstance(optimizer, lbfgs_kinds()):
        raise SpecError("optimizer", "LBFGS", "an optimizer whose step needs nothing but gradients")
    if held := [each for each in vars(optimizer).values() if isinstance(each, paddle.optimizer.Optimizer)]:
        raise SpecError("optimizer", type(optimizer).__name__, f"the {type(held[0]).__name__} that it holds, alone")
    if isinstance(optimizer, paddle.incubate.ModelAverage):
        allowed = "the optimizer that trains the model; an average of its weights is state for run.register"
        raise SpecError("optimizer", "ModelAverage", allowed)
    if getattr(optimizer, "_lazy_mode", False):
        allowed = "lazy_mode=False: sparse gradients are added up over ranks as whole ones"
        raise SpecError("optimizer", "lazy_mode=True", allowed)
    if isinstance(LearningRate(optimizer).scheduler, paddle.optimizer.lr.ReduceOnPlateau):
        raise SpecError("optimizer", "ReduceOnPlateau", "a learning rate that follows from the number of steps")


def _make_accumulators(optimizer: Any) -> None:
    """Make the accumulators that Paddle else makes at the first step."""
    from paddle.base.framework import default_main_program

    block = default_main_program().global_block()  # type: ignore[no-untyped-call]
    groups = optimizer._param_groups  # noqa: SLF001
    has_groups = bool(groups) and isinstance(groups[0], dict)
    for group in groups if has_groups else [{"params": parameters_of(optimizer)}]:
        trained = [each for each in group["params"] if not each.stop_gradient]
        optimizer._create_accumulators(block, {**group, "params": trained} if has_groups else trained)  # noqa: SLF001


# Registered state: what a script keeps beside its model, such as counters or averaged weights

_REGISTERED_NAME = re.compile(r"[a-z0-9_-]+")
_RESERVED_NAME = re.compile(r"(model|optimizer)(-\d+)?|scaler")
_METADATA = "__metadata__"  # reserved by the safetensors format
_DICTS = (dict, OrderedDict)
_VALUES = (
    "None, bool, int, float, str, numpy's arrays and numbers, Paddle's tensors, and list, tuple, dict and OrderedDict "
    "of these; no subclasses, which would come back as another type"
)


def check_registered_name(name: object) -> None:
    """Raise SpecError for an invalid name: it becomes the name of a checkpoint's file."""
    if not isinstance(name, str) or not _REGISTERED_NAME.fullmatch(name) or _RESERVED_NAME.fullmatch(name):
        allowed = "a-z, 0-9, '_' and '-', and not a name that run.wrap uses: model, optimizer, scaler"
        raise SpecError("run.register(name)", name, allowed)


class RegisteredState:
    """State that the script has registered.

    `target`: a dict or OrderedDict of plain values, changed in place; or an object with `state_dict` and
    `set_state_dict` (Paddle) or `load_state_dict` (PyTorch). Raises SpecError for anything else.
    """

    def __init__(self, name: str, target: Any) -> None:
        self._field = f"run.register({name!r})"
        self._is_own_dict = type(target) in _DICTS
        self._save, self._load = self._methods(target)
        self.state()

    def state(self) -> PartState:
        """Return its values. Arrays may be views of memory that the script changes. Raises SpecError."""
        arrays: dict[str, np.ndarray] = {}
        try:
            values = self._encode(self._save(), "", arrays)
        except RecursionError:
            raise SpecError(self._field, "values nested too deeply", "values that don't contain themselves") from None
        return PartState(arrays, values)

    def layout(self) -> Mapping[str, np.ndarray]:
        """Return its arrays."""
        return self.state().arrays

    def kept(self, room: PartState) -> PartState:
        """Return its values for a later `load`."""
        del room  # they may have other sizes now
        return copy.deepcopy(self.state())

    def differences(self, there: PartState) -> Iterator[str]:
        """Yield that there is no such state, if so."""
        if there.values is None:
            yield "(run.register): here, not there"

    def load(self, there: PartState) -> None:
        """Load copies of the values."""
        self._load(_decode(there.values, there.arrays))

    def _methods(self, target: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        if self._is_own_dict:

            def replace(values: dict[Any, Any]) -> None:
                target.clear()
                target.update(values)

            return lambda: target, replace
        load = getattr(target, "set_state_dict", None) or getattr(target, "load_state_dict", None)
        if load is None or not hasattr(target, "state_dict"):
            allowed = (
                'a dict (no subclass) that the script changes in place, such as {"best": 0.0}, or an object with '
                "state_dict and set_state_dict or load_state_dict"
            )
            raise SpecError(self._field, type(target).__name__, allowed)
        return target.state_dict, load

    def _encode(self, value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
        """Return the value as JSON, in which arrays are names of those that are added to `arrays`."""
        kind = type(value)
        if value is None or kind in (bool, int, float):
            return {"$float": repr(value)} if kind is float and not math.isfinite(value) else value
        if kind is str:
            return self._text(value, path)
        if kind in _DICTS:
            pairs = [
                (self._encode(key, path, arrays), self._encode(each, f"{path}/{key}".lstrip("/"), arrays))
                for key, each in value.items()
            ]
            if kind is OrderedDict:
                return {"$ordered": pairs}
            is_json = all(isinstance(key, str) and not key.startswith("$") for key in value)
            return dict(pairs) if is_json else {"$dict": pairs}
        if kind in (list, tuple):
            items = [self._encode(each, f"{path}/{at}".lstrip("/"), arrays) for at, each in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        return self._array(value, path, arrays)

    def _text(self, text: str, path: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            allowed = "text that UTF-8 can hold; for a path, register os.fsencode(path).hex()"
            raise SpecError(self._field, f"{text!r} at {path!r}", allowed) from None
        return text

    def _array(self, value: Any, path: str, arrays: dict[str, np.ndarray]) -> dict[str, str | bool]:
        from paddle.base.framework import EagerParamBase

        is_parameter = isinstance(value, EagerParamBase)
        if is_parameter and self._is_own_dict:  # an object's own method puts values into its parameters
            allowed = (
                "a model that is given to run.wrap, or is registered itself: a parameter would come back as a tensor"
            )
            raise SpecError(self._field, f"paddle.nn.Parameter at {path!r}", allowed)
        as_what, array = _array_of(value)
        if array is None:
            kind = type(value)
            allowed = _VALUES
            if callable(getattr(value, "detach", None)):
                allowed = f"what .detach().cpu().numpy() makes of a tensor that is not Paddle's; or {_VALUES}"
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            raise SpecError(self._field, f"{module}{kind.__qualname__} at {path!r}", allowed)
        try:
            check_types([(path, array)])
        except SpecError as error:
            raise SpecError(self._field, f"array of {error.given} at {path!r}", error.allowed) from None
        name = path
        while name in arrays or name == _METADATA:
            name += "'"
        arrays[name] = array
        is_trained = not (is_parameter or getattr(value, "stop_gradient", True))
        return {"$array": name, "as": as_what, **({"trained": True} if is_trained else {})}


def _array_of(value: Any) -> tuple[str, np.ndarray | None]:
    """Return its kind and its values, None for what is no array."""
    import paddle

    if isinstance(value, paddle.Tensor):
        return str(value.dtype), host_view(value)
    if isinstance(value, np.generic):
        return "scalar", np.asarray(value)
    return "numpy", value if type(value) is np.ndarray else None


def _decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:  # noqa: PLR0911 -- one a kind
    """Return what `_encode` was given, with arrays of its own."""
    match value:
        case list():
            return [_decode(each, arrays) for each in value]
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(_decode(each, arrays) for each in items)
        case {"$ordered": pairs}:
            return OrderedDict((_decode(key, arrays), _decode(each, arrays)) for key, each in pairs)
        case {"$dict": pairs}:
            return {_decode(key, arrays): _decode(each, arrays) for key, each in pairs}
        case {"$array": name, "as": kind}:
            return _restore_array(np.array(arrays[name]), kind, is_trained="trained" in value)
    return {key: _decode(each, arrays) for key, each in value.items()} if isinstance(value, dict) else value


def _restore_array(array: np.ndarray, kind: str, *, is_trained: bool) -> Any:
    import paddle

    if kind == "numpy":
        return array
    if kind == "scalar":
        return array[()]
    tensor = paddle.to_tensor(array)
    if kind == str(paddle.bfloat16):
        tensor = tensor.view(paddle.bfloat16)
    tensor.stop_gradient = not is_trained
    return tensor
