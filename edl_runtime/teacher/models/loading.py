"""Loads a model, selects its outputs and warms it up; the kind of model is told by its path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edl_runtime.log import get_logger
from edl_runtime.protocol.oip import TensorSpec
from edl_runtime.protocol.tensors import Array, dtype_of
from edl_runtime.teacher.errors import ModelError
from edl_runtime.teacher.models.model import NO_FILE, Model, ModelOptions

log = get_logger(__name__)


def load_model(options: ModelOptions) -> Model:
    """Load a model, select its outputs and run it once. Raises ModelError."""
    model = _load(options)
    if options.outputs:
        model = SelectedOutputs(model, options)
    _warm_up(model, options)
    return model


def check_model_files(options: ModelOptions) -> None:
    """Raise ModelError for what is wrong with a model as far as its files tell, without loading it.

    A Paddle model of today's format tells its outputs; a function tells nothing before it is imported.
    """
    path = Path(options.model)
    if path.suffix == ".onnx":
        if not path.is_file():
            raise ModelError(options.model, NO_FILE)
    elif ":" not in options.model or path.exists():
        from edl_runtime.teacher.models.paddle import output_names

        if known := output_names(path, options):
            output_origins(options, known)


def output_origins(options: ModelOptions, known: Sequence[str]) -> dict[str, str]:
    """Return under which names outputs are served, and what the model, which has those `known`, calls them.

    Raises ModelError for one that it does not have, or a name given twice.
    """
    chosen: dict[str, str] = {}
    for wish in options.outputs:
        name, _, origin = wish.partition("=")
        origin = origin or name
        if origin not in known:
            raise ModelError(options.model, f"no output {origin!r}; it has {', '.join(known)}")
        if name in chosen:
            raise ModelError(options.model, f"output {name!r} is asked for twice")
        chosen[name] = origin
    return chosen


def _load(options: ModelOptions) -> Model:
    path = Path(options.model)
    if path.suffix == ".onnx":
        from edl_runtime.teacher.models.onnx import OnnxModel

        return OnnxModel(path, options)
    if ":" in options.model and not path.exists():
        from edl_runtime.teacher.models.callable import CallableModel

        return CallableModel(options)
    from edl_runtime.teacher.models.paddle import PaddleModel

    return PaddleModel(path, options)


class SelectedOutputs:
    """A model reduced to some of its outputs, under other names where asked for."""

    def __init__(self, model: Model, options: ModelOptions) -> None:
        """Raise ModelError for an output that the model does not have, or a name given twice."""
        self._model = model
        known = {spec.name: spec for spec in model.signature.outputs}
        self._origin = output_origins(options, list(known))
        chosen = (msgspec.structs.replace(known[origin], name=name) for name, origin in self._origin.items())
        self.signature = msgspec.structs.replace(model.signature, outputs=tuple(chosen))

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        found = self._model.run(inputs, [self._origin[name] for name in outputs])
        return {name: found[self._origin[name]] for name in outputs}


def _warm_up(model: Model, options: ModelOptions) -> None:
    """Run once on zeros, so that the first student does not wait for what a first run prepares.

    The zeros are read-only, as all inputs are. A model of which more than the batch is free may rightly refuse the
    smallest sizes; that is only logged.
    """
    inputs = {spec.name: zeros(spec) for spec in model.signature.inputs}
    for array in inputs.values():
        array.flags.writeable = False
    try:
        outputs = model.run(inputs, [spec.name for spec in model.signature.outputs])
    except Exception as error:
        if any(-1 in spec.shape[1:] for spec in model.signature.inputs):
            log.warning("model.not_warm", model=options.model, cause=str(error))
            return
        raise ModelError(options.model, f"its first run failed: {type(error).__name__}: {error}") from error
    if missing := [spec.name for spec in model.signature.outputs if spec.name not in outputs]:
        raise ModelError(options.model, f"its first run gave no {', '.join(missing)}")


def zeros(spec: TensorSpec) -> Array:
    """Return a smallest input: 1 wherever the size is free."""
    return np.zeros([1 if size == -1 else size for size in spec.shape], dtype_of(spec.datatype))
