"""Generations as agents publish them, with defaults for most fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edl_runtime.elastic.rendezvous.generation import Generation


def generation(number: int, members: Iterable[str], **fields: Any) -> Generation:
    """Return a live generation of members with these ids."""
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
