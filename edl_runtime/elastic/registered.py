"""What a script keeps beside its model, as counters or averaged weights: to arrays and JSON, and back. Never pickle."""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from edl_runtime.checkpoint.tensors import check_types
from edl_runtime.elastic.state import PartState, host_view
from edl_runtime.errors import SpecError

_NAME = re.compile(r"[a-z0-9_-]+")
_WRAPPED = re.compile(r"(model|optimizer)(-\d+)?|scaler")
_METADATA = "__metadata__"  # which a checkpoint's files keep for themselves
_DICTS = (dict, OrderedDict)
_VALUES = (
    "None, bool, int, float, str, numpy's arrays and numbers, Paddle's tensors, and list, tuple, dict and OrderedDict "
    "of these; not of a type that is derived from one of them: it would come back as another"
)


def check_name(name: object) -> None:
    """Raise SpecError for what can't name registered state: it is the name of a checkpoint's file."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _WRAPPED.fullmatch(name):
        allowed = "a-z, 0-9, '_' and '-', and not a name that run.wrap gives: model, optimizer, scaler"
        raise SpecError("run.register(name)", name, allowed)


class Registered:
    """A part of a training's state that is the script's own.

    `target`: a dict or OrderedDict of plain values, changed in place; or an object with `state_dict`, which
    returns such a dict, and `set_state_dict` (Paddle's word) or `load_state_dict` (PyTorch's). Raises SpecError for
    anything else.
    """

    def __init__(self, name: str, target: Any) -> None:
        self._field = f"run.register({name!r})"
        self._is_own_dict = type(target) in _DICTS
        self._save, self._load = self._methods(target)
        self.state()

    def state(self) -> PartState:
        """Return its values. The arrays may be views of memory that the script changes. Raises SpecError."""
        arrays: dict[str, np.ndarray] = {}
        try:
            values = self._encode(self._save(), "", arrays)
        except RecursionError:
            given = "values in values, without end or nearly so"
            raise SpecError(self._field, given, "what does not contain itself") from None
        return PartState(arrays, values)

    def differences(self, there: PartState) -> Iterator[str]:
        """Yield what is wrong with a state that is to be loaded: that there is none."""
        if there.values is None:
            yield "(run.register): here, not there"

    def load(self, there: PartState) -> None:
        """Take over copies of such a state's values."""
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
                'a dict that the script changes in place, as {"best": 0.0}, not of a type derived from dict, or an '
                "object with state_dict and set_state_dict or load_state_dict"
            )
            raise SpecError(self._field, type(target).__name__, allowed)
        return target.state_dict, load

    def _encode(self, value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
        """Return it as JSON, in which arrays are names of those that are added to `arrays`."""
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
        is_parameter = _is_parameter(value)
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


def _is_parameter(value: Any) -> bool:
    from paddle.base.framework import EagerParamBase

    return isinstance(value, EagerParamBase)


def _array_of(value: Any) -> tuple[str, np.ndarray | None]:
    """Return what it is and its values, None for what is no array."""
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
            return _made(np.array(arrays[name]), kind, is_trained="trained" in value)
    return {key: _decode(each, arrays) for key, each in value.items()} if isinstance(value, dict) else value


def _made(array: np.ndarray, kind: str, *, is_trained: bool) -> Any:
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


def copied(state: PartState) -> PartState:
    """Return a state that later changes leave as it is."""
    return PartState({name: np.array(array) for name, array in state.arrays.items()}, copy.deepcopy(state.values))
