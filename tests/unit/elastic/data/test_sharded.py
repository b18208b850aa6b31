"""Records of shards that a ledger hands out."""

from __future__ import annotations

from edl_runtime.elastic.data.sharded import hold_s


def test_what_can_not_be_read_is_held_twice_as_long_each_time() -> None:
    """A storage that is away for long is not asked all the time, and one that is back is not missed for long."""
    assert [hold_s(count) for count in (0, 1, 2, 3, 4, 5, 16)] == [1, 2, 4, 8, 16, 30, 30]
