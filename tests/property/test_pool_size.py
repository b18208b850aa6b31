"""How many teachers a pool needs, for any students and teachers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.depth import examples
from support.students.pool_simulation import World

from edl_runtime.autoscale.policy.pool_size import (
    GROW_UTILISATION,
    SETTLED_S,
    SHRINK_UTILISATION,
    PoolSize,
    describe_limit,
    even_shares,
    pool_size,
)
from edl_runtime.balance.assign import assign
from edl_runtime.meter import WINDOW_S
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.specs import Bounds

BOUNDS = Bounds(1, 12)
PASSES = 9
STEPS = st.sampled_from([0.03, 0.04, 0.06, 0.1, 0.15, 0.3])
SHARES = st.floats(0, 1)


@st.composite
def worlds(draw: st.DrawFn, *, spread: float | None = None) -> World:
    """One to four students whose own steps take between a third of what a teacher needs and three times that."""
    return World(
        service_s=0.1,
        steps_s=tuple(draw(st.lists(STEPS, min_size=1, max_size=4))),
        spread=draw(st.sampled_from([0.1, 0.3, 0.5])) if spread is None else spread,
    )


@st.composite
def reports(draw: st.DrawFn) -> tuple[list[TeacherReport | None], list[StudentReport | None]]:
    """Any reports, whether or not they go together."""
    ages = st.sampled_from([0.0, 5.0, WINDOW_S])
    loads = draw(st.lists(st.none() | st.builds(TeacherReport, busy=SHARES, over_s=ages), max_size=8))
    student = st.builds(
        StudentReport, waiting=SHARES, asked=st.floats(0, 8), over_s=ages, want=st.none() | st.integers(1, 4)
    )
    return loads, draw(st.lists(st.none() | student, max_size=5))


def sizes_from(world: World, teachers: int) -> list[int]:
    """Return the sizes that a pool goes through, pass by pass."""
    sizes = [teachers]
    for seed in range(PASSES):
        sizes.append(pool_size(sizes[-1], world.run(sizes[-1], seed), BOUNDS).teachers)
    return sizes


def rests_at(world: World, teachers: int) -> int:
    """Return the size at which a pool that begins with so many comes to rest."""
    *_, last, now = sizes_from(world, teachers)
    assert now == last
    return now


@settings(max_examples=examples(5, 50))
@given(world=worlds(spread=0.0))
def test_a_pool_comes_to_rest_from_both_sides(world: World) -> None:
    """From one teacher it only grows, from twelve it only shrinks, and where it has come to rest it stays."""
    up, down = sizes_from(world, BOUNDS.min), sizes_from(world, BOUNDS.max)
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert up[-1] <= down[-1]
    assert len(set(up[5:])) == len(set(down[5:])) == 1


@settings(max_examples=examples(5, 50))
@given(world=worlds(), start=st.sampled_from([BOUNDS.min, BOUNDS.max]))
def test_a_pool_never_swings(world: World, start: int) -> None:
    """Where times vary by chance, and so do reports, it turns round once at most: to the size at which it stays."""
    sizes = sizes_from(world, start)
    steps = [after - before for before, after in pairwise(sizes) if after != before]
    turns = sum((one > 0) != (other > 0) for one, other in pairwise(steps))
    assert turns <= 1, sizes


@settings(max_examples=examples(5, 50))
@given(world=worlds(spread=0.0))
def test_at_rest_students_are_as_fast_as_they_can(world: World) -> None:
    """Nobody is slower by more than a tenth, unless the pool has its maximum."""
    for start in (BOUNDS.min, BOUNDS.max):
        rest = rests_at(world, start)
        assert rest == BOUNDS.max or world.pace(rest) > 0.89


@settings(max_examples=examples(5, 30))
@given(step_s=STEPS, students=st.integers(1, 3))
def test_at_rest_there_are_no_more_than_needed(step_s: float, students: int) -> None:
    """From below: with one teacher less for each student somebody waits. From above: at most what `ROOM` explains."""
    world = World(service_s=0.1, steps_s=(step_s,) * students)
    up, down = rests_at(world, BOUNDS.min), rests_at(world, BOUNDS.max)
    each = world.service_s / step_s
    fewer = up - students if up > students else up - 1
    assert up == BOUNDS.min or world.pace(max(fewer, 1)) <= GROW_UTILISATION + 0.02
    assert (
        down == BOUNDS.max
        or down <= max(-(-each / SHRINK_UTILISATION // 1) * students, -(-each * students / SHRINK_UTILISATION // 1)) + 1
    )


@given(given_reports=reports(), teachers=st.integers(0, 8), least=st.integers(1, 4), more=st.integers(0, 8))
def test_an_answer_is_within_bounds_and_at_most_twice_as_many(
    given_reports: tuple[list[TeacherReport | None], list[StudentReport | None]], teachers: int, least: int, more: int
) -> None:
    """Whatever is reported; and a reason is given."""
    loads, demands = given_reports
    bounds = Bounds(least, least + more)
    need = pool_size(teachers, said(loads, demands), bounds)
    assert need.teachers in bounds
    assert need.teachers <= max(teachers + len(loads), bounds.min)
    assert need.reason


@given(
    given_reports=reports(), teachers=st.integers(1, 8), which=st.integers(0, 4), more=SHARES, bounds=st.just(BOUNDS)
)
def test_who_waits_longer_never_gets_fewer(
    given_reports: tuple[list[TeacherReport | None], list[StudentReport | None]],
    teachers: int,
    which: int,
    more: float,
    bounds: Bounds,
) -> None:
    """With all else as it is, a student's longer waits are a reason for more teachers or none."""
    loads, demands = given_reports
    before = pool_size(teachers, said(loads, demands), bounds)
    if which < len(demands) and (demand := demands[which]) is not None:
        longer = msgspec.structs.replace(demand, waiting=max(demand.waiting, more))
        demands = [*demands[:which], longer, *demands[which + 1 :]]
    assert pool_size(teachers, said(loads, demands), bounds).teachers >= before.teachers


@given(teachers=st.integers(1, 12), wants=st.lists(st.none() | st.integers(1, 5), min_size=1, max_size=8))
def test_students_are_sure_of_their_even_shares(teachers: int, wants: list[int | None]) -> None:
    """What the size is computed from is what the balance gives at least."""
    given_to = assign({f"t{n}": 1.0 for n in range(teachers)}, {f"s{n}": want for n, want in enumerate(wants)})
    users = Counter(teacher for teachers_of_one in given_to.values() for teacher in teachers_of_one)
    for number, share in enumerate(even_shares(teachers, wants)):
        assert sum(1 / users[teacher] for teacher in given_to[f"s{number}"]) >= share - 1e-9


def test_students_that_share_a_teacher_are_equally_fast() -> None:
    """Three teachers serve two students that only wait: each is half as fast as all teachers, and no teacher rests."""
    demand = World(service_s=0.1, steps_s=(0.001, 0.001)).run(3)
    rates = [student.samples_per_s for student in demand.students.values() if student is not None]
    assert rates == pytest.approx([15, 15], rel=0.05)
    assert min(load.busy for load in demand.teachers.values() if load is not None) > 0.95


def said(
    loads: Sequence[TeacherReport | None], students: Sequence[StudentReport | None], settled_s: float = math.inf
) -> PoolDemand:
    return PoolDemand(
        teachers={f"t{number}": report for number, report in enumerate(loads)},
        students={f"s{number}": report for number, report in enumerate(students)},
        settled_s=settled_s,
    )


def load(busy: float = 1.0, over_s: float = WINDOW_S) -> TeacherReport:
    return TeacherReport(busy=busy, over_s=over_s)


def student(
    waiting: float = 0.0, asked: float = 1.0, *, over_s: float = WINDOW_S, want: int | None = None
) -> StudentReport:
    return StudentReport(waiting=waiting, asked=asked, over_s=over_s, want=want)


@pytest.mark.parametrize(
    ("teachers", "demand", "needed"),
    [
        pytest.param(2, said([load()] * 2, [student(0.25, 2.0)]), 3, id="what-students-would-ask"),
        pytest.param(4, said([load()] * 4, [student(0.2)] * 4), 6, id="an-even-share-that-is-enough-for-each"),
        pytest.param(4, said([load()] * 4, [student(0.2, want=1)] * 4), 4, id="no-more-than-students-can-use"),
        pytest.param(2, said([load()] * 2, [student(0.2), student(0.2, want=1)]), 3, id="more-for-who-can-use-it"),
        pytest.param(6, said([load(0.5)] * 6, [student(0.0, 3.0)]), 4, id="idle-ones-leave-with-room-to-spare"),
        pytest.param(4, said([None] * 4, [student(0.0, 1.0)]), 2, id="silent-ones-are-as-idle-as-students-see-them"),
        pytest.param(2, said([None] * 2, [student(0.3, 2.0)]), 4, id="silent-ones-are-as-busy-as-students-see-them"),
        pytest.param(4, said([load(0.25), None, None, None], [student(0.0, 1.0)]), 2, id="some-are-silent"),
        pytest.param(1, said([load()] * 2, [student(0.25, 2.0)]), 2, id="one-is-somebody-elses"),
    ],
)
def test_how_many_teachers_a_pool_needs(teachers: int, demand: PoolDemand, needed: int) -> None:
    """Two that are all busy, of a student that waits a quarter of its time, are three; a server may be silent."""
    assert pool_size(teachers, demand, BOUNDS).teachers == needed


def test_a_size_has_a_reason() -> None:
    """Also that a pool at most doubles, that none leaves while a student waits, and that there are none."""
    waits = "students wait {} % of the time, teachers are busy {} %"
    for teachers, demand, needed, why in (
        (2, said([load()] * 2, [student(0.3, 2.0)]), 4, waits.format(30, 100) + ": 4 could do what they ask"),
        (1, said([load()], [student(0.9)]), 2, ": 11 could do what they ask, and it at most doubles"),
        (6, said([load(0.5)] * 6, [student(0.2, 3.0)]), 6, waits.format(20, 50) + "; more would have too little to do"),
        (5, said([load(0.0)] * 5, []), 1, "it has no students"),
    ):
        need = pool_size(teachers, demand, BOUNDS)
        assert (need.teachers, need.reason[-len(why) :]) == (needed, why)


@pytest.mark.parametrize(
    ("demand", "limit"),
    [
        (said([load()] * 2, [student(0.3, 2.0)]), "students wait 30 % of the time for teachers; 2 more would end it"),
        (
            said([load()], [student(0.9)]),
            "students wait 90 % of the time for teachers; at least 1 more are needed",
        ),
        (
            said([load(0.5)] * 6, [student(0.2, 3.0)]),
            "students wait 20 % of the time for teachers, which are busy 50 % of it; more would not help",
        ),
        (
            said([load(0.5)] * 6, [student(0.0, 3.0)]),
            "students do not wait; teachers are busy 50 % of the time; 2 fewer would do",
        ),
        (said([load(0.9)], [student(0.0, 0.9)]), "students do not wait; teachers are busy 90 % of the time"),
        (said([load()], []), "it has no students"),
        (said([], [student(0.9)]), "no teacher is registered; its students wait"),
        (said([load()], [None]), "not known yet: 1 of 1 students have reported nothing of late"),
    ],
)
def test_a_limit_is_described(demand: PoolDemand, limit: str) -> None:
    """How long students wait, and how many teachers would end it, by the same estimate as a size."""
    assert describe_limit(demand) == limit


@pytest.mark.parametrize(
    ("loads", "demands", "why"),
    [
        ([load()], [student(0.9)], "1 of its teachers are registered"),
        ([], [student(0.9)], "0 of its teachers are registered"),
        ([load()] * 2, [student(0.9), None], "1 of 2 students have reported nothing of late"),
        ([load()] * 2, [StudentReport(pauses=True, over_s=WINDOW_S)], "1 of 1 students have paused a moment ago"),
        ([load()] * 2, [student(0.9, over_s=3.0)], "its members have worked together for less than 10 s"),
        ([load(), load(over_s=2.0)], [student(0.9)], "its members have worked together for less than 10 s"),
    ],
)
def test_reports_that_tell_nothing_change_nothing(
    loads: list[TeacherReport | None], demands: list[StudentReport | None], why: str
) -> None:
    """Silent members, and those that have just come, are no reason to grow or to shrink; bounds hold all the same."""
    assert pool_size(2, said(loads, demands), BOUNDS) == PoolSize(2, why)
    assert pool_size(2, said(loads, demands), Bounds(3, 4)) == PoolSize(3, f"{why}; its minimum is 3")


def test_reports_of_others_than_there_are_now_change_nothing() -> None:
    """Those of the last second before somebody came or went are still there, and look back ten seconds."""
    for settled_s, teachers in ((SETTLED_S - 0.1, 6), (SETTLED_S, 4)):
        demand = said([load(0.5)] * 6, [student(0.0, 3.0)], settled_s)
        assert pool_size(6, demand, BOUNDS).teachers == teachers
