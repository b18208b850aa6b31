"""A Redis that has everything that it answered on disk, as a queue of tasks needs it."""

from __future__ import annotations

from edl_runtime.store.redis_server import RedisServer


class DurableRedis(RedisServer):
    """After `kill`, `start` starts it with all that it had acknowledged."""

    def _configuration(self, port: int) -> str:
        return super()._configuration(port).replace("appendonly no", "appendonly yes\nappendfsync always")
