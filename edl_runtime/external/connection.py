"""What our teachers do and other servers don't: requests of any size, normalised inputs, the largest of an output.

Here the student does it, before it sends a request and after it has the answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol
from urllib.parse import quote

import msgspec
import numpy as np

from edl_runtime.errors import SpecError, clipped, missing_library
from edl_runtime.external.address import ServerAddress
from edl_runtime.protocol.client import ANSWER_LIMIT, TeacherConnection
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.infer_messages import MOST_AXES
from edl_runtime.protocol.oip import ModelSignature, Normalise, TensorSpec, TopK
from edl_runtime.protocol.tensors import Array, Tensor, dtype_of
from edl_runtime.protocol.tls import Trust
from edl_runtime.settings import RuntimeSettings

MOST_TENSORS = 4096
"""Most inputs of a model, and most outputs."""

LONGEST_NAME = 1000
"""Most characters of an input's or output's name."""

CHECK_TIMEOUT_S = 2.0
"""A server that takes longer to tell whether its model is ready leaves the pool."""

LLM_CHECK_TIMEOUT_S = 15.0
"""The same of one of a language model, which may spend seconds on writing the scores of a batch."""

PROBE_LIMIT = 256 * 1024 * 1024
"""Most bytes of one row, or of a fixed batch, in all inputs together: the request with which a server is tried."""


class Transport(Protocol):
    """A connection to a model of a server, by its own protocol. Errors as those of `TeacherConnection`."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def check_ready(self) -> None:
        """Raise ModelNotReadyError unless the server takes requests for the model."""

    def signature(self) -> ModelSignature:
        """Return what the server knows of its model, perhaps neither inputs nor outputs."""

    def max_batch(self) -> int | None:
        """Return the most rows of a request, None if that is not known."""

    def probe(self, row: Mapping[str, Array], outputs: Sequence[str]) -> None:
        """Prepare for requests of this form; may send `row`, a request of few rows, to see whether it is taken."""

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]: ...


class Watched(Protocol):
    """A connection to a server that is asked again and again. Errors as those of `ExternalConnection`."""

    def close(self) -> None: ...
    def ready(self) -> bool: ...
    def signature(self) -> ModelSignature: ...


def connect(
    address: str, settings: RuntimeSettings, *, trust: Trust | None = None, timeout_s: float | None = None
) -> ExternalConnection:
    """Return a connection to `address`, which must be external. Raises SpecError.

    `trust` are the certificates of `settings` to accept over HTTPS; `timeout_s` is the limit of each call, by default
    that of the settings.
    """
    server = ServerAddress.parse(address)
    if server.llm:
        allowed = "a server of tensors; students of language models ask an `edl gateway` of its pool"
        raise SpecError("teacher address", address, allowed)
    limit_s = settings.teacher_timeout_s if timeout_s is None else timeout_s
    try:
        return ExternalConnection(server, _transport(server, settings, limit_s, trust))
    except ImportError as error:
        raise missing_library(str(server), error) from None


def check_timeout_s(server: ServerAddress) -> float:
    """Return how long a server may take to tell whether its model is ready."""
    return LLM_CHECK_TIMEOUT_S if server.llm else CHECK_TIMEOUT_S


def watch_connection(server: ServerAddress, settings: RuntimeSettings, trust: Trust | None) -> Watched:
    """Return a connection that `edl register` watches a server by; each call takes `check_timeout_s` at most."""
    limit_s = check_timeout_s(server)
    if server.llm is None:
        return connect(str(server), settings, trust=trust, timeout_s=limit_s)
    from edl_runtime.external.llm import LlmConnection

    trust = trust if server.scheme.endswith("https") else None
    token = settings.teacher_token
    return LlmConnection(server, TeacherConnection(server.endpoint, token=token, timeout_s=limit_s, trust=trust))


def _transport(server: ServerAddress, settings: RuntimeSettings, timeout_s: float, trust: Trust | None) -> Transport:
    protocol, _, carrier = server.scheme.partition("+")
    token = settings.teacher_token
    if carrier.startswith("grpc"):
        from edl_runtime.external.grpc_channel import GrpcChannel, channel_credentials

        credentials = channel_credentials(settings) if carrier == "grpcs" else None
        channel = GrpcChannel(
            server.endpoint, token=token, timeout_s=timeout_s, credentials=credentials, name=settings.teacher_tls_name
        )
        if protocol == "oip":
            from edl_runtime.external.oip_grpc import OipGrpcTransport

            return OipGrpcTransport(channel, server.model)
    elif protocol == "oip":
        from edl_runtime.external.oip_http import OipHttpTransport

        trust = trust if carrier == "https" else None
        return OipHttpTransport(
            TeacherConnection(server.endpoint, model=server.model, token=token, timeout_s=timeout_s, trust=trust)
        )
    from edl_runtime.external import paddle_serving

    general = protocol == "paddle-serving"
    model = paddle_serving.GeneralModel if general else paddle_serving.PipelineModel
    if carrier == "grpc":
        return model(server, channel)
    if carrier == "brpc":
        return model(server, paddle_serving.BrpcCarrier(server, timeout_s, token))
    path = paddle_serving.GENERAL_PATH if general else f"/{quote(server.model, safe='')}/prediction"
    return model(server, paddle_serving.HttpCarrier(server, path, timeout_s, as_json=not general, token=token))


class ExternalConnection:
    """A connection to a server that is not ours, which answers as one of our teachers would.

    A request of more rows than the server takes becomes several; where it takes a fixed number of rows, the last one
    is filled up with its last row.
    """

    def __init__(self, address: ServerAddress, transport: Transport) -> None:
        self._address = address
        self._transport = transport
        self._limit: int | None = address.max_batch
        self._fixed = False

    def open(self) -> None:
        self._transport.open()

    def close(self) -> None:
        self._transport.close()

    def ready(self) -> bool:
        """Return True. Raises ModelNotReadyError with the server's words, OSError, ProtocolError, InferenceError."""
        self._transport.check_ready()
        return True

    def signature(self) -> ModelSignature:
        """Return the model's signature in the form of our teachers'. Raises SpecError where it is not known."""
        from edl_runtime.teacher.predictor.execute import with_extensions

        found = self._transport.signature()
        inputs, outputs = self._address.inputs or found.inputs, self._address.outputs or found.outputs
        if not inputs or not outputs:
            missing = "input" if not inputs else "output"
            raise SpecError(
                f"teacher {self._address}",
                f"a model whose {missing}s its server does not tell",
                f"an address that tells them: …?{missing}=NAME:DATATYPE:SIZE.SIZE…",
            )
        self._check_tensors(inputs, "input")
        self._check_tensors(outputs, "output")
        fixed = {spec.shape[0] for spec in inputs if spec.shape and spec.shape[0] >= 0}
        self._check_probe(inputs, fixed)
        self._fixed = bool(fixed)
        self._limit = min(fixed) if fixed else self._address.max_batch or self._transport.max_batch()
        self._transport.probe(_few_rows(inputs, min(fixed, default=1)), [spec.name for spec in outputs])
        # Name, platform and version are the server's own business, and nothing that teachers of a pool must share.
        return with_extensions(
            ModelSignature(name="", inputs=_with_free_batch(inputs), outputs=_with_free_batch(outputs)), joins=True
        )

    def _check_tensors(self, tensors: Sequence[TensorSpec], kind: str) -> None:
        """Raise ProtocolError for tensors that no model has: they are the server's words."""
        if len(tensors) > MOST_TENSORS:
            raise ProtocolError(f"{self._address}: it has {len(tensors)} {kind}s, allowed are {MOST_TENSORS}")
        names: set[str] = set()
        for spec in tensors:
            if not 0 < len(spec.name) <= LONGEST_NAME or spec.name in names:
                allowed = f"allowed is one of 1 to {LONGEST_NAME} characters that no other {kind} has"
                raise ProtocolError(f"{self._address}: {kind} has the name {clipped(spec.name)!r}, {allowed}")
            names.add(spec.name)
            if len(spec.shape) > MOST_AXES or not all(size == -1 or 0 < size < 2**62 for size in spec.shape):
                allowed = f"allowed are at most {MOST_AXES} axes of 1 or more, or -1 for any size"
                shown = clipped(str(list(spec.shape)))
                raise ProtocolError(f"{self._address}: {kind} {spec.name!r}: shape is {shown}, {allowed}")

    def _check_probe(self, inputs: Sequence[TensorSpec], fixed: Collection[int]) -> None:
        """Raise ProtocolError if the smallest request is too large, as it is made of what the server says."""
        if len(fixed) > 1:
            raise ProtocolError(f"{self._address}: its inputs have different fixed batches: {sorted(fixed)}")
        size = sum(math.prod(abs(size) for size in spec.shape) * dtype_of(spec.datatype).itemsize for spec in inputs)
        if size > PROBE_LIMIT:
            row = f"{min(fixed, default=1)} rows of its {len(inputs)} inputs have {size} bytes"
            raise ProtocolError(f"{self._address}: {row}, allowed are {PROBE_LIMIT}")

    def infer(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str | TopK],
        normalise: Mapping[str, Normalise] = MappingProxyType({}),
        *,
        alone: bool = False,  # noqa: ARG002 - what the server does with requests is its own business
    ) -> dict[str, Array]:
        """Return the model's `outputs` for `inputs`, as `TeacherConnection.infer` does; raises the same."""
        from edl_runtime.teacher.predictor.execute import select_outputs

        names = list(dict.fromkeys(output if isinstance(output, str) else output.name for output in outputs))
        rows = len(next(iter(inputs.values())))
        size = rows if self._limit is None else self._limit
        if rows <= size and not self._fixed:
            answer = self._transport.infer(_normalised(inputs, normalise), names)
        else:
            answer = self._infer_in_parts(inputs, names, normalise, rows=rows, size=size)
        return dict(select_outputs(answer, outputs or list(answer)))

    def _infer_in_parts(
        self,
        inputs: Mapping[str, Tensor],
        names: Sequence[str],
        normalise: Mapping[str, Normalise],
        *,
        rows: int,
        size: int,
    ) -> dict[str, Array]:
        answer: dict[str, Array] = {}
        for start in range(0, rows, size):
            part = {name: tensor[start : start + size] for name, tensor in inputs.items()}
            have = min(size, rows - start)
            sent = size if self._fixed else have
            if sent > have:
                part = {name: _filled_up(tensor, sent) for name, tensor in part.items()}
            found = self._transport.infer(_normalised(part, normalise), names)
            if start and found.keys() != answer.keys():  # else rows of an output would be left as they are in memory
                raise ProtocolError(f"{self._address}: the outputs are not alike for all rows of a request")
            for name, array in found.items():
                if array.shape[:1] != (sent,):
                    raise ProtocolError(f"{self._address}: output {name!r} is {list(array.shape)} for {sent} rows")
                if start == 0:
                    if rows * (of_row := array.nbytes // sent) > ANSWER_LIMIT:
                        problem = f"{of_row} bytes a row, allowed are {ANSWER_LIMIT} for {rows} rows"
                        raise ProtocolError(f"{self._address}: output {name!r} has {problem}")
                    answer[name] = np.empty((rows, *array.shape[1:]), array.dtype)
                whole = answer[name]
                if (whole.dtype, whole.shape[1:]) != (array.dtype, array.shape[1:]):
                    raise ProtocolError(f"{self._address}: output {name!r} is not alike for all rows of a request")
                whole[start : start + have] = array[:have]
        return answer


def _few_rows(inputs: Sequence[TensorSpec], rows: int) -> dict[str, Array]:
    """Return zeros in the form of the model's inputs; axes of any size have one element."""
    return {
        spec.name: np.zeros((rows, *(max(size, 1) for size in spec.shape[1:])), dtype_of(spec.datatype))
        for spec in inputs
    }


def _with_free_batch(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(msgspec.structs.replace(spec, shape=(-1, *spec.shape[1:])) for spec in tensors)


def _filled_up(tensor: Tensor, rows: int) -> Array:
    array = np.asarray(tensor)
    return np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])


def _normalised(inputs: Mapping[str, Tensor], normalise: Mapping[str, Normalise]) -> Mapping[str, Tensor]:
    """Return the inputs with those that a teacher of ours would convert to float32 converted."""
    from edl_runtime.teacher.predictor.execute import normalise as convert

    if not normalise:
        return inputs
    converted = dict(inputs)
    for name, how in normalise.items():
        pixels = np.asarray(inputs[name])
        converted[name] = out = np.empty(pixels.shape, np.float32)
        convert(pixels, how, out)
    return converted
