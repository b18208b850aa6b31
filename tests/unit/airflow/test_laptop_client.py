"""What the client makes of an API server's errors."""

from __future__ import annotations

import httpx
import pytest
from laptop.client import AirflowClient, ApiError

LOCKED = httpx.Response(500, json={"detail": {"reason": "Database error", "message": "Serious error."}})
BROKEN = httpx.Response(500, json={"detail": "Internal Server Error"})
GOOD = httpx.Response(200, json={"is_paused": True})


def _client(*answers: httpx.Response) -> AirflowClient:
    """One whose server gives these answers in turn."""
    left = iter(answers)
    client = AirflowClient("http://airflow.example", "admin", "secret")
    client._http = httpx.Client(base_url="http://airflow.example", transport=httpx.MockTransport(lambda _: next(left)))
    return client


@pytest.mark.slow
def test_a_locked_database_is_asked_again() -> None:
    """Airflow on SQLite refuses what comes while it waits for itself; a moment later it takes it."""
    with _client(LOCKED, LOCKED, GOOD) as client:
        assert client.dag("some") == {"is_paused": True}


def test_another_error_of_the_server_is_raised_at_once() -> None:
    """What only looks alike isn't tried again."""
    with _client(BROKEN) as client, pytest.raises(ApiError, match="with 500"):
        client.dag("some")
