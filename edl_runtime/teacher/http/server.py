"""The teacher's HTTP server: the Open Inference Protocol v2 over HTTP/1.1.

The model runs in other processes, so that connections, health and the lease stay responsive meanwhile.
"""

from __future__ import annotations

import asyncio

from edl_runtime.log import get_logger
from edl_runtime.protocol.listener import ConnectionTable
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.teacher.http.admission import MAX_SIDE_BUFFER_BYTES, STALL_CHECK_S, SideBuffers, SlotQueue
from edl_runtime.teacher.http.connection import ClientConnection
from edl_runtime.teacher.http.routes import Routes
from edl_runtime.teacher.metrics import TeacherMetrics
from edl_runtime.teacher.predictor.pool import Runner
from edl_runtime.teacher.shm.arena import Arena
from edl_runtime.teacher.shm.regions import RegionTable

BODY_LIMIT = 1 << 30
"""Most bytes of a request's body, and of an answer's."""

MOST_CONNECTIONS = 512

log = get_logger(__name__)


class HttpServer:
    """The state that all connections of a teacher share."""

    def __init__(
        self,
        signature: ModelSignature,
        runner: Runner,
        arena: Arena,
        metrics: TeacherMetrics | None = None,
        *,
        token: str = "",
        check_s: float = STALL_CHECK_S,
        most_connections: int = MOST_CONNECTIONS,
        max_side_bytes: int = MAX_SIDE_BUFFER_BYTES,
    ) -> None:
        """Serve `signature` by `runner`, whose requests lie in `arena`: the size of its areas limits bodies.

        `metrics` are served at /metrics, with gauges of the server.
        """
        self.metrics = metrics = metrics or TeacherMetrics()
        metrics.gauges["edl_teacher_connections"] = "Connected clients.", lambda: len(self.connections)
        metrics.gauges["edl_teacher_requests_in_flight"] = (
            "Requests that are received, wait, run or are answered.",
            lambda: self.slots.in_flight,
        )
        self.regions = RegionTable()
        self.routes = Routes(signature, token, metrics=metrics, shares_memory=self.regions.available)
        self.runner = runner
        self.arena = arena
        self.slots = SlotQueue(arena)
        self.side_buffers = SideBuffers(max_side_bytes)
        self.draining = False
        self.connections: ConnectionTable[ClientConnection] = ConnectionTable(most_connections)
        self._check_s = check_s

    def connect(self) -> ClientConnection:
        """Return a connection for a new client; called by `edl_runtime.protocol.listener`."""
        return ClientConnection(self)

    async def drain(self, limit_s: float) -> bool:
        """Refuse new requests, answer those in flight, then disconnect. Return whether `limit_s` was enough."""
        self.draining = True
        answered = await self.slots.all_answered(limit_s)
        if not answered:
            log.warning("teacher.not_drained", in_flight=self.slots.in_flight, limit_s=limit_s)
        for connection in self.connections:
            connection.end()
        return answered

    async def watch(self) -> None:
        """Disconnect stalled clients; runs until cancelled."""
        while True:
            await asyncio.sleep(self._check_s)
            self.end_stalled()

    def end_stalled(self) -> None:
        """Check all clients once, and disconnect those that have stalled for too long.

        When bodies arrive too slowly for slots that others wait for, they and all waiting bodies move to side buffers:
        then only complete requests take slots, however many clients are slow.
        """
        # Slots are given back last: by then, incomplete bodies that waited for one are in side buffers, too.
        slow = [connection for connection in self.connections if connection.check_progress()]
        for connection in slow:
            connection.move_aside()
        if slow:
            for connection in self.connections:
                connection.move_aside_if_waiting()
        for connection in slow:
            connection.leave_slot()
