"""The Open Inference Protocol v2 over gRPC, as Triton's and KServe's clients speak it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf import json_format

from edl_runtime.protocol.address import has_token
from edl_runtime.protocol.compression import GRPC_OPTION, inflated_if_packed
from edl_runtime.protocol.errors import InferenceError, ProtocolError, TeacherError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.oip_grpc import MESSAGES, SERVICE, TRITON_TYPES, arrays_of
from edl_runtime.protocol.tensors import datatype_of
from edl_runtime.settings import RuntimeSettings
from edl_runtime.teacher.http.admission import SideMemory
from edl_runtime.teacher.http.routes import UNAUTHORIZED, model_config, model_statistics
from edl_runtime.teacher.local_requests import LocalRequests
from edl_runtime.teacher.metrics import TeacherMetrics
from edl_runtime.teacher.other_body import MESSAGE_LIMIT, RECEIVE_S, OtherBody

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

SERVER_OPTIONS = (
    GRPC_OPTION,
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)

Handler = Callable[[Any], Awaitable[Any]]


class ServiceHandler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """The methods of a service, by name. `admits` tells whether a call with this Authorization may have its message.

    It is asked before the message is received, all of which gRPC keeps in memory. Open methods need no token; their
    messages say nothing, and are not received at all.
    """

    def __init__(
        self,
        service: str,
        methods: Mapping[str, Any],
        admits: Callable[[str], bool],
        open_methods: Mapping[str, Handler] = MappingProxyType({}),
    ) -> None:
        self._methods = {f"/{service}/{name}": method for name, method in methods.items()}
        self._open = {f"/{service}/{name}": _without_message(answer) for name, answer in open_methods.items()}
        self._admits = admits

    def service(self, details: Any) -> Any:
        if details.method in self._open:
            return self._open[details.method]
        method = self._methods.get(details.method)
        given = dict(details.invocation_metadata or ()).get("authorization", "")
        return method if method is None or self._admits(given) else _REFUSAL


def _without_message(answer: Handler) -> Any:
    """Return a method that answers a call before it has received a message."""

    async def call(_: Any, context: Any) -> Any:
        return await answer(context)

    return grpc.stream_unary_rpc_method_handler(call, response_serializer=lambda message: message.SerializeToString())


def method_of_one_message(answer: Callable[[bytes, OtherBody], Awaitable[bytes]], memory: SideMemory) -> Any:
    """Return a method that answers one message, unpacked, for which there is `memory`; errors become statuses."""

    async def call(_: Any, context: Any) -> bytes:
        try:
            with OtherBody(memory) as body:
                return await answer(await _received(context, memory, body), body)
        except ProtocolError as error:
            code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except InferenceError as error:
            code, reason = _STATUS.get(error.status, grpc.StatusCode.INTERNAL), error.reason
        await context.abort(code, reason)  # not above: gRPC keeps what this raises, which would keep the message
        raise AssertionError  # abort raises

    return grpc.stream_unary_rpc_method_handler(call)


async def _received(context: Any, memory: SideMemory, body: OtherBody) -> bytes:
    async with memory.unseen:
        try:
            async with asyncio.timeout(RECEIVE_S):
                message = await context.read()
        except TimeoutError:
            reason = f"the message did not come within {RECEIVE_S:.0f} s"
            raise InferenceError("this teacher", 503, reason, retryable=True) from None
    if message is grpc.aio.EOF:
        raise ProtocolError("the call has no message")
    body.receive(len(message))
    body.end()
    return await body.unpacked(message, inflated_if_packed)


async def _refuse(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, UNAUTHORIZED)


_REFUSAL = _without_message(_refuse)


class GrpcService:
    """The methods of the service for one model.

    With a `token`, all but liveness and readiness of the server require it as bearer token.
    """

    def __init__(
        self, signature: ModelSignature, requests: LocalRequests, metrics: TeacherMetrics, *, token: str = ""
    ) -> None:
        self._signature = signature
        self._requests = requests
        self._metrics = metrics
        self._token = token

    def handlers(self) -> Any:
        """Return what `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        methods: dict[str, tuple[str, Handler]] = {
            "ServerMetadata": ("Nothing", self._server_metadata),
            "ModelReady": ("Model", self._model_ready),
            "ModelMetadata": ("Model", self._model_metadata),
            "ModelConfig": ("Model", self._model_config),
            "ModelStatistics": ("Model", self._model_statistics),
            "ModelInfer": ("ModelInferRequest", self._infer),
        }
        return ServiceHandler(
            SERVICE,
            {name: self._method(request, handler) for name, (request, handler) in methods.items()},
            lambda given: has_token(given, self._token),
            {"ServerLive": self._server_live, "ServerReady": self._server_ready},
        )

    def _method(self, request: str, handler: Handler) -> Any:
        async def answer(content: bytes, body: OtherBody) -> bytes:
            found = await handler(await body.parsed(MESSAGES[request], content))
            return bytes(found.SerializeToString())

        return method_of_one_message(answer, self._requests.memory)

    async def _server_live(self, _: Any) -> Any:
        return MESSAGES["ServerLive"](live=True)

    async def _server_ready(self, _: Any) -> Any:
        return MESSAGES["ServerReady"](ready=not self._requests.draining)

    async def _model_ready(self, request: Any) -> Any:
        return MESSAGES["ModelReady"](ready=self._is_served(request.name) and not self._requests.draining)

    async def _server_metadata(self, _: Any) -> Any:
        about = {"name": "edl-airflow", "version": version("edl-airflow"), "extensions": ["model_configuration"]}
        return MESSAGES["ServerMetadata"](**about)

    async def _model_metadata(self, request: Any) -> Any:
        self._require(request.name)
        signature = self._signature
        answer = MESSAGES["ModelMetadata"](
            name=signature.name, versions=signature.versions, platform=signature.platform
        )
        for found, specs in ((answer.inputs, signature.inputs), (answer.outputs, signature.outputs)):
            for spec in specs:
                found.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
        return answer

    async def _model_config(self, request: Any) -> Any:
        self._require(request.name)
        config = model_config(self._signature)
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = TRITON_TYPES[tensor["data_type"].removeprefix("TYPE_")]
        return json_format.ParseDict({"config": config}, MESSAGES["ModelConfigResponse"]())

    async def _model_statistics(self, request: Any) -> Any:
        if request.name:
            self._require(request.name)
        found = {"model_stats": [model_statistics(self._signature, self._metrics.totals())]}
        return json_format.ParseDict(found, MESSAGES["ModelStatisticsResponse"]())

    async def _infer(self, request: Any) -> Any:
        self._require(request.model_name)
        inputs = await asyncio.to_thread(arrays_of, request.inputs, request.raw_input_contents, "input")
        names = [output.name for output in request.outputs]
        outputs = await self._requests.infer(inputs, names)
        answer = MESSAGES["ModelInferResponse"](
            model_name=self._signature.name, model_version=next(iter(self._signature.versions), ""), id=request.id
        )
        for name, array in outputs.items():
            answer.outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
            answer.raw_output_contents.append(array.tobytes())
        return answer

    def _is_served(self, name: str) -> bool:
        return name == self._signature.name

    def _require(self, name: str) -> None:
        if not self._is_served(name):
            reason = f"there is no model {name!r}; served is {self._signature.name!r}"
            raise InferenceError(self._requests.address, 404, reason, retryable=False)


def server_credentials(settings: RuntimeSettings) -> grpc.ServerCredentials | None:
    """Return the certificate of EDL_TLS_CERT for gRPC; None without TLS. Raises OSError."""
    if not settings.tls_cert:
        return None
    certificate, key = (Path(path).read_bytes() for path in (settings.tls_cert, settings.tls_key or settings.tls_cert))
    return grpc.ssl_server_credentials([(key, certificate)])


@asynccontextmanager
async def serving_grpc(service: GrpcService, address: str, tls: grpc.ServerCredentials | None) -> AsyncIterator[int]:
    """Serve on "host:port" during the block; yields the port. Raises TeacherError when it can't listen."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((service.handlers(),))
    try:
        port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    except RuntimeError as error:
        raise TeacherError(f"can't listen on {address} for gRPC: {error}") from None
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=1.0)
