"""What the members of pools report: read all at once, for whoever decides how large pools are to be, or shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from edl_runtime.decoding import Decoder
from edl_runtime.log import get_logger
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.store import keys
from edl_runtime.store.client import run_script_on_each
from edl_runtime.store.keys import Service

if TYPE_CHECKING:
    from redis.asyncio import Redis

STALE_S = 5.0
"""A report that is older counts as none: its writer lives and can't work, or is of another version."""

Report = TypeVar("Report", TeacherReport, StudentReport)

log = get_logger(__name__)

# Made while one thread imports this: msgspec crashes when several threads are the first to decode a type.
_teacher_decoder = Decoder(TeacherReport)
_student_decoder = Decoder(StudentReport)


async def demands(client: Redis, namespace: str, pools: Sequence[str]) -> dict[str, PoolDemand]:
    """Return what the members of each of these pools report, in one round trip or two for all of them together.

    A pool that nobody is in has no reports. Raises RegistryUnavailableError.
    """
    if not pools:
        return {}
    services = [Service(namespace, pool, role) for pool in pools for role in keys.ROLES]
    answers = await run_script_on_each(client, "said", [keys.of_service(service) for service in services])
    return {
        pool: PoolDemand(
            teachers=_reports(teachers, _teacher_decoder),
            students=_reports(students, _student_decoder),
            settled_s=min(_settled_s(teachers), _settled_s(students)),
        )
        for pool, teachers, students in zip(pools, answers[::2], answers[1::2], strict=True)
    }


def _reports(answer: Any, decoder: Decoder[Report]) -> dict[str, Report | None]:
    now_ms, _, ids, said = answer
    said_by = sorted(zip(ids, said, strict=True))
    return {member: _report(member, text, now_ms / 1000, decoder) for member, text in said_by}


def _settled_s(answer: Any) -> float:
    _, settled_ms, *_ = answer
    return settled_ms / 1000 if settled_ms >= 0 else math.inf


def _report(member: str, text: str, now_s: float, decoder: Decoder[Report]) -> Report | None:
    if not text:
        return None
    try:
        at = _at_decoder.decode(text).at
        return decoder.decode(text) if now_s - at <= STALE_S else None
    except msgspec.DecodeError as error:
        log.warning("report.unreadable", member=member, report=text[:200], cause=str(error))
        return None


class _At(msgspec.Struct):
    at: float


_at_decoder = Decoder(_At)
