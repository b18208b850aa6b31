"""The running part of a reader: its threads and how they wait for each other."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from edl_runtime.distill import data_loaders
from edl_runtime.distill.batching import Batch, Format, ItemAccumulator, Request, cut
from edl_runtime.distill.bindings import RequestPlan, Tokenizer
from edl_runtime.distill.cache.answer_cache import AnswerCache
from edl_runtime.distill.cache.lookup import CacheLookup
from edl_runtime.distill.discovery import DemandMeter, follow_pool
from edl_runtime.distill.dispatch_policy import DEFAULT_ROWS, MAX_REQUEST_BYTES, AnswerTimeout
from edl_runtime.distill.errors import DistillError, SampleError
from edl_runtime.distill.event_loop_thread import EventLoopThread
from edl_runtime.distill.pipeline import Epoch, Pipeline
from edl_runtime.distill.stats import ReaderStats
from edl_runtime.distill.teacher_addresses import Discovered, Fixed, connection_factory
from edl_runtime.distill.teacher_connections import Connect, TeacherPool, WorkerContext
from edl_runtime.log import get_logger
from edl_runtime.pool_reports import StudentReport
from edl_runtime.protocol.oip import ModelSignature, Normalise, TopK
from edl_runtime.settings import RuntimeSettings

CLOSE_LIMIT_S = 1.0
"""How long closing waits for threads. Only a source that does not return or a silent network keeps one running longer,
and no thread keeps the process running."""

CHECK_EVERY_S = 0.2
"""How often a feeder that waits for the source checks whether its epoch is over."""

log = get_logger(__name__)


class PoolQuery(NamedTuple):
    """What is requested from one pool for each sample."""

    teachers: Fixed | Discovered
    outputs: tuple[str | TopK, ...]


class Engine:
    """Feeder, workers and discovery of one reader. Holds no reference to it, so that an unclosed reader is collected.

    Belongs to the process that made it: threads, locks and connections don't survive a fork. See `is_mine`.
    """

    def __init__(
        self,
        source: Callable[[], Iterable[Any]],
        *,
        inputs: tuple[str | None, ...],
        queries: Sequence[PoolQuery],
        normalise: Mapping[str, Normalise],
        format: Format,  # noqa: A002 -- as the reader has it
        teacher_batch_size: int | None,
        allow_nan: bool,
        tokenizer: Tokenizer | None,
        epochs: int | None,
        cache: AnswerCache | None,
        settings: RuntimeSettings,
        connect: Connect | None,
    ) -> None:
        self._source = source
        self._format: Format = format
        self._size = teacher_batch_size
        self._fit_together = True  # until several items of the source can't be joined
        self._joins = False  # requests may be joined; known once a teacher is connected
        self._item_rows = self._row_bytes = 1.0  # of the last batch
        self._settings = settings
        self._queries = queries
        self._plans_of = [
            partial(RequestPlan.of, inputs, query.outputs, normalise, allow_nan=allow_nan, tokenizer=tokenizer)
            for query in queries
        ]
        self._epochs = epochs
        self._forked_epochs = 0
        self._cache = cache
        self._lookup: CacheLookup | None = None
        self._pid = os.getpid()
        connect = connect or connection_factory(settings)
        timeouts = [
            AnswerTimeout(
                str(query.teachers), wait_limit_s=settings.teacher_wait_s, request_limit_s=settings.teacher_timeout_s
            )
            for query in queries
        ]
        self.pipeline = Pipeline(timeouts, epochs)
        self._pools = [
            TeacherPool(WorkerContext(dispatcher, connect, plan_of, self.pipeline.fail))
            for dispatcher, plan_of in zip(self.pipeline.dispatchers, self._plans_of, strict=True)
        ]
        self._discovery: EventLoopThread | None = None
        self._watcher: threading.Thread | None = None
        self._feeder: threading.Thread | None = None
        self._source_free = threading.Lock()
        self._lock = threading.RLock()  # reentrant: the garbage collector may stop it from inside
        self._started = False
        self._closed = False

    @property
    def is_mine(self) -> bool:
        """Whether this process made it; a forked child must not use it."""
        return self._pid == os.getpid()

    def start(self) -> bool:
        """Start looking for teachers, unless started; return whether it was not. Raises DistillError when stopped."""
        with self._lock:
            if self._closed:
                raise DistillError("this reader is closed")
            if self._started:
                return False
            self._started = True
            for query, pool in zip(self._queries, self._pools, strict=True):
                if isinstance(query.teachers, Fixed):
                    pool.use(query.teachers.addresses)
            if any(isinstance(query.teachers, Discovered) for query in self._queries):
                self._discovery = EventLoopThread("edl discovery", self._discover)
                self._discovery.start()
            self._watcher = threading.Thread(target=self.pipeline.watch, name="edl hedges", daemon=True)
            self._watcher.start()
            return True

    def begin(self) -> Epoch:
        """Begin the next epoch, and start a thread that feeds it unless it is fed already."""
        data_loaders.allow_loaders_in_threads()
        epoch, is_fed = self.pipeline.begin()
        if not is_fed:
            self._feeder = threading.Thread(target=self._feed, args=(epoch,), name="edl feeder", daemon=True)
            self._feeder.start()
        return epoch

    def take(self, epoch: Epoch) -> Batch | None:
        """Return the next batch as the pipeline does. Raises DistillError in a forked child, which has no feeder."""
        if not self.is_mine:
            raise DistillError("this epoch was begun in another process; iterate the reader again in this one")
        return self.pipeline.take_batch(epoch)

    def end(self, epoch: Epoch) -> None:
        """Drop the rest of the epoch."""
        if self.is_mine:  # a forked child may have inherited a held lock
            self.pipeline.end(epoch)

    def stats(self) -> ReaderStats:
        quarantined: dict[str, str] = {}
        for pool in self._pools:
            quarantined |= pool.quarantined()
        return self.pipeline.stats(quarantined)

    def stop(self) -> None:
        with self._lock:
            self._closed = True
            self.pipeline.close()
            if self._discovery is not None:
                self._discovery.stop()
            for pool in self._pools:
                pool.stop()

    def join(self) -> None:
        """Wait for the threads to end after `stop`, for `CLOSE_LIMIT_S` at most."""
        until = time.monotonic() + CLOSE_LIMIT_S
        for pool in self._pools:
            pool.join(until)
        if self._discovery is not None:
            self._discovery.join(until - time.monotonic())
        if self._watcher is not None:
            self._watcher.join(max(0.0, until - time.monotonic()))
        if self._feeder is not None and self._feeder is not threading.current_thread():
            self._feeder.join(max(0.0, until - time.monotonic()))
            if self._feeder.is_alive():
                log.warning("source.abandoned", waited_s=CLOSE_LIMIT_S)
        if self._lookup is not None:
            self._lookup.close()

    async def _discover(self) -> None:
        try:
            async with asyncio.TaskGroup() as following:
                for number, (query, pool) in enumerate(zip(self._queries, self._pools, strict=True)):
                    teachers = query.teachers
                    if isinstance(teachers, Discovered):
                        demand = DemandMeter(partial(self.pipeline.pool_counts, number), teachers.at_most)
                        report = partial(_student_report, pool, demand)
                        unavailable = self.pipeline.dispatchers[number].report_unavailable
                        following.create_task(follow_pool(teachers, self._settings, pool.use, unavailable, report))
        except* Exception as group:  # noqa: BLE001 -- raised in the training script
            self.pipeline.fail(group.exceptions[0])

    def _feed(self, begun: Epoch) -> None:
        try:
            self._feed_epochs(begun)
        finally:
            data_loaders.thread_ends_here()

    def _feed_epochs(self, epoch: Epoch | None) -> None:
        while epoch is not None and self._await_source(epoch):
            error: BaseException | None = None
            forked_before = data_loaders.fork_count()
            try:
                self._feed_epoch(epoch)
            except BaseException as raised:  # noqa: BLE001 -- raised in the training script
                error = raised
            finally:
                self._source_free.release()
            ahead = data_loaders.fork_count() == forked_before
            if not ahead:
                self._note_forks()
            epoch = self.pipeline.end_of_source(epoch, error, ahead=ahead)

    def _note_forks(self) -> None:
        """Log once that a source which forks is called only while the script waits.

        A child that is forked while another thread holds a lock, such as Paddle's allocator's, hangs when it needs it.
        """
        self._forked_epochs += 1
        if self._epochs and self._forked_epochs == 2:  # persistent workers are forked in one epoch only
            log.warning(
                "source.forked",
                effect="each epoch begins only when the script reads it, despite `epochs`",
                advice="keep the processes, as DataLoader(persistent_workers=True) does, or start them by spawn",
            )

    def _await_source(self, epoch: Epoch) -> bool:
        """Lock the source, which only one thread may run at a time; False if the epoch is over before."""
        while not self._source_free.acquire(timeout=CHECK_EVERY_S):
            if epoch.over:
                return False
        return True

    def _feed_epoch(self, epoch: Epoch) -> None:
        plans: list[RequestPlan] = []
        first = 0

        def put(piece: list[Any]) -> bool:
            nonlocal plans, first
            if not plans:
                signatures = self.pipeline.await_signatures(epoch)
                if signatures is None:
                    return False
                plans = self._agreed_plans(signatures)
            for batch, requests in self._cut(piece, plans, first):
                if not self.pipeline.put(epoch, batch, requests):
                    return False
                self._measure(batch, requests)
            first += len(piece)
            return True

        items = data_loaders.SourcePass(self._source)
        accumulator = ItemAccumulator(self._least_items, self._most_items, put)
        epoch.accumulator = accumulator
        ended = False
        try:
            ended = accumulator.consume(items)
        finally:
            epoch.accumulator = None  # which refers to the epoch
            if not ended:
                items.close()

    @property
    def _least_items(self) -> int:
        return self._size or DEFAULT_ROWS if self._format == "sample" else 1

    @property
    def _most_rows(self) -> int:
        return self.pipeline.most_rows if self._joins else DEFAULT_ROWS

    def _most_items(self) -> int:
        """Return how many items to request at once: more than usual if that is faster, by the size of the last ones."""
        rows = self._most_rows
        if self._size or self._cache is not None or rows == DEFAULT_ROWS or not self._fit_together:
            return self._least_items
        rows = min(rows, int(MAX_REQUEST_BYTES / self._row_bytes))
        return max(self._least_items, rows if self._format == "sample" else int(rows / self._item_rows))

    def _measure(self, batch: Batch, requests: Sequence[Sequence[Request]]) -> None:
        if batch.samples and requests[0]:
            self._item_rows = batch.samples / len(batch.items)
            self._row_bytes = max(1.0, requests[0][0].row_bytes)

    def _cut(
        self, piece: Sequence[Any], plans: Sequence[RequestPlan], first: int
    ) -> Iterator[tuple[Batch, list[list[Request]]]]:
        """Return batches of these items and their requests: one batch, unless the items can't be joined."""
        cut_some = partial(cut, self._format, plans=plans, size=self._size, recall=self._lookup)
        least = self._least_items

        def as_usual() -> Iterator[tuple[Batch, list[list[Request]]]]:
            for start in range(0, len(piece), least):
                yield cut_some(piece[start : start + least], first=first + start)

        try:
            batch, requests = cut_some(piece, first=first, most_rows=self._most_rows)
        except SampleError:
            if len(piece) <= least:
                raise
            self._fit_together = False
            yield from as_usual()
            return
        is_more = any(request.rows > DEFAULT_ROWS for of_pool in requests for request in of_pool)
        if len(piece) > least or (is_more and not self._size):
            batch.split = as_usual
        yield batch, requests

    def _agreed_plans(self, signatures: Sequence[ModelSignature]) -> list[RequestPlan]:
        plans = [plan_of(signature) for plan_of, signature in zip(self._plans_of, signatures, strict=True)]
        self._joins = all(plan.joins for plan in plans)
        if self._cache is not None and self._lookup is None:
            self._lookup = CacheLookup(self._cache, signatures, plans)
        return plans


def _student_report(pool: TeacherPool, demand: DemandMeter) -> StudentReport:
    return demand.report(pool.quarantined())
