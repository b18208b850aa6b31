"""`edl windows`: windows and their source, checked and shown."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from support.autoscale.prometheus_server import prometheus
from support.edl_command import Edl, edl_command

from edl_runtime.errors import EX_CONFIG

BERLIN = ZoneInfo("Europe/Berlin")

WINDOWS = """
time_zone: Europe/Berlin
windows:
  - {name: evening, start: 18:00, end: 23:00, sizes: {cluster: {gpu: 8}, jobs: {nightly: 25%}, pools: {resnext: 2}}}
default: {cluster: {gpu: 24, cpu: 50%}}
"""


@pytest.fixture
def edl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Edl]:
    """Runs `edl windows` with the words given: its exit status, what it printed and what it complained of."""
    with edl_command(monkeypatch, capsys, "windows") as run:
        yield run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of windows."""
    path = tmp_path / "windows.yaml"
    path.write_text(WINDOWS)
    return path


def with_source(file: Path, source: str) -> Path:
    """Give the windows a source."""
    file.write_text(f"{WINDOWS}traffic: {{resource: gpu, times: 0.5, {source}}}\n")
    return file


def two_weeks(path: Path) -> Path:
    """Write a web that needs 8 GPUs, and 24 from 12:00 to 14:00 in Berlin; it counts twice as many."""
    now_s = time.time()
    times = [now_s - 60 - 600 * number for number in reversed(range(14 * 144))]
    rows = [f"{at_s:.0f},{48 if 12 <= datetime.fromtimestamp(at_s, BERLIN).hour < 14 else 16}" for at_s in times]
    path.write_text("\n".join(["time,needed", *rows, ""]))
    return path


def test_windows_are_shown_with_the_next_edges(edl: Edl, file: Path) -> None:
    """What holds, what comes, and what that leaves of a cluster; times are those of the windows' zone."""
    status, printed, _ = edl(file, "--at", "2026-12-24T18:30", "--total", "gpu=32,cpu=128")
    lines = [line.rstrip() for line in printed.splitlines()]
    assert status == 0
    assert lines[:3] == [
        "FROM                      WINDOW   CLUSTER          JOBS         POOLS",
        "Thu 24 Dec 18:00 (holds)  evening  gpu 8            nightly 25%  resnext 2",
        "Thu 24 Dec 23:00          default  gpu 24, cpu 50%",
    ]
    assert lines[7:] == [
        "",
        "Thu 24 Dec 18:30: window 'evening' holds until 23:00",
        "training may use 8 of 32 gpu",
        "training may use 128 of 128 cpu",
    ]
    utc = edl(file, "--at", "2026-12-24T17:30Z", "--total", "gpu=32,cpu=128")
    assert utc == (0, printed, "")


def test_of_an_hour_that_comes_twice_one_holds(edl: Edl, file: Path) -> None:
    """The clock on the wall says the same in both, and what holds is the first alone."""
    file.write_text(WINDOWS.replace("18:00", "02:15").replace("23:00", "02:45"))
    lines = edl(file, "--at", "2026-10-25T02:20")[1].splitlines()
    assert [line[:25].rstrip() for line in lines[1:5]] == [
        "Sun 25 Oct 02:15 (holds)",
        "Sun 25 Oct 02:45",
        "Sun 25 Oct 02:15",
        "Sun 25 Oct 02:45",
    ]


def test_json_has_the_same(edl: Edl, file: Path) -> None:
    """For other programs."""
    _, printed, _ = edl(file, "--at", "2026-12-24T18:30", "--total", "gpu=32", "--json")
    found = json.loads(printed)
    assert found["windows"][0] == {
        "window": "evening",
        "start": "2026-12-24T17:00:00Z",
        "end": "2026-12-24T22:00:00Z",
        "cluster": {"gpu": "8"},
        "jobs": {"nightly": "25%"},
        "pools": {"resnext": "2"},
    }
    assert (found["capacity"], found["why"]) == ({"gpu": 8}, "window 'evening' holds until 23:00")
    assert (found["need"], found["trouble"]) == (None, "")


def test_what_the_web_needs_is_shown(edl: Edl, file: Path, tmp_path: Path) -> None:
    """It is read and learned from the source at once, with Redis or without; training has the rest, with headroom."""
    with_source(file, f"csv: {{path: {two_weeks(tmp_path / 'web.csv')}}}")
    status, printed, _ = edl(file, "--total", "gpu=32")
    assert status == 0
    assert re.search(r"^now: the web .*, and is left \d", printed, re.MULTILINE)
    foretold = r"(?m)^it needed (8|24) gpu at \d\d:\d\d, and most in the next 24 h will be about 24 at \d\d:\d\d$"
    assert re.search(foretold, printed)
    _, printed, _ = edl(file, "--total", "gpu=32", "--at", "2026-06-10T11:55")
    assert "Wed 10 Jun 11:55: the web is expected to need 24 gpu by 12:00, and is left 27.6\n" in printed
    assert "training may use 4.4 of 32 gpu\n" in printed


def test_what_was_learned_is_kept_in_redis(
    edl: Edl, file: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second look asks for a day and half an hour."""
    monkeypatch.setenv("EDL_REDIS_URL", redis_url)
    monkeypatch.setenv("EDL_NAMESPACE", namespace)
    with prometheus() as server:
        server.series["requests"] = [({}, lambda _: 16.0)]
        with_source(file, f"prometheus: {{url: '{server.url}', query: sum(requests), timeout_s: 20}}")
        assert "now: the web is expected to need 8 gpu now, and is left 9.2\n" in edl(file, "--total", "gpu=32")[1]
        before = len(server.queries)
        assert edl(file, "--total", "gpu=32")[0] == 0
        spans = [float(each["end"]) - float(each["start"]) for each in server.queries[before:]]
        assert spans == [pytest.approx(86_400, abs=60), pytest.approx(1_800, abs=60)]


def test_a_silent_source_is_an_error_and_windows_are_shown(edl: Edl, file: Path) -> None:
    """With the status of a mistake where it is one."""
    with prometheus() as server:
        for query, expected, says in (
            ("requests", 1, "edl: the query 'requests' of Prometheus at"),
            ("sum(requests", EX_CONFIG, "edl: traffic.prometheus.query: got 'sum(requests', allowed is"),
        ):
            with_source(file, f"prometheus: {{url: '{server.url}', query: '{query}', timeout_s: 20}}")
            status, printed, complaint = edl(file, "--total", "gpu=32")
            assert (status, complaint[: len(says)]) == (expected, says)
            assert "training may use " in printed
    assert edl(with_source(file, "prometheus: {url: 'http://127.0.0.1:1', query: a}"))[0] == 1
    status, _, complaint = edl(with_source(file, "redis: {stream: web-load}"))
    assert (status, "EDL_REDIS_URL, which is not set" in complaint) == (EX_CONFIG, True)


def test_an_error_of_the_source_is_shown_beside_the_windows(edl: Edl, file: Path, tmp_path: Path) -> None:
    """Lines of a file that can't be read, and a server that has no time for a long range; JSON stays JSON."""
    path = two_weeks(tmp_path / "web.csv")
    path.write_text(path.read_text() + "noon,many\n")
    status, printed, complaint = edl(with_source(file, f"csv: {{path: {path}}}"), "--json")
    assert (status, json.loads(printed)["trouble"]) == (0, "")
    assert "source.records_skipped" in complaint
    with prometheus() as server:
        server.series["requests"] = [({}, lambda _: 16.0)]
        server.longest_s = 86_400
        with_source(file, f"prometheus: {{url: '{server.url}', query: requests, timeout_s: 20}}")
        status, printed, _ = edl(file)
    assert (status, "no earlier day like this one" in printed, "too many samples" in printed) == (0, True, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--total", "gpu"), "total: got 'gpu', allowed is resources with numbers above 0, as in gpu=32,cpu=128"),
        (("--total", "gpu=0"), "total: got 'gpu=0', allowed is"),
        (("--at", "tomorrow"), "at: got 'tomorrow', allowed is a date and time"),
        (("--at", "0001-01-01"), "at: got '0001-01-01', allowed is a time of the years 1970 to 2999"),
        (("--at", "9999-12-31T23:59+01:00"), "allowed is a time of the years 1970 to 2999"),
    ],
)
def test_wrong_options_are_errors(edl: Edl, file: Path, words: tuple[str, ...], says: str) -> None:
    """What was given, and what is allowed."""
    status, _, complaint = edl(file, *words)
    assert status == EX_CONFIG
    assert says in complaint


def test_a_mistake_in_the_file_is_reported_with_its_line(edl: Edl, file: Path) -> None:
    """And nothing else is shown."""
    file.write_text(WINDOWS.replace("23:00", "25:00"))
    status, printed, complaint = edl(file)
    assert (status, printed) == (EX_CONFIG, "")
    assert complaint.startswith("edl: line 4: windows[0].end: got '25:00', allowed is a time of day")
    file.write_bytes(b"windows: []\n# caf\xe9")
    assert "FILE: got " in (complaint := edl(file)[2])
    assert "allowed is a text in UTF-8 (unexpected end of data at byte 17)" in complaint
