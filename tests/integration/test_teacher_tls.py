"""Teachers over TLS, and the errors when it fails."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.network.certificates import Authority, CertificateFiles
from support.students.readers import Batches, reader_of
from support.teachers.process import PATIENCE_S, Teacher, running_teacher

from edl_runtime.distill import Discovered
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.tls import client_trust
from edl_runtime.settings import RuntimeSettings

NAME = "teachers.tests"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def shown(authority: Authority) -> CertificateFiles:
    """What teachers show: a name that is not the address at which they are reached."""
    return authority.sign(NAME)


@pytest.fixture(scope="module")
def echo(shown: CertificateFiles) -> Iterator[Teacher]:
    """A teacher that speaks TLS alone."""
    with running_teacher("support.models:echo", env=shown.to_env()) as teacher:
        yield teacher


def student(authority: Authority, name: str = NAME, timeout_s: float = PATIENCE_S) -> RuntimeSettings:
    return RuntimeSettings(
        teacher_ca=str(authority.ca), teacher_tls_name=name, teacher_wait_s=2.0, teacher_timeout_s=timeout_s
    )


def connection(address: str, settings: RuntimeSettings) -> TeacherConnection:
    return TeacherConnection(address, timeout_s=settings.teacher_timeout_s, trust=client_trust(settings))


@pytest.mark.parametrize("shape", [(1, 1), (3, 20_000), (8, 500_000)])
def test_tensors_of_any_size_go_both_ways(echo: Teacher, authority: Authority, shape: tuple[int, int]) -> None:
    """One piece of TLS or thousands; and more than one request a connection."""
    x = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    with connection(echo.address, student(authority)) as asked:
        for _ in range(2):
            np.testing.assert_array_equal(asked.infer({"x": x}, ["x"])["x"], x)


def test_rows_go_without_being_stacked(echo: Teacher, authority: Authority) -> None:
    """Also when there are more of them than the kernel takes at a time, and some are empty."""
    rows = [np.full(7, number % 251, np.uint8) for number in range(3000)]
    with connection(echo.address, student(authority)) as asked:
        np.testing.assert_array_equal(asked.infer({"x": rows}, ["x"])["x"], np.stack(rows))
        empty = [np.empty(0, np.uint8) for _ in range(5)]
        assert asked.infer({"x": empty}, ["x"])["x"].shape == (5, 0)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is for Linux")
def test_large_requests_on_one_machine_lie_in_shared_memory(echo: Teacher, authority: Authority) -> None:
    """As without TLS; what is shared is agreed on over the connection."""
    x = np.ones((4, 1 << 20), np.uint8)
    with connection(echo.address, student(authority)) as asked:
        asked.signature()
        np.testing.assert_array_equal(asked.infer({"x": x}, ["x"])["x"], x)
        assert asked._shared_memory._region is not None


def test_a_refused_request_is_answered_before_the_end(echo: Teacher, authority: Authority) -> None:
    """The teacher, which disconnects then, logs why; and the client connects again."""
    with connection(echo.address, student(authority)) as asked:
        with pytest.raises(InferenceError, match="nobody"):
            asked.infer({"nobody": np.ones((1, 1), np.uint8)}, ["x"])
        assert asked.ready()
    other = TeacherConnection(echo.address, model="another", trust=client_trust(student(authority)))
    with other, pytest.raises(InferenceError, match="another"):
        other.infer({"x": np.ones((1, 1 << 20), np.uint8)}, ["x"])


def test_a_student_reads_from_a_pool(settings: RuntimeSettings, authority: Authority, shown: CertificateFiles) -> None:
    """With the name that all certificates hold, whatever addresses teachers register."""
    batches = Batches(20)
    with running_teacher("support.models:slow", "--pool", "pool", env={**settings.to_env(), **shown.to_env()}):
        trusting = msgspec.structs.replace(settings, teacher_ca=str(authority.ca), teacher_tls_name=NAME)
        with reader_of(batches, Discovered("pool"), trusting) as reader:
            batches.check(list(reader))


def test_a_student_trusts_no_other_authority_and_no_other_name(
    echo: Teacher, authority: Authority, tmp_path: Path
) -> None:
    """The error names what is wrong with the certificate; without a name it has to hold the host."""
    elsewhere = Authority(tmp_path / "elsewhere")
    for wrong, said in (
        (student(elsewhere), "unable to get local issuer"),
        (student(authority, "redis.tests"), r"trusts for 'redis\.tests'"),
        (student(authority, ""), "127.0.0.1"),
    ):
        with closing(connection(echo.address, wrong)) as asked, pytest.raises(ConnectionError, match=said):
            asked.open()


@contextmanager
def plain(answer: bytes) -> Iterator[tuple[str, bytearray]]:
    """A server that speaks no TLS: its address, and what it is sent until the other end leaves."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            taken, _ = listener.accept()
            with taken:
                taken.sendall(answer)
                with suppress(ConnectionError):
                    while some := taken.recv(65536):
                        heard.extend(some)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", heard
        finally:
            thread.join()


@pytest.mark.parametrize(
    ("answer", "within_s", "error", "said"),
    [
        (b"", 0.5, TimeoutError, "did not answer a TLS handshake"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", PATIENCE_S, OSError, "EDL_TEACHER_CA"),
    ],
    ids=["silent", "answering"],
)
def test_a_teacher_without_tls_never_gets_to_see_a_token(
    authority: Authority, answer: bytes, within_s: float, error: type[OSError], said: str
) -> None:
    """Nor anything else but that TLS is asked for; whether it waits, as a busy one may seem to, or answers."""
    trust = client_trust(student(authority))
    with plain(answer) as (address, heard):
        asked = TeacherConnection(address, token="never-to-be-seen", timeout_s=within_s, trust=trust)
        with closing(asked), pytest.raises(error, match=said):
            asked.ready()
    assert heard[:1] == b"\x16"  # a handshake
    assert b"never-to-be-seen" not in heard
    assert b"HTTP" not in heard


def test_a_student_without_tls_gets_nothing(echo: Teacher, authority: Authority) -> None:
    """The teacher ends the connection, and serves others on."""
    with pytest.raises(ConnectionError, match="closed the connection"):
        TeacherConnection(echo.address).ready()
    with connection(echo.address, student(authority)) as asked:
        assert asked.ready()
