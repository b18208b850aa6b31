"""The clock of a trainer group, in a real Redis whose own clock is put on and back."""

from __future__ import annotations

import pytest

from edl_runtime.elastic.generation import TrainerMember
from edl_runtime.elastic.membership import Membership
from edl_runtime.store import keys
from edl_runtime.store.client import connect

LEASE_S = 30.0
HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("ago_ms", "goes_on_s"),
    [
        pytest.param(HOUR_MS, LEASE_S / 3, id="Redis or all agents were stopped"),
        pytest.param(-HOUR_MS, 0.0, id="Redis's clock was put back"),
    ],
)
async def test_the_clock_never_jumps_over_a_lease(
    redis_url: str, namespace: str, ago_ms: int, goes_on_s: float
) -> None:
    """It goes on by a third of a lease at most from one beat to the next, and never back: nobody runs out by that."""
    async with connect(redis_url) as client:
        agents = [(Membership(client, namespace, "job", ttl_s=LEASE_S), f"{index}-a") for index in range(2)]
        for index, (membership, name) in enumerate(agents):
            before = await membership.beat(TrainerMember(id=name, index=index))
        await client.hincrby(keys.group_state(namespace, "job"), "wall", -ago_ms)
        after = await agents[0][0].beat(TrainerMember(id="0-a", index=0))
        assert after.now - before.now == pytest.approx(goes_on_s, abs=1e-6)
        assert sorted(each.member.id for each in after.members) == ["0-a", "1-a"]
