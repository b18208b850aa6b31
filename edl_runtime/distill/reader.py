"""DistillReader: iterate over one's batches and find the teachers' answers in them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, get_args

from edl_runtime.distill.engine import Engine
from edl_runtime.distill.formats import Format, join
from edl_runtime.distill.pool import Connect, Connection
from edl_runtime.distill.reporter import JobReporter
from edl_runtime.distill.stats import ReaderStats
from edl_runtime.distill.teachers import Discovered, Fixed, teachers_from
from edl_runtime.errors import SpecError
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.settings import RuntimeSettings

Source = Callable[[], Iterable[Any]] | Iterable[Any]


class DistillReader:
    """A source's items with the teachers' predictions appended, in the source's order, each exactly once.

        with DistillReader(batches, inputs=["image", "label"], outputs=["logits"]) as reader:
            for images, labels, logits in reader:
                ...

    Each iteration is one epoch. The source runs ahead in a thread of its own, by a few requests for each teacher.
    Teachers may come, go and fail in the middle. Leaving an epoch early is fine; of several iterations only the
    latest goes on.

    - `source`: a function that returns an iterable for one epoch, called once for each, or a list of items. Items
      are not copied, so it must not write to an array it has yielded.
    - `inputs`: names the slots of an item, in order; None for one that teachers never take. What the teachers' model
      takes is sent, and every slot comes back as an array. dtypes have to be the model's; a slot of another shape
      with as many values is reshaped on the way.
    - `outputs`: the model's outputs to append after the slots, in order.
    - `format`: what an item is: "sample" (a tuple of slots), "sample_list" (a list of samples) or "batch" (a tuple of
      slots with the batch as their first axis).
    - `teachers`: by default what EDL_TEACHERS (fixed) or EDL_POOL (discovered, by EDL_REDIS_URL) say.
    - `teacher_batch_size`: the most samples in one request. A request has samples of one item of the source only,
      except in format "sample".
    - `total_steps`: batches in all epochs together, if known, to tell the time left.
    - `settings`: by default from the environment.
    - `reporter`: what tells the job's progress, for readers and phases that are one job; by default one of its own.
    - `connect`: opens a connection to an address; by default one of the Open Inference Protocol.

    Raises SpecError for what can't work. Nothing is started before the first iteration, which raises SpecError for
    names that the teachers' model does not have, SampleError for an item that it does not take, InferenceError for
    what it refuses or fails again and again, NoTeacherError after EDL_TEACHER_WAIT_S without a teacher (with teachers
    that answer nothing, after EDL_TEACHER_TIMEOUT_S if that is longer), RegistryUnavailableError when Redis is away at
    the start, and what the source raises.
    """

    def __init__(
        self,
        source: Source,
        *,
        inputs: Sequence[str | None],
        outputs: Sequence[str],
        format: Format = "batch",  # noqa: A002 -- the word that users look for
        teachers: Fixed | Discovered | None = None,
        teacher_batch_size: int = 16,
        total_steps: int | None = None,
        settings: RuntimeSettings | None = None,
        reporter: JobReporter | None = None,
        connect: Connect | None = None,
    ) -> None:
        settings = settings or RuntimeSettings.from_env(os.environ)
        if reporter is not None and total_steps is not None:
            raise SpecError("total_steps", total_steps, "None with a reporter, which knows it already")
        self._format = _checked_format(format)
        self._engine = Engine(
            _checked_source(source),
            inputs=_checked_inputs(inputs),
            outputs=_checked_outputs(outputs),
            format=self._format,
            teachers=_checked_teachers(teachers_from(settings) if teachers is None else teachers, settings),
            teacher_batch_size=_checked_size(teacher_batch_size),
            settings=settings,
            connect=connect or _connect_with(settings.teacher_token, settings.teacher_timeout_s),
        )
        self._reporter = reporter or JobReporter(total_steps=total_steps, settings=settings)
        self._owns_reporter = reporter is None
        self._forgotten = weakref.finalize(self, _stop, self._engine, self._reporter if reporter is None else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        """Yield the items of one epoch."""
        engine = self._engine
        if engine.start():
            self._reporter.follow(engine.pipeline.stats)
        epoch = engine.begin()
        try:
            while (batch := engine.pipeline.take_batch(epoch)) is not None:
                yield from join(self._format, batch)
        finally:
            engine.pipeline.end(epoch)

    def report(self, *, loss: float | None = None, note: str | None = None) -> None:
        """Tell the job's progress what only the script knows; None leaves it as it was."""
        self._reporter.report(loss=loss, note=note)

    def stats(self) -> ReaderStats:
        """Return what was delivered so far; also after `close`."""
        return self._engine.pipeline.stats()

    def close(self) -> None:
        """Disconnect from the teachers and end all threads, in the middle of an epoch or not; may be called again."""
        self._forgotten.detach()
        self._engine.stop()
        self._engine.join()
        if self._owns_reporter:
            self._reporter.close()


def _stop(engine: Engine, reporter: JobReporter | None) -> None:
    engine.stop()
    if reporter is not None:
        reporter.stop()


def _connect_with(token: str, timeout_s: float) -> Connect:
    def connect(address: str) -> Connection:
        return TeacherConnection(address, token=token, timeout_s=timeout_s)

    return connect


def _checked_source(source: object) -> Callable[[], Iterable[Any]]:
    if callable(source):
        return source
    if isinstance(source, Iterator):
        raise SpecError("source", type(source).__name__, "a function that returns a new one for each epoch")
    if not isinstance(source, Iterable):
        raise SpecError("source", type(source).__name__, "a function that returns an iterable, or a list of items")
    return lambda: source


def _checked_inputs(inputs: object) -> tuple[str | None, ...]:
    allowed = "a list of names, one for each slot of an item, None for one without"
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise SpecError("inputs", inputs, allowed)
    names = [name for name in inputs if name is not None]
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise SpecError("inputs", inputs, f"{allowed}; at least one name, none twice")
    return tuple(inputs)


def _checked_outputs(outputs: object) -> tuple[str, ...]:
    allowed = "a list of one or more of the model's outputs, none twice"
    if isinstance(outputs, str) or not isinstance(outputs, Sequence) or not outputs:
        raise SpecError("outputs", outputs, allowed)
    if len(set(outputs)) < len(outputs) or not all(isinstance(name, str) and name for name in outputs):
        raise SpecError("outputs", outputs, allowed)
    return tuple(outputs)


def _checked_format(given: Format) -> Format:
    if given not in get_args(Format):
        raise SpecError("format", given, " or ".join(map(repr, get_args(Format))))
    return given


def _checked_teachers(given: object, settings: RuntimeSettings) -> Fixed | Discovered:
    if not isinstance(given, Fixed | Discovered):
        raise SpecError("teachers", given, "Fixed(…), Discovered(…) or None for what the environment says")
    if isinstance(given, Discovered) and not settings.redis_url:
        raise SpecError("settings.redis_url (EDL_REDIS_URL)", "", "the URL of the Redis that knows the pool's teachers")
    return given


def _checked_size(given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise SpecError("teacher_batch_size", given, "a whole number of 1 or more")
    return given
