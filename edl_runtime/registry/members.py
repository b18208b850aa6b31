"""Who is registered."""

from __future__ import annotations

import msgspec

from edl_runtime.protocol.oip import ModelSignature


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A teacher or a student of a pool.

    - `id`: unique in its pool and role; a later registration of the same id takes over from the earlier.
    - `address`: "host:port" of a teacher; of a student, where it runs, for people.
    - `weight`: a teacher's share of the work, relative to its pool's others.
    - `signature`: what a teacher's model takes and answers; None joins any pool.
    - `want`: the most teachers that a student can use, None for all.
    - `fence`: the fencing token, given by the registry; a later registration's is always larger.
    """

    id: str
    address: str
    weight: float = 1.0
    signature: ModelSignature | None = None
    want: int | None = None
    fence: int = 0
