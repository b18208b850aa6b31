"""A connection to a server that speaks the Open Inference Protocol v2 over gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edl_runtime.external.grpc_channel import GrpcChannel
from edl_runtime.protocol.errors import InferenceError, ModelNotReadyError, ProtocolError
from edl_runtime.protocol.infer_messages import RequestIds, check_id
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.oip_grpc import MESSAGES, SERVICE, arrays_of
from edl_runtime.protocol.tensors import Array, Tensor, datatype_of, dtype_of


class OipGrpcTransport:
    """A connection to one model of a server, over a channel that it closes."""

    def __init__(self, channel: GrpcChannel, model: str) -> None:
        self._channel = channel
        self._model = model
        self._ids = RequestIds()

    def open(self) -> None:
        self._channel.open()

    def close(self) -> None:
        self._channel.close()

    def check_ready(self) -> None:
        """Raise ModelNotReadyError unless the server takes requests for the model; OSError, InferenceError."""
        try:
            if self._call("ModelReady", self._named(), "ModelReady").ready:
                return
            self._call("ModelMetadata", self._named(), "ModelMetadata")  # its refusal says more
        except InferenceError as refused:
            if refused.status in (404, 500):  # as some servers answer while they load it
                raise ModelNotReadyError(str(refused)) from None
            raise
        raise ModelNotReadyError(f"{self._channel.address} answers that {self._model!r} is not ready")

    def signature(self) -> ModelSignature:
        """Return the model's metadata as the server has it, perhaps without tensors. Raises as `infer`."""
        answer = self._call("ModelMetadata", self._named(), "ModelMetadata")
        tensors = [
            tuple(TensorSpec(one.name, datatype_of(dtype_of(one.datatype)), tuple(one.shape)) for one in found)
            for found in (answer.inputs, answer.outputs)
        ]
        return ModelSignature(
            name=answer.name,
            versions=tuple(answer.versions),
            platform=answer.platform,
            inputs=tensors[0],
            outputs=tensors[1],
        )

    def max_batch(self) -> int | None:
        """Return the most rows of a request by Triton's configuration of the model; None where there is no such limit.

        Raises OSError.
        """
        try:
            answer = self._call("ModelConfig", self._named(), "ModelConfigResponse")
        except InferenceError:
            return None  # not Triton
        return max(0, answer.config.max_batch_size) or None

    def probe(self, row: Mapping[str, Array], outputs: Sequence[str]) -> None:
        """See that the model takes what is said of it: raw tensors are part of the protocol. Raises as `infer`."""
        self.infer(row, outputs)

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:
        """Return the model's `outputs` (empty: all) for `inputs`, as fresh writable arrays.

        Raises InferenceError when the server refuses, ProtocolError for an answer that is not what was requested,
        TimeoutError and other OSErrors when the network fails.
        """
        asked = self._ids.new()
        request = MESSAGES["ModelInferRequest"](model_name=self._model, id=asked)
        for name, tensor in inputs.items():
            array = np.ascontiguousarray(tensor)
            request.inputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        for name in outputs:
            request.outputs.add(name=name)
        answer = self._call("ModelInfer", request, "ModelInferResponse")
        check_id(asked, answer.id)
        arrays = arrays_of(answer.outputs, answer.raw_output_contents, "output")
        if missing := [name for name in outputs if name not in arrays]:
            raise ProtocolError(f"{self._channel.address} left out output {missing[0]!r}")
        return arrays

    def _call(self, method: str, request: Any, answer: str) -> Any:
        return self._channel.call(f"/{SERVICE}/{method}", request, MESSAGES[answer])

    def _named(self) -> Any:
        return MESSAGES["Model"](name=self._model)
