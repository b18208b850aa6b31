"""Who asks whom."""

from __future__ import annotations

from edl_runtime.registry.members import Member
from edl_runtime.registry.shares import shares

TEACHERS = [Member(id=name, address=f"{name}:1") for name in "abc"]


def test_each_student_gets_addresses() -> None:
    """Every teacher has a student, and a student knows its teachers by where they listen."""
    shared = shares(TEACHERS, [Member(id="s", address="here", want=1), Member(id="t", address="there")])
    assert sorted(address for mine in shared.values() for address in mine) == ["a:1", "b:1", "c:1"]
    assert len(shared["s"]) == 1


def test_the_later_of_two_entries_counts() -> None:
    """A student knows best what it wants, whatever an older list says."""
    shared = shares(TEACHERS, [Member(id="s", address="here"), Member(id="s", address="here", want=1)])
    assert len(shared["s"]) == 1


def test_without_teachers_a_student_has_none() -> None:
    """Nobody is left out of the answer."""
    assert shares([], [Member(id="s", address="here")]) == {"s": ()}


def test_who_can_use_none_of_its_teachers_has_others_too() -> None:
    """As long as one of its own is good, nothing changes; and with no good one in the pool neither."""
    students = [Member(id=name, address="here") for name in "stu"]
    plain = shares(TEACHERS, students)
    [mine] = plain["s"]
    borrowing = shares(TEACHERS, students, {"s": {mine}})
    assert mine in borrowing["s"]
    assert len(borrowing["s"]) == 2
    assert {**borrowing, "s": (mine,)} == plain
    assert shares(TEACHERS, students, {"s": {"d:1"}}) == plain
    assert shares(TEACHERS, students, {"s": {"a:1", "b:1", "c:1"}}) == plain
