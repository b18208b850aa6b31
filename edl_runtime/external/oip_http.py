"""A connection to a server that speaks the Open Inference Protocol v2 over HTTP, with or without binary tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError, ModelNotReadyError, ProtocolError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.tensors import Array, Tensor, datatype_of

MOST_NUMBERS_TRIED = 4 * 1024 * 1024
"""Most numbers of a request that is tried as JSON: Python's objects of them take 32 bytes each."""

log = get_logger(__name__)


class _Config(msgspec.Struct):
    """Of Triton's configuration of a model."""

    max_batch_size: int = 0


_config_decoder = JsonDecoder(_Config)


class OipHttpTransport:
    """The requests of `TeacherConnection`, as JSON where the server refuses binary tensors."""

    def __init__(self, client: TeacherConnection) -> None:
        self._client = client
        self._binary = True

    def open(self) -> None:
        self._client.open()

    def close(self) -> None:
        self._client.close()

    def check_ready(self) -> None:
        status, body = self._client.get("/ready")
        if status != 200:
            raise ModelNotReadyError(f"the server answers {status} {body[:200].decode('utf-8', 'replace')}".rstrip())

    def signature(self) -> ModelSignature:
        return self._client.signature()

    def max_batch(self) -> int | None:
        status, body = self._client.get("/config")
        if status != 200:
            return None  # not Triton
        try:
            return max(0, _config_decoder.decode(body).max_batch_size) or None
        except msgspec.DecodeError as error:
            raise ProtocolError(f"teacher {self._client.address}: its model's /config is invalid: {error}") from None

    def probe(self, row: Mapping[str, Array], outputs: Sequence[str]) -> None:
        """Find out by a request whether the server takes binary tensors, as what it says is not to be relied on.

        The request is small: some close the connection before they have read a large one that they refuse. One of
        more than `MOST_NUMBERS_TRIED` is not tried as JSON. Raises as `infer`.
        """
        try:
            self._client.infer(row, outputs)
        except (InferenceError, ConnectionError) as refused:
            if sum(array.size for array in row.values()) > MOST_NUMBERS_TRIED:
                raise
            try:
                self._infer_json(row, outputs)
            except InferenceError:
                raise refused from None  # so it is not for want of JSON
            log.warning("teacher.json_only", teacher=self._client.address, cause=str(refused))
            self._binary = False

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:
        return self._client.infer(inputs, outputs) if self._binary else self._infer_json(inputs, outputs)

    def _infer_json(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:
        tensors = []
        for name, tensor in inputs.items():
            array = np.asarray(tensor)
            shape, data = array.shape, array.ravel().tolist()
            tensors.append({"name": name, "shape": shape, "datatype": datatype_of(array.dtype), "data": data})
        request: dict[str, object] = {"inputs": tensors}
        if outputs:
            request["outputs"] = [{"name": name} for name in outputs]
        answer = self._client.infer_json(msgspec.json.encode(request))
        if missing := [name for name in outputs if name not in answer]:
            raise ProtocolError(f"teacher {self._client.address} left out output {missing[0]!r}")
        return answer
