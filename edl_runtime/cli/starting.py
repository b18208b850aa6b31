"""What the commands that start a job share."""

from __future__ import annotations

from datetime import datetime

from edl_runtime.backends.base import Backend
from edl_runtime.errors import JobRunsError, UnknownJobError


async def make_way(backend: Backend, name: str) -> None:
    """Forget an ended job of that name: who starts one again means it, also when it has succeeded before.

    Raises JobRunsError for one that has not ended.
    """
    try:
        status = await backend.get(name)
    except UnknownJobError:
        return
    if not status.has_ended:
        raise JobRunsError(name, datetime.fromtimestamp(status.created_at).astimezone(), status.cwd)
    await backend.delete(name, token=status.token)
