"""An ONNX model, run by onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edl_runtime.protocol.oip import ModelSignature, TensorSpec, digest_of
from edl_runtime.protocol.tensors import Array
from edl_runtime.teacher.errors import ModelError
from edl_runtime.teacher.models.model import DATATYPES, NO_FILE, ModelOptions, tokenizer_in

_NUMPY_NAMES = {"float": "float32", "double": "float64"}  # ONNX has numpy's names for all other datatypes


class OnnxModel:
    """A session on one CPU thread, or on a GPU."""

    def __init__(self, path: Path, options: ModelOptions) -> None:
        """Load it. Raises ModelError."""
        if not path.is_file():
            raise ModelError(options.model, NO_FILE)
        try:
            import onnxruntime as ort
        except ImportError as error:
            raise ModelError(options.model, "onnxruntime is missing; pip install 'edl-airflow[onnx]'") from error
        providers = _providers(ort, options)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        try:
            self._session = ort.InferenceSession(str(path), settings, providers=providers)
        except Exception as error:  # onnxruntime's errors share no base class
            raise ModelError(options.model, f"not an ONNX model that can be loaded: {error}") from error
        self.signature = ModelSignature(
            name=options.name,
            versions=(digest_of([path]),),
            platform="onnx_onnxruntime",
            inputs=_specs(self._session.get_inputs(), options),
            outputs=_specs(self._session.get_outputs(), options),
            extensions=tokenizer_in(path.parent),
        )

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        return dict(zip(outputs, self._session.run(list(outputs), dict(inputs)), strict=True))


def _providers(ort: Any, options: ModelOptions) -> list[str | tuple[str, dict[str, int]]]:
    if options.gpu_id is None:
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise ModelError(options.model, "this onnxruntime has no CUDA for GPUs; install onnxruntime-gpu")
    return [("CUDAExecutionProvider", {"device_id": options.gpu_id})]


def _specs(tensors: Sequence[Any], options: ModelOptions) -> tuple[TensorSpec, ...]:
    specs = []
    for tensor in tensors:
        name = tensor.type.removeprefix("tensor(").removesuffix(")")
        datatype = DATATYPES.get(_NUMPY_NAMES.get(name, name))
        if datatype is None:
            raise ModelError(options.model, f"{tensor.name!r} is a {tensor.type}; supported are {', '.join(DATATYPES)}")
        shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in tensor.shape)
        specs.append(TensorSpec(tensor.name, datatype, shape))
    return tuple(specs)
