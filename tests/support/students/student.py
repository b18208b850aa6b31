"""Students in processes of their own: `python -m support.students.student SCENARIO TEACHER`, in the tests' folder.

The teacher is an address, or `POOL` for the teachers of the pool in the environment's registry.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from support.students.readers import POOL, Batches, reader_of

from edl_runtime.distill import Discovered, DistillReader, Fixed
from edl_runtime.distill.errors import DistillError
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

COUNT = 40


class Marked(Batches):
    """Batches numbered from `first` on, so that those of two processes differ."""

    first = 0

    def __call__(self) -> Iterator[tuple[Array]]:
        for (x,) in super().__call__():
            x[:, 1] += self.first
            yield (x,)


def reader_from(address: str, source: Callable[[], Iterator[tuple[Array]]]) -> DistillReader:
    teachers = Discovered(POOL) if address == POOL else Fixed((address,))
    return reader_of(source, teachers, RuntimeSettings.from_env(os.environ))


def read(address: str) -> None:
    """Read for ever, and print the number of each batch."""
    with reader_from(address, Batches(10**6, 0.005)) as reader:
        for number, _ in enumerate(reader):
            print_line(number)


def read_a_hanging_source(address: str) -> None:
    def source() -> Iterator[tuple[Array]]:
        yield from Batches(3)()
        threading.Event().wait()

    with reader_from(address, source) as reader:
        for number, _ in enumerate(reader):
            print_line(number)


def fork(address: str) -> None:
    """Parent and child read at the same time: from a new reader, and from one in mid-epoch."""
    source = Marked(COUNT, 0.002)
    with reader_from(address, source) as reader:
        both(reader, source, iter(reader), [])
        epoch = iter(reader)
        both(reader, source, epoch, [next(epoch) for _ in range(5)])
        check(list(reader), 0)
    print_line("passed")


def both(
    reader: DistillReader, source: Marked, epoch: Iterator[tuple[Array, ...]], seen: list[tuple[Array, ...]]
) -> None:
    child = os.fork()
    if child:
        check([*seen, *epoch], 0)
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        source.first = 1000
        for _ in range(2):
            check(list(reader), 1000)
        if seen:
            check_refused(epoch)
        del epoch  # closing the parent's epoch here has no effect
        reader.close()
        os._exit(0)
    finally:
        os._exit(1)


def check_refused(epoch: Iterator[tuple[Array, ...]]) -> None:
    with pytest.raises(DistillError, match="another process"):
        next(epoch)


def check(epoch: list[tuple[Array, ...]], first: int) -> None:
    assert [int(x[0, 1]) for x, _ in epoch] == list(range(first, first + COUNT)), epoch
    assert all((double == x * 2).all() for x, double in epoch)


def spawn(address: str) -> None:
    """Read here and in a spawned child at the same time."""
    with reader_from(address, Marked(COUNT, 0.002)) as reader:
        epoch = iter(reader)
        seen = [next(epoch)]
        child = multiprocessing.get_context("spawn").Process(target=read_an_epoch, args=(address, 1000))
        child.start()
        check([*seen, *epoch], 0)
        check(list(reader), 0)
        child.join()
    assert child.exitcode == 0
    print_line("passed")


def read_an_epoch(address: str, first: int) -> None:
    source = Marked(COUNT, 0.002)
    source.first = first
    with reader_from(address, source) as reader:
        check(list(reader), first)


def print_line(text: object) -> None:
    print(text, flush=True)  # noqa: T201 - read by the test


SCENARIOS = {scenario.__name__: scenario for scenario in (read, read_a_hanging_source, fork, spawn)}

if __name__ == "__main__":
    scenario, address = sys.argv[1:]
    SCENARIOS[scenario](address)
