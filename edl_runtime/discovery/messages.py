"""What an endpoint and a student tell each other, as JSON, and how often."""

from __future__ import annotations

import msgspec

from edl_runtime.pool_reports import StudentReport

SAY_EVERY_S = 1.0
"""How often both sides speak, news or not."""

SILENT_AFTER_S = 4.0
"""Who says nothing for so long counts as gone: the student leaves the pool, the endpoint is tried anew."""


class Assignment(msgspec.Struct, frozen=True):
    """A line of the stream: the addresses of a student's teachers, of so many `listed` among so many `students`."""

    teachers: tuple[str, ...]
    students: int
    listed: int


class Words(msgspec.Struct, frozen=True):
    """What a student says: which teachers it keeps in quarantine, address → why; and what it needs, if it says."""

    quarantined: dict[str, str] = {}
    needs: StudentReport | None = None
