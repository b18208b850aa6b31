"""TLS between students and teachers: servers' certificates, students' trust, and a stream over TLS."""

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
    """Which teachers' certificates a student accepts: those signed by the authorities of `context` for `name`.

    Without a `name` they have to be for the host of the teacher's address.
    """

    context: ssl.SSLContext
    name: str = ""


def client_trust(settings: RuntimeSettings) -> Trust | None:
    """Return the certificates that students accept; None without TLS. Raises SpecError."""
    if not settings.teacher_ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(settings.teacher_ca)
    except OSError as error:
        allowed = "a PEM file with the certificates of the teachers' authorities"
        raise SpecError(named("teacher_ca"), _file_problem(settings.teacher_ca, error), allowed) from None
    if settings.teacher_tls_name:
        try:  # a name that TLS can't use would otherwise fail at the first connection
            context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=settings.teacher_tls_name)
        except (ValueError, ssl.SSLError):
            allowed = "a host name, as in teachers.edl: labels of 1 to 63 letters with dots between, 255 in all"
            raise SpecError(named("teacher_tls_name"), settings.teacher_tls_name, allowed) from None
    return Trust(context, settings.teacher_tls_name)


def server_tls_context(settings: RuntimeSettings) -> ssl.SSLContext | None:
    """Return a server's certificate; None without TLS. Raises SpecError."""
    if not settings.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None, password="")  # None would prompt for one
    except OSError as error:
        allowed = "a PEM file with a certificate, and in it or in EDL_TLS_KEY its private key, which needs no password"
        raise SpecError(named("tls_cert"), _file_problem(settings.tls_cert, error), allowed) from None
    return context


def _file_problem(path: str, error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or error
    return f"{path} ({str(reason).lower().replace('_', ' ')})"


def open_tls(connected: socket.socket, trust: Trust, host: str, timeout_s: float) -> TensorStream:
    """Return a stream over a connection to `host`, which is closed if the teacher can't be trusted.

    Raises ConnectionError or TimeoutError with the reason, and other OSErrors when the network fails.
    """
    name, limit_s = trust.name or host, connected.gettimeout()
    try:
        return _TlsStream(trust.context.wrap_socket(connected, server_hostname=name), timeout_s)
    except ssl.SSLCertVerificationError as error:
        raise ConnectionError(
            f"its certificate is not one that EDL_TEACHER_CA trusts for {name!r}: {error.verify_message.rstrip('.')}"
        ) from None
    except TimeoutError:
        raise TimeoutError(
            f"it did not answer a TLS handshake, which EDL_TEACHER_CA requires, within {limit_s:g} s; it may lack TLS"
        ) from None
    except ssl.SSLEOFError:
        raise ConnectionError(
            "it closed the connection during the TLS handshake, which EDL_TEACHER_CA requires"
        ) from None
    except ssl.SSLError as error:
        raise ConnectionError(f"the TLS handshake, which EDL_TEACHER_CA requires, failed: {error.reason}") from None
    finally:
        connected.close()  # no effect after `wrap_socket`, which detaches it


class _TlsStream(TensorStream):
    """A stream over TLS, which copies the bytes in records of up to 16 KB."""

    def __init__(self, connected: ssl.SSLSocket, timeout_s: float) -> None:
        super().__init__(connected, timeout_s)
        connected.settimeout(timeout_s)  # TLS repeats a call that the kernel's timeout ends

    def _sendmsg(self, buffers: Sequence[bytes | memoryview | Array]) -> int:
        """Send the first buffer, or as many as fit into one TLS record."""
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

    def _receive(self, into: memoryview, flags: int = 0) -> int:  # noqa: ARG002 - TLS decides the sizes
        try:
            return super()._receive(into)
        except TimeoutError:
            raise self._timed_out() from None

    def abort(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # SSLSocket.shutdown would drop TLS, and the other thread would send in clear
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
