"""The assignment of teachers to students, for any lists."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.depth import examples

from edl_runtime.balance.assign import assign, most_sharing

Teachers = Mapping[str, float]
Students = Mapping[str, int | None]

NAMES = st.text("abcdé\0 -9", min_size=1, max_size=6)
SOME_TEACHERS = st.dictionaries(NAMES, st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=25)
EQUAL_TEACHERS = st.dictionaries(NAMES, st.just(1.0), min_size=1, max_size=25)
ANY_TEACHERS = st.dictionaries(NAMES, st.floats(1e-6, 1e6), min_size=1, max_size=12)
STUDENTS = st.dictionaries(NAMES, st.none(), min_size=1, max_size=25)
CAPPED_STUDENTS = st.dictionaries(NAMES, st.none() | st.integers(1, 4), min_size=1, max_size=12)


def users(assignment: Mapping[str, tuple[str, ...]]) -> Counter[str]:
    """Return how many students each teacher serves."""
    return Counter(teacher for chosen in assignment.values() for teacher in chosen)


def moves(before: tuple[Teachers, Students], after: tuple[Teachers, Students]) -> int:
    """Return how many students lose a teacher although both are still there, counted by teacher."""
    then, now = assign(*before), assign(*after)
    return sum(
        teacher in after[0] and teacher not in now[student] for student in now for teacher in then.get(student, ())
    )


def parts(teachers: Teachers, students: Students) -> list[float]:
    """Return the weight that each student has, of shared teachers an equal part."""
    assignment = assign(teachers, students)
    served = users(assignment)
    return [sum(teachers[teacher] / served[teacher] for teacher in chosen) for chosen in assignment.values()]


def fewest_moves(before: tuple[Teachers, Students], after: tuple[Teachers, Students]) -> int:
    """Return the least that any assignment must move to be as even after as it was before, were all weights equal.

    A student may have so many teachers, and so many teachers may have so many students.
    """
    teachers, students = after
    kept = [(student, t) for student, chosen in assign(*before).items() if student in students for t in chosen]
    kept = [(student, teacher) for student, teacher in kept if teacher in teachers]
    own, left_over = divmod(len(teachers), len(students))
    has = Counter(student for student, _ in kept)
    serves = sorted(Counter(teacher for _, teacher in kept).values(), reverse=True)
    if len(students) > most_sharing(own) * left_over:  # some have one more
        stays = sum(min(count, own) for count in has.values())
        stays += min(left_over, sum(count > own for count in has.values()))
        return len(kept) - min(stays, len(serves))
    each, with_one_more = divmod(len(students), left_over)
    stays = sum(min(count, own + 1) for count in has.values())
    may_stay = sum(min(count, each) for count in serves[:left_over]) + sum(min(n, 1) for n in serves[left_over:])
    may_stay += min(with_one_more, sum(count > each for count in serves[:left_over]))
    return len(kept) - min(stays, may_stay)


@given(ANY_TEACHERS, CAPPED_STUDENTS)
def test_everyone_has_work(teachers: Teachers, students: Students) -> None:
    """Every student has a teacher and no more than it wants; every teacher is used, if anyone can use it.

    Of teachers that are shared, a student has one at most; with too few teachers it has no other.
    """
    assignment = assign(teachers, students)
    assert list(assignment) == list(students)
    for student, want in students.items():
        assert 1 <= len(assignment[student]) <= (want or math.inf)
        assert len(set(assignment[student])) == len(assignment[student])
        assert set(assignment[student]) <= set(teachers)
    usable = sum(want or math.inf for want in students.values())
    assert len(users(assignment)) == min(len(teachers), usable)
    served = users(assignment)
    assert all(sum(served[teacher] > 1 for teacher in chosen) <= 1 for chosen in assignment.values())
    if len(teachers) < len(students):
        assert {len(chosen) for chosen in assignment.values()} == {1}


@given(EQUAL_TEACHERS, CAPPED_STUDENTS)
def test_what_is_left_over_after_whole_rounds_is_shared(teachers: Teachers, students: Students) -> None:
    """Students that can use more have equally many equal teachers, or some one more than others and none shared."""
    assignment = assign(teachers, students)
    served = users(assignment)
    able = {len(chosen) for student, chosen in assignment.items() if len(chosen) != students[student]}
    shared = [served[teacher] for teacher in served if served[teacher] > 1]
    assert len(able) <= 1 or (not shared and max(able) - min(able) == 1)
    if len(teachers) >= len(students):
        assert max(shared, default=0) <= most_sharing(min(able, default=0) - 1)


@pytest.mark.parametrize(
    ("teachers", "wants", "expected"),
    [
        (3, (None, None), [1.5, 1.5]),
        (5, (None, None, None), [1.5, 1.5, 2]),
        (7, (None, None, None), [2 + 1 / 3] * 3),
        (9, (None, None, None, None, None), [1.5, 1.5, 2, 2, 2]),
        (5, (None, None, None, None), [1, 1, 1, 2]),
        (10, (None, None, None), [3, 3, 4]),
        (2, (None, None, None), [0.5, 0.5, 1]),
        (1, (None, None, None, None), [0.25] * 4),
        (6, (1, None, None), [1, 2.5, 2.5]),
        (5, (2, 2, None), [1.5, 1.5, 2]),
        (5, (1, 3), [1, 3]),
    ],
)
def test_equal_teachers_are_shared_evenly(teachers: int, wants: tuple[int | None, ...], expected: list[float]) -> None:
    """Nobody has twice as much as another because one is left over, and nobody gets more than it wants."""
    found = parts({f"t{n}": 1.0 for n in range(teachers)}, {f"s{n}": want for n, want in enumerate(wants)})
    assert sorted(found) == pytest.approx(expected)


def test_of_teachers_with_weights_the_last_round_is_shared() -> None:
    """Lighter ones fill up what heavier ones left uneven; those that are left over then serve equals."""
    two, four = (dict.fromkeys("stuv"[:count], None) for count in (2, 4))
    assert parts({"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0}, two) == [2.5, 2.5]
    assert parts({"a": 2.0, "b": 2.0, "c": 2.0, "d": 1.0, "e": 1.0}, two) == [4, 4]
    heavy = {f"t{n}": 2.0 for n in range(5)}
    assert sorted(parts({**heavy, "light": 1.0}, four)) == pytest.approx([2 + 2 / 3] * 3 + [3])


@given(SOME_TEACHERS, STUDENTS)
def test_students_get_fair_weights(teachers: Teachers, students: Students) -> None:
    """With enough teachers, no student has more than another by over the heaviest teacher's weight."""
    if len(teachers) >= len(students):
        sums = parts(teachers, students)
        assert max(sums) - min(sums) <= max(teachers.values()) + 1e-9


@given(SOME_TEACHERS, STUDENTS)
def test_teachers_get_students_by_weight(teachers: Teachers, students: Students) -> None:
    """With too few teachers, no student would be better off with another teacher."""
    served = users(assign(teachers, students))
    if len(teachers) < len(students):
        for crowded in teachers:
            for other in teachers:
                if served[crowded] > 1:
                    assert served[crowded] / teachers[crowded] <= (served[other] + 1) / teachers[other]


@given(ANY_TEACHERS, CAPPED_STUDENTS, st.randoms(use_true_random=False))
def test_the_order_of_the_lists_does_not_matter(teachers: Teachers, students: Students, rng: random.Random) -> None:
    """Each student may read the lists in an order of its own."""
    shuffled_teachers = dict(rng.sample(list(teachers.items()), len(teachers)))
    shuffled_students = dict(rng.sample(list(students.items()), len(students)))
    assert assign(shuffled_teachers, shuffled_students) == assign(teachers, students)


def test_each_version_computes_the_same() -> None:
    """Students of one pool may run other versions of Python and numpy, so what is computed is written down here."""
    pool = {"a": 1.0, "b": 1.0, "c": 2.0}
    assert assign(pool, {"x": None, "y": None}) == {"x": ("c",), "y": ("a", "b")}
    assert assign({**pool, "c": 1.0}, {"x": None, "y": None}) == {"x": ("b", "c"), "y": ("a", "b")}
    served = assign(pool, dict.fromkeys("stuvwxyz", None))
    assert "".join(teacher for (teacher,) in served.values()) == "cabcbcac"


def test_empty_lists_have_empty_assignments() -> None:
    """Without teachers each student has none; without students there is nothing to say."""
    assert assign({}, {"s": None}) == {"s": ()}
    assert assign({"t": 1.0}, {}) == {}
    assert assign({}, {}) == {}


def test_weights_decide_shares_and_idle_teachers() -> None:
    """In proportion, as evenly as whole numbers allow; the heavy ones are spread, and used first."""
    assert users(assign({"big": 4.0, "mid": 2.0, "small": 1.0}, {f"s{n}": None for n in range(14)})) == {
        "big": 8,
        "mid": 4,
        "small": 2,
    }
    spread = assign({"a": 2.0, "b": 2.0, "c": 1.0, "d": 1.0}, {"s": None, "t": None})
    assert [sorted(w > "b" for w in chosen) for chosen in spread.values()] == [[False, True]] * 2
    assert set(users(assign({"light": 1.0, "mid": 2.0, "heavy": 4.0}, {"s": 1, "t": 1}))) == {"mid", "heavy"}


@given(EQUAL_TEACHERS, STUDENTS)
def test_a_change_moves_little_more_than_it_must(teachers: Teachers, students: Students) -> None:
    """However the hashes fall, one teacher or student more or less sets off a few chains and no reshuffle."""
    fewer_teachers = dict(list(teachers.items())[1:])
    fewer_students = dict(list(students.items())[1:])
    chains = 4 * (1 + math.log(max(len(teachers), len(students))))
    for other in ((fewer_teachers, students), (teachers, fewer_students)):
        if all(other):
            for before, after in (((teachers, students), other), (other, (teachers, students))):
                assert moves(before, after) <= fewest_moves(before, after) + chains


@pytest.mark.parametrize(
    ("teachers", "students"),
    [(3, 2), (16, 4), (17, 4), (31, 16), (40, 4), (20, 20), (10, 11), (4, 16), (100, 30)],
)
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0)])
def test_moves_are_few_on_average(teachers: int, students: int, weights: tuple[float, ...]) -> None:
    """Over many pools a change moves about ln n pairs, for each weight there is, on top of what equal weights need."""
    rng = random.Random(7)
    made: dict[str, list[int]] = {"teacher": [], "student": []}
    needed: dict[str, list[int]] = {"teacher": [], "student": []}
    for _ in range(examples(5, 25)):
        pool = {f"t{rng.random()}": rng.choice(weights) for _ in range(teachers)}
        served = {f"s{rng.random()}": None for _ in range(students)}
        one_less = {
            "teacher": (dict(list(pool.items())[1:]), served),
            "student": (pool, dict(list(served.items())[1:])),
        }
        for who, other in one_less.items():
            for before, after in (((pool, served), other), (other, (pool, served))):
                made[who].append(moves(before, after))
                needed[who].append(fewest_moves(before, after))
    for who, counts in made.items():
        chains = len(weights) * (1 + math.log(max(teachers, students)))
        assert mean(counts) <= mean(needed[who]) + chains
