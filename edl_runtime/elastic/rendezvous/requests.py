"""What others ask of a job's trainers: to end with a checkpoint, or to write one now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from edl_runtime.elastic.errors import NoCheckpointError
from edl_runtime.elastic.rendezvous.group_status import SILENT_S, group_status, has_live_agents
from edl_runtime.elastic.rendezvous.redis_store import BLOCK_S, Event
from edl_runtime.parsing import JsonDecoder
from edl_runtime.store import keys
from edl_runtime.store.redis_client import malformed_if_unreadable, run_script, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

DESERTED_S = 30.0
"""How long a checkpoint is awaited while no agent lives: a lost one is started again meanwhile."""

REFUSALS = {
    "unknown": "its Redis knows no trainers of that name; EDL_REDIS_URL and EDL_NAMESPACE name another",
    "ended": "it has ended",
    "absent": "none of its trainers runs: it was stopped, or it is suspended, and `edl resize` resumes it",
    "early": "its script has not called elastic.init yet; unchanged scripts never do, and write checkpoints themselves",
    "keeps none": "it keeps no checkpoints; give it a location, by EDL_CHECKPOINT or elastic.init(checkpoint=…)",
}
"""Why `group_checkpoint.lua` refuses a request."""

_event_decoder = JsonDecoder(Event)


async def request_stop(client: Redis, namespace: str, job: str, reason: str) -> bool:
    """Ask a job's workers to end with a checkpoint; the first reason counts.

    False when none is registered. Repeat it until they have ended: dead instances are detected only after repeated
    requests. Raises RegistryUnavailableError.
    """
    return bool(await run_script(client, "group_stop", keys.group_keys(namespace, job), [reason or "asked to stop"]))


async def request_checkpoint(client: Redis, namespace: str, job: str) -> int:
    """Ask a job's workers for a checkpoint at their next step, and return the request's number.

    One checkpoint answers all requests that were made before it begins. Raises NoCheckpointError where there can be
    none, RegistryUnavailableError.
    """
    silent_ms = round(SILENT_S * 1000)
    answer = str(await run_script(client, "group_checkpoint", keys.group_keys(namespace, job), [silent_ms]))
    if answer in REFUSALS:
        raise NoCheckpointError(job, REFUSALS[answer])
    return int(answer)


async def await_checkpoint(client: Redis, namespace: str, job: str, request: int) -> Event:
    """Wait for the checkpoint that answers a request, and return its event: step, epoch, generation and `url`.

    Raises NoCheckpointError when it can't be written, or the job ends before; MalformedRecordError,
    RegistryUnavailableError.
    """
    state, fields = keys.group_state(namespace, job), ["checkpoint_asked", "checkpoint_answered", "checkpoint_answer"]
    there_at = time.monotonic()
    while True:
        with unavailable_if_lost(client, state):
            found: Any = client.hmget(state, fields)
            asked, answered, answer = await found
        with malformed_if_unreadable(state):
            if int(answered or 0) >= request and answer:
                event = _event_decoder.decode(answer)
                if event.kind == "saved":
                    return event
                raise NoCheckpointError(job, event.reason)
            is_lost = int(asked or 0) < request
        status = await group_status(client, namespace, job)
        if status and status.outcome:
            last = f"; its last checkpoint is of step {status.checkpoint.step}" if status.checkpoint else ""
            raise NoCheckpointError(job, f"it has ended before ({status.outcome.kind}){last}")
        if is_lost:
            raise NoCheckpointError(job, "Redis has lost the request, or another run of the job has begun; ask again")
        if await has_live_agents(client, namespace, job):
            there_at = time.monotonic()
        elif time.monotonic() >= there_at + DESERTED_S:
            raise NoCheckpointError(job, REFUSALS["absent"])
        events = keys.group_events(namespace, job)
        with unavailable_if_lost(client, events):
            await client.xread({events: "$"}, count=1, block=round(BLOCK_S * 1000))
