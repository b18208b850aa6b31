"""Teachers and the discovery endpoint over TLS: who speaks it, with whom, and what is said when it fails."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.network.certificates import Authority, Shown
from support.registry.discovery_process import running_discovery
from support.students.readers import Batches, reader_of
from support.teachers.process import Teacher, running_teacher, starting_teacher

from edl_runtime.discovery.link import Link
from edl_runtime.distill import Discovered
from edl_runtime.errors import DiscoveryUnavailableError, InferenceError, NoTeacherError
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.tls import trust_of
from edl_runtime.settings import RuntimeSettings

NAME = "teachers.tests"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def shown(authority: Authority) -> Shown:
    """What teachers show: a name that is not the address at which they are reached."""
    return authority.sign(NAME)


@pytest.fixture(scope="module")
def echo(shown: Shown) -> Iterator[Teacher]:
    """A teacher that speaks TLS alone."""
    with running_teacher("support.models:echo", env=shown.to_env()) as teacher:
        yield teacher


def student(authority: Authority, name: str = NAME, timeout_s: float = 10.0) -> RuntimeSettings:
    return RuntimeSettings(
        teacher_ca=str(authority.ca), teacher_tls_name=name, teacher_wait_s=2.0, teacher_timeout_s=timeout_s
    )


def connection(address: str, settings: RuntimeSettings) -> TeacherConnection:
    return TeacherConnection(address, timeout_s=settings.teacher_timeout_s, trust=trust_of(settings))


@pytest.mark.parametrize("shape", [(1, 1), (3, 20_000), (8, 4_000_000)])
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
        assert asked._sharing._region is not None


def test_a_refused_request_is_answered_before_the_end(echo: Teacher, authority: Authority) -> None:
    """The teacher, which disconnects then, says why; and the connection is made anew."""
    with connection(echo.address, student(authority)) as asked:
        with pytest.raises(InferenceError, match="nobody"):
            asked.infer({"nobody": np.ones((1, 1), np.uint8)}, ["x"])
        assert asked.ready()
    other = TeacherConnection(echo.address, model="another", trust=trust_of(student(authority)))
    with other, pytest.raises(InferenceError, match="another"):
        other.infer({"x": np.ones((1, 1 << 20), np.uint8)}, ["x"])


def test_a_student_reads_from_a_pool(
    settings: RuntimeSettings, authority: Authority, shown: Shown, tmp_path: Path
) -> None:
    """With the name that all certificates hold, whatever addresses teachers register; other students don't."""
    pooled = {**settings.to_env(), **shown.to_env()}
    batches = Batches(20)
    with running_teacher("support.models:slow", "--pool", "pool", env=pooled):
        trusting = msgspec.structs.replace(settings, teacher_ca=str(authority.ca), teacher_tls_name=NAME)
        with reader_of(batches, Discovered("pool"), trusting) as reader:
            batches.check(list(reader))
        elsewhere = Authority(tmp_path / "elsewhere")
        for others, said in (
            (settings, "closed the connection"),
            (msgspec.structs.replace(trusting, teacher_ca=str(elsewhere.ca)), "unable to get local issuer"),
            (msgspec.structs.replace(trusting, teacher_tls_name="redis.tests"), "redis.tests"),
        ):
            hasty = msgspec.structs.replace(others, teacher_wait_s=1.0)
            with pytest.raises(NoTeacherError, match=said), reader_of(batches, Discovered("pool"), hasty) as reader:
                list(reader)


def test_without_a_name_the_certificate_holds_the_host(authority: Authority) -> None:
    """As everywhere on the web."""
    with running_teacher("support.models:echo", env=authority.sign("127.0.0.1").to_env()) as teacher:
        with connection(teacher.address, student(authority, name="")) as asked:
            assert asked.ready()
        with pytest.raises(ConnectionError, match=r"trusts for 'teachers\.tests'"):
            connection(teacher.address, student(authority)).open()


def test_a_teacher_without_tls_is_told_apart(authority: Authority) -> None:
    """It waits for the student's request, as a busy one may seem to that speaks it; both are said."""
    with (
        running_teacher("support.models:echo") as teacher,
        pytest.raises(TimeoutError, match="asked for TLS, as EDL_TEACHER_CA has it; it may speak none"),
    ):
        connection(teacher.address, student(authority, timeout_s=1.0)).open()


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
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"], ids=["silent", "answering"]
)
def test_a_teacher_without_tls_never_gets_to_see_a_token(authority: Authority, answer: bytes) -> None:
    """Nor anything else but that TLS is asked for; whether it waits or answers."""
    trust = trust_of(student(authority))
    with plain(answer) as (address, heard):
        asked = TeacherConnection(address, token="never-to-be-seen", timeout_s=1.0, trust=trust)
        with closing(asked), pytest.raises(OSError, match="EDL_TEACHER_CA"):
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


@contextmanager
def silent(authority: Authority, *, after_handshake: bool) -> Iterator[str]:
    """A server that takes a connection, and then says nothing more."""
    import ssl

    shown = authority.sign("127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.cert, shown.key)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            taken, _ = listener.accept()
            with taken:
                if after_handshake:
                    with context.wrap_socket(taken, server_side=True):
                        done.wait()
                else:
                    done.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("after_handshake", [True, False])
def test_one_that_is_silent_is_given_up_in_time(authority: Authority, after_handshake: bool) -> None:  # noqa: FBT001
    """In the handshake or after it."""
    with silent(authority, after_handshake=after_handshake) as address:
        asked = connection(address, student(authority, name="", timeout_s=0.5))
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            asked.ready()
        assert time.monotonic() - begun < 5


def test_closing_ends_a_call_under_way(authority: Authority) -> None:
    """From another thread, at once."""
    with silent(authority, after_handshake=True) as address:
        asked = connection(address, student(authority, name="", timeout_s=30.0))
        asked.open()
        closer = threading.Timer(0.3, asked.close)
        closer.start()
        begun = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011 - whichever
            asked.ready()
        assert time.monotonic() - begun < 10
        closer.join()


@pytest.mark.parametrize("fault", ["missing", "mixed up"])
def test_a_certificate_that_can_not_be_shown_is_named(authority: Authority, tmp_path: Path, fault: str) -> None:
    """The teacher ends with 78, as for all that a restart can't mend."""
    one, other = authority.sign("one"), authority.sign("other")
    env = {"EDL_TLS_CERT": str(tmp_path / "none"), "EDL_TLS_KEY": ""}
    if fault == "mixed up":
        env = Shown(one.cert, other.key).to_env()
    with starting_teacher("support.models:echo", env=env) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 78
    assert "EDL_TLS_CERT" in said


async def test_the_discovery_endpoint_speaks_https(
    settings: RuntimeSettings, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells its URL; who trusts its certificate is served."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    with running_discovery(settings, env=authority.sign("127.0.0.1").to_env()) as endpoint:
        assert endpoint.url.startswith("https://")
        async with Link(endpoint.url, "") as link:
            assert await link.pools() == []
        async with Link(endpoint.url.replace("https", "http"), "") as link:
            with pytest.raises(DiscoveryUnavailableError):
                await link.pools()
