"""What any agent of a job may do for all of them, and the first that does has done."""

from __future__ import annotations

import math
import secrets

import msgspec

from edl_runtime.elastic.agreement import decide, outcome_of, waits_for
from edl_runtime.elastic.events import Event
from edl_runtime.elastic.generation import GroupView, Outcome
from edl_runtime.elastic.membership import BEAT_EVERY_S, Membership
from edl_runtime.log import get_logger
from edl_runtime.specs import Bounds

log = get_logger(__name__)


async def lead(membership: Membership, view: GroupView, bounds: Bounds, me: str, failed: Outcome | None) -> float:
    """End the job, or publish its next generation, or say what that waits for, as the view has it.

    `failed`: how it ends, by what `me` alone knows. Returns after how many seconds there may be more to do. Raises
    RegistryUnavailableError.
    """
    if view.outcome:
        return BEAT_EVERY_S
    if outcome := failed or outcome_of(view):
        await membership.end(outcome)
        return 0.0
    if draft := decide(view, bounds, me):
        await membership.propose(msgspec.structs.replace(draft, word=secrets.token_hex(16)))
        return 0.0
    wait = waits_for(view, bounds)
    if wait.why and (wait.told or wait.for_s == math.inf):
        is_news = await membership.announce(Event(kind="waiting", reason=wait.why))
        if is_news and wait.warns:
            log.warning("job.waits", reason=wait.why)
    return wait.for_s
