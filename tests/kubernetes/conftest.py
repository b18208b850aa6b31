"""What tests on a real cluster share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from kubernetes_cluster import Cluster, RedisService


@pytest.fixture(scope="session")
def redis_service(cluster: Cluster) -> Iterator[RedisService]:
    """A Redis in a pod, with a password, behind a Service."""
    with RedisService(cluster, secrets.token_hex(8)) as service:
        yield service
