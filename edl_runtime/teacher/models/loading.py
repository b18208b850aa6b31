"""Loads a model, selects its outputs and warms it up. The path tells the kind: Paddle, ONNX or a Python function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edl_runtime.log import get_logger
from edl_runtime.protocol.oip import TensorSpec
from edl_runtime.protocol.tensors import Array, dtype_of
from edl_runtime.teacher.errors import ModelError
from edl_runtime.teacher.models.model import NO_FILE, Model, ModelOptions, check_protobuf

log = get_logger(__name__)


def load_model(options: ModelOptions) -> Model:
    """Load a model, select its outputs and run it once. Raises ModelError."""
    path = Path(options.model)
    model: Model
    if path.suffix == ".onnx":
        from edl_runtime.teacher.models.onnx import OnnxModel

        model = OnnxModel(path, options)
    elif _is_function(options):
        from edl_runtime.teacher.models.callable import CallableModel

        model = CallableModel(options)
    else:
        from edl_runtime.teacher.models.paddle import PaddleModel

        model = PaddleModel(path, options)
    if options.outputs:
        model = SelectedOutputs(model, options)
    _warm_up(model, options)
    return model


def check_model_files(options: ModelOptions) -> None:
    """Check a model's files without loading it. Raises ModelError.

    Outputs are checked only for Paddle 3 models (.json). Functions are not checked, for that needs an import.
    """
    path = Path(options.model)
    if path.suffix == ".onnx":
        if not path.is_file():
            raise ModelError(options.model, NO_FILE)
        check_protobuf(path, options)
    elif not _is_function(options):
        from edl_runtime.teacher.models.paddle import output_names

        if known := output_names(path, options):
            output_origins(options, known)


def output_origins(options: ModelOptions, known: Sequence[str]) -> dict[str, str]:
    """Return the model's name of each served output by its served name; `known` are the model's outputs.

    Raises ModelError for an unknown output, or a name given twice.
    """
    chosen: dict[str, str] = {}
    for requested in options.outputs:
        name, _, origin = requested.partition("=")
        origin = origin or name
        if origin not in known:
            raise ModelError(options.model, f"no output {origin!r}; it has {', '.join(known)}")
        if name in chosen:
            raise ModelError(options.model, f"output {name!r} is given twice")
        chosen[name] = origin
    return chosen


def _is_function(options: ModelOptions) -> bool:
    return ":" in options.model and not Path(options.model).exists()


class SelectedOutputs:
    """A model reduced to `options.outputs`, renamed where these say so."""

    def __init__(self, model: Model, options: ModelOptions) -> None:
        self._model = model
        known = {spec.name: spec for spec in model.signature.outputs}
        self._origin = output_origins(options, list(known))
        chosen = (msgspec.structs.replace(known[origin], name=name) for name, origin in self._origin.items())
        self.signature = msgspec.structs.replace(model.signature, outputs=tuple(chosen))

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        found = self._model.run(inputs, [self._origin[name] for name in outputs])
        return {name: found[self._origin[name]] for name in outputs}


def _warm_up(model: Model, options: ModelOptions) -> None:
    """Run once on zeros, so that the first request is not slow.

    A failure is only logged when axes other than the batch are free: the model may need larger sizes than 1.
    """
    inputs = {spec.name: zeros(spec) for spec in model.signature.inputs}
    for array in inputs.values():
        array.flags.writeable = False
    try:
        outputs = model.run(inputs, [spec.name for spec in model.signature.outputs])
    except Exception as error:
        if any(-1 in spec.shape[1:] for spec in model.signature.inputs):
            log.warning("model.warm_up_failed", model=options.model, cause=str(error))
            return
        raise ModelError(options.model, f"its first run failed: {type(error).__name__}: {error}") from error
    if missing := [spec.name for spec in model.signature.outputs if spec.name not in outputs]:
        raise ModelError(options.model, f"its first run returned no {', '.join(missing)}")


def zeros(spec: TensorSpec) -> Array:
    """Return the smallest input: size 1 for each free axis."""
    return np.zeros([1 if size == -1 else size for size in spec.shape], dtype_of(spec.datatype))
