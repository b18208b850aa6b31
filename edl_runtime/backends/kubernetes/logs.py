"""What instances write: of all pods of a job in one stream, also of those that come later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from edl_runtime.backends.base import LogLine
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.api import AGAIN_AFTER_S, Api, lines_of
from edl_runtime.backends.kubernetes.stamps import NOTHING, Told, may_begin_moment, moment_of
from edl_runtime.backends.kubernetes.status import container_of
from edl_runtime.errors import ClusterError, ClusterUnavailableError

Manifest = dict[str, Any]

LONGEST_LINE = 1 << 16
"""Bytes: a longer line is handed out in parts."""

MOST_WAITING = 1000
"""Lines: readers wait while so many are not taken yet."""

NOT_YET = 400
"""How the log of a container is refused that has not begun, or whose predecessor's is gone."""

NO_LOG = (
    "unable to retrieve container logs for ",
    "failed to try resolving symlinks in path ",
    "failed to open log file ",
)
"""How a node's answer begins, which has no moment, when a container's log is just being removed."""

TOLD_WITHIN_S = 3.0
"""So soon after a container has ended its pod says so."""

SILENT_S = 60.0
"""A log that says nothing for so long is opened anew from where it stopped: its connection may be gone, untold."""


class Source(msgspec.Struct, frozen=True):
    """A pod whose log is read, as which instance. `opened` is called when it is, and when there is none to read."""

    instance: int
    pod: str
    opened: Callable[[], None]


class Part(msgspec.Struct, frozen=True):
    """A line of a log, or a part of one that is too long.

    `told`: how much of the log has been told with it. `ends`: whether its line does.
    """

    text: str
    told: Told
    ends: bool


async def read(api: Api, pods: Iterable[tuple[int, Mapping[str, Any]]], last: int | None) -> AsyncIterator[LogLine]:
    """Yield what each instance's pod has written up to now, or its `last` lines."""
    for instance, pod in pods:
        container = container_of(pod)
        if not has_written(container):
            continue
        found: list[str] = []
        for previous in (True, False) if container.get("restartCount") else (False,):
            try:
                parts = _parts(api, pod["metadata"]["name"], last=last, previous=previous)
                found.extend([part.text async for part in parts])
            except ClusterError as error:
                if error.status not in (404, NOT_YET):
                    raise
        for text in found if last is None else found[len(found) - min(last, len(found)) :]:
            yield LogLine(instance, text)


async def follow(
    api: Api,
    labels: str,
    *,
    numbers: Callable[[dict[str, Manifest]], dict[str, int]],
    instance: int | None,
    last: int | None,
    end_of_job: Callable[[], Awaitable[None]],
    opened: asyncio.Event | None = None,
) -> AsyncGenerator[LogLine, None]:
    """Yield what the pods with these labels write, each line once, until `end_of_job` returns and all is read.

    `numbers`: the instance that each pod is, by its name. `last`: only so many lines of what there was to begin with.
    `opened` is set when the logs of all pods that there were to begin with are being read: they may be deleted then.
    """
    lines: asyncio.Queue[LogLine | None] = asyncio.Queue(MOST_WAITING)
    pods = _Pods()
    opening = _Opening(opened or asyncio.Event())
    async with _failing_as_one(), asyncio.TaskGroup() as tasks:
        reading: dict[str, asyncio.Task[None]] = {}

        async def watch() -> None:
            first = True
            async for now in api.watch("Pod", labels=labels):
                for name, number in numbers(now).items():
                    if name not in reading and instance in (None, number):
                        source = Source(number, name, partial(opening.done, name))
                        reader = _read_all(api, source, pods, lines, last if first else None)
                        reading[name] = tasks.create_task(reader)
                if first:
                    opening.begin({name for name in reading if has_written(container_of(now[name]))})
                first = False
                await pods.renew(now)

        async def end() -> None:
            await end_of_job()
            await pods.listed.wait()
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
async def _failing_as_one() -> AsyncIterator[None]:
    """Raise the first of the errors that a task group has collected."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


class _Opening:
    """Which logs are still to be opened; `all_done` is set when none is any more."""

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


class _Pods:
    """The pods of a job as they are now. `over`: no more come."""

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
        """Wait until the pod's container has been started `restarts` times again; False if it never will be."""

        def decided() -> bool:
            return self.over or self._is_over(name) or self._has(name, restarts)

        async with self._changed:
            await self._changed.wait_for(decided)
        return self._has(name, restarts)

    async def ended(self, name: str, restarts: int) -> bool:
        """Whether that container of the pod ends, soon: a kubelet that restarts also ends the log of one that runs."""

        def decided() -> bool:
            running = "running" in container_of(self.now.get(name, {})).get("state", {})
            return self.over or not running or self.restarts(name) > restarts

        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(TOLD_WITHIN_S):
                    await self._changed.wait_for(decided)
            return decided()

    def restarts(self, name: str) -> int:
        return int(container_of(self.now.get(name, {})).get("restartCount", 0))

    def _is_over(self, name: str) -> bool:
        return self.now.get(name, {}).get("status", {}).get("phase", "Succeeded") in ("Succeeded", "Failed")

    def _has(self, name: str, restarts: int) -> bool:
        container = container_of(self.now.get(name, {}))
        return has_written(container) and int(container.get("restartCount", 0)) >= restarts


async def _read_all(
    api: Api, source: Source, pods: _Pods, lines: asyncio.Queue[LogLine | None], last: int | None
) -> None:
    """Put all that a pod writes, of one container after the other."""
    reader = _Reader(api, source, lines, last)
    restarts = 0
    while await pods.started(source.pod, restarts):
        restarts = pods.restarts(source.pod)
        try:
            await reader.read_on()
        except ClusterUnavailableError:  # the connection, or a node; the job's watches know whether it is the cluster
            await asyncio.sleep(AGAIN_AFTER_S)
            continue
        except ClusterError as error:
            if error.status == 404:
                source.opened()
                break
            if error.status != NOT_YET:
                raise
            await asyncio.sleep(AGAIN_AFTER_S)
            continue
        if await pods.ended(source.pod, restarts):
            await reader.tell_rest()
            restarts += 1
    await reader.tell_rest()


class _Reader:
    """Puts what a pod writes, each line once, however often its log breaks off. `last`: see `follow`."""

    def __init__(self, api: Api, source: Source, lines: asyncio.Queue[LogLine | None], last: int | None) -> None:
        self._api = api
        self._source = source
        self._lines = lines
        self._last = last
        self._told = NOTHING
        self._rest: Part | None = None

    async def read_on(self) -> None:
        """Put what comes until the log ends, but for a rest without a line's end, which may not be all of its line."""
        if self._last is not None:
            await self._read_end(self._last)
            self._last = None
        pod, opened = self._source.pod, self._source.opened
        async for part in _parts(self._api, pod, after=self._told, follow=True, opened=opened):
            if self._rest and part.told > self._rest.told:
                await self.tell_rest()
            self._rest = None  # else it is what comes again, by now maybe to its line's end
            if part.ends:
                await self._tell(part)
            else:
                self._rest = part

    async def tell_rest(self) -> None:
        """Put what came after the last line's end: no more of it comes."""
        if self._rest:
            await self._tell(self._rest)
            self._rest = None

    async def _read_end(self, last: int) -> None:
        """Put the last lines that there are now. One more is read: only who knows one can tell what comes after it."""
        found = [part async for part in _parts(self._api, self._source.pod, last=last + 1)]
        if found and not found[-1].ends:
            del found[-1]
        for part in found[len(found) - min(last, len(found)) :]:
            await self._tell(part)
        self._told = max((part.told for part in found), default=self._told)

    async def _tell(self, part: Part) -> None:
        self._told = max(self._told, part.told)
        await self._lines.put(LogLine(self._source.instance, part.text))


async def _parts(
    api: Api,
    pod: str,
    *,
    last: int | None = None,
    after: Told = NOTHING,
    follow: bool = False,
    previous: bool = False,
    opened: Callable[[], None] = lambda: None,
) -> AsyncIterator[Part]:
    """Yield the lines of a pod's log, those only that come `after` what has been told of it."""
    query = {
        "container": names.CONTAINER,
        "timestamps": "true",
        "follow": "true" if follow else "",
        "previous": "true" if previous else "",
        "tailLines": "" if last is None else str(last),
        "sinceTime": after.since,
    }
    told, begins = NOTHING, True
    async with api.stream(api.log_path(pod), query, silent_s=SILENT_S) as response:
        opened()
        async for line, ends in lines_of(response, LONGEST_LINE):
            text, moment = line.decode(errors="replace"), None
            if begins:
                stamp, _, rest = text.partition(" ")
                if not ends and not rest and may_begin_moment(stamp):
                    continue  # it broke off before any word
                moment = moment_of(stamp)
                if moment is None and text.startswith(NO_LOG):
                    continue
                text = text if moment is None else rest
            # without a moment it belongs to what is before it, which may have been left out as too old
            told = told.then(told.moment if moment is None else moment)
            begins = ends
            if told > after:
                yield Part(text.rstrip("\r") if ends else text, told, ends)


def has_written(container: Mapping[str, Any]) -> bool:
    """Whether the container has been started, so that it has a log."""
    state = container.get("state", {})
    return "running" in state or "terminated" in state or bool(container.get("lastState"))
