"""Settings from the environment and to it."""

from __future__ import annotations

import pytest

from edl_runtime.errors import SpecError
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.settings import RuntimeSettings, split_secrets

TIMES = ["EDL_TEACHER_WAIT_S", "EDL_TEACHER_TIMEOUT_S", "EDL_LEASE_TTL_S"]
BAD_TOKENS = ["päss", "a\r\nX-Evil: 1", "secret\n", "two words", "ta\tb", "nul\0", "del\x7f"]


def test_what_is_set_is_read_back() -> None:
    """An instance gets from its environment what the backend put there; defaults are left out."""
    settings = RuntimeSettings(
        redis_url="redis://:pw@h:1",
        job="job",
        instance=2,
        teacher_wait_s=0.0,
        teacher_timeout_s=1.5,
        teacher_token="t~!",
        discovery_url="https://h:2",
        discovery_token="d~!",
        metrics_port=9400,
        teacher_ca="/tls/ca.crt",
        teacher_tls_name="teachers",
        tls_cert="/tls/tls.crt",
        tls_key="/tls/tls.key",
    )
    environ = settings.to_env()
    assert environ["EDL_TEACHER_TIMEOUT_S"] == "1.5"
    assert "EDL_LEASE_TTL_S" not in environ
    assert RuntimeSettings.from_env(environ) == settings
    assert RuntimeSettings.from_env({}) == RuntimeSettings()


@pytest.mark.parametrize("variable", TIMES)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "soon"])
def test_a_time_that_nobody_can_wait_for_is_refused(variable: str, text: str) -> None:
    """The error names the variable: a wait of nan seconds would never end."""
    with pytest.raises(SpecError, match=variable):
        RuntimeSettings.from_env({variable: text})


@pytest.mark.parametrize(("variable", "allowed"), [("EDL_METRICS_PORT", "whole number"), (TIMES[0], "of seconds")])
def test_what_is_no_number_is_told_what_is_allowed(variable: str, allowed: str) -> None:
    """In words, and not by the name of a type."""
    with pytest.raises(SpecError, match=f"{variable}: got 'abc', allowed is a .*{allowed}"):
        RuntimeSettings.from_env({variable: "abc"})


@pytest.mark.parametrize("variable", TIMES[1:])
def test_a_limit_of_nothing_is_refused(variable: str) -> None:
    """Only the wait for teachers may be 0: then there is none."""
    with pytest.raises(SpecError, match=variable):
        RuntimeSettings.from_env({variable: "0"})


@pytest.mark.parametrize("text", ["-1", "65536", "9400.5", "metrics"])
def test_a_port_that_does_not_exist_is_refused(text: str) -> None:
    """An empty one is none."""
    with pytest.raises(SpecError, match="EDL_METRICS_PORT"):
        RuntimeSettings.from_env({"EDL_METRICS_PORT": text})
    assert RuntimeSettings.from_env({"EDL_METRICS_PORT": ""}).metrics_port == 0


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(token: str) -> None:
    """Wherever it comes from: it could add a header, or be another one at the other end."""
    with pytest.raises(SpecError, match="EDL_TEACHER_TOKEN") as from_environment:
        RuntimeSettings.from_env({"EDL_TEACHER_TOKEN": token})
    with pytest.raises(SpecError, match="EDL_DISCOVERY_TOKEN") as of_discovery:
        RuntimeSettings.from_env({"EDL_DISCOVERY_TOKEN": token})
    with pytest.raises(SpecError, match="token") as from_code:
        TeacherConnection("127.0.0.1:1", token=token)
    for caught in (from_environment, of_discovery, from_code):
        assert token.strip() not in str(caught.value)
        assert caught.value.given != token


@pytest.mark.parametrize(("variable", "needed"), [("TLS_KEY", "TLS_CERT"), ("TEACHER_TLS_NAME", "TEACHER_CA")])
def test_half_of_tls_is_refused(variable: str, needed: str) -> None:
    """A name alone would leave a student without TLS that was to have it."""
    with pytest.raises(SpecError, match=f"EDL_{variable}.*EDL_{needed}"):
        RuntimeSettings.from_env({f"EDL_{variable}": "given"})


def test_secrets_are_told_apart() -> None:
    """Redis' URL and the tokens never go where plain settings go."""
    settings = RuntimeSettings(
        redis_url="redis://:pw@h:1", teacher_token="t", discovery_token="d", monitor_token="m", pool="p"
    )
    plain, secret = split_secrets(settings.to_env())
    assert plain == {"EDL_POOL": "p"}
    assert set(secret) == {"EDL_DISCOVERY_TOKEN", "EDL_MONITOR_TOKEN", "EDL_REDIS_URL", "EDL_TEACHER_TOKEN"}
