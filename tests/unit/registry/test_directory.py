"""What a watcher shows when Redis has lost its memory, or members while it was away."""

from __future__ import annotations

from edl_runtime.registry.directory import NO_EVENT, SETTLE_S, _Listing, _Snapshot
from edl_runtime.registry.members import Member

A, B = (Member(id=name, address=f"{name}:1", fence=1) for name in "ab")
A_BACK = Member(id="a", address="a:1", fence=9)


def snapshot(*members: Member, oldest: tuple[int, int], newest: tuple[int, int]) -> _Snapshot:
    return _Snapshot(members=list(members), contract=None, expires_in_s=3.0, oldest_event=oldest, newest_event=newest)


def test_members_that_redis_forgot_stay_until_they_could_be_back() -> None:
    """An emptied Redis does not empty the list: who comes back stays, who does not goes after a while."""
    listing = _Listing(snapshot(A, B, oldest=(1, 0), newest=(2, 0)))
    listing.update(snapshot(oldest=NO_EVENT, newest=NO_EVENT), now=10.0)
    assert listing.members == [A, B]
    listing.update(snapshot(A_BACK, oldest=(5, 0), newest=(5, 0)), now=10.5)
    assert listing.members == [A_BACK, B]
    assert listing.settles_in_s(10.5) == SETTLE_S - 0.5
    listing.update(snapshot(A_BACK, oldest=(5, 0), newest=(5, 0)), now=10.0 + SETTLE_S)
    assert listing.members == [A_BACK]


def test_a_redis_emptied_and_filled_between_two_looks_is_noticed() -> None:
    """Its oldest event is newer than all known ones; being kept through that ends with the first sign of life."""
    listing = _Listing(snapshot(A, B, oldest=(1, 0), newest=(2, 0)))
    listing.update(snapshot(A_BACK, oldest=(5, 0), newest=(5, 0)), now=10.0)
    assert listing.members == [A_BACK, B]
    listing.update(snapshot(oldest=(5, 0), newest=(6, 0)), now=10.1)
    assert listing.members == [B]


def test_members_that_ran_out_while_redis_was_away_stay_until_they_could_be_back() -> None:
    """Who could not renew is no more dead than Redis was: only those that don't come back go."""
    listing = _Listing(snapshot(A, B, oldest=(1, 0), newest=(2, 0)))
    listing.update(snapshot(oldest=(1, 0), newest=(4, 0)), now=10.0, after_outage=True)
    assert listing.members == [A, B]
    listing.update(snapshot(A_BACK, oldest=(1, 0), newest=(5, 0)), now=10.5)
    assert listing.members == [A_BACK, B]
    listing.update(snapshot(A_BACK, oldest=(1, 0), newest=(5, 0)), now=10.0 + SETTLE_S)
    assert listing.members == [A_BACK]
