"""TLS between students and teachers: what servers show, what students believe, and a stream over it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edl_runtime.errors import SpecError
from edl_runtime.protocol.tensor_stream import TensorStream, bytes_of
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings, named

_RECORD = 16 * 1024
"""Most bytes that TLS sends in one piece."""


class Trust(NamedTuple):
    """Which certificates a student takes for a teacher's: those by the authorities of `context` that hold `name`.

    Without a `name` they have to hold the host that the teacher is reached at.
    """

    context: ssl.SSLContext
    name: str = ""


def client_trust(settings: RuntimeSettings) -> Trust | None:
    """Return what students ask of their teachers; None where they don't speak TLS. Raises SpecError."""
    if not settings.teacher_ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(settings.teacher_ca)
    except OSError as error:
        allowed = "a PEM file with the certificates of who signs for teachers"
        raise SpecError(named("teacher_ca"), _file_problem(settings.teacher_ca, error), allowed) from None
    if settings.teacher_tls_name:
        _check_name(context, settings.teacher_tls_name)
    return Trust(context, settings.teacher_tls_name)


def _check_name(context: ssl.SSLContext, name: str) -> None:
    """Have TLS itself say whether it can ask for a name, which it says else when a student connects."""
    try:
        context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=name)
    except (ValueError, ssl.SSLError):
        allowed = "a host name, as in teachers.edl: labels of 1 to 63 letters with dots between, 255 in all"
        raise SpecError(named("teacher_tls_name"), name, allowed) from None


def server_tls_context(settings: RuntimeSettings) -> ssl.SSLContext | None:
    """Return what a server shows its clients; None where it does not speak TLS. Raises SpecError."""
    if not settings.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None, password="")  # else it would ask for one
    except OSError as error:
        allowed = "a PEM file with a certificate, and in it or in EDL_TLS_KEY its private key, which needs no password"
        raise SpecError(named("tls_cert"), _file_problem(settings.tls_cert, error), allowed) from None
    return context


def _file_problem(path: str, error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or error
    return f"{path} ({str(reason).lower().replace('_', ' ')})"


def open_tls(connected: socket.socket, trust: Trust, host: str, timeout_s: float) -> TensorStream:
    """Return a stream over a connection to `host`, which is closed if the other end is no teacher to be trusted.

    Raises ConnectionError or TimeoutError that says why it is none, and other OSErrors when the network fails.
    """
    name, limit_s = trust.name or host, connected.gettimeout()
    try:
        return _TlsStream(trust.context.wrap_socket(connected, server_hostname=name), timeout_s)
    except ssl.SSLCertVerificationError as error:
        raise ConnectionError(
            f"its certificate is not one that EDL_TEACHER_CA trusts for {name!r}: {_verify_problem(error)}"
        ) from None
    except TimeoutError:
        raise TimeoutError(
            f"it did not answer within {limit_s:g} s when asked for TLS, as EDL_TEACHER_CA has it; it may speak none"
        ) from None
    except ssl.SSLEOFError:
        raise ConnectionError("it closed the connection when asked for TLS, as EDL_TEACHER_CA has it") from None
    except ssl.SSLError as error:
        raise ConnectionError(f"it speaks no TLS that fits, which EDL_TEACHER_CA asks for: {error.reason}") from None
    finally:
        connected.close()  # which the new socket has taken over, if there is one


def _verify_problem(error: ssl.SSLCertVerificationError) -> str:
    return error.verify_message.rstrip(".")


class _TlsStream(TensorStream):
    """A stream whose bytes are copied on the way, 16 KB at a time, as TLS has it."""

    def __init__(self, connected: ssl.SSLSocket, timeout_s: float) -> None:
        super().__init__(connected, timeout_s)
        connected.settimeout(timeout_s)  # for the kernel's own ends no call: TLS would begin it again

    def _sendmsg(self, buffers: Sequence[bytes | memoryview | Array]) -> int:
        """Send the first of them, or as many as one piece of TLS has room for."""
        record: list[memoryview] = []
        size = 0
        for buffer in buffers:
            part = bytes_of(buffer) if isinstance(buffer, np.ndarray) else memoryview(buffer)
            if record and size + len(part) > _RECORD:
                break
            record.append(part)
            size += len(part)
        try:
            return self._socket.send(record[0] if len(record) == 1 else b"".join(record))
        except TimeoutError:
            raise self._timed_out() from None

    def _receive(self, into: memoryview, flags: int = 0) -> int:  # noqa: ARG002 - pieces are as large as TLS has them
        try:
            return super()._receive(into)
        except TimeoutError:
            raise self._timed_out() from None

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # not the SSLSocket's own, after which the other thread would send in clear
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
