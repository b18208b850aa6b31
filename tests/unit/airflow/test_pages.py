"""The plugin's pages, of what there is to show."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.airflow.fakes import job_status

from edl_airflow.links import PageUrls
from edl_airflow.plugin import pages
from edl_airflow.plugin.pages import LogTail
from edl_runtime.autoscale.planner import JobTarget, RescalingPlan
from edl_runtime.backends.interface import InstanceStatus, LogLine
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.registry.members import Member

PENDING = InstanceStatus(
    index=1, phase="pending", started_at=1.0, pod="night-1-abc", disruptions=2, reason="<b>no place</b>"
)
RUNS = InstanceStatus(index=0, phase="running", started_at=1.0, pod="night-0-xyz", node="gpu-7", restarts=3)


def _page(*instances: InstanceStatus, members: tuple[int, ...] = (), **changes: Any) -> str:
    job = job_status("night", wanted=2, reason="no place", instances=instances, **changes)
    return pages.job_page(PageUrls("edl_default", "night"), job, None, members)


def test_the_job_page_shows_which_pods_there_are_and_what_they_wait_for() -> None:
    """And where they run, their rank, and how often the cluster has ended them."""
    page = _page(RUNS, PENDING, members=(0,), most_disruptions=20)
    shown = ("night-0-xyz", "gpu-7", "night-1-abc", "&lt;b&gt;no place&lt;/b&gt;", "2 of at most 20", "rank", "pending")
    assert [part for part in shown if part not in page] == []
    assert "<b>no place" not in page
    assert 'http-equiv="refresh"' in page
    assert 'http-equiv="refresh"' not in _page(RUNS, phase="failed")


def _colours(css: str) -> dict[str, str]:
    """What each selector has as its colour or, with " background" behind it, as its background."""
    return {
        f"{selector}{' background' if name == 'background' else ''}": colour
        for selector, rule in re.findall(r"([\w.]+) \{([^{}]*)\}", css)
        for name, colour in re.findall(r"\b(color|background): #(\w+)", rule)
    }


def _contrast(one: str, other: str) -> float:
    """By the Web Content Accessibility Guidelines 2.2: from 1 to 21; text needs 4.5."""

    def luminance(colour: str) -> float:
        full = colour if len(colour) == 6 else "".join(digit * 2 for digit in colour)
        shares = [int(full[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("is_dark", [False, True])
def test_all_text_can_be_read_by_day_and_in_dark_mode(is_dark: bool) -> None:  # noqa: FBT001 (pytest gives it)
    """Links too, visited or not, which a browser draws in dark blue or purple on any background."""
    css, dark = pages.message_page("title", "text").split("@media (prefers-color-scheme: dark)")
    colours = {"a": "0000ee", **_colours(css), **(_colours(dark) if is_dark else {})}
    background = colours["body background"]
    shown = ("body", "a", ".failed", ".succeeded", ".quiet")
    assert {name: colours[name] for name in shown if _contrast(colours[name], background) < 4.5} == {}
    assert _contrast(colours["body"], colours["pre background"]) >= 4.5


def test_the_job_page_of_processes_has_no_columns_for_pods() -> None:
    """Nor one for ranks where nobody trains together."""
    page = _page(InstanceStatus(index=0, phase="running", started_at=1.0))
    assert all(word not in page for word in ("<th>pod", "<th>node", "<th>rank", "ended by the cluster"))
    assert "none yet" in _page()


def test_the_pool_page_shows_its_pods() -> None:
    """As a job's page does its own."""
    pool = job_status("digits", kind="pool", wanted=2, instances=(RUNS, PENDING))
    page = pages.pool_page(PageUrls("edl_default", "digits"), pool, [], [], PoolDemand(), trouble="")
    for part in ("night-0-xyz", "gpu-7", "no place", 'href="/edl/jobs/edl_default/digits/log?instance=1"'):
        assert part in page
    log = pages.log_page(PageUrls("edl_default", "digits"), pool, None, LogTail(), 1)
    assert 'href="/edl/pools/edl_default/digits"' in log


def test_the_pool_page_shows_who_is_busy_and_who_waits() -> None:
    """Of those that say."""
    logged = PoolDemand(
        teachers={"t0": TeacherReport(busy=0.754, over_s=10.0), "t1": None},
        students={"s0": StudentReport(waiting=0.25, samples_per_s=81.4)},
    )
    teachers = [Member(id="t0", address="h:1"), Member(id="t1", address="h:2")]
    page = pages.pool_page(PageUrls("c", "p"), None, teachers, [Member(id="s0", address="h:3")], logged, trouble="")
    for part in ("<td>75 %</td><td>t0</td>", "<td></td><td>t1</td>", "<td>25 %</td>", "<td>81</td>"):
        assert part in page


def test_the_page_shows_the_plan_and_escapes_it() -> None:
    """Capacity, window, and of each job what it had and should have; nothing of it is a script for the browser."""
    first = JobTarget(name="first", kind="trainer", instances=4, target=1, reason="shrinks: <script>alert(1)</script>")
    pool = JobTarget(name="teachers", kind="pool", instances=1, target=2, reason="grows from 1 to 2")
    capacity = {"cpu": 1.5, "memory": 3 * 2.0**30}
    plan = RescalingPlan(
        at=1.8e9, window="day", until=1.8e9 + 60, why="half of it", capacity=capacity, targets=(first, pool)
    )
    page = pages.rescaling_page("team", plan, trouble="")
    assert "window day until 2027-01-15 08:01:00 UTC" in page
    assert "<td>cpu</td><td>1.5</td>" in page
    assert "<td>memory</td><td>3.0 GiB</td>" in page
    assert '/edl/jobs/team/first"' in page
    assert '/edl/pools/team/teachers"' in page
    assert 'class="fewer" style="width: 25%"' in page
    assert 'class="more" style="width: 50%"' in page
    assert "<script>" not in page
    assert "Nothing has been rescaled" in pages.rescaling_page("team", None, trouble="")
    assert "Redis is away" in pages.rescaling_page("team", None, trouble="Redis is away")


def test_of_a_long_log_the_end_of_each_instance_is_shown() -> None:
    """As many bytes as there is room for, in the order they were written; whoever writes little keeps it all."""
    end = LogTail(most_bytes=100)
    for number in range(30):
        end.add(LogLine(0, f"loud {number:02}"))
        if number == 0:
            end.add(LogLine(1, "a word"))
    shown = [(line.instance, line.text) for line in end.lines()]
    assert shown == [(1, "a word"), *((0, f"loud {number}") for number in range(19, 30))]
    assert end.left_out == 19
    end.add(LogLine(0, "x" * 101))
    assert [line.instance for line in end.lines()] == [1]


def test_a_log_that_is_cut_says_so_and_a_large_one_does_not_reload() -> None:
    """A page that costs much is paid for once."""
    end = LogTail(most_bytes=10)
    for _ in range(3):
        end.add(LogLine(0, "12345678"))
    at, job = PageUrls("edl_default", "night"), job_status("night")
    cut = pages.log_page(at, job, None, end, None, reloads=False)
    assert "2 earlier lines are left out here; `edl logs night` shows" in cut
    assert 'http-equiv="refresh"' not in cut
    assert 'http-equiv="refresh"' in pages.log_page(at, job, None, LogTail(), None)
