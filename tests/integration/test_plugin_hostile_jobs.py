"""A job that writes what it likes into Redis: the page of all others goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Route
from support.airflow.page import Api, overview, report, submit
from support.airflow.world import World
from support.browser.chromium import new_page, running_chromium
from support.teachers.process import PATIENCE_S, wait_until

from edl_airflow.plugin.app import STATIC
from edl_airflow.plugin.views import MOST_METRICS, View
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

NEVER = "99999999999999999-1"
"""An event's id in the year 3,170,843."""


def written(world: World, *commands: tuple[Any, ...]) -> None:
    """Change Redis as any job may that has its password."""

    async def run() -> None:
        async with connect(world.redis_url) as client:
            for command in commands:
                await client.execute_command(*command)  # type: ignore[no-untyped-call]

    asyncio.run(run())


def started(world: World, api: Api) -> None:
    submit(world, "night", "nightly")
    submit(world, "evil", "secret", elastic=True)
    wait_until(lambda: set(world.jobs().values()) == {"running"})
    overview(api, "night")


def test_events_of_no_calendar_take_nothing_from_others(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the timeline of all, nor the job's own page."""
    monkeypatch.setattr("support.airflow.page.Roles.readable", ("nightly", "secret", None))
    started(world, api)
    event = '{"kind": "failed", "instance": 0, "reason": "as it says"}'
    written(world, ("XADD", keys.group_events(world.namespace, "evil"), NEVER, "event", event))
    assert api.get("job?job=evil")["events"][-1]["text"] == "instance 0 · as it says"
    assert {"night", "evil"} == {series["name"] for series in api.get("timeline")["series"]}


@pytest.mark.parametrize("what", ["group_state", "progress"])
def test_a_value_of_another_type_at_a_job_s_own_key_is_that_job_s_trouble(
    world: World, api: Api, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of all others is shown."""
    monkeypatch.setattr("support.airflow.page.Roles.readable", ("nightly", "secret", None))
    started(world, api)
    key = getattr(keys, what)(world.namespace, "evil")
    written(world, ("DEL", key), ("XADD", key, "*", "not", "that"))

    def troubles() -> dict[str, str]:
        return {job["name"]: job["trouble"] for job in api.get("overview")["jobs"]}

    wait_until(lambda: "WRONGTYPE" in troubles().get("evil", ""))
    assert troubles()["night"] == ""
    assert api.get("overview")["problems"] == []


@pytest.mark.parametrize("what", ["plan", "pools"])
def test_a_value_of_another_type_is_a_problem_that_is_told(world: World, api: Api, what: str) -> None:
    """Also to those who first ask; what the backend knows is there. Who may not see the job doesn't learn its name."""
    started(world, api)
    key = getattr(keys, what)(world.namespace, *([world.backend.place] if what == "plan" else []))
    written(world, ("DEL", key), ("XADD", key, "*", "not", "that"))
    wait_until(lambda: api.get("overview")["problems"])
    first = Api(api._manager)
    for one in (api, first):
        found = one.get("overview")
        assert [job["name"] for job in found["jobs"]] == ["night"]
        assert "evil" not in json.dumps(found)
        assert one.act("resize", "user", job="night", instances=9).status_code == 422, "actions are possible"
        problem = one.get("overview", "admin")["problems"]
        assert "WRONGTYPE" in str(problem) or found["problems"] == ["Redis can't be read now."]
    first.close()


def test_a_report_of_no_calendar_leaves_the_page_whole(world: World, api: Api) -> None:
    """In a browser; and what a script says is text."""
    submit(world, "night", "nightly", elastic=True)
    submit(world, "other", "nightly")
    wait_until(lambda: set(world.jobs().values()) == {"running"})
    note = "<img src=x onerror=document.title='mine'>"
    hostile = {"step": 1, "updated_at": 1e300, "note": note, "time_left_s": 1e300}
    saved = {"saved_at": "9" * 20, "saved": '{"step": 1}'}
    state = {"run": "r", "formed": "active", "members": "", "wall": round(9e14), **saved}
    group = [word for pair in state.items() for word in pair]
    written(
        world,
        ("SET", keys.progress(world.namespace, "night"), json.dumps(hostile)),
        ("HSET", keys.group_state(world.namespace, "night"), *group),
    )
    answers = {"/edl/api/overview": json.dumps(overview(api, "onerror"))}
    assert '"checkpoint": {' in answers["/edl/api/overview"]
    with shown_page("", answers) as page:
        page.get_by_role("link", name="other").first.wait_for(timeout=1000 * PATIENCE_S)
        page.get_by_role("link", name="night").first.wait_for(timeout=1000 * PATIENCE_S)
        assert "mine" not in page.title()


@contextmanager
def shown_page(where: str, answers: Mapping[str, str]) -> Iterator[Page]:
    """The page in a browser, with these answers of the API, by path; no script of it may fail."""

    def answer(route: Route) -> None:
        path = urlsplit(route.request.url).path
        file = STATIC / (path.removeprefix("/edl/static/") if "static" in path else "index.html")
        if path in answers:
            route.fulfill(body=answers[path], content_type="application/json")
        elif "/api/" in path:
            route.fulfill(status=503, body='{"error": "away"}', content_type="application/json")
        else:
            route.fulfill(path=file)

    with running_chromium() as browser, browser.new_context() as context:
        page = new_page(context)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.route("**/*", answer)
        page.goto(f"http://airflow.example/edl/{where}")
        yield page
        assert errors == []


OVERRIDE = "\u202e"


def test_what_a_script_reports_does_not_break_the_page(world: World, api: Api) -> None:
    """Names of thousands of metrics and of thousands of letters, a note that is a book, and texts turned round."""
    submit(world, "night", "nightly", elastic=True)
    metrics = {f"{OVERRIDE}{number}{'M' * 5000}": 0.5 for number in range(100)}
    status = asyncio.run(world.backend.get("night"))
    for step in (1, 2, 3):
        report(
            world, "night", step=step, metrics=metrics, note=OVERRIDE + "N" * 3000, updated_at=status.created_at + step
        )
    event = json.dumps({"kind": "failed", "instance": 0, "reason": OVERRIDE + "R" * 3000})
    written(world, ("XADD", keys.group_events(world.namespace, "night"), "*", "event", event))
    overview(api, "NNN")
    told = json.dumps(api.get("job?job=night"), ensure_ascii=False)
    assert OVERRIDE not in told
    assert len(told) < 20_000
    with shown_page("?job=night", {"/edl/api/job": told}) as page:
        page.get_by_text("NNNN").first.wait_for(timeout=1000 * PATIENCE_S)
        assert page.locator("dt").filter(has_text="MMMM").count() == MOST_METRICS
        for width in (1280, 375):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(
                "[...document.querySelectorAll('dt, figcaption')].every((one) => one.scrollWidth <= one.clientWidth)"
            )


def test_texts_and_reports_without_end_are_bounded(world: World, api: Api) -> None:
    """A reason is shortened; an event, a point of a curve and a report of megabytes are none."""
    submit(world, "night", "nightly", elastic=True)
    overview(api, "night")
    events = [
        json.dumps({"kind": "failed", "instance": place, "reason": letter * size})
        for place, (letter, size) in enumerate([("x", 200_000), ("y", 3_000_000), ("z", 60_000)])
    ]
    report = json.dumps({"step": 1, "updated_at": 9e9, "metrics": {f"m{number}": 0.5 for number in range(200_000)}})
    points = [json.dumps({"step": step, "at": 9e9, "note": "x" * size}) for step, size in enumerate([9, 5_000_000, 9])]
    stream = keys.group_events(world.namespace, "night")
    written(
        world,
        *(("XADD", stream, "*", "event", event) for event in events),
        ("SET", keys.progress(world.namespace, "night"), report),
        *(("ZADD", keys.progress_curve(world.namespace, "night"), step, point) for step, point in enumerate(points)),
    )
    assert [point["step"] for point in api.get("job?job=night")["curve"]] == [0, 2]
    for what in ("overview", "job?job=night", "timeline"):
        assert len(api.ask(f"/api/{what}").content) < 50_000
    assert [mark["text"][-2:] for mark in api.get("timeline")["marks"]] == ["x…", "z…"]
    assert [event["instance"] for event in api.get("job?job=night")["events"]] == [0, 2]


def test_events_of_another_type_are_that_job_s_trouble(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told in its own view; the timeline of all goes on."""
    monkeypatch.setattr("support.airflow.page.Roles.readable", ("nightly", "secret", None))
    submit(world, "night", "nightly", elastic=True)
    submit(world, "evil", "secret", elastic=True)
    overview(api, "evil")
    event = '{"kind": "failed", "instance": 0, "reason": "as it says"}'
    written(
        world,
        ("SET", keys.group_events(world.namespace, "evil"), "not that"),
        ("XADD", keys.group_events(world.namespace, "night"), "*", "event", event),
    )
    assert [mark["job"] for mark in api.get("timeline")["marks"]] == ["night"]
    assert "WRONGTYPE" in str(api.get("job?job=evil")["problems"])


def test_no_text_is_read_in_the_event_loop(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many and long a job's texts are, Airflow's other requests are answered meanwhile."""
    submit(world, "night", "nightly", elastic=True)
    report(world, "night", note="a note")
    overview(api, "a note")
    event = json.dumps({"kind": "failed", "instance": 0, "reason": "as it says"})
    written(world, ("XADD", keys.group_events(world.namespace, "night"), "*", "event", event))
    threads = set[int]()
    text = View.text

    def noted(self: View, *given: str) -> str:
        threads.add(threading.get_ident())
        return text(self, *given)

    monkeypatch.setattr(View, "text", noted)
    for what in ("overview?conn=edl_default", "job?job=night", "timeline"):
        threads.clear()
        report(world, "night", note="another note")
        wait_until(lambda what=what: api.get(what) and threads)
        assert threading.get_ident() not in threads, what


def test_odd_parameters_are_no_errors_of_the_server(world: World, api: Api) -> None:
    """Numbers that no column holds, and origins that are none."""
    submit(world, "night", "nightly")
    overview(api, "night")
    assert api.get(f"overview?dag_id=nightly&run_id=r&task_id=train&map_index={'9' * 20}")["jobs"] == []
    for origin in ("http://[", "null", "http://airflow.example.evil", "airflow.example"):
        given = {"X-EDL-Request": "1", "Content-Type": "application/json", "Origin": origin}
        answer = api.ask("/api/actions/stop", "user", "POST", content=b'{"job": "night"}', headers=given)
        assert (answer.status_code, "own page only" in answer.text) == (403, True)
