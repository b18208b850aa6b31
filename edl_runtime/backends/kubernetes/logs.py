"""The output of all pods of a job in one stream, also of pods that start later; each line once.

A log whose connection breaks is opened again from a whole second on, so some lines come twice. They are recognized by
their timestamp and, within it, their number; long lines come in parts, which count alike. This expects ascending
timestamps: if a runtime stamps stdout and stderr separately, a line that is stamped earlier than the one before it is
lost when the log breaks off between the two.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec

from edl_runtime.backends.errors import ClusterError, ClusterUnavailableError
from edl_runtime.backends.interface import LogLine
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.client import RECONNECT_DELAY_S, KubernetesClient, Manifest, read_lines
from edl_runtime.backends.kubernetes.informer import Informer
from edl_runtime.backends.kubernetes.job_status import has_ended, pool_pods
from edl_runtime.backends.kubernetes.pod_status import container_status, index_of, is_pod_of, sorted_by_age

_RFC_3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_LETTERS = frozenset("0123456789-:.TZ+")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NS = 10**9


class LogOffset(msgspec.Struct, frozen=True, order=True):
    """A position in a log: all before a timestamp, and so many parts of lines with that timestamp.

    `moment`: the timestamp in nanoseconds since 1970, -1 before any.
    """

    moment: int = -1
    parts: int = 0

    def then(self, moment: int) -> LogOffset:
        """Return the position after one more part of a line with this timestamp."""
        return LogOffset(moment, self.parts + 1 if moment == self.moment else 1)

    @property
    def since(self) -> str:
        """The second to read the rest of the log from, empty for all of it."""
        if self.moment < 0:
            return ""
        return f"{_EPOCH + timedelta(seconds=self.moment // _NS):%Y-%m-%dT%H:%M:%SZ}"


START_OF_LOG = LogOffset()


def may_be_timestamp(text: str) -> bool:
    """Whether the text may be the start of a timestamp."""
    return _LETTERS.issuperset(text)


def parse_timestamp(text: str) -> int | None:
    """Return an RFC 3339 timestamp, with any offset, in nanoseconds since 1970; None for other text."""
    found = _RFC_3339.fullmatch(text)
    if not found:
        return None
    whole, fraction, zone = found.groups()
    try:
        second = datetime.fromisoformat(whole + zone)
    except ValueError:
        return None
    return (second - _EPOCH) // timedelta(seconds=1) * _NS + int((fraction or "").ljust(9, "0"))


Entry = TypeVar("Entry")

LONGEST_LINE = 1 << 16
"""Bytes. Longer lines are split."""

MAX_QUEUED_LINES = 1000
"""Readers wait while so many lines are not taken."""

NO_LOG_YET = 400
"""Status for the log of a container that has not started, or whose previous log was deleted."""

NO_LOG = (
    "unable to retrieve container logs for ",
    "failed to try resolving symlinks in path ",
    "failed to open log file ",
)
"""How a node's response begins, without a timestamp, while a container's log is being deleted."""

POD_UPDATE_WITHIN_S = 3.0
"""How soon after a container has ended its pod's status shows it."""

LOG_SILENCE_S = 60.0
"""A log without lines for so long is opened again at its last position: its connection may be dead."""


MAX_LOG_RETRY_DELAY_S = 30.0
"""Longest delay before a log is opened again whose node does not answer, or that ends while its container runs."""


class LogSource(msgspec.Struct, frozen=True):
    """A pod to read. `streams`: see `follow`.

    `opened` is called when its log is open, and when there is none or its node does not serve it.
    """

    instance: int
    pod: str
    opened: Callable[[], None]
    streams: asyncio.Semaphore | None = None


class LogChunk(msgspec.Struct, frozen=True):
    """A line of a log, or a part of a long one. `offset`: the position after it. `ends`: it ends its line."""

    text: str
    offset: LogOffset
    ends: bool


class JobWatch(msgspec.Struct, frozen=True):
    """Watches of a job that is followed. Both functions yield what there is first, and again after each change.

    `owners`: its Job or Deployment, None when it is gone. `pods`: its pods by name.
    """

    owners: Callable[[], AsyncIterator[Manifest | None]]
    pods: Callable[[], AsyncIterator[dict[str, Manifest]]]


def watch_job(api: KubernetesClient, owner: Manifest) -> JobWatch:
    """Return watches that ask the API server."""
    name = owner["metadata"]["name"]

    async def owners() -> AsyncIterator[Manifest | None]:
        async for objects in api.watch(owner["kind"], fields=f"metadata.name={name}"):
            yield objects.get(name)

    return JobWatch(owners, partial(api.watch, "Pod", labels=names.selector(name)))


def watch_known_job(informer: Informer, name: str) -> JobWatch:
    """Return watches that share those of the informer."""

    async def owners() -> AsyncIterator[Manifest | None]:
        async for job in informer.follow(name):
            yield job.owner if job else None

    async def pods() -> AsyncIterator[dict[str, Manifest]]:
        async for job in informer.follow(name):
            yield {pod["metadata"]["name"]: pod for pod in job.pods} if job else {}

    return JobWatch(owners, pods)


def follow_job(
    api: KubernetesClient,
    owner: Manifest,
    watch: JobWatch,
    *,
    instance: int | None,
    last: int | None,
    streams: asyncio.Semaphore | None = None,
    opened: asyncio.Event | None = None,
    gone: asyncio.Event | None = None,
) -> AsyncGenerator[LogLine, None]:
    """Follow the output of the job's instances until it has ended, or until `gone` is set if that is given.

    `streams`, `opened`: see `follow`.
    """
    uid = owner["metadata"]["uid"]

    async def end_of_job() -> None:
        if gone:
            await gone.wait()
            return
        async for now in watch.owners():
            if not now or now["metadata"]["uid"] != uid or has_ended(now):
                return

    seen: dict[str, int] = {}

    def numbers(pods: dict[str, Any]) -> dict[str, int]:
        """Return each pod's instance: a Job's index; in a pool, the first number that no other pod has."""
        mine = [pod for pod in pods.values() if is_pod_of(pod, owner)]
        if owner["kind"] == "Job":
            return {pod["metadata"]["name"]: index_of(pod) for pod in mine}
        now = [pod["metadata"]["name"] for pod in pool_pods(mine)]
        for left in seen.keys() - set(now):
            del seen[left]
        for pod in now:
            free = (number for number in range(len(now)) if number not in seen.values())
            if pod not in seen:
                seen[pod] = next(free)
        return dict(seen)

    return follow(
        api,
        watch.pods,
        numbers=numbers,
        instance=instance,
        last=last,
        end_of_job=end_of_job,
        streams=streams,
        opened=opened,
    )


def pods_by_instance(owner: Manifest, pods: list[Manifest]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return a job's pods with their instances' indexes, sorted by index and age."""
    mine = [pod for pod in pods if is_pod_of(pod, owner)]
    if owner["kind"] == "Job":
        return sorted(((index_of(pod), pod) for pod in sorted_by_age(mine)), key=lambda each: each[0])
    return list(enumerate(pool_pods(mine)))


def select_lines(kept: list[LogLine], instance: int | None, tail: int | None) -> list[LogLine]:
    of_each: dict[int, list[LogLine]] = defaultdict(list)
    for line in kept:
        if instance in (None, line.instance):
            of_each[line.instance].append(line)
    return [line for _, lines in sorted(of_each.items()) for line in _last(lines, tail)]


def _last(entries: list[Entry], count: int | None) -> list[Entry]:
    """Return the last entries, all for None."""
    return entries if count is None else entries[max(0, len(entries) - count) :]


async def read_logs(
    api: KubernetesClient, pods: Iterable[tuple[int, Mapping[str, Any]]], last: int | None
) -> AsyncIterator[LogLine]:
    """Yield the current log of each instance's pod, or its `last` lines."""
    for instance, pod in pods:
        container = container_status(pod)
        if not has_log(container):
            continue
        found: list[str] = []
        for previous in (True, False) if container.get("restartCount") else (False,):
            try:
                parts = _read_chunks(api, pod["metadata"]["name"], last=last, previous=previous)
                found.extend([part.text async for part in parts])
            except ClusterError as error:
                if error.status not in (404, NO_LOG_YET):
                    raise
        for text in _last(found, last):
            yield LogLine(instance, text, pod["metadata"]["name"])


async def follow(
    api: KubernetesClient,
    watch_pods: Callable[[], AsyncIterator[dict[str, Manifest]]],
    *,
    numbers: Callable[[dict[str, Manifest]], dict[str, int]],
    instance: int | None,
    last: int | None,
    end_of_job: Callable[[], Awaitable[None]],
    streams: asyncio.Semaphore | None = None,
    opened: asyncio.Event | None = None,
) -> AsyncGenerator[LogLine, None]:
    """Yield the output of the pods that are watched, each line once, until `end_of_job` returns and all is read.

    `streams`: as many logs are open at a time; others wait until one has ended or was silent for LOG_SILENCE_S.
    `numbers`: returns the index of each pod's instance by the pod's name. `last`: begin so many lines before the end of
    the first pods' logs. `opened` is set once the logs of all first pods are open, so that the pods may be deleted.
    """
    lines: asyncio.Queue[LogLine | None] = asyncio.Queue(MAX_QUEUED_LINES)
    pods = _PodStates()
    opening = _PendingOpens(opened or asyncio.Event())
    async with _raise_first(), asyncio.TaskGroup() as tasks:
        reading: dict[str, asyncio.Task[None]] = {}

        async def watch() -> None:
            first = True
            async for now in watch_pods():
                for name, number in numbers(now).items():
                    if name not in reading and instance in (None, number):
                        source = LogSource(number, name, partial(opening.done, name), streams)
                        reader = _follow_pod(api, source, pods, lines, last if first else None)
                        reading[name] = tasks.create_task(reader)
                if first:
                    opening.begin({name for name in reading if has_log(container_status(now[name]))})
                first = False
                await pods.renew(now)

        async def end() -> None:
            await end_of_job()
            await pods.listed.wait()  # a job that has ended before has logs, too
            await pods.end()
            while waiting := [task for task in reading.values() if not task.done()]:
                await asyncio.wait(waiting)
            watching.cancel()
            await lines.put(None)

        watching = tasks.create_task(watch())
        ending = tasks.create_task(end())
        try:
            while line := await lines.get():
                yield line
        finally:
            for task in (watching, ending, *reading.values()):
                task.cancel()


@asynccontextmanager
async def _raise_first() -> AsyncIterator[None]:
    """Raise the first of the errors that a task group has collected."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


class _PendingOpens:
    """Which logs are still to be opened. Sets `all_done` when all are open."""

    def __init__(self, all_done: asyncio.Event) -> None:
        self._all_done = all_done
        self._left: set[str] = set()

    def begin(self, pods: set[str]) -> None:
        self._left = pods
        self.done("")

    def done(self, pod: str) -> None:
        self._left.discard(pod)
        if not self._left:
            self._all_done.set()


class _PodStates:
    """The current pods of a job. `over`: no more pods will start."""

    def __init__(self) -> None:
        self.now: dict[str, Manifest] = {}
        self.over = False
        self.listed = asyncio.Event()
        self._changed = asyncio.Condition()

    async def renew(self, now: dict[str, Manifest]) -> None:
        async with self._changed:
            self.now = now
            self.listed.set()
            self._changed.notify_all()

    async def end(self) -> None:
        async with self._changed:
            self.over = True
            self._changed.notify_all()

    async def started(self, name: str, restarts: int) -> bool:
        """Wait until the pod's container has been restarted so often; False if it never will be."""

        def decided() -> bool:
            return self.over or self._is_over(name) or self._has(name, restarts)

        async with self._changed:
            await self._changed.wait_for(decided)
        return self._has(name, restarts)

    async def ended(self, name: str, restarts: int) -> bool:
        """Whether that container has ended: a kubelet that restarts ends logs of running containers, too."""

        def decided() -> bool:
            running = "running" in container_status(self.now.get(name, {})).get("state", {})
            return self.over or not running or self.restarts(name) > restarts

        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(POD_UPDATE_WITHIN_S):
                    await self._changed.wait_for(decided)
            return decided()

    def restarts(self, name: str) -> int:
        return int(container_status(self.now.get(name, {})).get("restartCount", 0))

    def _is_over(self, name: str) -> bool:
        return self.now.get(name, {}).get("status", {}).get("phase", "Succeeded") in ("Succeeded", "Failed")

    def _has(self, name: str, restarts: int) -> bool:
        container = container_status(self.now.get(name, {}))
        return has_log(container) and int(container.get("restartCount", 0)) >= restarts


async def _follow_pod(
    api: KubernetesClient, source: LogSource, pods: _PodStates, lines: asyncio.Queue[LogLine | None], last: int | None
) -> None:
    """Queue the output of a pod's containers, one after the other."""
    reader = _Reader(api, source, lines, last)
    restarts, pause_s = 0, RECONNECT_DELAY_S
    while await pods.started(source.pod, restarts):
        restarts = pods.restarts(source.pod)
        before = reader.offset
        try:
            async with source.streams or nullcontext():
                await reader.read_on()
        except ClusterUnavailableError:  # a connection or node; the job's watches notice if the cluster is away
            source.opened()  # a deletion does not wait for a lost node
            has_ended_by_itself = False
        except ClusterError as error:
            if error.status == 404:
                source.opened()
                break
            if error.status != NO_LOG_YET:
                raise
            has_ended_by_itself = False
        else:
            has_ended_by_itself = True
        if has_ended_by_itself and await pods.ended(source.pod, restarts):
            await reader.put_rest()
            restarts += 1
        elif reader.offset > before:
            pause_s = RECONNECT_DELAY_S
        else:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_LOG_RETRY_DELAY_S)
    await reader.put_rest()


class _Reader:
    """Queues the lines of a pod, each once, however often its log breaks off. `last`: see `follow`.

    `offset`: the position up to which they are queued.
    """

    def __init__(
        self, api: KubernetesClient, source: LogSource, lines: asyncio.Queue[LogLine | None], last: int | None
    ) -> None:
        self._api = api
        self._source = source
        self._lines = lines
        self._last = last
        self.offset = START_OF_LOG
        self._rest: LogChunk | None = None

    async def read_on(self) -> None:
        """Queue all lines until the log ends, but keep an unfinished one: more of it may come."""
        if self._last is not None:
            await self._read_end(self._last)
            self._last = None
        pod, opened = self._source.pod, self._source.opened
        reading = _read_chunks(self._api, pod, after=self.offset, follow=True, is_retried=False, opened=opened)
        async for part in reading:
            if self._rest and part.offset > self._rest.offset:
                await self.put_rest()
            self._rest = None  # else this part repeats it, and may be complete now
            if part.ends:
                await self._put(part)
            else:
                self._rest = part

    async def put_rest(self) -> None:
        """Queue the unfinished line: no more of it comes."""
        if self._rest:
            await self._put(self._rest)
            self._rest = None

    async def _read_end(self, last: int) -> None:
        """Queue the current last lines. One more is read, as the position for `last=0`."""
        reading = _read_chunks(self._api, self._source.pod, last=last + 1, is_retried=False)
        found = [part async for part in reading]
        if found and not found[-1].ends:
            del found[-1]
        for part in _last(found, last):
            await self._put(part)
        self.offset = max((part.offset for part in found), default=self.offset)

    async def _put(self, part: LogChunk) -> None:
        self.offset = max(self.offset, part.offset)
        await self._lines.put(LogLine(self._source.instance, part.text, self._source.pod))


async def _read_chunks(
    api: KubernetesClient,
    pod: str,
    *,
    last: int | None = None,
    after: LogOffset = START_OF_LOG,
    follow: bool = False,
    previous: bool = False,
    is_retried: bool = True,
    opened: Callable[[], None] = lambda: None,
) -> AsyncIterator[LogChunk]:
    """Yield the lines of a pod's log after a position. `is_retried`: see `KubernetesClient.stream`."""
    query = {
        "container": names.CONTAINER,
        "timestamps": "true",
        "follow": "true" if follow else "",
        "previous": "true" if previous else "",
        "tailLines": "" if last is None else str(last),
        "sinceTime": after.since,
    }
    offset, begins = START_OF_LOG, True
    opening = api.stream(api.log_path(pod), query, silent_s=LOG_SILENCE_S, is_retried=is_retried)
    async with opening as response:
        opened()
        async for line, ends in read_lines(response, LONGEST_LINE):
            text, moment = line.decode(errors="replace"), None
            if begins:
                stamp, _, rest = text.partition(" ")
                if not ends and not rest and may_be_timestamp(stamp):
                    continue  # it broke off within the timestamp
                moment = parse_timestamp(stamp)
                if moment is None and text.startswith(NO_LOG):
                    continue
                text = text if moment is None else rest
            # a part without a timestamp belongs to the one before it, which may be before `after`
            offset = offset.then(offset.moment if moment is None else moment)
            begins = ends
            if offset > after:
                yield LogChunk(text.rstrip("\r") if ends else text, offset, ends)


def has_log(container: Mapping[str, Any]) -> bool:
    """Whether the container has been started, so that it has a log."""
    state = container.get("state", {})
    return "running" in state or "terminated" in state or bool(container.get("lastState"))
