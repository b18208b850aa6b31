"""A Kubernetes backend that is patient, for tests on a busy machine."""

from __future__ import annotations

import math

import pytest

from edl_runtime.backends.kubernetes import backend, informer


@pytest.fixture(autouse=True)
def api_server_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than users do for nodes and last lines, and take no pause of this process for an outage."""
    monkeypatch.setattr(backend, "NODES_WAIT_S", 60.0)
    monkeypatch.setattr(backend, "LOG_COLLECT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(informer, "SILENCE_REPORTED_S", math.inf)
