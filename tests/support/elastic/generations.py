"""Generations as agents publish them, for tests to which most of what is in them does not matter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edl_runtime.elastic.rendezvous.generation import Generation


def generation(number: int, members: Iterable[str], **fields: Any) -> Generation:
    """Return a live one of these members, by id, but for what is given."""
    given = {
        "store": "",
        "endpoints": (),
        "gear": "live",
        "reason": "",
        "proposed_by": "",
        "proposed_at": 0.0,
        **fields,
    }
    return Generation(number=number, members=tuple(members), **given)
