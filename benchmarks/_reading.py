"""What a benchmark reads: a source, and the source with teachers' answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from _data import DATA
from _measuring import Peer, Run, instant_teachers, measured

from edl_runtime.distill import DistillReader, Fixed
from edl_runtime.settings import RuntimeSettings

Format = Literal["sample", "sample_list", "batch"]
FORMATS = get_args(Format)


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data and options of a reader. A `dtype` other than the data's is sent to the teachers."""

    data: Literal["img224", "img28", "tok128"] = "img224"
    format: Format = "batch"
    dtype: Literal["", "float32", "uint8"] = ""
    batch_size: int = 32
    teacher_batch_size: int | None = None
    teachers: int = 2
    teacher_ms: float = 0
    batches: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "teacher_batch_size", "teachers"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise ValueError(f"{name} must be 1 or more")
        if self.dtype and not self.data.startswith("img"):
            raise ValueError(f"dtype is of images, and {self.data} has none")

    @property
    def passes(self) -> int:
        """Batches in one pass over the data."""
        return self.batches or DATA[self.data].batches


class Reading(NamedTuple):
    """The plain source, the reader with answers, and its teachers."""

    plain: Callable[[], Iterable[Any]]
    distilled: Iterable[Any]
    teachers: list[Peer]

    def take(self, items: Iterable[Any], hold: int) -> Run:
        """Consume all of `items`, dropping them whenever `hold` are held; return the times."""

        def consume() -> None:
            held = []
            for item in items:
                held.append(item)
                if len(held) == hold:
                    held.clear()

        return measured(consume, self.teachers)


@contextlib.contextmanager
def reading(case: Case) -> Iterator[Reading]:
    """Run the teachers of a case, and a reader that has read one item."""
    data = DATA[case.data].of(case.dtype) if case.dtype else DATA[case.data]
    source = data.source(case.format, case.passes, case.batch_size)
    with instant_teachers(case.teachers, data.signature, case.teacher_ms) as teachers:
        reader = DistillReader(
            source,
            inputs=data.names,
            outputs=["logits"],
            format=case.format,
            teachers=Fixed(tuple(teacher.address for teacher in teachers)),
            teacher_batch_size=case.teacher_batch_size,
            settings=RuntimeSettings(),
        )
        with reader:
            for item in reader:  # connects, and fails at once if something is wrong
                slots = item if case.format != "sample_list" else item[0]
                if len(slots) != len(data.names) + 1:
                    raise SystemExit(f"got {len(slots)} slots")
                break
            yield Reading(source, reader, teachers)
