"""What a ledger is told, and how ranks tell each other where they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.errors import SpecError
from edl_runtime.shards.ledger import Ledger
from edl_runtime.shards.ledger_state import ReadPosition, ShardPlan, digest_of, from_vector, to_vector
from edl_runtime.store.redis_client import connect

POSITIONS = st.none() | st.builds(ReadPosition, st.integers(0, 9), st.integers(0, 10**12))


@given(ranks=st.lists(POSITIONS, min_size=1, max_size=6))
def test_the_sum_of_all_ranks_vectors_tells_where_each_is(ranks: list[ReadPosition | None]) -> None:
    """A ticket that two ranks were at, one after the other, is as far as the later of them."""
    vectors = [to_vector(position, rank, len(ranks)) for rank, position in enumerate(ranks)]
    found = from_vector([sum(places) for places in zip(*vectors, strict=True)])
    there = [position for position in ranks if position]
    assert found.keys() == {position.ticket for position in there}
    assert all(found[position.ticket] >= position.offset for position in there)
    assert set(found.items()) <= {(position.ticket, position.offset) for position in there}


@pytest.mark.parametrize(("field", "wrong"), [("epochs", 0), ("seed", -1), ("failure_limit", 0)])
def test_a_plan_that_cannot_be_is_refused(field: str, wrong: int) -> None:
    """By name."""
    fields: dict[str, Any] = {field: wrong}
    with pytest.raises(SpecError, match=field):
        ShardPlan(**fields)


async def test_a_stream_cannot_be_shuffled_and_a_lease_has_a_size() -> None:
    """Both are said before Redis is asked."""
    async with connect("redis://127.0.0.1:1") as client:
        with pytest.raises(SpecError, match="shuffle"):
            Ledger(client, "n", "job", worker="w", plan=ShardPlan(shuffle=True))
        ledger = Ledger(client, "n", "job", worker="w", shards=["a"])
        for wrong in (0, 1001):
            with pytest.raises(SpecError, match="1 to 1000"):
                await ledger.lease(wrong)


def test_the_seed_counts_only_where_it_shuffles() -> None:
    """Who does not shuffle may change it between runs."""
    assert digest_of(["a"], ShardPlan(seed=1)) == digest_of(["a"], ShardPlan(seed=2, epochs=5))
    assert digest_of(["a"], ShardPlan(seed=1, shuffle=True)) != digest_of(["a"], ShardPlan(seed=2, shuffle=True))
    assert digest_of(["ab"], ShardPlan()) != digest_of(["a", "b"], ShardPlan())
