"""Clients of teachers, discovery and Redis with wrong TLS settings: python tls_clients.py POOL.

Run with the settings of a student that may connect; /wrong/ca.crt is another authority's. Prints one line of JSON: the
result of each client, or its error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.tls import client_trust
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryTimeoutError
from edl_runtime.store.redis_client import connect

WRONG = "/wrong/ca.crt"
PATIENCE_S = 60.0
SETTINGS = RuntimeSettings.from_env(os.environ)


async def members(url: str, pool: str) -> list[str]:
    """Return the addresses in the pool; a Redis on a busy machine may need several tries to answer in time."""
    deadline = time.monotonic() + PATIENCE_S
    async with connect(url) as client:
        while True:
            try:
                return [member.address for member in await Directory(client, SETTINGS.namespace).members(pool)]
            except RegistryTimeoutError:
                if time.monotonic() > deadline:
                    raise


def is_ready(address: str, settings: RuntimeSettings) -> bool:
    """Ask a teacher whether it is ready."""
    token = settings.teacher_token
    with TeacherConnection(address, token=token, timeout_s=PATIENCE_S, trust=client_trust(settings)) as teacher:
        return teacher.ready()


def result_of(attempt: Callable[[], object]) -> str:
    """Return an attempt's result, or its error."""
    try:
        return repr(attempt())
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}"


def main(pool: str) -> None:
    """Try all clients and print the results."""
    url = SETTINGS.redis_url
    (address,) = asyncio.run(members(url, pool))
    plain_redis = url.replace("rediss://", "redis://")
    discovery = urlsplit(SETTINGS.discovery_url).netloc

    def with_other(**settings: str) -> Callable[[], object]:
        return lambda: is_ready(address, msgspec.structs.replace(SETTINGS, **settings))

    results = {
        "right settings": result_of(with_other()),
        "HTTP to a teacher": result_of(
            lambda: urllib.request.urlopen(f"http://{address}/v2/health/live", timeout=PATIENCE_S)
        ),
        "student without TLS": result_of(with_other(teacher_ca="", teacher_tls_name="")),
        "student of another authority": result_of(with_other(teacher_ca=WRONG)),
        "teacher of another name": result_of(with_other(teacher_tls_name="edl-redis")),
        "HTTP to discovery": result_of(
            lambda: urllib.request.urlopen(f"http://{discovery}/v1/health/live", timeout=PATIENCE_S)
        ),
        "Redis without TLS": result_of(lambda: asyncio.run(members(plain_redis, pool))),
    }
    os.environ["SSL_CERT_FILE"] = WRONG
    results["Redis by another authority"] = result_of(lambda: asyncio.run(members(url, pool)))
    sys.stdout.write(f"{json.dumps(results)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
