"""How a pod's log becomes lines, from a real HTTP server that speaks as the kubelet does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio.client import ApiClient, Configuration

from edl_runtime.backends.errors import ClusterError
from edl_runtime.backends.kubernetes import logs
from edl_runtime.backends.kubernetes.client import KubernetesClient, read_lines
from edl_runtime.backends.kubernetes.logs import (
    LogChunk,
    LogLine,
    LogOffset,
    LogSource,
    _PodStates,
    has_log,
    parse_timestamp,
)
from edl_runtime.backends.kubernetes.pod_status import container_status

AT = "2026-11-22T09:08:4"


class Kubelet:
    """Serves the logs of pods in the namespace "ns": `blocks` are sent one by one, `asked` is what was asked for."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, bool], list[bytes]] = {}
        self.asked: list[dict[str, str]] = []

    async def log(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        blocks = self.blocks.get((request.match_info["pod"], "previous" in request.query))
        if blocks is None:
            return web.json_response({"reason": "BadRequest", "message": "container not found"}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for block in blocks:
            await response.write(block)
        return response

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[KubernetesClient]:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/ns/pods/{pod}/log", self.log)
        async with TestServer(app) as server:
            configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
            async with ApiClient(configuration) as client:
                yield KubernetesClient(client, "ns")


@pytest.fixture
async def kubelet() -> Kubelet:
    return Kubelet()


def started(restarts: int = 0, name: str = "p") -> dict[str, Any]:
    container = {"name": "instance", "state": {"running": {}}, "restartCount": restarts}
    return {"metadata": {"name": name}, "status": {"containerStatuses": [container]}}


async def parts(kubelet: Kubelet, **given: Any) -> list[LogChunk]:
    async with kubelet.opened() as api:
        return [part async for part in logs._read_chunks(api, "p", **given)]


def ns(text: str) -> int:
    found = parse_timestamp(text)
    assert found is not None
    return found


async def test_lines_come_with_their_moment(kubelet: Kubelet) -> None:
    """However they are cut on the way, and whatever bytes are in them."""
    text = f"{AT}1.5Z one\n{AT}1.6Z \n{AT}1.7Z a  b\r\n{AT}1.8Z \xff\n".encode("latin-1")
    kubelet.blocks["p", False] = [text[at : at + 7] for at in range(0, len(text), 7)]
    assert [(part.offset.moment, part.text) for part in await parts(kubelet)] == [
        (ns(f"{AT}1.5Z"), "one"),
        (ns(f"{AT}1.6Z"), ""),
        (ns(f"{AT}1.7Z"), "a  b"),
        (ns(f"{AT}1.8Z"), "\ufffd"),
    ]
    assert kubelet.asked == [{"container": "instance", "timestamps": "true"}]


@pytest.mark.parametrize(
    "gone",
    [
        "unable to retrieve container logs for containerd://cbcbd3f122c3",
        'failed to try resolving symlinks in path "/var/log/p/0.log": lstat /var/log/p: no such file',
        'failed to open log file "/var/log/p/0.log": no such file or directory',
    ],
)
async def test_what_a_node_says_of_a_log_that_is_gone_is_no_line_of_it(kubelet: Kubelet, gone: str) -> None:
    """With a moment somebody has written it."""
    for end in ("", "\n"):
        kubelet.blocks["p", False] = [f"{gone}{end}".encode()]
        assert await parts(kubelet) == []
        kubelet.blocks["p", False] = [f"{AT}1.5Z {gone}\n{AT}1.6Z b\n{gone}{end}".encode()]
        assert [part.text for part in await parts(kubelet)] == [gone, "b"]


async def test_reading_goes_on_after_a_moment(kubelet: Kubelet) -> None:
    """The server knows whole seconds only, so what was read of that second is left out."""
    kubelet.blocks["p", False] = [f"{AT}1.100Z one\n{AT}1.200Z two\n{AT}1.300Z three\n".encode()]
    (rest,) = await parts(kubelet, after=LogOffset(ns(f"{AT}1.200Z"), 1), follow=True)
    assert (rest.text, rest.offset) == ("three", LogOffset(ns(f"{AT}1.300Z"), 1))
    (asked,) = kubelet.asked
    assert asked == {"container": "instance", "timestamps": "true", "follow": "true", "sinceTime": f"{AT}1Z"}


@pytest.mark.parametrize(
    ("text", "longest", "cut"),
    [
        (b"a\nb\n", 10, [b"a\n", b"b\n"]),
        (b"a\nb", 10, [b"a\n", b"b"]),
        (b"ab\n\nc", 10, [b"ab\n", b"\n", b"c"]),
        (b"abcde\nf\n", 3, [b"abc", b"de\n", b"f\n"]),
        (b"abcdef\nabcdef", 3, [b"abc", b"def\n", b"abc", b"def"]),
        (b"\n", 10, [b"\n"]),
        (b"", 10, []),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
async def test_lines_are_cut_at_their_ends(text: bytes, longest: int, cut: list[bytes], size: int) -> None:
    """A line that is too long comes in parts, the same however it comes; the last line may have no end."""
    blocks = [text[at : at + size] for at in range(0, len(text), size)]

    class Response:
        class content:  # noqa: N801 - as aiohttp has it
            @staticmethod
            async def iter_any() -> AsyncIterator[bytes]:
                for block in blocks:
                    yield block

    found = read_lines(Response, longest)  # type: ignore[arg-type]
    assert [line + b"\n" * ends async for line, ends in found] == cut


async def test_what_was_written_before_a_restart_comes_first(kubelet: Kubelet) -> None:
    """If the cluster still has it; the last lines are those of both lives together."""
    kubelet.blocks = {
        ("p", True): [f"{AT}1.0Z one\n".encode()],
        ("p", False): [f"{AT}2.1Z two\n{AT}2.2Z three\n".encode()],
        ("q", False): [f"{AT}2.1Z other\n".encode()],
    }
    waits = {"metadata": {"name": "w"}, "status": {}}
    pods = [(0, started(restarts=1)), (1, waits), (2, started(restarts=1, name="q"))]
    async with kubelet.opened() as api:
        assert [line async for line in logs.read_logs(api, pods, None)] == [
            LogLine(0, "one", "p"),
            LogLine(0, "two", "p"),
            LogLine(0, "three", "p"),
            LogLine(2, "other", "q"),
        ]
        assert [line.text async for line in logs.read_logs(api, pods[:1], 2)] == ["two", "three"]
        assert [line async for line in logs.read_logs(api, pods, 0)] == []


@pytest.mark.parametrize(
    ("container", "written"),
    [
        ({}, False),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": {}}, False),
        ({"state": {"running": {}}}, True),
        ({"state": {"terminated": {"exitCode": 0}}}, True),
        ({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 1}}}, True),
    ],
)
def test_a_container_that_was_started_has_a_log(container: dict[str, Any], *, written: bool) -> None:
    """One that waits for its image has none."""
    assert has_log(container) is written


@pytest.mark.parametrize("status", [{}, {"containerStatuses": None}, {"containerStatuses": [{"name": "audit"}]}])
def test_the_container_is_that_of_the_instance(status: dict[str, Any]) -> None:
    """Others of the pod are none of the job's, and it may have none yet."""
    assert container_status({"status": status}) == container_status({}) == {}
    ours = {"name": "instance"}
    assert container_status({"status": {"containerStatuses": [{"name": "audit"}, ours]}}) is ours


class Broken(Kubelet):
    """Serves the log of one container, as it is by now, and breaks off after so many bytes of each answer.

    `log`: the entries as a container runtime writes them, each with its moment; a line may be made of several.
    """

    def __init__(self, entries: list[tuple[str, bytes]], breaks: list[int]) -> None:
        super().__init__()
        self.entries = entries
        self.breaks = breaks
        self.pods = _PodStates()

    async def log(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        whole = self._as_kubelet(query.get("sinceTime", ""), query.get("tailLines"))
        response = web.StreamResponse()
        await response.prepare(request)
        if "follow" not in query:
            await response.write(whole)
        elif self.breaks:
            await response.write(whole[: self.breaks.pop(0)])
            assert request.transport
            request.transport.abort()
        else:
            await response.write(whole)
            await self.pods.renew(pod("terminated"))
        return response

    def _as_kubelet(self, since: str, tail: str | None) -> bytes:
        text, begins = b"", True
        for at, entry in self.entries if tail is None else self.entries[-int(tail) :]:
            if not since or ns(at) >= ns(since):
                text += (f"{at} ".encode() if begins else b"") + entry
            begins = entry.endswith(b"\n")
        return text


def pod(state: str) -> dict[str, Any]:
    phase = "Running" if state == "running" else "Succeeded"
    return {"p": {"status": {"phase": phase, "containerStatuses": [{"name": "instance", "state": {state: {}}}]}}}


async def told(kubelet: Broken, last: int | None = None) -> list[str]:
    """Return what is told of the log to who follows it until its container has ended."""
    lines: asyncio.Queue[LogLine | None] = asyncio.Queue()
    await kubelet.pods.renew(pod("running"))
    async with kubelet.opened() as api:
        await logs._follow_pod(api, LogSource(0, "p", lambda: None), kubelet.pods, lines, last)
    lines.put_nowait(None)
    return [line.text for line in iter(lines.get_nowait, None) if line]


LONG = [
    ("09:08:40.900000000Z", b"before\n"),
    ("09:08:41.100000001Z", b"a" * 16384),  # a runtime writes no more at once, and then the rest
    ("09:08:41.100000002Z", b"b" * 16384),
    ("09:08:42.100000000Z", b"c" * 16384),
    ("09:08:42.200000000Z", b"d" * 16384),
    ("09:08:43.000000000Z", b"2026-11-22T09:08:43.0Z e\n"),
    ("09:08:43.500000000Z", b"one\n"),
    ("09:08:43.500000000Z", b"two at the same moment\n"),
    ("09:08:44.000000000Z", b"no end"),
]


def with_offset(entries: list[tuple[str, bytes]], hours: int) -> list[tuple[str, bytes]]:
    """Return them as a node does that has not set its clock to UTC."""
    zone = "Z" if not hours else f"{hours:+03d}:00"
    return [(f"2026-11-22T{9 + hours:02d}{at[2:-1]}{zone}", text) for at, text in entries]


@pytest.mark.parametrize("hours", [0, 2, -5])
@pytest.mark.parametrize("size", [40, 200, 16500, 33000, 40000, 66000])
async def test_each_line_is_told_once_wherever_a_log_breaks_off(
    size: int, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is too long, whose second part is told or not; and whatever the node's offset is."""
    monkeypatch.setattr(logs, "RECONNECT_DELAY_S", 0.0)
    entries = with_offset(LONG, hours)
    kubelet = Broken(entries, [size, size + 30, size + 30000, size + 45])
    text = b"".join(text for _, text in entries).decode()
    found = await told(kubelet)
    assert "".join(found).replace("\n", "") == text.replace("\n", "")
    assert [found[0], *found[-3:]] == ["before", "one", "two at the same moment", "no end"]
    assert len(found) == 6
    assert all(asked.get("sinceTime", "Z").endswith("Z") for asked in kubelet.asked)


@pytest.mark.parametrize(("last", "expected"), [(0, []), (1, ["two"]), (2, ["one", "two"]), (9, ["one", "two"])])
@pytest.mark.parametrize("written", [True, False])
async def test_what_comes_after_the_last_lines_is_not_lost(
    last: int, expected: list[str], monkeypatch: pytest.MonkeyPatch, *, written: bool
) -> None:
    """A log that has told nothing new and breaks off goes on behind the last lines that there were."""
    monkeypatch.setattr(logs, "RECONNECT_DELAY_S", 0.0)
    at = "2026-11-22T09:08:4"
    before = [(f"{at}1.1Z", b"one\n"), (f"{at}1.2Z", b"two\n")] if written else []

    class Meanwhile(Broken):
        async def log(self, request: web.Request) -> web.StreamResponse:
            if len(self.asked) == 2:  # the end was read, and a connection has broken
                self.entries += [(f"{at}1.3Z", b"three\n"), (f"{at}1.4Z", b"four\n"), (f"{at}1.5Z", b"five\n")]
            return await super().log(request)

    found = await told(Meanwhile(before, [0]), last)
    assert found == [*(expected if written else []), "three", "four", "five"]


@pytest.mark.parametrize("silent", [False, True], ids=["its node's kubelet restarts", "a connection is lost untold"])
@pytest.mark.parametrize("first", ["half", "half and half\n"])
async def test_a_log_that_ends_before_its_container_is_read_on(
    first: str, monkeypatch: pytest.MonkeyPatch, *, silent: bool
) -> None:
    """Each line comes once, and nobody is told half a line."""
    again = asyncio.Event()
    monkeypatch.setattr(logs, "LOG_SILENCE_S", 0.1 if silent else 60.0)
    monkeypatch.setattr(logs, "POD_UPDATE_WITHIN_S", 0.01)
    monkeypatch.setattr(logs, "RECONNECT_DELAY_S", 0.0)
    at = "2026-11-22T09:08:4"

    class Restarting(Broken):
        async def log(self, request: web.Request) -> web.StreamResponse:
            if self.asked:
                again.set()
                self.entries = [(f"{at}1.1Z", b"half and half\n")]
                return await super().log(request)
            self.asked.append({})
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(f"{at}1.1Z {first}".encode())
            if silent:
                await again.wait()
            return response

    assert await told(Restarting([], [])) == ["half and half"]


class Lost(Broken):
    """Of a node that does not answer."""

    async def log(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        return web.json_response({"message": "dial tcp 10.0.0.1:10250: connect: no route to host"}, status=500)


@pytest.mark.parametrize("last", [None, 40])
async def test_who_waits_for_a_log_to_open_does_not_wait_for_a_lost_node(last: int | None) -> None:
    """A deletion goes on, while the log is asked for again."""
    lost, opened = Lost([], []), asyncio.Event()
    await lost.pods.renew(pod("running"))
    async with lost.opened() as api:
        source = LogSource(0, "p", opened.set)
        reading = asyncio.create_task(logs._follow_pod(api, source, lost.pods, asyncio.Queue(), last))
        await opened.wait()
        assert not reading.done()
        reading.cancel()
        await asyncio.wait([reading])


class Refusing(Broken):
    """Lets nobody read."""

    async def log(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        return web.json_response({"reason": "Forbidden", "message": 'cannot get resource "pods/log"'}, status=403)


async def test_a_log_that_may_not_be_read_is_an_error() -> None:
    """Read or followed it does not seem empty, and the error names the right that is missing."""
    refused = pytest.raises(ClusterError, match='cannot get resource "pods/log"')
    refusing = Refusing([], [])
    async with refusing.opened() as api:
        with refused:
            await anext(logs.read_logs(api, [(0, started())], None))
    with refused:
        await told(refusing)


WORDS = [(f"{AT}1.1Z", b"one\n"), (f"{AT}1.2Z", b"last words")]


class Leaving(Broken):
    """Serves the log of a container once: when `heard` is set that answer breaks or ends. Then comes what is `next`."""

    def __init__(self, entries: list[tuple[str, bytes]], next_: int | list[tuple[str, bytes]], *, breaks: bool) -> None:
        super().__init__(entries, [])
        self.next = next_
        self.does_break = breaks
        self.heard = asyncio.Event()

    async def log(self, request: web.Request) -> web.StreamResponse:
        if not self.asked:
            self.asked.append({})
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(self._as_kubelet("", None).rstrip(b" "))
            await self.heard.wait()
            if self.does_break:
                assert request.transport
                request.transport.abort()
            return response
        if isinstance(self.next, int):
            await self.pods.renew({})
            return web.json_response({"reason": "NotFound", "message": "no such pod"}, status=self.next)
        self.entries = self.next
        return await super().log(request)


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.parametrize(
    ("entries", "next_", "rest"),
    [
        (WORDS, 404, ["last words"]),
        (WORDS, 400, ["last words"]),
        (WORDS, [(f"{AT}3.1Z", b"again\n")], ["last words", "again"]),
        (WORDS, [(f"{AT}1.2Z", b"last words and more\n")], ["last words and more"]),
        ([WORDS[0], (f"{AT}1.2Z", b"")], 404, []),
        ([WORDS[0], (f"{AT}1"[:-4], b"")], 404, []),
    ],
    ids=["pod gone", "pod going", "the next container", "told anew", "no words yet", "half a stamp"],
)
async def test_the_last_words_are_told(
    entries: list[tuple[str, bytes]],
    next_: int | list[tuple[str, bytes]],
    rest: list[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    breaks: bool,
) -> None:
    """A log has broken off, or ended, within a line: it is told whole if more of it comes, else as far as it came."""
    monkeypatch.setattr(logs, "RECONNECT_DELAY_S", 0.0)
    monkeypatch.setattr(logs, "POD_UPDATE_WITHIN_S", 0.01)
    kubelet = Leaving(entries, next_, breaks=breaks)
    lines: asyncio.Queue[LogLine | None] = asyncio.Queue()
    await kubelet.pods.renew(pod("running"))
    async with kubelet.opened() as api:
        reading = asyncio.create_task(logs._follow_pod(api, LogSource(0, "p", lambda: None), kubelet.pods, lines, None))
        assert await lines.get() == LogLine(0, "one", "p")
        kubelet.heard.set()
        await reading
    assert [lines.get_nowait() for _ in range(lines.qsize())] == [LogLine(0, text, "p") for text in rest]


async def test_no_more_logs_are_open_than_may_be(kubelet: Kubelet) -> None:
    """Others wait until one has ended, and are read then: no line is lost."""
    streams, lines, most = asyncio.Semaphore(2), asyncio.Queue[LogLine | None](), 0
    pods = _PodStates()
    ended = {"state": {"terminated": {}}, "name": "instance", "restartCount": 0}
    pods.now = {f"p{number}": {"status": {"phase": "Succeeded", "containerStatuses": [ended]}} for number in range(5)}
    log, open_now = kubelet.log, 0

    async def counted(request: web.Request) -> web.StreamResponse:
        nonlocal most, open_now
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.02)
        answer = await log(request)
        open_now -= 1
        return answer

    kubelet.log = counted  # type: ignore[method-assign]
    for name in pods.now:
        kubelet.blocks[name, False] = [f"{AT}1.5Z of {name}\n".encode()]
    async with kubelet.opened() as api, asyncio.TaskGroup() as tasks:
        for number, name in enumerate(pods.now):
            source = LogSource(number, name, lambda: None, streams)
            tasks.create_task(logs._follow_pod(api, source, pods, lines, None))
    told = [lines.get_nowait() for _ in range(lines.qsize())]
    assert sorted(line.text for line in told if line) == [f"of {name}" for name in sorted(pods.now)]
    assert most == 2


@pytest.mark.parametrize("last", [None, 2])
async def test_a_line_with_an_earlier_stamp_is_told_once(last: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runtimes stamp what comes by stdout and by stderr apart, so what is written first may be stamped last."""
    monkeypatch.setattr(logs, "RECONNECT_DELAY_S", 0.0)
    entries = [(f"{AT}1.1Z", b"one\n"), (f"{AT}1.4Z", b"late\n"), (f"{AT}1.3Z", b"early\n")]
    size = sum(len(f"{at} ".encode() + text) for at, text in entries)
    assert (await told(Broken(entries, [size]), last))[-2:] == ["late", "early"]
