"""What a ledger and its plan refuse, and how its shards are identified."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.errors import SpecError
from edl_runtime.shards.ledger import Ledger, ShardPlan, digest_of
from edl_runtime.store.redis_client import connect


@pytest.mark.parametrize(("field", "wrong"), [("epochs", 0), ("seed", -1), ("failure_limit", 0)])
def test_a_plan_that_cannot_be_is_refused(field: str, wrong: int) -> None:
    """By name."""
    fields: dict[str, Any] = {field: wrong}
    with pytest.raises(SpecError, match=field):
        ShardPlan(**fields)


async def test_a_stream_cannot_be_shuffled_and_a_lease_has_a_size() -> None:
    """Both are checked before Redis is asked."""
    async with connect("redis://127.0.0.1:1") as client:
        with pytest.raises(SpecError, match="shuffle"):
            Ledger(client, "n", "job", worker="w", plan=ShardPlan(shuffle=True))
        ledger = Ledger(client, "n", "job", worker="w", shards=["a"])
        for wrong in (0, 1001):
            with pytest.raises(SpecError, match="1 to 1000"):
                await ledger.lease(wrong)


def test_the_seed_counts_only_where_it_shuffles() -> None:
    """Without shuffling it may change between runs."""
    assert digest_of(["a"], ShardPlan(seed=1)) == digest_of(["a"], ShardPlan(seed=2, epochs=5))
    assert digest_of(["a"], ShardPlan(seed=1, shuffle=True)) != digest_of(["a"], ShardPlan(seed=2, shuffle=True))
    assert digest_of(["ab"], ShardPlan()) != digest_of(["a", "b"], ShardPlan())
