"""How ranks exchange how far each is in its shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.elastic.data.indexed import default_collate
from edl_runtime.elastic.data.sharded import ShardedData, decode_positions, encode_position

POSITIONS = st.none() | st.tuples(st.integers(0, 9), st.integers(0, 10**12))


@given(ranks=st.lists(POSITIONS, min_size=1, max_size=6))
def test_the_sum_of_all_ranks_says_how_far_each_shard_is(ranks: list[tuple[int, int] | None]) -> None:
    """A ticket that two ranks had, one after the other, is as far as the later of them."""
    vectors = [encode_position(position, rank, len(ranks)) for rank, position in enumerate(ranks)]
    found = decode_positions([sum(places) for places in zip(*vectors, strict=True)])
    there = [position for position in ranks if position]
    assert found.keys() == {ticket for ticket, _ in there}
    assert all(found[ticket] >= offset for ticket, offset in there)
    assert set(found.items()) <= set(there)


def test_a_schedule_by_samples_counts_the_batches_of_one_rank() -> None:
    """Of all records that all ranks have applied, whatever parts of shards their batches were."""
    ledger: Any = None
    training: Any = SimpleNamespace(samples=0)
    data = ShardedData(training, ledger, lambda _: [], batch_size=8, epochs=1, collate_fn=default_collate)
    found = []
    for training.samples in (0, 4, 8, 12, 28):
        found.append(data.steps_of_one)
    assert found == [0, 1, 1, 2, 4]
