"""Members of pools, the differences between two models, and which student uses which teachers."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping

import msgspec

from edl_runtime.balance.assign import assign
from edl_runtime.errors import SpecError
from edl_runtime.protocol.llm import LLM_EXTENSION, llm_server
from edl_runtime.protocol.oip import JOIN_EXTENSION, TOKENIZER_EXTENSION, ModelSignature
from edl_runtime.specs import check_weight


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A teacher or a student of a pool. Raises SpecError for a `weight` or `want` that is not allowed.

    - `id`: unique in its pool and role; a later registration of the same id replaces an earlier one.
    - `address`: "host:port" of a teacher; of a student, where it runs, for display only.
    - `weight`: a teacher's share of the work, relative to its pool's others.
    - `signature`: inputs and outputs of a teacher's model; None joins any pool.
    - `want`: the most teachers that a student can use, None for all.
    - `fence`: the fencing token from the registry; it grows with each registration.
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


def student_id(job: str, instance: int) -> str:
    """Return a new id of the student that an instance of a job is; an empty `job` for one started by hand."""
    return f"{job or 'student'}-{instance}-{uuid.uuid4().hex[:8]}"


def job_of_student(member_id: str) -> str:
    """Return the job of a student's id, as `student_id` makes it; anything for other ids."""
    return member_id.rsplit("-", 2)[0]


def signature_differences(pool: ModelSignature, teacher: ModelSignature) -> list[str]:
    """Return a text for each field in which `teacher` differs from `pool`; empty when they are the same.

    Name, platform, versions and tokenizer are compared where both have them; servers that are not ours have none. One
    of a language model has to tell its tokenizer where the pool has one.
    """
    theirs, ours = _described(pool), _described(teacher)
    if theirs["tokenizer"] and not ours["tokenizer"] and llm_server(teacher):
        ours["tokenizer"] = "unknown (name its folder by --tokenizer)"
    for field in ("name", "platform", "versions", "tokenizer"):
        if not (theirs[field] and ours[field]):  # of a server that is not ours
            theirs[field] = ours[field] = ""
    different = [field for field in {**theirs, **ours} if theirs.get(field) != ours.get(field)]
    if not different:  # the tensors are the same, in any order
        theirs, ours = _tensor_names(pool), _tensor_names(teacher)
        different = [field for field in theirs if theirs[field] != ours[field]]
    found = [
        f"{field} is {ours.get(field, 'missing')} and the pool's {theirs.get(field, 'missing')}" for field in different
    ]
    batching = ["above 1" if JOIN_EXTENSION in signature.extensions else "1" for signature in (teacher, pool)]
    if batching[0] != batching[1]:
        found.append(
            "--max-batch is {} and the pool's {}; start all its teachers with 1, or all with more".format(*batching)
        )
    return found


def _described(signature: ModelSignature) -> dict[str, str]:
    tensors = [*(("input", one) for one in signature.inputs), *(("output", one) for one in signature.outputs)]
    return {
        "name": signature.name,
        "platform": signature.platform,
        "versions": ", ".join(signature.versions),
        **{f"{kind} {one.name!r}": f"{one.datatype} {list(one.shape)}" for kind, one in tensors},
        "tokenizer": signature.tokenizer,
        "logprobs_mode": server.logprobs_mode if (server := llm_server(signature)) else "",
        "extensions": ", ".join(name for name in signature.extensions if not _is_compared_alone(name)) or "empty",
    }


def _is_compared_alone(extension: str) -> bool:
    return extension == JOIN_EXTENSION or extension.startswith((TOKENIZER_EXTENSION, LLM_EXTENSION))


def _tensor_names(signature: ModelSignature) -> dict[str, str]:
    return {
        "inputs": ", ".join(one.name for one in signature.inputs),
        "outputs": ", ".join(one.name for one in signature.outputs),
    }


# Which student uses which teachers.


def assign_teachers(
    teachers: Collection[Member], students: Collection[Member], avoided: Mapping[str, Collection[str]] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the addresses of each student's teachers, sorted, by the student's id.

    If a student is listed twice, the later entry counts. `avoided` has the addresses that a student can't use, by its
    id. A student that can use none of its teachers also gets those it would have without them. It keeps its own, so
    that it notices when they recover.
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
