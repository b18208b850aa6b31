"""Hook for connections of type `edl`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from airflow.sdk import BaseHook

from edl_airflow.connection import EdlConnection
from edl_airflow.runtime.spec import BackendRef, LocalBackendRef
from edl_airflow.supervisor import lacks_async_channel
from edl_runtime.errors import EdlError
from edl_runtime.store.errors import RegistryUnavailableError

DEFAULT_CONN_ID = "edl_default"
REDIS_AT_LEAST = (6, 2)


class EdlHook(BaseHook):
    """Looks up an `edl` connection, for `edl_airflow.client.open_client`.

    Raises SpecError for an incomplete connection, and Airflow's AirflowNotFoundException for one that does not exist.

    :param edl_conn_id: the Airflow connection of type `edl`
    """

    conn_name_attr = "edl_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = "edl"
    hook_name = "Elastic Deep Learning"

    def __init__(self, edl_conn_id: str = DEFAULT_CONN_ID) -> None:
        super().__init__()
        self.edl_conn_id = edl_conn_id

    def edl_connection(self) -> EdlConnection:
        """Look the connection up. Blocks, so never call it in an event loop."""
        connection = self.get_connection(self.edl_conn_id)
        return EdlConnection.of(connection, connection.extra_dejson)

    async def aedl_connection(self) -> EdlConnection:
        """Look the connection up from an event loop."""
        if lacks_async_channel():
            return await asyncio.to_thread(self.edl_connection)
        connection = await self.aget_connection(self.edl_conn_id)
        aextra = getattr(connection, "aextra_dejson", None)  # the API server's connections have none
        return EdlConnection.of(connection, await aextra() if aextra else connection.extra_dejson)

    def test_connection(self) -> tuple[bool, str]:
        """Return whether Redis answers and is new enough and the backend works, and a message.

        A Redis that evicts keys when it is full passes with a warning.
        """
        try:
            edl_connection = self.edl_connection()
            backend = _check_backend(edl_connection.place)
            version, warning = asyncio.run(_ask_redis(edl_connection))
        except (EdlError, OSError) as error:
            return False, str(error)
        if version < REDIS_AT_LEAST:
            return (
                False,
                f"Redis is {'.'.join(map(str, version))}, required is {'.'.join(map(str, REDIS_AT_LEAST))} or newer",
            )
        good = f"Redis {'.'.join(map(str, version))} answers, and {backend}"
        return True, f"{good}. Warning: {warning}" if warning else good


def _check_backend(place: BackendRef) -> str:
    """Return a message about the backend. Raises OSError, EdlError."""
    if isinstance(place, LocalBackendRef):
        _check_folder(Path(place.work_dir))
        return f"{place.work_dir} can be written to"
    from edl_airflow.client import backend_for

    jobs = asyncio.run(backend_for(place).list())
    return f"namespace {place.namespace!r} has {len(jobs)} jobs and pools"


async def _ask_redis(edl_connection: EdlConnection) -> tuple[tuple[int, ...], str]:
    """Return Redis's version, and a warning if it may evict keys."""
    from redis.exceptions import RedisError

    from edl_runtime.store import redis_client
    from edl_runtime.store.redis_client import address_of, connect

    client = connect(edl_connection.redis_url)
    try:
        info: dict[str, Any] = await client.info("server")
        warning = await redis_client.eviction_warning(client)
    except (RedisError, OSError) as error:
        raise RegistryUnavailableError(address_of(edl_connection.redis_url), str(error)) from error
    finally:
        await client.aclose()
    return tuple(int(part) for part in str(info["redis_version"]).split(".")[:3]), warning


def _check_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=folder):
        pass
