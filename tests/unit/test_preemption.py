"""Notices of clouds, read from a server that answers as they document it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs
from support.metadata_server import MetadataServer, metadata_server

from edl_runtime import preemption
from edl_runtime.errors import SpecError
from edl_runtime.preemption import PreemptionNotice, await_notice, watch_machine
from edl_runtime.settings import CLOUDS, RuntimeSettings

PATIENCE_S = 60.0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    monkeypatch.setattr(preemption, "POLL_EVERY_S", 0.01)
    monkeypatch.setattr(preemption, "ANSWER_TIMEOUT_S", PATIENCE_S)
    with metadata_server() as running:
        yield running


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def asking(thread: ThreadPoolExecutor, cloud: str, server: MetadataServer) -> Future[PreemptionNotice]:
    return thread.submit(await_notice, f"{cloud}={server.url}/")


@pytest.mark.parametrize(
    ("cloud", "left_s", "reason"),
    [
        ("aws", 120, "AWS announces to terminate this machine"),
        ("gcp", 30, "Google Cloud preempts this machine"),
        ("azure", 120, "Azure announces: Preempt of this machine"),
    ],
)
def test_a_notice_is_read_once_there_is_one(
    cloud: str, left_s: float, reason: str, server: MetadataServer, thread: ThreadPoolExecutor
) -> None:
    """With the time that is left; Google's has none, and is always of half a minute."""
    found = asking(thread, cloud, server)
    server.await_questions(2)
    assert not found.done()
    server.announce(120)
    notice = found.result(PATIENCE_S)
    assert notice.reason == reason
    assert left_s - PATIENCE_S < notice.left_s <= left_s + 1


def test_every_cloud_of_the_settings_can_be_asked() -> None:
    assert tuple(preemption._CLOUDS) == CLOUDS


def test_google_is_not_asked_again_before_something_changes(server: MetadataServer, thread: ThreadPoolExecutor) -> None:
    """Its server holds the answer back."""
    found = asking(thread, "gcp", server)
    server.await_questions(2)
    time.sleep(0.1)  # ten pauses between two questions
    assert len(server.asked) == 2
    server.announce(30)
    found.result(PATIENCE_S)
    assert len(server.asked) == 2


def test_azures_events_of_other_machines_count_for_them(server: MetadataServer, thread: ThreadPoolExecutor) -> None:
    """All machines of a scale set get those of all."""
    server.announce(120, machine="worker_4")
    found = asking(thread, "azure", server)
    server.await_questions(6)
    assert not found.done()
    server.announce(120)
    found.result(PATIENCE_S)


def test_a_server_that_fails_is_logged_once_and_asked_again(server: MetadataServer, thread: ThreadPoolExecutor) -> None:
    """As during its own maintenance, or where the setting names another cloud."""
    server.status = 503
    with capture_logs() as told:
        found = asking(thread, "aws", server)
        server.await_questions(5)
        server.status = 0
        server.announce(120)
        found.result(PATIENCE_S)
    assert [line["event"] for line in told] == ["preemption.unknown", "preemption.announced"]
    assert "503" in told[0]["cause"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_server_that_does_not_answer_is_asked_again(
    cloud: str, server: MetadataServer, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Azure's, which takes up to two minutes for the first answer."""
    monkeypatch.setattr(preemption, "ANSWER_TIMEOUT_S", 0.05)
    server.answers.clear()
    found = asking(thread, cloud, server)
    server.await_questions(3)
    assert not found.done()
    monkeypatch.setattr(preemption, "ANSWER_TIMEOUT_S", PATIENCE_S)
    server.announce(120)
    server.answers.set()
    assert found.result(PATIENCE_S).left_s > 0


def test_a_machine_whose_time_is_over_counts_as_there_for_a_moment(
    server: MetadataServer, thread: ThreadPoolExecutor
) -> None:
    """What it does in that moment is not lost."""
    server.announce(-10)
    assert asking(thread, "aws", server).result(PATIENCE_S).left_s == preemption.LEAST_LEFT_S


@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_what_should_have_happened_long_ago_is_no_notice(
    cloud: str, server: MetadataServer, thread: ThreadPoolExecutor
) -> None:
    """The machine has been spared: who left again for that would be started again and leave again, without end."""
    server.announce(-preemption.LATE_S - 1)
    with capture_logs() as told:
        found = asking(thread, cloud, server)
        server.await_questions(7)
        assert not found.done()
        server.announce(120)
        assert found.result(PATIENCE_S).left_s > PATIENCE_S
    assert [line["event"] for line in told] == ["preemption.unknown", "preemption.announced"]
    over = re.search(r"but its time was over (\d+) s ago$", told[0]["cause"])
    assert over
    assert int(over[1]) >= 60


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no JSON",
        "\udcff",
        "[]",
        '{"action": "terminate", "time": "soon"}',
        '{"action": "terminate", "time": "0001-01-01T00:00:00+01:00"}',
        '{"Events": [{"EventType": "Preempt", "Resources": ["worker_3"], "NotBefore": "soon"}]}',
        '{"Events": [{"EventType": "Preempt", "Resources": ["worker_3"], "NotBefore": ","}]}',
        '{"Events": [{"EventType": "Preempt", "Resources": ["worker_3"], "NotBefore": 5}]}',
    ],
)
def test_whatever_a_server_answers_it_is_asked_again(
    cloud: str, answer: str, server: MetadataServer, thread: ThreadPoolExecutor
) -> None:
    """As something that is no metadata server does, or one that is about to fail."""
    server.text = answer
    found = asking(thread, cloud, server)
    server.await_questions(6)
    assert not found.done()
    server.text = None
    server.announce(120)
    assert found.result(PATIENCE_S).left_s > 0


async def test_the_event_loop_hears_of_it(server: MetadataServer) -> None:
    heard: asyncio.Future[PreemptionNotice] = asyncio.get_running_loop().create_future()
    watch_machine("", heard.set_result)
    watch_machine(f"aws={server.url}", heard.set_result)
    server.announce(120)
    async with asyncio.timeout(PATIENCE_S):
        assert (await heard).left_s > 0


async def test_who_has_left_stays_until_it_is_ended_or_the_machine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be started again on a machine that goes."""
    terminated = asyncio.Event()
    staying = asyncio.create_task(PreemptionNotice("it goes", time.monotonic() + 600).outlast(terminated))
    await asyncio.sleep(0)
    assert not staying.done()
    terminated.set()
    async with asyncio.timeout(PATIENCE_S):
        await staying
        monkeypatch.setattr(preemption, "LATE_S", 0.01)
        await PreemptionNotice("it was to go", time.monotonic()).outlast(asyncio.Event())


@pytest.mark.parametrize(
    "given",
    [
        *("gce", "aws=", "aws=169.254.169.254", "=http://127.0.0.1", "aws=file:///etc"),
        *("aws=http://", "aws=http://:1338", "aws=http://127.0.0.1:port", "aws=http://[::1", "aws=http:// mock"),
    ],
)
def test_other_sources_are_refused(given: str) -> None:
    with pytest.raises(SpecError, match=r"EDL_PREEMPTION_NOTICE.*'azure', or one with an address"):
        RuntimeSettings.from_env({"EDL_PREEMPTION_NOTICE": given})
