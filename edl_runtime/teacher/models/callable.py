"""A Python function as a model."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from edl_runtime.protocol.oip import ModelSignature, TensorSpec, digest_of, shape_fits
from edl_runtime.protocol.tensors import Array, dtype_of
from edl_runtime.teacher.errors import ModelError
from edl_runtime.teacher.models.model import ModelOptions

F = TypeVar("F", bound=Callable[[Mapping[str, Array]], Mapping[str, Array]])


def served(*, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], version: str = "") -> Callable[[F], F]:
    """Declare a function's `inputs` and `outputs`, so that `edl teacher --model package.module:function` can serve it.

        @served(inputs=[TensorSpec("image", "FP32", (-1, 784))], outputs=[TensorSpec("logits", "FP32", (-1, 10))])
        def teach(inputs): return {"logits": inputs["image"] @ WEIGHTS}

    Input arrays are read-only and valid during the call only.

    `version` identifies the model: all teachers of a pool must have the same, and cached answers of other versions are
    dropped. The default is a digest of the function's name and its source file. It does not cover weights that are
    loaded from elsewhere: give their version, as in `version=digest_of_weights`.
    """

    def mark(function: F) -> F:
        function.inputs, function.outputs, function.version = tuple(inputs), tuple(outputs), version  # type: ignore[attr-defined]
        return function

    return mark


class CallableModel:
    """A function marked by `served`. Names, dtypes and shapes of its outputs are checked against the declared ones."""

    def __init__(self, options: ModelOptions) -> None:
        """Import it; the working directory is searched last. Raises ModelError."""
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)  # last, so that no file there shadows a library
        module_name, _, function_name = options.model.partition(":")
        try:
            module = importlib.import_module(module_name)
            function = getattr(module, function_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ModelError(options.model, f"{error}; give package.module:function") from error
        inputs, outputs = getattr(function, "inputs", None), getattr(function, "outputs", None)
        if inputs is None or outputs is None:
            raise ModelError(options.model, "the function has no declared inputs; mark it with @served(…)")
        self._function = function
        self.signature = ModelSignature(
            name=options.name,
            versions=_versions(function, module),
            platform="python",
            inputs=tuple(inputs),
            outputs=tuple(outputs),
        )
        self._outputs = {spec.name: spec for spec in self.signature.outputs}

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Call the function. Raises ValueError when an output does not match its declaration."""
        rows = len(next(iter(inputs.values())))
        found: Mapping[str, Array] = self._function(inputs)
        for name in outputs:
            declared = self._outputs[name]
            dtype = dtype_of(declared.datatype)
            shape = (rows, *declared.shape[1:]) if declared.shape[:1] == (-1,) else declared.shape
            array = found.get(name)
            if array is None or array.dtype != dtype or not shape_fits(array.shape, shape):
                given = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
                raise ValueError(f"the function returned {given} for {name!r}, declared is {dtype} {list(shape)}")
        return found


def _versions(function: Any, module: ModuleType) -> tuple[str, ...]:
    """Return the version of a function; empty without a source file and a version of its own."""
    source = inspect.getsourcefile(module)
    content = function.version or (digest_of([Path(source)]) if source else "")
    named = f"{function.__qualname__} {content}"
    return (hashlib.sha256(named.encode()).hexdigest()[:16],) if content else ()
