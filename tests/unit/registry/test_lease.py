"""When a lease is renewed."""

from __future__ import annotations

import pytest

from edl_runtime.errors import SpecError
from edl_runtime.registry.lease import hold_lease, pause_s
from edl_runtime.registry.members import Member
from edl_runtime.store.client import connect
from edl_runtime.store.keys import Service


@pytest.mark.parametrize(
    ("ttl_s", "took_s", "away", "pause"),
    [
        pytest.param(0.9, 0.0, False, 0.3, id="every third of a lease"),
        pytest.param(60.0, 0.0, False, 1.0, id="a long lease once a second"),
        pytest.param(60.0, 0.0, True, 0.5, id="sooner while Redis is away"),
        pytest.param(0.9, 0.0, True, 0.3, id="a short one no later then"),
        pytest.param(3.0, 0.25, False, 0.75, id="counted from the beginning of the try before"),
        pytest.param(3.0, 1.5, True, 0.0, id="at once after an answer that took as long"),
    ],
)
def test_a_lease_is_renewed_in_time(ttl_s: float, took_s: float, pause: float, *, away: bool) -> None:
    """A Redis that was emptied has everybody back within a second, and one slow answer costs no lease."""
    assert pause_s(ttl_s, took_s, away=away) == pytest.approx(pause)


async def test_a_lease_needs_a_length() -> None:
    """A lease of no time would have run out before it began."""
    async with connect("redis://127.0.0.1:1/0") as client:
        with pytest.raises(SpecError, match="lease_ttl_s"):
            hold_lease(client, Service("n", "pool"), Member(id="a", address="a:1"), ttl_s=0)
