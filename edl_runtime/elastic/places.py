"""Where a job keeps its checkpoints, held by each of its agents for it; see `edl_runtime.checkpoint.place`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from edl_runtime.checkpoint.place import PlaceLease
from edl_runtime.checkpoint.storage import storage_at
from edl_runtime.elastic.messages import Note
from edl_runtime.errors import (
    CheckpointHeldError,
    CheckpointStoreError,
    MalformedRecordError,
    RegistryUnavailableError,
)
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from redis.asyncio import Redis

COMING_BACK_S = 1.0
"""How long an agent waits where Redis did not answer: jobs that have held their places come back sooner."""
WAITS_UNTOLD_S = 5.0
"""How long an agent waits for a place before it says what for."""

log = get_logger(__name__)


class Places:
    """The places of one agent's job: that of EDL_CHECKPOINT, and where its script says otherwise. `run` it in a task.

    `told` is given what the job's owner is to know, `changed` called when something else is to be asked here.
    """

    def __init__(
        self, client: Redis, settings: RuntimeSettings, *, told: Callable[[Note], None], changed: Callable[[], None]
    ) -> None:
        self._client = client
        self._settings = settings
        self._told = told
        self._changed = changed
        self._settled: dict[str, bool] = {}
        self._added: asyncio.Queue[str] = asyncio.Queue()
        self._refusals: list[CheckpointHeldError | MalformedRecordError] = []

    @property
    def are_held(self) -> bool:
        """Whether the job may train, as far as its places are concerned."""
        return all(self._settled.values())

    def add(self, url: str) -> None:
        """Have the job hold this place as well, if it does not yet; "" for nowhere."""
        if not url:
            return
        place = storage_at(url).url
        if place not in self._settled:
            self._settled[place] = False
            self._added.put_nowait(place)

    def take_refusals(self) -> list[CheckpointHeldError | MalformedRecordError]:
        """Return which places turned out to be other jobs', or nobody knows whose, since this was last asked."""
        refusals, self._refusals = self._refusals, []
        return refusals

    async def run(self) -> None:
        """Hold the places until cancelled, and let go of them."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._hold(await self._added.get()))

    async def _hold(self, url: str) -> None:
        lease = PlaceLease(self._client, self._settings, url)
        try:
            await self._take(lease, url)
        except (CheckpointHeldError, MalformedRecordError) as error:
            self._refusals.append(error)
        except CheckpointStoreError as error:  # a script that writes there finds that out by itself
            log.warning("checkpoint.place_not_held", url=url, cause=str(error))
            self._settle(url)
            return
        self._settle(url)
        await lease.keep(self._tell_lost)

    async def _take(self, lease: PlaceLease, url: str) -> None:
        since, told = time.monotonic(), False
        while True:
            try:
                return await lease.take()
            except RegistryUnavailableError as error:  # that Redis is away the agent's loop says, too
                if not told and time.monotonic() >= since + WAITS_UNTOLD_S:
                    log.warning("checkpoint.place_awaited", url=url, cause=str(error))
                    text = (
                        f"nothing is trained before this job holds {url} by the keys edl:{{place/…}} of Redis: {error}"
                    )
                    self._told(Note(text=text))
                    told = True
                await asyncio.sleep(COMING_BACK_S)

    def _settle(self, url: str) -> None:
        self._settled[url] = True
        self._changed()

    def _tell_lost(self, error: CheckpointHeldError | MalformedRecordError) -> None:
        log.error("checkpoint.place_lost", cause=str(error))
        how = "That one took the place while this job's hold on it was lost; this job"
        if isinstance(error, MalformedRecordError):
            how = "This job no longer holds the place of its checkpoints by that; it"
        self._told(Note(text=f"{error}. {how} goes on meanwhile"))
