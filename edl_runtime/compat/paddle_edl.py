"""`DistillReader` of EDL 0.3.1 (`paddle_edl.distill.distill_reader`), on this project's reader.

A script changes one import. Teachers are `edl teacher`s or other servers, see `edl_runtime.external.address`; a pool
has the name that was the service's. What differs is in docs/migration/from-edl.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import msgspec
import numpy as np

from edl_runtime.distill.batching import Format
from edl_runtime.distill.reader import DistillReader as Reader
from edl_runtime.distill.reader import Teachers
from edl_runtime.distill.teacher_addresses import Discovered, Fixed
from edl_runtime.errors import SpecError
from edl_runtime.protocol.oip import positive_integer
from edl_runtime.settings import RuntimeSettings, paddle_distill

Generator = Callable[[], Iterable[Any]]


class DistillReader:
    """A reader whose items have the teachers' predictions behind their slots; each call returns one epoch.

    - `ins`: names the slots of an item in order; None for one without a name.
    - `predicts`: the outputs of the teachers' model to append, in order.

    The environment comes before what is set: PADDLE_DISTILL_BALANCE_SERVER ("host:port" of an `edl discovery`, or
    several with commas), PADDLE_DISTILL_SERVICE_NAME and PADDLE_DISTILL_MAX_TEACHER. Raises SpecError for invalid
    arguments, for a second generator or second teachers, and on the first call where one of them is missing; an epoch
    raises what `edl_runtime.distill.DistillReader` does.
    """

    def __init__(self, ins: Sequence[str | None], predicts: Sequence[str]) -> None:
        self._ins = list(ins)
        self._predicts = list(predicts)
        self._teacher_batch_size = 1
        self._teachers: Teachers | None = None
        self._servers: tuple[str, ...] = ()
        self._source: tuple[Format, Generator] | None = None
        self._reader: Reader | None = None

    def set_teacher_batch_size(self, teacher_batch_size: int = 1) -> Self:
        """Set the most samples of a request."""
        self._teacher_batch_size = positive_integer("teacher_batch_size", teacher_batch_size)
        return self

    def set_serving_conf_file(self, conf_file: str) -> Self:  # noqa: ARG002 - a teacher's own metadata replaces it
        """Do nothing: teachers say themselves what they take."""
        return self

    def set_fixed_teacher(self, fixed_teacher: str | Sequence[str]) -> Self:
        """Set the teachers' addresses, "host:port,host:port" or a list."""
        teachers = Fixed.parse(fixed_teacher) if isinstance(fixed_teacher, str) else Fixed(tuple(fixed_teacher))
        return self._set_teachers(teachers)

    def set_dynamic_teacher(
        self, discovery_servers: str | Sequence[str], teacher_service_name: str, require_max_teacher: int = 1
    ) -> Self:
        """Use at most so many teachers of a pool, which `discovery_servers` ("host:port" of `edl discovery`) assign."""
        self._servers = _addresses(discovery_servers)
        return self._set_teachers(Discovered(teacher_service_name, at_most=require_max_teacher))

    def set_require_max_teacher(self, require_max_teacher: int) -> Self:
        """Set the most teachers of a pool to use; no effect on fixed ones."""
        if isinstance(self._teachers, Discovered):
            self._teachers = Discovered(self._teachers.pool, at_most=require_max_teacher)
        return self

    def set_sample_generator(self, reader: Generator) -> Self:
        """Set a function that yields samples, tuples of slots."""
        return self._set_source("sample", reader)

    def set_sample_list_generator(self, reader: Generator) -> Self:
        """Set a function that yields lists of samples."""
        return self._set_source("sample_list", reader)

    def set_batch_generator(self, reader: Generator) -> Self:
        """Set a function that yields tuples of slots, whose first axis is the batch."""
        return self._set_source("batch", reader)

    def print_config(self) -> None:
        """Print what is set."""
        format_, teachers = self._source[0] if self._source else None, self._teachers
        print(  # noqa: T201 - what it is for
            f"DistillReader: ins={self._ins}, predicts={self._predicts}, "
            f"teacher_batch_size={self._teacher_batch_size}, format={format_}, teachers={teachers}"
        )

    def __call__(self) -> Iterator[Any]:
        """Return the items of the next epoch."""
        if self._reader is None:
            self._reader = self._make_reader()
        return iter(self._reader)

    def close(self) -> None:
        """Disconnect from the teachers; also done when the reader is forgotten."""
        if self._reader is not None:
            self._reader.close()

    def _set_teachers(self, teachers: Teachers) -> Self:
        if self._teachers is not None:
            raise SpecError("teachers", str(teachers), f"to be set once; they are {self._teachers}")
        self._teachers = teachers
        return self

    def _set_source(self, format_: Format, reader: Generator) -> Self:
        if self._source is not None:
            raise SpecError("generator", format_, f"to be set once; there is one of format {self._source[0]!r}")
        self._source = format_, reader
        return self

    def _make_reader(self) -> Reader:
        if self._source is None:
            raise SpecError("generator", None, "set_sample_generator, set_sample_list_generator or set_batch_generator")
        format_, generate = self._source
        settings, teachers = self._from_environment(RuntimeSettings.from_env(os.environ))
        return Reader(
            lambda: map(_TO_ARRAYS[format_], generate()),
            inputs=self._ins,
            outputs=self._predicts,
            format=format_,
            teachers=teachers,
            teacher_batch_size=self._teacher_batch_size,
            settings=settings,
        )

    def _from_environment(self, settings: RuntimeSettings) -> tuple[RuntimeSettings, Teachers | None]:
        servers, teachers = self._servers, self._teachers
        if given := paddle_distill(os.environ):
            servers, teachers = _addresses(given.servers), Discovered(given.pool, at_most=given.most)
        if servers:
            settings = msgspec.structs.replace(settings, discovery_url=f"http://{servers[0]}")
        return settings, teachers


def _addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    words = given.split(",") if isinstance(given, str) else given
    return tuple(word.strip() for word in words if word.strip())


def _arrays(slots: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(np.asarray, slots))


_TO_ARRAYS: dict[Format, Callable[[Any], Any]] = {
    "sample": _arrays,
    "sample_list": lambda samples: [_arrays(sample) for sample in samples],
    "batch": _arrays,
}
