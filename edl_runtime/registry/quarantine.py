"""Which teachers students ask nothing for a while, and why: told by the students, shown to people.

Nobody acts on it. A student's words are kept for `QUARANTINE_TTL_S` after it said them last, so it repeats them while
they hold.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.store import keys
from edl_runtime.store.redis_client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

QUARANTINE_TTL_S = 10
"""How long a student's quarantines outlive its last word."""

log = get_logger(__name__)

_reasons_decoder = JsonDecoder(dict[str, str])


class Quarantine(msgspec.Struct, frozen=True):
    """Why a teacher is in quarantine, by most of the students that keep it there, and how many those are."""

    reason: str
    students: int

    def __str__(self) -> str:
        return f"{self.reason} (by {self.students} student{'' if self.students == 1 else 's'})"


async def publish_quarantine(
    client: Redis, namespace: str, pool: str, student_id: str, reasons: Mapping[str, str]
) -> None:
    """Replace the teachers, by address, that the student keeps in quarantine; none of them ends its word.

    Raises RegistryUnavailableError.
    """
    key = keys.quarantine(namespace, pool, student_id)
    with unavailable_if_lost(client):
        if reasons:
            await client.set(key, msgspec.json.encode(reasons), ex=QUARANTINE_TTL_S)
        else:
            await client.delete(key)


async def read_quarantines(
    client: Redis, namespace: str, pool: str, student_ids: Sequence[str]
) -> dict[str, Quarantine]:
    """Return the quarantined teachers, by address, of those students. Raises RegistryUnavailableError."""
    if not student_ids:
        return {}
    with unavailable_if_lost(client):
        said = await client.mget([keys.quarantine(namespace, pool, student) for student in student_ids])
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for student, content in zip(student_ids, said, strict=True):
        for address, reason in _decoded_reasons(student, content).items():
            reasons[address].append(reason)
    return {address: _summary(reasons[address]) for address in sorted(reasons)}


def _decoded_reasons(student: str, content: str | bytes | None) -> dict[str, str]:
    if content is None:
        return {}
    try:
        return _reasons_decoder.decode(content)
    except msgspec.DecodeError as error:
        log.warning("quarantine.unreadable", student=student, content=content[:200], cause=str(error))
        return {}


def _summary(reasons: Sequence[str]) -> Quarantine:
    [(reason, _)] = Counter(reasons).most_common(1)
    return Quarantine(reason, len(reasons))
