"""Answers of an API server that end too soon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing, suppress
from typing import Any

import pytest
import structlog

from edl_runtime.backends.errors import ClusterUnavailableError, ResourceVersionExpiredError, UnknownJobError
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.kubernetes.capacity import read_usage
from edl_runtime.backends.kubernetes.client import (
    MAX_LIST_ATTEMPTS,
    PAGE_SIZE,
    KubernetesClient,
    Manifest,
    Read,
    read_whole,
)
from edl_runtime.backends.kubernetes.kept_fields import read_owner, read_pod, read_pod_of_job
from edl_runtime.backends.kubernetes.names import INDEX

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
BUSY, ABSENT = (
    f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    for status in ("429 Too Many Requests", "404 Not Found")
)

FORGOTTEN = 'HTTP/1.1 410 Gone\r\nContent-Length: 22\r\nConnection: close\r\n\r\n{"message": "too old"}'


@asynccontextmanager
async def answering(*answers: str, **given: Any) -> AsyncIterator[tuple[KubernetesClient, list[str]]]:
    """Give an API whose server gives these answers and then closes, and the paths that were asked for."""
    from kubernetes_asyncio.client import ApiClient, Configuration

    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):  # it may leave without a word
            request = await reader.readuntil(b"\r\n\r\n")
            asked.append(request.split()[1].decode())
            writer.write(answers[len(asked) - 1].encode())
            await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with ApiClient(Configuration(host=f"http://127.0.0.1:{port}")) as client:
            yield KubernetesClient(client, "here", **given), asked


async def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    """An API server may go away in the middle of what it says."""
    whole = f'{HEAD}Content-Length: 15\r\n\r\n{{"kind": "Job"}}'
    async with answering(whole[:-5], whole) as (api, asked):
        assert await api.get("Job", "job") == {"kind": "Job"}
    assert asked == ["/apis/batch/v1/namespaces/here/jobs/job"] * 2


@pytest.mark.parametrize("said", ["<html>", "[1]", "[" * 5000])
async def test_what_no_api_server_says_is_taken_for_one_that_is_away(said: str) -> None:
    """A proxy in front of it may answer meanwhile."""
    strange = f"{HEAD}Content-Length: {len(said)}\r\n\r\n{said}"
    whole = f'{HEAD}Content-Length: 15\r\n\r\n{{"kind": "Job"}}'
    async with answering(strange, whole) as (api, asked):
        assert await api.get("Job", "job") == {"kind": "Job"}
    assert len(asked) == 2


SHAPELESS = [
    "{}",
    '{"items": []}',
    '{"items": [{}], "metadata": {"resourceVersion": "1"}}',
    '{"items": 7, "metadata": {}}',
]


@pytest.mark.parametrize("said", SHAPELESS)
async def test_a_list_of_another_shape_is_taken_for_a_server_that_is_away(said: str) -> None:
    """As is one of all namespaces."""
    strange = f"{HEAD}Content-Length: {len(said)}\r\n\r\n{said}"
    async with answering(strange, _page("a", version="1"), strange, _page("a")) as (api, asked):
        things, version = await api.list("Pod")
        assert ([*map(_name, things)], version) == (["a"], "1")
        assert [*map(_name, await api.list_all_namespaces("Pod", read_whole))] == ["a"]
    assert len(asked) == 4


@pytest.mark.parametrize("event", [{}, {"type": "ADDED"}, {"type": "ADDED", "object": {"metadata": {}}}])
async def test_a_watch_that_tells_of_another_shape_is_opened_anew(event: dict[str, Any]) -> None:
    """It goes on where it was."""
    thing = {"metadata": {"name": "a", "resourceVersion": "2"}}
    told = [f"{HEAD}\r\n{json.dumps(said)}\n" for said in (event, {"type": "ADDED", "object": thing})]
    async with answering(_page(version="1"), *told) as (api, asked), aclosing(api.changes("Pod")) as changes:
        seen = [(one.type, one.version) for one in [await anext(changes) for _ in range(5)]]
    assert seen == [("LISTED", "1"), ("OPENED", "1"), ("CLOSED", "1"), ("OPENED", "1"), ("ADDED", "2")]
    assert len(asked) == 3


async def test_a_server_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is an end to patience."""
    monkeypatch.setattr("edl_runtime.backends.kubernetes.client.MAX_OUTAGE_S", 0.0)
    async with answering(BUSY) as (api, _):
        with pytest.raises(ClusterUnavailableError, match=f"API at {api.address} does not answer"):
            await api.get("Job", "job")


async def test_a_token_that_has_expired_is_renewed() -> None:
    """Who follows for hours outlives the token that he began with."""
    renewed: list[bool] = []

    async def renew() -> None:
        renewed.append(True)

    async with answering(BUSY.replace("429 Too Many Requests", "401 Unauthorized"), ABSENT, renew=renew) as (api, _):
        assert await api.get("Job", "job") is None
    assert renewed == [True]


async def test_an_outage_is_told_once_and_its_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often each of several requests is repeated meanwhile."""
    monkeypatch.setattr("edl_runtime.backends.kubernetes.client.LOG_OUTAGE_AFTER_S", 0.0)
    whole = f'{HEAD}Content-Length: 15\r\n\r\n{{"kind": "Job"}}'
    with structlog.testing.capture_logs() as told:
        async with answering("", BUSY, BUSY, "", "", BUSY, *[whole] * 4) as (api, asked):
            await asyncio.gather(*(api.get("Job", "job") for _ in range(3)))
            await api.get("Job", "job")
    assert len(asked) == 10
    assert [(one["event"], one["address"]) for one in told] == [
        ("cluster.away", api.address),
        ("cluster.back", api.address),
    ]
    assert 0 < told[1]["away_s"] < 60


async def test_an_outage_that_is_over_soon_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks now and then is nothing that anybody has to know."""
    monkeypatch.setattr("edl_runtime.backends.kubernetes.client.LOG_OUTAGE_AFTER_S", 100.0)
    with structlog.testing.capture_logs() as told:
        async with answering("", f'{HEAD}Content-Length: 15\r\n\r\n{{"kind": "Job"}}') as (api, asked):
            await api.get("Job", "job")
    assert (len(asked), told) == (2, [])


async def test_an_outage_is_over_with_an_answer_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says that something is not there, is there."""
    monkeypatch.setattr("edl_runtime.backends.kubernetes.client.LOG_OUTAGE_AFTER_S", 0.0)
    with structlog.testing.capture_logs() as told:
        async with answering(BUSY, ABSENT) as (api, _):
            assert await api.get("Job", "job") is None
    assert [one["event"] for one in told] == ["cluster.away", "cluster.back"]


async def test_an_outage_is_told_once_by_all_that_a_backend_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the watches of those who follow its jobs."""
    from kubernetes_asyncio.client import ApiClient, Configuration

    monkeypatch.setattr("edl_runtime.backends.kubernetes.client.LOG_OUTAGE_AFTER_S", 0.0)
    nothing = f'{HEAD}Content-Length: 51\r\n\r\n{{"items": [], "metadata": {{"resourceVersion": "1"}}}}'
    asked = 0  # first by three lists of each `list` and four of the watches

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):  # it may leave without a word
            request = await reader.readuntil(b"\r\n\r\n")
            asked += 1
            if asked <= 10:
                writer.write(BUSY.encode())
            elif b"watch=true" in request:
                writer.write(f"{HEAD}\r\n".encode())
                await reader.read()
            else:
                writer.write(nothing.encode())

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        backend = KubernetesBackend(lambda: ApiClient(Configuration(host=host)), namespace="here")
        with structlog.testing.capture_logs() as told:
            async with backend.following() as followed:
                found = await asyncio.gather(
                    backend.list(), backend.list(), followed.get("job"), return_exceptions=True
                )
    assert [found[:2], type(found[2])] == [[[], []], UnknownJobError]
    assert [(one["event"], one["address"]) for one in told] == [("cluster.away", host), ("cluster.back", host)]


async def test_a_watch_that_has_lost_its_place_lists_anew() -> None:
    """The server forgets what was long ago."""
    watched = f"{HEAD}\r\n"
    lost = f'{watched}{{"type": "ERROR", "object": {{"code": 410, "message": "too old resource version"}}}}\n'
    answers = (_page(version="1"), lost, _page(version="2"), watched)
    async with answering(*answers) as (api, _), aclosing(api.changes("Pod")) as changes:
        seen = [(one.type, one.version) for one in [await anext(changes) for _ in range(4)]]
    assert seen == [("LISTED", "1"), ("OPENED", "1"), ("LISTED", "2"), ("OPENED", "2")]


def _page(*names_there: str, more: str = "", version: str = "") -> str:
    items = [{"metadata": {"name": name, "managedFields": [name] * 9}} for name in names_there]
    body = json.dumps({"items": items, "metadata": {"continue": more, "resourceVersion": version}})
    return f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}"


def _name(thing: dict[str, Any]) -> str:
    return str(thing["metadata"]["name"])


async def test_of_all_namespaces_only_what_is_needed_is_kept() -> None:
    """Page by page, and anew where the server has forgotten where it was."""
    pages = (_page("a", more="1"), FORGOTTEN, _page("b", "a", more="2"), _page("c"))
    async with answering(*pages) as (api, asked):
        pods = await api.list_all_namespaces("Pod", read_pod, fields="x=1")
    assert pods == [{"metadata": {"name": name}, "kind": "Pod"} for name in ("b", "a", "c")]
    first = f"/api/v1/pods?fieldSelector=x%3D1&limit={PAGE_SIZE}"
    assert asked == [first, f"{first}&continue=1", first, f"{first}&continue=2"]


def _pod_asking(cpu: str, version: str) -> dict[str, Any]:
    containers = [{"name": "a", "resources": {"requests": {"cpu": cpu}}}]
    metadata = {"name": f"pod-{version}", "uid": version, "resourceVersion": version}
    return {"metadata": metadata, "spec": {"nodeName": "n", "containers": containers}}


async def test_an_object_that_nobody_understands_is_left_out() -> None:
    """Of a list, and of a watch: what pods of strangers ask for may be written in a way of tomorrow."""
    listed = json.dumps(
        {"metadata": {"resourceVersion": "2"}, "items": [_pod_asking("2 cores", "1"), _pod_asking("500m", "2")]}
    )
    events = [
        {"type": "MODIFIED", "object": _pod_asking("two", "3")},
        {"type": "ADDED", "object": _pod_asking("1", "4")},
    ]
    told = "".join(json.dumps(one) + "\n" for one in events)
    answers = (f"{HEAD}Content-Length: {len(listed)}\r\n\r\n{listed}", f"{HEAD}\r\n{told}")
    with structlog.testing.capture_logs() as logs:
        async with answering(*answers) as (api, _), aclosing(api.changes("Pod", read=read_usage)) as changes:
            seen = [await anext(changes) for _ in range(4)]
    assert [(one.type, one.version, [*map(_name, one.objects)]) for one in seen] == [
        ("LISTED", "2", ["pod-2"]),
        ("OPENED", "2", []),
        ("DELETED", "3", ["pod-3"]),
        ("ADDED", "4", ["pod-4"]),
    ]
    assert [entry["event"] for entry in logs] == ["object.unreadable"] * 2
    assert "ValueError" in logs[0]["cause"]


LOOKS_LIKE_OURS = [
    (
        "Pod",
        read_pod_of_job,
        {"metadata": {"annotations": {INDEX: "banana"}}},
        {"metadata": {"annotations": {INDEX: "7"}}},
    ),
    ("Job", read_owner, {"metadata": {}, "spec": {"parallelism": 2}}, {"metadata": {}, "spec": {"completions": 2}}),
]


@pytest.mark.parametrize(("kind", "read", "other", "own"), LOOKS_LIKE_OURS, ids=["pod", "job"])
async def test_what_only_looks_like_ours_is_left_out(kind: str, read: Read, other: Manifest, own: Manifest) -> None:
    """Anybody who may create Jobs and pods can give one our labels; no pass ends by what else it lacks."""
    things = [
        {**other, "metadata": {**other["metadata"], "name": "a"}},
        {**own, "metadata": {**own["metadata"], "name": "b"}},
    ]
    listed = json.dumps({"metadata": {"resourceVersion": "2"}, "items": things})
    with structlog.testing.capture_logs() as logs:
        async with answering(f"{HEAD}Content-Length: {len(listed)}\r\n\r\n{listed}") as (api, _):
            found, _ = await api.list(kind, read=read)
    assert [*map(_name, found)] == ["b"]
    assert [entry["event"] for entry in logs] == ["object.unreadable"]


async def test_a_server_that_always_forgets_is_not_asked_for_ever() -> None:
    """Whoever wants to know is told."""
    async with answering(*[_page("a", more="1"), FORGOTTEN] * MAX_LIST_ATTEMPTS) as (api, asked):
        with pytest.raises(ResourceVersionExpiredError, match="too old"):
            await api.list_all_namespaces("Node", read_whole)
    assert len(asked) == 2 * MAX_LIST_ATTEMPTS
