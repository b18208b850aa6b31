"""How a pod's log becomes lines, from a real HTTP server that speaks as the kubelet does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio.client import ApiClient, Configuration

from edl_runtime.backends.kubernetes import logs
from edl_runtime.backends.kubernetes.api import Api, lines_of
from edl_runtime.backends.kubernetes.logs import LogLine, has_written
from edl_runtime.backends.kubernetes.status import container_of

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
    async def opened(self) -> AsyncIterator[Api]:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/ns/pods/{pod}/log", self.log)
        async with TestServer(app) as server:
            configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
            async with ApiClient(configuration) as client:
                yield Api(client, "ns")


@pytest.fixture
async def kubelet() -> Kubelet:
    return Kubelet()


def started(restarts: int = 0, name: str = "p") -> dict[str, Any]:
    container = {"name": "instance", "state": {"running": {}}, "restartCount": restarts}
    return {"metadata": {"name": name}, "status": {"containerStatuses": [container]}}


async def lines(kubelet: Kubelet, **given: Any) -> list[tuple[str, str]]:
    async with kubelet.opened() as api:
        return [line async for line in logs._lines(api, "p", **given)]


async def test_lines_come_with_their_moment(kubelet: Kubelet) -> None:
    """However they are cut on the way, and whatever bytes are in them."""
    text = f"{AT}1.5Z one\n{AT}1.6Z \n{AT}1.7Z a  b\r\n{AT}1.8Z \xff\n".encode("latin-1")
    kubelet.blocks["p", False] = [text[at : at + 7] for at in range(0, len(text), 7)]
    assert await lines(kubelet) == [
        (f"{AT}1.5Z", "one"),
        (f"{AT}1.6Z", ""),
        (f"{AT}1.7Z", "a  b"),
        (f"{AT}1.8Z", "\ufffd"),
    ]
    assert kubelet.asked == [{"container": "instance", "timestamps": "true"}]


async def test_reading_goes_on_after_a_moment(kubelet: Kubelet) -> None:
    """The server knows whole seconds only, so what was read of that second is left out."""
    kubelet.blocks["p", False] = [f"{AT}1.100Z one\n{AT}1.200Z two\n{AT}1.300Z three\n".encode()]
    assert await lines(kubelet, after=f"{AT}1.200Z", last=5, follow=True) == [(f"{AT}1.300Z", "three")]
    (asked,) = kubelet.asked
    assert asked == {"container": "instance", "timestamps": "true", "follow": "true", "sinceTime": f"{AT}1Z"}


@pytest.mark.parametrize(
    ("blocks", "longest", "cut"),
    [
        ([b"a\nb\n"], 10, [b"a", b"b"]),
        ([b"a\nb"], 10, [b"a", b"b"]),
        ([b"a", b"b", b"\n\nc"], 10, [b"ab", b"", b"c"]),
        ([b"abc", b"de\nf\n"], 3, [b"abc", b"de", b"f"]),
        ([b"\n"], 10, [b""]),
        ([], 10, []),
    ],
)
async def test_lines_are_cut_at_their_ends(blocks: list[bytes], longest: int, cut: list[bytes]) -> None:
    """A line that is too long comes in parts; one without an end is one, too."""

    class Response:
        class content:  # noqa: N801 - as aiohttp has it
            @staticmethod
            async def iter_any() -> AsyncIterator[bytes]:
                for block in blocks:
                    yield block

    assert [line async for line in lines_of(Response, longest)] == cut  # type: ignore[arg-type]


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
        assert [line async for line in logs.read(api, pods, None)] == [
            LogLine(0, "one"),
            LogLine(0, "two"),
            LogLine(0, "three"),
            LogLine(2, "other"),
        ]
        assert [line.text async for line in logs.read(api, pods[:1], 2)] == ["two", "three"]
        assert [line async for line in logs.read(api, pods, 0)] == []


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
    assert has_written(container) is written


@pytest.mark.parametrize("status", [{}, {"containerStatuses": None}, {"containerStatuses": [{"name": "audit"}]}])
def test_the_container_is_that_of_the_instance(status: dict[str, Any]) -> None:
    """Others of the pod are none of the job's, and it may have none yet."""
    assert container_of({"status": status}) == container_of({}) == {}
    ours = {"name": "instance"}
    assert container_of({"status": {"containerStatuses": [{"name": "audit"}, ours]}}) is ours
