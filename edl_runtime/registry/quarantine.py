"""Which teachers students have quarantined, and why. For display only.

A student publishes its quarantines again and again; each is kept for `QUARANTINE_TTL_S`.
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
"""How long a student's quarantines are kept after it last published them."""

log = get_logger(__name__)

_reasons_decoder = JsonDecoder(dict[str, str])


class Quarantine(msgspec.Struct, frozen=True):
    """The most frequent reason why students have quarantined a teacher, and how many students have."""

    reason: str
    students: int

    def __str__(self) -> str:
        return f"{self.reason} (by {self.students} student{'' if self.students == 1 else 's'})"


async def publish_quarantine(
    client: Redis, namespace: str, pool: str, student_id: str, reasons: Mapping[str, str]
) -> None:
    """Replace the student's quarantined teachers (address → reason); none removes the key.

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
    """Return the teachers that those students have quarantined, by address. Raises RegistryUnavailableError."""
    if not student_ids:
        return {}
    with unavailable_if_lost(client):
        contents = await client.mget([keys.quarantine(namespace, pool, student) for student in student_ids])
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for student, content in zip(student_ids, contents, strict=True):
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
