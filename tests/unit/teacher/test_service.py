"""A teacher's options, and those that are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from click.testing import CliRunner

from edl_runtime.cli.teacher import teacher
from edl_runtime.errors import SpecError


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    """The command configures them."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("logs_as_before")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "host: got '0.0.0.0', allowed is 127.0.0.1"),
        (["--pool", "Bad Name"], "pool: got 'Bad Name'"),
        (["--pool", "pool"], "EDL_REDIS_URL: got ''"),
        (["--weight", "0"], "weight: got 0.0"),
        (["--hung-after", "nan"], "hung_after: got nan"),
        (["--hung-after", "0"], "hung_after: got 0.0"),
        (["--advertise", "host:80"], "advertise: got 'host:80'"),
        (["--gpu-ids", "all"], "gpu_ids: got 'all'"),
        (["--paddle-port", "9292"], "paddle_port: got 9292, allowed is none where EDL_TLS_CERT is set"),
    ],
)
def test_what_a_restart_can_not_mend_is_said_before_the_model_is_loaded(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the option and what is allowed."""
    monkeypatch.setenv("EDL_TLS_CERT", "tls.crt")
    result = CliRunner().invoke(teacher, ["--model", "support.models:arithmetic", *flags])
    assert isinstance(result.exception, SpecError)
    assert message in str(result.exception)
