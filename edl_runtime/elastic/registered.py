"""What a script keeps beside its model, as counters or averaged weights: to arrays and JSON, and back. Never pickle."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from edl_runtime.elastic.state import PartState, host_view
from edl_runtime.errors import SpecError

_NAME = re.compile(r"[a-z0-9_-]+")
_WRAPPED = re.compile(r"(model|optimizer)(-\d+)?|scaler")
_VALUES = "None, booleans, numbers, text, numpy arrays, Paddle's tensors, and lists, tuples and dicts of these"


def check_name(name: object) -> None:
    """Raise SpecError for what can't name registered state: it is the name of a checkpoint's file."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _WRAPPED.fullmatch(name):
        allowed = "a-z, 0-9, '_' and '-', and not a name that run.wrap gives: model, optimizer, scaler"
        raise SpecError("run.register(name)", name, allowed)


class Registered:
    """A part of a training's state that is the script's own.

    `target`: a dict of plain values, changed in place; or an object with `state_dict`, which returns such a dict, and
    `set_state_dict` (Paddle's word) or `load_state_dict` (PyTorch's). Raises SpecError for anything else.
    """

    def __init__(self, name: str, target: Any) -> None:
        self._field = f"run.register({name!r})"
        self._save, self._load = self._methods(target)
        self.state()

    def state(self) -> PartState:
        """Return its values. The arrays may be views of memory that the script changes. Raises SpecError."""
        arrays: dict[str, np.ndarray] = {}
        values = self._encode(self._save(), "", arrays)
        return PartState(arrays, values)

    def differences(self, there: PartState) -> Iterator[str]:
        """Yield what is wrong with a state that is to be loaded: that there is none."""
        if there.values is None:
            yield "(run.register): here, not there"

    def load(self, there: PartState) -> None:
        """Take over copies of such a state's values."""
        self._load(_decode(there.values, there.arrays))

    def _methods(self, target: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        if isinstance(target, dict):

            def replace(values: dict[Any, Any]) -> None:
                target.clear()
                target.update(values)

            return lambda: target, replace
        load = getattr(target, "set_state_dict", None) or getattr(target, "load_state_dict", None)
        if load is None or not hasattr(target, "state_dict"):
            allowed = (
                'a dict that the script changes in place, as {"best": 0.0}, or an object with state_dict and '
                "set_state_dict or load_state_dict"
            )
            raise SpecError(self._field, type(target).__name__, allowed)
        return target.state_dict, load

    def _encode(self, value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
        """Return it as JSON, in which arrays are names of those that are added to `arrays`."""
        match value:
            case None | bool() | int() | float() | str():
                return _plain(value)
            case dict():
                pairs = [
                    (self._encode(key, path, arrays), self._encode(each, f"{path}/{key}".lstrip("/"), arrays))
                    for key, each in value.items()
                ]
                is_json = all(isinstance(key, str) and not key.startswith("$") for key in value)
                return dict(pairs) if is_json else {"$dict": pairs}
            case list() | tuple():
                items = [self._encode(each, f"{path}/{at}".lstrip("/"), arrays) for at, each in enumerate(value)]
                return items if isinstance(value, list) else {"$tuple": items}
        kind, array = _array_of(value)
        if array is None:
            raise SpecError(self._field, f"{type(value).__name__} at {path!r}", _VALUES)
        name = path
        while name in arrays:
            name += "'"
        arrays[name] = array
        return {"$array": name, "as": kind}


def _plain(value: Any) -> Any:
    """Return a single value as JSON has it, also one of a subclass, as numpy's float64 is."""
    if value is None or isinstance(value, bool):
        return value
    kind = next(kind for kind in (int, float, str) if isinstance(value, kind))
    return {"$float": repr(float(value))} if kind is float and not math.isfinite(value) else kind(value)


def _array_of(value: Any) -> tuple[str, np.ndarray | None]:
    """Return what it is and its values, None for what is no array."""
    import paddle

    if isinstance(value, paddle.Tensor):
        return str(value.dtype), host_view(value)
    if isinstance(value, np.generic):
        return "scalar", np.asarray(value)
    return "numpy", value if isinstance(value, np.ndarray) else None


def _decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return what `_encode` was given, with arrays of its own."""
    match value:
        case list():
            return [_decode(each, arrays) for each in value]
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(_decode(each, arrays) for each in items)
        case {"$dict": pairs}:
            return {_decode(key, arrays): _decode(each, arrays) for key, each in pairs}
        case {"$array": name, "as": kind}:
            return _made(np.array(arrays[name]), kind)
    return {key: _decode(each, arrays) for key, each in value.items()} if isinstance(value, dict) else value


def _made(array: np.ndarray, kind: str) -> Any:
    import paddle

    if kind == "numpy":
        return array
    if kind == "scalar":
        return array[()]
    tensor = paddle.to_tensor(array)
    return tensor.view(paddle.bfloat16) if kind == str(paddle.bfloat16) else tensor


def copied(state: PartState) -> PartState:
    """Return a state that later changes leave as it is."""
    return PartState({name: np.array(array) for name, array in state.arrays.items()}, copy.deepcopy(state.values))
