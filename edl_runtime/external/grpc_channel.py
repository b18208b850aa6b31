"""A gRPC channel whose errors are those of the other connections to teachers."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.client import ANSWER_LIMIT, METADATA_LIMIT
from edl_runtime.protocol.compression import GRPC_OPTION, inflated_if_packed
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.oip_grpc import MESSAGES, SERVICE
from edl_runtime.protocol.paddle_serving import GENERAL_SERVICE, PIPELINE_SERVICE
from edl_runtime.protocol.proto import parsed
from edl_runtime.settings import RuntimeSettings, check_token, named

CONNECT_TIMEOUT_S = 5.0

_SERVICE_CONFIG = {
    "methodConfig": [
        {"name": [{}], "maxResponseMessageBytes": METADATA_LIMIT},
        {
            "name": [
                {"service": SERVICE, "method": "ModelInfer"},
                *({"service": one, "method": "inference"} for one in (GENERAL_SERVICE, PIPELINE_SERVICE)),
            ],
            "maxResponseMessageBytes": ANSWER_LIMIT,
        },
    ]
}
"""Most bytes of each method's answers, all but those of models are short."""

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
}
"""The HTTP statuses that mean the same; all others are failures of the server, 500."""


def channel_credentials(settings: RuntimeSettings) -> grpc.ChannelCredentials:
    """Return the authorities of EDL_TEACHER_CA, or the system's without one. Raises SpecError."""
    if not settings.teacher_ca:
        return grpc.ssl_channel_credentials()
    try:
        return grpc.ssl_channel_credentials(Path(settings.teacher_ca).read_bytes())
    except OSError as error:
        allowed = f"a readable PEM file: {error.strerror}"
        raise SpecError(named("teacher_ca"), settings.teacher_ca, allowed) from None


class GrpcChannel:
    """A connection to one server. For one thread at a time; only `close` may be called from another.

    - `address`: "host:port".
    - `token`: sent as a bearer token.
    - `timeout_s`: limit of each call.
    - `credentials`: for TLS; None for a connection without it.
    - `name`: the name in the server's certificate, empty for its address.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        timeout_s: float = 30.0,
        credentials: grpc.ChannelCredentials | None = None,
        name: str = "",
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._metadata = [("authorization", f"Bearer {check_token('token', token)}")] if token else []
        options: list[tuple[str, int | str]] = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", ANSWER_LIMIT),
            ("grpc.service_config", msgspec.json.encode(_SERVICE_CONFIG).decode()),
            ("grpc.service_config_disable_resolution", 1),  # else the DNS may have another
            GRPC_OPTION,
            ("grpc.use_local_subchannel_pool", 1),  # else all channels to an address share one connection
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),  # else a server that was away for long is found minutes later
        ]
        if name:
            options.append(("grpc.ssl_target_name_override", name))
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)

    def open(self) -> None:
        """See that the server takes connections; the channel connects at its first call. Raises OSError at once."""
        limit_s = min(self._timeout_s, CONNECT_TIMEOUT_S)
        socket.create_connection(endpoint_of(self.address), limit_s).close()

    def close(self) -> None:
        """Disconnect for good. A call in another thread raises OSError at once."""
        self._channel.close()

    def check(self) -> None:
        """See that the server answers, if only that it has no such service. Raises OSError."""
        with suppress(InferenceError):
            self.call("/grpc.health.v1.Health/Check", MESSAGES["Nothing"](), MESSAGES["Nothing"])

    def call(self, method: str, request: Any, answer: Any) -> Any:
        """Send a message to a method, "/SERVICE/METHOD"; return its answer, of the class `answer`.

        Raises InferenceError when the server refuses, ProtocolError when it answers something else, TimeoutError and
        other OSErrors when the network fails.
        """
        call = self._channel.unary_unary(method, request_serializer=type(request).SerializeToString)
        try:
            content = call(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translated(error) from None
        except ValueError as error:  # what grpc raises once the channel is closed
            raise ConnectionAbortedError(f"{self.address}: {error}") from None
        try:
            message = inflated_if_packed(content)
        except ProtocolError as error:
            raise ProtocolError(f"{self.address}: {error}") from None
        return parsed(answer, message, f"{self.address}: its answer")

    def _translated(self, error: Any) -> Exception:
        code, details = error.code(), error.details() or "no reason given"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimeoutError(f"{self.address} did not answer within {self._timeout_s:g} s")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return ConnectionResetError(f"{self.address}: {details}")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "CLIENT: Received message larger" in details:
            return ProtocolError(f"{self.address}: {details}")
        status = _STATUS.get(code, 500)
        return InferenceError(self.address, status, details, retryable=status in (429, 500))
