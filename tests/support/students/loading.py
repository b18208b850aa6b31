"""Students with Paddle's real DataLoader: `python -m support.students.loading SCENARIO METHOD`, in the tests' folder.

METHOD is how its workers are started, "fork" or "spawn". The teacher is in the reader's own process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from paddle.io import DataLoader, Dataset, IterableDataset, get_worker_info
from paddle.io.dataloader.dataloader_iter import _DataLoaderIterMultiProcess
from support.students.readers import reader_of
from support.students.student import print_line
from support.teachers.process import wait_until

from edl_runtime.distill import DistillReader, Fixed, data_loaders
from edl_runtime.distill.teacher_addresses import in_process_address
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

SAMPLES = 40
ALL = list(range(SAMPLES))
BAD, KILLS = -1, -2


class Samples(Dataset):  # type: ignore[misc]
    """Numbered samples; number 30 may raise an error (BAD) or kill its worker (KILLS)."""

    def __init__(self, odd: int = 0) -> None:
        super().__init__()
        self._odd = odd

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Array, int]:
        if number == 30 and self._odd == BAD:
            raise ValueError("a bad sample")
        if number == 30 and self._odd == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(4, number, np.float32), number


def identity(samples: list[Any]) -> list[Any]:
    return samples


FORMS: dict[str, dict[str, Any]] = {
    "batch": {"batch_size": 4},
    "sample_list": {"batch_size": 4, "collate_fn": identity},
    "sample": {"batch_size": None},
}


def reading(source: Any, **options: Any) -> DistillReader:
    teachers = Fixed((in_process_address("support.models:arithmetic"),))
    return reader_of(source, teachers, RuntimeSettings(), **{"inputs": ["x", "label"], **options})


def labels(form: str, epoch: list[Any]) -> list[int]:
    """Return the labels in order; check the answers."""
    if form == "sample_list":
        epoch = [sample for samples in epoch for sample in samples]
    for x, _, double in epoch:
        np.testing.assert_array_equal(double, x * 2)
    return [int(label) for _, of_item, _ in epoch for label in np.atleast_1d(of_item)]


def wait_for_workers_to_end() -> None:
    wait_until(lambda: not multiprocessing.active_children())


def source(method: str) -> None:
    """A loader is the source, in all forms; whole epochs, an abandoned one, and a close in mid-epoch."""
    for form, options in FORMS.items() if method == "fork" else [("batch", FORMS["batch"])]:
        for epochs in (None, 4) if method == "fork" else (3,):
            with reading(DataLoader(Samples(), num_workers=2, **options), format=form, epochs=epochs) as reader:
                assert labels(form, list(reader)) == ALL
                next(iter(reader))
                wait_for_workers_to_end()
                assert labels(form, list(reader)) == ALL
                if epochs == 4:
                    in_its_middle = iter(reader)
                    next(in_its_middle)
            wait_for_workers_to_end()


def abandoned(_: str) -> None:
    """A generator reads the loader, and loaders keep their workers; epochs are abandoned at once."""
    loader = DataLoader(Samples(), batch_size=4, num_workers=2)

    def batches() -> Iterator[Any]:
        for x, label in map(identity, loader):
            yield x.numpy(), label.numpy()

    with reading(batches) as reader:
        next(iter(reader))
        wait_for_workers_to_end()
        assert labels("batch", list(reader)) == ALL
        next(iter(reader))
    wait_for_workers_to_end()
    persistent = DataLoader(Samples(), batch_size=4, num_workers=2, persistent_workers=True)
    with reading(persistent, epochs=5) as reader:
        for _ in range(2):
            assert labels("batch", list(reader)) == ALL
            kept = multiprocessing.active_children()
            assert len(kept) == 2
            next(iter(reader))
        assert labels("batch", list(reader)) == ALL
        assert not set(kept) & set(multiprocessing.active_children())


def wrong(_: str) -> None:
    """A sample raises an error, also for a loader that a generator reads; another kills its worker."""
    for odd in (BAD, KILLS):
        loader = DataLoader(Samples(odd), batch_size=4, num_workers=2)

        def batches(loader: Any = loader) -> Iterator[Any]:
            yield from map(identity, loader)

        for of_loader in (loader, batches) if odd == BAD else (loader,):
            with reading(of_loader) as reader:
                seen: list[Any] = []
                with pytest.raises(SystemError):
                    seen.extend(reader)
                if odd == BAD:
                    assert labels("batch", seen) == ALL[: len(seen) * 4]
            wait_for_workers_to_end()


class Dying(Samples):
    """The last two samples, of one worker each, take until the reader closes: one is then killed, the other goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = multiprocessing.Semaphore(0)
        self.closing, self.over = multiprocessing.Event(), multiprocessing.Event()

    def __getitem__(self, number: int) -> tuple[Array, int]:
        if number >= SAMPLES - 2:
            self.begun.release()
            self.closing.wait()
            if number == SAMPLES - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self.over.wait()
        return super().__getitem__(number)


def raises(_: str) -> None:
    """The script raises an error, and a worker is killed while the reader closes: the script's error is raised."""
    samples = Dying()
    shut_down = _DataLoaderIterMultiProcess._try_shutdown_all

    def told(loader: Any, timeout: float | None = None) -> None:
        samples.closing.set()
        shut_down(loader, timeout)

    _DataLoaderIterMultiProcess._try_shutdown_all = told
    loader = DataLoader(samples, batch_size=1, num_workers=2, prefetch_factor=SAMPLES)

    def script() -> None:
        with reading(loader, teacher_batch_size=1) as reader:
            epoch = iter(reader)
            next(epoch)
            samples.begun.acquire()
            samples.begun.acquire()
            raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        script()
    samples.over.set()
    wait_for_workers_to_end()


def thread(_: str) -> None:
    """A thread of the script iterates the reader: a whole epoch, an abandoned one, and a killed worker."""

    def read() -> None:
        with reading(DataLoader(Samples(), batch_size=4, num_workers=2)) as reader:
            assert labels("batch", list(reader)) == ALL
            next(iter(reader))
        with reading(DataLoader(Samples(KILLS), batch_size=4, num_workers=2)) as reader, pytest.raises(SystemError):
            list(reader)

    with ThreadPoolExecutor() as threads:
        threads.submit(read).result()
    wait_for_workers_to_end()


def late(_: str) -> None:
    """The source imports Paddle after the reader has started: an error with advice, and the epoch ends."""
    loader = DataLoader(Samples(), batch_size=4, num_workers=2)

    def batches() -> Iterator[Any]:
        yield from loader

    def read() -> None:
        for source in (loader, batches):
            with reading(source) as reader, pytest.raises(ValueError, match="main thread") as failed:
                list(reader)
            assert "Import paddle.io before" in "".join(failed.value.__notes__)
            kept.append(failed.value)  # and all that it refers to

    kept: list[Any] = []
    data_loaders.allow_loaders_in_threads = lambda: None
    with ThreadPoolExecutor() as threads:
        threads.submit(read).result()
    wait_for_workers_to_end()


class Shares:
    """The samples of this worker, one at a time."""

    def __call__(self) -> Iterator[tuple[Array, Array]]:
        worker = get_worker_info()
        for number in range(worker.id, SAMPLES, worker.num_workers) if worker else ALL:
            yield np.full((1, 4), number, np.float32), np.array([number])


class Answered(IterableDataset):  # type: ignore[misc]
    """Samples with their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = reading(Shares())

    def __iter__(self) -> Iterator[tuple[Array, ...]]:
        for item in self.reader:
            yield tuple(array[0] for array in item)


def inside(method: str) -> None:
    """Workers read a reader that was made here and is in mid-epoch here; they are the source of another reader."""
    answered = Answered()
    loader = DataLoader(answered, batch_size=5, num_workers=2)
    with answered.reader:
        epoch = iter(answered.reader)
        seen = [next(epoch)]
        for _ in range(3 if method == "fork" else 1):
            assert sorted(labels("batch", [[part.numpy() for part in batch] for batch in loader])) == ALL
        assert labels("batch", [*seen, *epoch]) == ALL
        if method == "fork":
            with reading(loader, inputs=["x", None, None]) as reader:
                assert sorted(int(label) for _, several, *_ in reader for label in several) == ALL
    wait_for_workers_to_end()


SCENARIOS: dict[str, Callable[[str], None]] = {
    each.__name__: each for each in (source, abandoned, wrong, raises, thread, late, inside)
}

if __name__ == "__main__":
    scenario, method = sys.argv[1:]
    multiprocessing.set_start_method(method)
    SCENARIOS[scenario](method)
    print_line("passed")
