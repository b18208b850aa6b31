"""The page's API, behind Airflow's own authentication and database, before a real backend and Redis."""

from __future__ import annotations

import asyncio
import json
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.airflow.page import Api, Roles, add_task, overview, report, submit
from support.airflow.world import World, registered
from support.network.proxy import Proxy, running_proxy
from support.teachers.process import wait_until

from edl_runtime.specs import Bounds

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity

    from edl_airflow.plugin import log_tail


@pytest.mark.usefixtures("world")
def test_nobody_sees_anything_without_logging_in(api: Api) -> None:
    """Neither the page, nor a file of it, nor whether there is something behind a path."""
    paths = ("", "static/edl.js", "api/overview", "api/job?job=student", "api/log?job=student", "openapi.json", "no")
    assert {api.ask(f"/{path}", role="").status_code for path in paths} == {401}
    answers = [api.ask("/api/actions/stop", role="", method="POST", json={}), api.ask("/", role="", method="POST")]
    assert [answer.status_code for answer in answers] == [401, 401]
    assert api.ask("/api/overview", role="", headers={"Authorization": "Bearer none"}).status_code == 401


def test_the_overview_shows_jobs_and_pools_with_their_progress(world: World, api: Api) -> None:
    """And whose they are, what they may do, and how much of the cluster they use."""
    add_task()
    submit(world, "night", "nightly")
    submit(world, "answers", kind="pool", bounds=Bounds(1, 3))
    report(world, "night", total_steps=14, waiting=0.38, limit="teachers", loss=0.5, metrics={"acc": 0.75})
    with registered(world, "by-hand", "127.0.0.1:4711"):
        overview(api, "127.0.0.1:4711")
        seen = overview(api, '"ours": 2.0')
    (night,) = seen["jobs"]
    assert [night[field] for field in ("name", "state", "dag_id", "run_id", "task_id", "share")] == [
        "night", "running", "nightly", "manual__1", "train", 0.5,
    ]  # fmt: skip
    assert night["progress"]["metrics"] == {"acc": 0.75}
    assert "the student waits 38 % of the time" in night["limit"]
    assert {pool["name"]: (pool["state"], pool["wanted"]) for pool in seen["pools"]} == {
        "answers": ("running", 1),
        "by-hand": ("", None),
    }
    assert seen["cluster"]["use"]["cpu"]["ours"] == 2.0
    assert (seen["conn"], seen["conns"], seen["problems"]) == ("edl_default", ["edl_default"], [])


def test_a_poll_without_a_change_costs_no_body(world: World, api: Api) -> None:
    """The tag is the same for another user with the same rights, too."""
    submit(world, "night", "nightly")
    overview(api, '"running": 1')
    answer = api.ask("/api/overview")
    for role in ("viewer", "viewer"):
        again = api.ask("/api/overview", role, headers={"If-None-Match": f"W/{answer.headers['etag']}"})
        assert (again.status_code, again.content) == (304, b"")
        assert float(again.headers["x-edl-at"]) >= float(answer.headers["x-edl-at"])


def test_a_job_of_a_dag_that_the_user_may_not_read_is_nowhere(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as an entry nor by its name; its pages are as those of a job that does not exist."""
    submit(world, "payroll", "secret", kind="pool")
    submit(world, "night", "nightly")
    seen = overview(api, "night")
    timeline = api.ask("/api/timeline").text
    assert "payroll" not in json.dumps(seen) + timeline
    asked = [f"/api/{what}={name}" for name in ("payroll", "nobody") for what in ("job?job", "pool?pool", "log?job")]
    denied = [api.ask(path) for path in (*asked, "/api/log/download?job=payroll", "/api/overview?dag_id=secret")]
    assert {(answer.status_code, answer.text) for answer in denied} == {(403, denied[0].text)}
    monkeypatch.setattr(Roles, "readable", ("secret",))
    seen = overview(api, "payroll")
    assert ("night" in json.dumps(seen), [pool["name"] for pool in seen["pools"]]) == (False, ["payroll"])
    monkeypatch.setattr(Roles, "hidden", (None,))
    assert "payroll" not in json.dumps(api.get("overview"))


LOUD = r"""
import sys, time
print('\x1b[31mred\x1b[0m <b>bold</b>')
print('10%\r50%\r100%')
print('\x1b]0;title\x07end', flush=True)
while not sys.stdin.closed and not __import__('os').path.exists('go'):
    time.sleep(0.05)
print('later', flush=True)
"""


def test_the_log_is_text_and_is_followed(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Escape codes are removed, a progress bar is its last state; filters and the file have the same lines."""
    monkeypatch.setattr(log_tail, "QUIET_S", 0.5)
    submit(world, "night", "nightly", words=("python", "-c", LOUD), cwd=str(tmp_path))
    shown: list[str] = []

    def lines() -> list[str]:
        part = api.get("log?job=night")
        shown[:] = [part["cursor"]]
        return [line["text"] for line in part["lines"]]

    wait_until(lambda: lines() == ["red <b>bold</b>", "100%", "end"])
    assert api.get("log?job=night&text=BOLD")["lines"] == [{"instance": 0, "text": "red <b>bold</b>"}]
    assert api.get("log?job=night&instance=1")["lines"] == []
    assert api.get(f"log?job=night&cursor={shown[0]}")["lines"] == []
    (tmp_path / "go").touch()
    new: list[str] = []

    def follows() -> bool:
        part = api.get(f"log?job=night&cursor={shown[0]}")
        shown[:] = [part["cursor"]]
        assert not part["reset"]
        new.extend(line["text"] for line in part["lines"])
        return bool(part["ended"])

    wait_until(follows)
    assert new == ["later"]
    assert api.get("log?job=night&cursor=other-3")["reset"]
    file = api.ask("/api/log/download?job=night")
    assert file.text == "[0] red <b>bold</b>\n[0] 100%\n[0] end\n[0] later\n"
    assert "attachment" in file.headers["content-disposition"]
    asyncio.run(world.backend.delete("night"))
    assert [line["text"] for line in api.get("log?job=night")["lines"]][-1] == "later", "logs outlive their job"
    assert api.get("job?job=night")["job"] is None


def test_who_may_not_read_a_task_s_log_reads_no_line_of_its_job(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the log, nor the last lines of a failed instance; the state they see."""
    submit(world, "night", "nightly", words=("python", "-c", "raise SystemExit('the prices of all')"))
    overview(api, "failed")
    assert "the prices of all" in json.dumps(api.get("job?job=night")["last_lines"])
    monkeypatch.setattr(Roles, "hidden", (DagAccessEntity.TASK_LOGS,))
    assert "prices" not in json.dumps(api.get("job?job=night")["last_lines"])
    assert [api.ask(f"/api/log{path}?job=night").status_code for path in ("", "/download")] == [403, 403]
    assert api.get("overview")["jobs"][0]["can"]["log"] is False


def test_one_job_is_shown_with_its_curve_and_instances(world: World, api: Api) -> None:
    """The curve by step."""
    submit(world, "night", "nightly")
    for step in (1, 2, 3):
        report(world, "night", step=step, loss=1 / step)
    overview(api, '"state": "running"')
    seen = api.get("job?job=night")
    assert [(point["step"], point["loss"]) for point in seen["curve"]] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [(one["index"], one["phase"], one["rank"]) for one in seen["instances"]] == [(0, "running", None)]
    assert seen["can_log"]


def test_while_redis_is_away_the_page_says_so_and_shows_what_was_known(world: World, api: Api) -> None:
    """The states are those of now; all is well again with Redis."""
    submit(world, "night", "nightly")
    report(world, "night", total_steps=14)
    url = urlsplit(world.redis_url)
    with running_proxy(url.hostname or "", url.port or 6379) as proxy:
        world.connect_to(world.redis_url.replace(f":{url.port}", f":{proxy.port}"))
        _sees_redis_go_and_come(api, proxy)


def _sees_redis_go_and_come(api: Api, proxy: Proxy) -> None:
    overview(api, '"share": 0.5')
    overview(api, '"state": "running"')
    proxy.cut()
    away = overview(api, "can't be used")
    assert (away["jobs"][0]["share"], away["jobs"][0]["state"]) == (0.5, "running")
    fresh = Api(api._manager)
    (job,) = fresh.get("overview")["jobs"]
    assert (job["state"], job["progress"]) == ("running", None), "with nothing known before"
    assert fresh.get("job?job=night")["problems"]
    fresh.close()
    assert {api.ask("/api/timeline").status_code, api.act("policy", "op").status_code} == {503}
    proxy.mend()
    wait_until(lambda: not api.get("overview")["problems"])
    assert api.get("timeline")["series"]


def test_the_timeline_keeps_jobs_that_were_removed(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those who may see their DAG: what has failed and gone is what people look for."""
    submit(world, "night", "nightly")
    overview(api, "night")
    asyncio.run(world.backend.delete("night"))
    wait_until(lambda: not api.get("overview")["jobs"])
    assert [series["name"] for series in api.get("timeline")["series"]] == ["night"]
    monkeypatch.setattr(Roles, "readable", ("other", None))
    assert api.get("timeline")["series"] == []
