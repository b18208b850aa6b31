"""DistillReader: iterates over a source's batches and appends the teachers' answers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, get_args

from edl_runtime.distill.batching import Format, join
from edl_runtime.distill.bindings import Tokenizer
from edl_runtime.distill.cache.answer_cache import AnswerCache
from edl_runtime.distill.engine import Engine, PoolQuery
from edl_runtime.distill.reporter import JobReporter
from edl_runtime.distill.stats import ReaderStats
from edl_runtime.distill.teacher_addresses import Discovered, Fixed, teachers_from_settings
from edl_runtime.distill.teacher_connections import Connect
from edl_runtime.errors import SpecError
from edl_runtime.protocol.oip import Normalise, TopK, digest_of, positive_integer
from edl_runtime.settings import RuntimeSettings


class DistillReader:
    """A source's items with the teachers' predictions appended, in the source's order, each exactly once.

        with DistillReader(batches, inputs=["image", "label"], outputs=["logits"]) as reader:
            for images, labels, logits in reader:
                ...

    Each iteration is one epoch. The source runs ahead in a thread of its own, by a few requests for each teacher.
    Teachers may come, go and fail in the middle. Leaving an epoch early is fine; of several iterations only the
    latest continues. In a child process, forked or spawned, such as a DataLoader's worker, the reader starts again with
    connections of its own; an iteration from before the fork stays the parent's. Closing, also by Ctrl-C, waits at most
    one second for a source that hangs.

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
    - `teachers`: by default those of EDL_TEACHERS (fixed) or EDL_POOL (discovered, through EDL_REDIS_URL or
      EDL_DISCOVERY_URL). With a mapping, name → teachers, each sample is sent to several pools; then `outputs` is a
      mapping, too, and one slot is appended, a dict of dicts: `answers["vision"]["logits"]`.
    - `teacher_batch_size`: the most samples in one request; by default 64, and fewer of more than 8 MiB in all. A
      request has samples of one item of the source only, except in format "sample". Without it, teachers that answer
      within 4 ms and may join requests get up to 256 samples at once, of several items if the source has them ready.
      Set it for slow teachers: a whole request has to be answered within EDL_TEACHER_TIMEOUT_S.
    - `normalise`: inputs whose slots are uint8 though the model takes float32, and how teachers normalise them; a
      quarter of the bytes is sent.
    - `allow_nan`: accept answers with NaN or infinity, as of a model that masks with them. By default they count as
      wrong answers, and their teacher goes into quarantine.
    - `tokenizer`: the file with which the script made tokens of texts, such as tokenizer.json. Teachers whose model
      lies beside one with other content are refused; those that tell none, as other servers, are not.
    - `epochs`: how many the script will read, if known. The first batches of the next epoch are then requested before
      the current one ends; by default the source is called for an epoch only when that begins. Don't use it with
      `data.through` of an elastic training; it has no effect where the source forks in each epoch.
    - `total_steps`: batches in all epochs together, if known, to estimate the time left.
    - `cache`: with `AnswerCache(sample_id)` each sample is sent only once. For data without augmentation.
    - `settings`: by default from the environment.
    - `reporter`: publishes the job's progress; pass one to several readers that are one job. By default its own.
    - `connect`: opens a connection to an address; by default one of the Open Inference Protocol.

    Raises SpecError for invalid arguments. Nothing is started before the first iteration, which raises SpecError for
    names and features that the teachers' model does not have, SampleError for an item that it does not take,
    InferenceError for a request that it refuses or fails repeatedly, NoTeacherError after EDL_TEACHER_WAIT_S without a
    teacher (with teachers that don't answer, after EDL_TEACHER_TIMEOUT_S if that is longer), RegistryError when Redis
    or the discovery endpoint is unavailable at the start or refuses, and what the source raises.
    """

    def __init__(
        self,
        source: Source,
        *,
        inputs: Sequence[str | None],
        outputs: Outputs | Mapping[str, Outputs],
        format: Format = "batch",  # noqa: A002 -- the name that users look for
        teachers: Teachers | Mapping[str, Teachers] | None = None,
        teacher_batch_size: int | None = None,
        normalise: Mapping[str, Normalise] = MappingProxyType({}),
        allow_nan: bool = False,
        tokenizer: str | os.PathLike[str] | None = None,
        epochs: int | None = None,
        total_steps: int | None = None,
        cache: AnswerCache | None = None,
        settings: RuntimeSettings | None = None,
        reporter: JobReporter | None = None,
        connect: Connect | None = None,
    ) -> None:
        settings = settings or RuntimeSettings.from_env(os.environ)
        if reporter is not None and total_steps is not None:
            raise SpecError("total_steps", total_steps, "None with a reporter, which has its own")
        self.epochs = None if epochs is None else positive_integer("epochs", epochs)
        if teacher_batch_size is not None:
            teacher_batch_size = positive_integer("teacher_batch_size", teacher_batch_size)
        queries, self._pools = _checked_queries(teachers, outputs, settings)
        self._format: Format = format
        _require(format in get_args(Format), "format", format, " or ".join(map(repr, get_args(Format))))
        _require(isinstance(allow_nan, bool), "allow_nan", allow_nan, "True or False")
        _check_inputs(inputs)
        named = f"a name of `inputs`: {', '.join(name for name in inputs if name)}"
        _require(
            isinstance(normalise, Mapping) and all(isinstance(how, Normalise) for how in normalise.values()),
            "normalise",
            normalise,
            "Normalise(…) by the name of an input",
        )
        for name in normalise:
            _require(name in inputs, "normalise", name, named)
        if cache is not None:
            _require(isinstance(cache, AnswerCache), "cache", cache, "AnswerCache(…), or None to keep no answers")
            _require(cache.sample_id in inputs, "cache.sample_id", cache.sample_id, named)
        self._make_engine = partial(
            Engine,
            _checked_source(source),
            inputs=tuple(inputs),
            queries=queries,
            normalise=dict(normalise),
            format=format,
            teacher_batch_size=teacher_batch_size,
            allow_nan=allow_nan,
            tokenizer=None if tokenizer is None else _read_tokenizer(tokenizer),
            epochs=self.epochs,
            cache=cache,
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
        """Return what a spawned child needs to make its own reader."""
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

    def report(
        self, *, loss: float | None = None, note: str | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Add to the job's progress what only the script knows: `loss`, `note` and `metrics` as in `JobReporter`."""
        self._reporter.report(loss=loss, note=note, metrics=metrics)

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
        """Return this process's engine; a forked child makes its own."""
        if not self._own_engine.is_mine:
            self._forgotten.detach()
            self._restart_in_child()
        return self._own_engine

    def _restart_in_child(self) -> None:
        """Use threads and connections of this child process; the parent alone publishes the job's progress."""
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


def _require(ok: object, field: str, given: object, allowed: str) -> None:
    if not ok:
        raise SpecError(field, given, allowed)


def _checked_source(source: object) -> Callable[[], Iterable[Any]]:
    """Return what makes an iterable for each epoch."""
    if callable(source):
        return source
    kind = type(source).__name__
    _require(not isinstance(source, Iterator), "source", kind, "a function that returns a new one for each epoch")
    if not isinstance(source, Iterable):
        raise SpecError("source", kind, "a function that returns an iterable, or a list of items")
    return source.__iter__


def _read_tokenizer(given: object) -> Tokenizer:
    try:
        file = Path(given)  # type: ignore[arg-type]
        return Tokenizer(file, digest_of([file]))
    except (OSError, TypeError, ValueError):
        raise SpecError("tokenizer", given, "a file that can be read, or None") from None


def _are_names(given: Sequence[object]) -> bool:
    return bool(given) and all(isinstance(name, str) and name for name in given) and len(set(given)) == len(given)


def _check_inputs(inputs: object) -> None:
    is_list = isinstance(inputs, Sequence) and not isinstance(inputs, str)
    _require(
        is_list and _are_names([name for name in inputs if name is not None]),  # type: ignore[attr-defined]
        "inputs",
        inputs,
        "a list of names, one for each slot of an item, None for one without; at least one name, none twice",
    )


def _checked_queries(
    teachers: Teachers | Mapping[str, Teachers] | None,
    outputs: Outputs | Mapping[str, Outputs],
    settings: RuntimeSettings,
) -> tuple[list[PoolQuery], tuple[str, ...]]:
    """Return what is requested from each pool, and the pools' names if they have any."""
    if not isinstance(teachers, Mapping):
        if isinstance(outputs, Mapping):
            allowed = "a list of outputs; by the names of several teachers only when `teachers` has names"
            raise SpecError("outputs", dict(outputs), allowed)
        one = teachers_from_settings(settings) if teachers is None else teachers
        return [_checked_query("", one, outputs, settings)], ()
    names = tuple(teachers)
    _require(_are_names(names), "teachers", names, "at least one name with its Fixed(…) or Discovered(…)")
    if not isinstance(outputs, Mapping) or outputs.keys() != teachers.keys():
        given = list(outputs) if isinstance(outputs, Mapping) else outputs
        raise SpecError("outputs", given, f"a list of outputs for each of the teachers {', '.join(names)}")
    return [_checked_query(f"[{name!r}]", teachers[name], outputs[name], settings) for name in names], names


def _checked_query(key: str, teachers: Teachers, outputs: Outputs, settings: RuntimeSettings) -> PoolQuery:
    """Return what is requested from a pool; `key` is where the arguments of the reader have it."""
    allowed = "Fixed(…), Discovered(…) or None for the environment's"
    _require(isinstance(teachers, Fixed | Discovered), f"teachers{key}", teachers, allowed)
    if isinstance(teachers, Discovered) and not settings.redis_url and not settings.discovery_url:
        allowed = "the URL of the Redis that knows the pool's teachers, or of an `edl discovery` in EDL_DISCOVERY_URL"
        raise SpecError("settings.redis_url (EDL_REDIS_URL)", "", allowed)
    is_list = isinstance(outputs, Sequence) and not isinstance(outputs, str)
    _require(
        is_list and _are_names([one.name if isinstance(one, TopK) else one for one in outputs]),
        f"outputs{key}",
        outputs,
        "a list of one or more of the model's outputs, names or TopK(name, k), none twice",
    )
    return PoolQuery(teachers, tuple(outputs))
