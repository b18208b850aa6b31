"""DistillReader: iterates over a source's batches and appends the teachers' answers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Self, get_args

from edl_runtime.distill.batching import Format, join
from edl_runtime.distill.cache.answer_cache import AnswerCache
from edl_runtime.distill.engine import Engine, PoolQuery
from edl_runtime.distill.reporter import JobReporter
from edl_runtime.distill.stats import ReaderStats
from edl_runtime.distill.teacher_worker import Connect
from edl_runtime.distill.teachers import Discovered, Fixed, teachers_from_settings
from edl_runtime.errors import SpecError
from edl_runtime.protocol.oip import Normalise, TopK
from edl_runtime.settings import RuntimeSettings


class DistillReader:
    """A source's items with the teachers' predictions appended, in the source's order, each exactly once.

        with DistillReader(batches, inputs=["image", "label"], outputs=["logits"]) as reader:
            for images, labels, logits in reader:
                ...

    Each iteration is one epoch. The source runs ahead in a thread of its own, by a few requests for each teacher.
    Teachers may come, go and fail in the middle. Leaving an epoch early is fine; of several iterations only the
    latest goes on. In a child, forked or spawned, as the workers of a DataLoader are, the reader begins anew, with
    connections of its own; an iteration from before the fork is the parent's. Closing, also by Ctrl-C, waits a second
    for a source that hangs, and then leaves it behind.

    - `source`: a function that returns an iterable for one epoch, called once for each, a list of items, or a
      paddle.io.DataLoader, with workers or without. Items are not copied, so it must not write to an array it has
      yielded.
    - `inputs`: names the slots of an item, in order; None for one that teachers never take. What the teachers' model
      takes is sent, and every slot comes back as an array. dtypes have to be the model's; a slot of another shape
      with as many values is reshaped on the way.
    - `outputs`: the model's outputs to append after the slots, in order. `TopK(name, k)` appends two arrays: the k
      largest values along the last axis, largest first, and where they stand (int32).
    - `format`: what an item is: "sample" (a tuple of slots), "sample_list" (a list of samples) or "batch" (a tuple of
      slots with the batch as their first axis).
    - `teachers`: by default what EDL_TEACHERS (fixed) or EDL_POOL (discovered, by EDL_REDIS_URL or EDL_DISCOVERY_URL)
      say. A mapping, name → teachers, asks several pools about each sample; then `outputs` is a mapping, too, and one
      slot is appended, a dict of dicts: `answers["vision"]["logits"]`.
    - `teacher_batch_size`: the most samples in one request; by default 64, and fewer of more than 8 MiB in all. A
      request has samples of one item of the source only, except in format "sample". Without it, teachers that answer
      within 4 ms and may join requests are asked about up to 256 samples at once, of several items if the source has
      them at hand. Set it for teachers that take long: all of a request has to be answered within
      EDL_TEACHER_TIMEOUT_S.
    - `normalise`: inputs whose slots are uint8 though the model takes float32, and how the teachers are to normalise
      them: a quarter of the bytes travel.
    - `allow_nan`: take answers with NaN or infinity, too, as of a model that masks with them. Without it they count as
      wrong answers, and their teacher goes into quarantine.
    - `epochs`: how many the script will read, if it is known. The first batches of the next epoch are then under way
      before one ends; without it the source is called for an epoch only when that begins, and the log says once what
      that costs. Not with `data.through` of an elastic training, and of no use where the source forks in each epoch.
    - `total_steps`: batches in all epochs together, if known, to tell the time left.
    - `cache`: `AnswerCache(sample_id)` asks about each sample only once. For data without augmentation.
    - `settings`: by default from the environment.
    - `reporter`: what tells the job's progress, for readers and phases that are one job; by default one of its own.
    - `connect`: opens a connection to an address; by default one of the Open Inference Protocol.

    Raises SpecError for what can't work. Nothing is started before the first iteration, which raises SpecError for
    names that the teachers' model does not have and for what they can't do, SampleError for an item that it does not
    take, InferenceError for what it refuses or fails again and again, NoTeacherError after EDL_TEACHER_WAIT_S without a
    teacher (with teachers that answer nothing, after EDL_TEACHER_TIMEOUT_S if that is longer),
    RegistryError when Redis or the discovery endpoint is away at the start or refuses, and what the source raises.
    """

    def __init__(
        self,
        source: Source,
        *,
        inputs: Sequence[str | None],
        outputs: Outputs | Mapping[str, Outputs],
        format: Format = "batch",  # noqa: A002 -- the word that users look for
        teachers: Teachers | Mapping[str, Teachers] | None = None,
        teacher_batch_size: int | None = None,
        normalise: Mapping[str, Normalise] = MappingProxyType({}),
        allow_nan: bool = False,
        epochs: int | None = None,
        total_steps: int | None = None,
        cache: AnswerCache | None = None,
        settings: RuntimeSettings | None = None,
        reporter: JobReporter | None = None,
        connect: Connect | None = None,
    ) -> None:
        settings = settings or RuntimeSettings.from_env(os.environ)
        if reporter is not None and total_steps is not None:
            raise SpecError("total_steps", total_steps, "None with a reporter, which knows it already")
        names = checked_inputs(inputs)
        queries, self._pools = checked_queries(teachers, outputs, settings)
        self._format = checked_format(format)
        self.epochs = None if epochs is None else checked_count("epochs", epochs)
        self._make_engine = partial(
            Engine,
            checked_source(source),
            inputs=names,
            queries=queries,
            normalise=checked_normalise(normalise, names),
            format=self._format,
            teacher_batch_size=(
                None if teacher_batch_size is None else checked_count("teacher_batch_size", teacher_batch_size)
            ),
            allow_nan=checked_flag("allow_nan", allow_nan),
            epochs=self.epochs,
            cache=checked_cache(cache, names),
            settings=settings,
            connect=connect,
        )
        self._own_engine = self._make_engine()
        self._reporter = reporter or JobReporter(total_steps=total_steps, settings=settings)
        self._owns_reporter = reporter is None
        self._forgotten = weakref.finalize(self, _stop, self._own_engine, None if reporter else self._reporter)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned child is given to make its own."""
        return {name: self.__dict__[name] for name in ("epochs", "_format", "_pools", "_make_engine")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._restart_in_child()

    def __iter__(self) -> Iterator[Any]:
        """Yield the items of one epoch."""
        engine = self._engine()
        if engine.start():
            self._reporter.follow(engine.stats)
        epoch = engine.begin()
        try:
            while (batch := engine.take(epoch)) is not None:
                yield from join(self._format, batch, self._pools)
        finally:
            engine.end(epoch)

    def report(self, *, loss: float | None = None, note: str | None = None) -> None:
        """Tell the job's progress what only the script knows; None leaves it as it was."""
        self._reporter.report(loss=loss, note=note)

    def stats(self) -> ReaderStats:
        """Return what was delivered so far; also after `close`."""
        return self._engine().stats()

    def close(self) -> None:
        """Disconnect from the teachers and end all threads, in the middle of an epoch or not; may be called again."""
        engine = self._engine()
        self._forgotten.detach()
        engine.stop()
        engine.join()
        self._reporter.unfollow(engine.stats)
        if self._owns_reporter:
            self._reporter.close()

    def _engine(self) -> Engine:
        """Return this process's engine: a forked child has one of its own."""
        if not self._own_engine.is_mine:
            self._forgotten.detach()
            self._restart_in_child()
        return self._own_engine

    def _restart_in_child(self) -> None:
        """Begin in a child, with threads and connections of its own; the job's progress is the parent's to tell."""
        self._own_engine = self._make_engine()
        self._reporter = JobReporter(settings=RuntimeSettings())
        self._owns_reporter = True
        self._forgotten = weakref.finalize(self, _stop, self._own_engine, self._reporter)


def _stop(engine: Engine, reporter: JobReporter | None) -> None:
    if engine.is_mine:
        engine.stop()
        if reporter is not None:
            reporter.stop()


# Validation of the arguments

Source = Callable[[], Iterable[Any]] | Iterable[Any]
Teachers = Fixed | Discovered
Outputs = Sequence[str | TopK]


def checked_source(source: object) -> Callable[[], Iterable[Any]]:
    """Return what makes an iterable for each epoch. Raises SpecError."""
    if callable(source):
        return source
    if isinstance(source, Iterator):
        raise SpecError("source", type(source).__name__, "a function that returns a new one for each epoch")
    if not isinstance(source, Iterable):
        raise SpecError("source", type(source).__name__, "a function that returns an iterable, or a list of items")
    return source.__iter__


def checked_inputs(inputs: object) -> tuple[str | None, ...]:
    """Return the names of an item's slots. Raises SpecError."""
    allowed = "a list of names, one for each slot of an item, None for one without"
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise SpecError("inputs", inputs, allowed)
    names = [name for name in inputs if name is not None]
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise SpecError("inputs", inputs, f"{allowed}; at least one name, none twice")
    return tuple(inputs)


def checked_queries(
    teachers: Teachers | Mapping[str, Teachers] | None,
    outputs: Outputs | Mapping[str, Outputs],
    settings: RuntimeSettings,
) -> tuple[list[PoolQuery], tuple[str, ...]]:
    """Return what is asked of each pool, and the pools' names if they have any. Raises SpecError."""
    if not isinstance(teachers, Mapping):
        if isinstance(outputs, Mapping):
            allowed = "a list of outputs; by the names of several teachers only when `teachers` has names"
            raise SpecError("outputs", dict(outputs), allowed)
        asked = teachers_from_settings(settings) if teachers is None else teachers
        return [PoolQuery(_checked_teachers("teachers", asked, settings), _checked_outputs("outputs", outputs))], ()
    names = tuple(teachers)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise SpecError("teachers", names, "at least one name with its Fixed(…) or Discovered(…)")
    if not isinstance(outputs, Mapping) or outputs.keys() != teachers.keys():
        given = list(outputs) if isinstance(outputs, Mapping) else outputs
        raise SpecError("outputs", given, f"a list of outputs for each of the teachers {', '.join(names)}")
    return [
        PoolQuery(
            _checked_teachers(f"teachers[{name!r}]", asked, settings),
            _checked_outputs(f"outputs[{name!r}]", outputs[name]),
        )
        for name, asked in teachers.items()
    ], names


def checked_normalise(normalise: object, inputs: Sequence[str | None]) -> dict[str, Normalise]:
    """Return what the teachers are to make of uint8 inputs. Raises SpecError."""
    if not isinstance(normalise, Mapping) or not all(isinstance(how, Normalise) for how in normalise.values()):
        raise SpecError("normalise", normalise, "Normalise(…) by the name of an input")
    for name in normalise:
        if name not in inputs:
            raise SpecError("normalise", name, f"a name of `inputs`: {', '.join(name for name in inputs if name)}")
    return dict(normalise)


def checked_cache(cache: object, inputs: Sequence[str | None]) -> AnswerCache | None:
    """Return the cache, if one is wished for. Raises SpecError."""
    if cache is None:
        return None
    if not isinstance(cache, AnswerCache):
        raise SpecError("cache", cache, "AnswerCache(…), or None to ask about each sample in each epoch")
    if cache.sample_id not in inputs:
        allowed = f"a name of `inputs`: {', '.join(name for name in inputs if name)}"
        raise SpecError("cache.sample_id", cache.sample_id, allowed)
    return cache


def checked_format(given: Format) -> Format:
    """Return `given` if it is a format. Raises SpecError."""
    if given not in get_args(Format):
        raise SpecError("format", given, " or ".join(map(repr, get_args(Format))))
    return given


def checked_count(field: str, given: object) -> int:
    """Return `given` if it is a whole number above 0. Raises SpecError that names `field`."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise SpecError(field, given, "a whole number of 1 or more")
    return given


def checked_flag(field: str, given: object) -> bool:
    """Return `given` if it is True or False. Raises SpecError that names `field`."""
    if not isinstance(given, bool):
        raise SpecError(field, given, "True or False")
    return given


def _checked_outputs(field: str, outputs: object) -> tuple[str | TopK, ...]:
    allowed = "a list of one or more of the model's outputs, names or TopK(name, k), none twice"
    if isinstance(outputs, str) or not isinstance(outputs, Sequence) or not outputs:
        raise SpecError(field, outputs, allowed)
    names = [output.name if isinstance(output, TopK) else output for output in outputs]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise SpecError(field, outputs, allowed)
    return tuple(outputs)


def _checked_teachers(field: str, given: object, settings: RuntimeSettings) -> Teachers:
    if not isinstance(given, Fixed | Discovered):
        raise SpecError(field, given, "Fixed(…), Discovered(…) or None for what the environment says")
    if isinstance(given, Discovered) and not settings.redis_url and not settings.discovery_url:
        allowed = "the URL of the Redis that knows the pool's teachers, or of an `edl discovery` in EDL_DISCOVERY_URL"
        raise SpecError("settings.redis_url (EDL_REDIS_URL)", "", allowed)
    return given
