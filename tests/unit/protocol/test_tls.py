"""Which files make TLS, and the errors for those that don't."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.network.certificates import Authority

from edl_runtime.errors import SpecError
from edl_runtime.protocol.tls import client_trust, open_tls, server_tls_context
from edl_runtime.settings import RuntimeSettings


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def test_nothing_is_said_nothing_is_done() -> None:
    """Without the files there is no TLS."""
    assert client_trust(RuntimeSettings()) is None
    assert server_tls_context(RuntimeSettings()) is None


@pytest.mark.parametrize("name", ["a..b", ".teachers", "x" * 64, ".".join(["x" * 63] * 5)])
def test_a_name_that_no_certificate_can_hold_is_refused(authority: Authority, name: str) -> None:
    """When a student is made, and not each time it connects."""
    with pytest.raises(SpecError, match=f"EDL_TEACHER_TLS_NAME.*{name}"):
        client_trust(RuntimeSettings(teacher_ca=str(authority.ca), teacher_tls_name=name))


@pytest.mark.parametrize("name", ["teachers", "teachers.edl.svc", "x" * 63, "10.0.0.1", "::1", "lehrkräfte.example"])
def test_any_name_or_address_that_certificates_hold_will_do(authority: Authority, name: str) -> None:
    """It is taken as it stands, and the authority of the file is the only one."""
    trust = client_trust(RuntimeSettings(teacher_ca=str(authority.ca), teacher_tls_name=name))
    assert trust is not None
    assert trust.name == name
    assert len(trust.context.get_ca_certs()) == 1


def test_one_that_does_not_answer_may_be_busy_or_speak_no_tls(authority: Authority) -> None:
    """The cause is unknown; the error names the time limit."""
    trust = client_trust(RuntimeSettings(teacher_ca=str(authority.ca)))
    assert trust is not None
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    with theirs, pytest.raises(TimeoutError, match=r"did not answer a TLS handshake.*within 0\.05 s"):
        open_tls(ours, trust, "127.0.0.1", timeout_s=30.0)
    assert ours.fileno() == -1


def test_certificate_and_key_may_stand_in_one_file(authority: Authority, tmp_path: Path) -> None:
    """Then nothing names the key."""
    shown = authority.sign("one")
    both = tmp_path / "both.pem"
    both.write_bytes(shown.key.read_bytes() + shown.cert.read_bytes())
    assert server_tls_context(RuntimeSettings(tls_cert=str(both))) is not None
    assert server_tls_context(RuntimeSettings(tls_cert=str(shown.cert), tls_key=str(shown.key))) is not None


def test_a_file_that_is_no_certificate_is_named(authority: Authority, tmp_path: Path) -> None:
    """Whichever it is, with what is wrong with it."""
    shown, other = authority.sign("one"), authority.sign("two")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("no certificate")
    wrong = [
        (client_trust, {"teacher_ca": str(tmp_path / "none")}, "EDL_TEACHER_CA.*No such file"),
        (client_trust, {"teacher_ca": str(nonsense)}, "EDL_TEACHER_CA.*nonsense.*no certificate"),
        (server_tls_context, {"tls_cert": str(tmp_path / "none")}, "EDL_TLS_CERT.*No such file"),
        (server_tls_context, {"tls_cert": str(nonsense)}, "EDL_TLS_CERT.*nonsense"),
        (server_tls_context, {"tls_cert": str(shown.cert)}, "EDL_TLS_CERT.*private key"),
        (server_tls_context, {"tls_cert": str(shown.cert), "tls_key": str(other.key)}, "EDL_TLS_CERT.*mismatch"),
    ]
    for make, given, said in wrong:
        with pytest.raises(SpecError, match=f"(?i){said}"):
            make(RuntimeSettings(**given))


def test_a_key_with_a_password_is_refused_and_not_asked_for(authority: Authority, tmp_path: Path) -> None:
    """There is nobody to type it."""
    from cryptography.hazmat.primitives import serialization as of

    shown = authority.sign("one")
    key = of.load_pem_private_key(shown.key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    format_, encryption = of.PrivateFormat.PKCS8, of.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(of.Encoding.PEM, format_, encryption))
    with pytest.raises(SpecError, match=r"EDL_TLS_CERT.*needs no password"):
        server_tls_context(RuntimeSettings(tls_cert=str(shown.cert), tls_key=str(locked)))
