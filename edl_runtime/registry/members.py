"""Members of pools, whether two models are the same to a student, and which student uses which teachers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import msgspec

from edl_runtime.balance.assign import assign
from edl_runtime.errors import SpecError
from edl_runtime.protocol.oip import JOIN_EXTENSION, ModelSignature, TensorSpec


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A teacher or a student of a pool. Raises SpecError for a `weight` or `want` that can't be.

    - `id`: unique in its pool and role; a later registration of the same id takes over from the earlier.
    - `address`: "host:port" of a teacher; of a student, where it runs, for people.
    - `weight`: a teacher's share of the work, relative to its pool's others.
    - `signature`: what a teacher's model takes and answers; None joins any pool.
    - `want`: the most teachers that a student can use, None for all.
    - `fence`: the fencing token, given by the registry; a later registration's is always larger.
    """

    id: str
    address: str
    weight: float = 1.0
    signature: ModelSignature | None = None
    want: int | None = None
    fence: int = 0

    def __post_init__(self) -> None:
        check_weight(self.weight)
        if self.want is not None and self.want < 1:
            raise SpecError("want", self.want, "1 or more, or None for all")


def check_weight(weight: float) -> None:
    """Raise SpecError unless a teacher can have this share of the work."""
    if not (math.isfinite(weight) and weight > 0):
        raise SpecError("weight", weight, "a number above 0")


def differences(pool: ModelSignature, teacher: ModelSignature) -> list[str]:
    """Return in words, field by field, where `teacher` differs from `pool`; empty when they are the same."""
    return [
        *_unlike("name", pool.name, teacher.name),
        *_unlike("platform", pool.platform, teacher.platform),
        *_unlike("versions", ", ".join(pool.versions), ", ".join(teacher.versions)),
        *_unlike_tensors("input", pool.inputs, teacher.inputs),
        *_unlike_tensors("output", pool.outputs, teacher.outputs),
        *_unlike("extensions", _abilities(pool), _abilities(teacher)),
        *_unlike_joining(pool, teacher),
    ]


def _abilities(signature: ModelSignature) -> str:
    return ", ".join(name for name in signature.extensions if name != JOIN_EXTENSION)


def _unlike_joining(pool: ModelSignature, teacher: ModelSignature) -> Iterator[str]:
    ours, theirs = ("above 1" if JOIN_EXTENSION in one.extensions else "1" for one in (teacher, pool))
    if ours != theirs:
        yield f"--max-batch is {ours} and the pool's {theirs}; start all its teachers with 1, or all with more"


def _unlike_tensors(kind: str, pool: tuple[TensorSpec, ...], teacher: tuple[TensorSpec, ...]) -> Iterator[str]:
    theirs = {tensor.name: tensor for tensor in pool}
    ours = {tensor.name: tensor for tensor in teacher}
    for name in {**theirs, **ours}:
        yield from _unlike(f"{kind} {name!r}", _describe_tensor(theirs.get(name)), _describe_tensor(ours.get(name)))
    if theirs == ours and pool != teacher:
        yield from _unlike(f"{kind}s", ", ".join(theirs), ", ".join(ours))


def _unlike(field: str, pool: str, teacher: str) -> Iterator[str]:
    if pool != teacher:
        yield f"{field} is {teacher or 'empty'} and the pool's {pool or 'empty'}"


def _describe_tensor(tensor: TensorSpec | None) -> str:
    return f"{tensor.datatype} {list(tensor.shape)}" if tensor else "missing"


# Who asks whom, by the lists of both roles.


def assign_teachers(
    teachers: Collection[Member], students: Collection[Member], avoided: Mapping[str, Collection[str]] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the addresses of each student's teachers, sorted, by the student's id; whoever computes it, alike.

    A student may be listed twice: the later wins. `avoided` has addresses that a student can't use, by its id. One
    whose teachers are all among them gets those too that it would have if they weren't there; its own stay its own, for
    it has to notice when they are good again.
    """
    chosen = _assigned(teachers, students)
    for student, bad in (avoided or {}).items():
        mine = chosen.get(student, ())
        if mine and set(mine) <= set(bad):
            others = _assigned([teacher for teacher in teachers if teacher.address not in bad], students)
            chosen[student] = tuple(sorted({*mine, *others[student]}))
    return chosen


def _assigned(teachers: Collection[Member], students: Collection[Member]) -> dict[str, tuple[str, ...]]:
    addresses = {teacher.id: teacher.address for teacher in teachers}
    chosen = assign(
        {teacher.id: teacher.weight for teacher in teachers}, {student.id: student.want for student in students}
    )
    return {student: tuple(sorted({addresses[teacher] for teacher in chosen[student]})) for student in chosen}
