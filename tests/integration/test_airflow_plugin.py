"""The page's API, behind Airflow's own authentication and database, before a real backend and Redis."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
import warnings
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.airflow.page import Api, Roles, add_task, audit, overview, report, submit
from support.airflow.world import World, registered
from support.network.proxy import Proxy, running_proxy
from support.teachers.process import wait_until

from edl_airflow.plugin import run_note
from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.specs import Bounds
from edl_runtime.store.redis_client import connect

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from airflow.utils.types import DagRunType
    from sqlalchemy import insert, select

    from edl_airflow.plugin import app, log_tail


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
    overview(api, "night")
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


def test_a_tab_shows_the_jobs_of_its_task_or_run(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the task is deferred, too, and in whichever connection; a task that has none shows none."""
    add_task()
    submit(world, "night", "nightly")
    submit(world, "other")
    overview(api, "other")
    for where in ("", "&task_id=train&map_index={MAP_INDEX}"):
        seen = api.get(f"overview?dag_id=nightly&run_id=manual__1{where}")
        assert [job["name"] for job in seen["jobs"]] == ["night"]
        assert seen["scope"]["task"] == ("deferred" if where else "")
    other = json.loads(os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    other["extra"]["work_dir"] = str(world.folder / "other")
    monkeypatch.setenv("AIRFLOW_CONN_A_FIRST", os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    monkeypatch.setenv("AIRFLOW_CONN_EDL_DEFAULT", json.dumps(other))
    monkeypatch.setattr(app, "CONNECTIONS_HOLD_S", 0.0)
    fresh = Api(api._manager)
    seen = fresh.get("overview?dag_id=nightly&run_id=manual__1&task_id=train")
    assert (seen["conn"], [job["name"] for job in seen["jobs"]]) == ("a_first", ["night"])
    fresh.close()
    for where in ("&task_id=train&map_index=3", "&task_id=none"):
        assert api.get(f"overview?dag_id=nightly&run_id=manual__1{where}")["jobs"] == []


def test_each_action_needs_the_permission_of_the_job_s_dag(world: World, api: Api) -> None:
    """Who may only read sees no button; jobs of no DAG are for those who may change the connection."""
    submit(world, "night", "nightly", kind="pool", bounds=Bounds(1, 3))
    submit(world, "other", kind="pool", bounds=Bounds(1, 3))
    overview(api, "other")
    may = {}
    for role in ("viewer", "user", "op", "admin"):
        pools = {pool["name"]: pool["can"] for pool in api.get("overview", role)["pools"]}
        may[role] = [name for name, can in pools.items() if can["resize"] and can["stop"] and can["drain"]]
    assert may == {"viewer": [], "user": ["night"], "op": ["night", "other"], "admin": ["night", "other"]}
    bodies = {
        "resize": {"instances": 2}, "suspend": {}, "resume": {}, "checkpoint": {}, "stop": {},
    }  # fmt: skip
    for action, body in bodies.items():
        assert api.act(action, "viewer", job="night", **body).status_code == 403
        assert api.act(action, "user", job="other", **body).status_code == 403
    assert api.act("drain", "viewer", pool="night", teacher="t").status_code == 403
    assert api.act("policy", "user").status_code == 403
    assert asyncio.run(world.backend.get("night")).wanted == 1
    assert {outcome for *_, outcome in audit()} == {"no permission"}
    assert len(audit()) == 2 * len(bodies) + 2


def test_a_resize_is_in_the_audit_log_with_what_came_of_it(world: World, api: Api) -> None:
    """By the user's name, at the job's task; a size outside the bounds is told to both."""
    add_task()
    submit(world, "night", "nightly", kind="pool", bounds=Bounds(1, 3))
    done = api.act("resize", "user", job="night", instances=3)
    assert (done.status_code, done.json()["done"]) == (200, "night will have 3 instances.")
    assert asyncio.run(world.backend.get("night")).wanted == 3
    refused = api.act("resize", "user", job="night", instances=9)
    assert refused.status_code == 422
    assert "9" in refused.json()["error"]
    assert [row[:3] for row in audit()] == [("edl.resize", "the user", "nightly")] * 2
    assert audit()[0][3] == "night will have 3 instances."
    assert audit()[1][3].startswith("failed: ")


def test_a_job_is_suspended_resumed_and_stopped(world: World, api: Api) -> None:
    """The page shows each. A job that is not suspended can't resume; one that has gone is told as hidden ones are."""
    submit(world, "night", "nightly", kind="pool", bounds=Bounds(2, 3), instances=3)
    overview(api, '"wanted": 3')
    assert api.act("resume", "user", job="night").status_code == 409
    assert api.act("suspend", "user", job="night").status_code == 200
    overview(api, '"state": "suspended"')
    (pool,) = api.get("overview", "user")["pools"]
    assert (pool["wanted"], pool["can"]["resume"], pool["can"]["suspend"]) == (0, True, False)
    assert api.act("resume", "user", job="night").json()["done"] == "night resumes with 2 instances."
    assert api.act("stop", "user", job="night").status_code == 200
    assert world.jobs() == {}
    assert api.act("stop", "admin", job="night").status_code == 403


def test_a_checkpoint_of_a_job_that_writes_none_is_refused_in_words(world: World, api: Api) -> None:
    """With the reason, and in the audit log."""
    submit(world, "night", "nightly")
    refused = api.act("checkpoint", "user", job="night")
    assert refused.status_code == 409
    assert "no elastic training" in refused.json()["error"]
    assert "no elastic training" in audit()[0][3]


def test_a_teacher_is_drained(world: World, api: Api) -> None:
    """By who may change what no DAG owns; an unknown one is told."""
    with registered(world, "by-hand", "127.0.0.1:4711"):
        assert api.act("drain", "op", pool="by-hand", teacher="127.0.0.1:4711").status_code == 200
        drained = api.act("drain", "op", pool="by-hand", teacher="127.0.0.1:9")
    assert drained.status_code == 409
    assert [event for event, *_ in audit()] == ["edl.drain"] * 2


def test_the_policy_runs_by_the_rules_of_its_last_pass(world: World, api: Api) -> None:
    """A dry run changes nothing; without a last pass its traffic windows are unknown."""
    submit(world, "night", "nightly", kind="pool", bounds=Bounds(1, 3))
    overview(api, '"state": "running"')
    assert "traffic windows are unknown" in api.act("policy", "op").json()["error"]
    sizes = [("day", "00:00", "12:00", 2), ("night", "12:00", "24:00", 2)]
    windows = [{"name": name, "start": a, "end": b, "sizes": {"pools": {"night": n}}} for name, a, b, n in sizes]
    rules = RescalingRules(windows=to_windows({"windows": windows}))

    async def last() -> None:
        async with connect(world.redis_url) as client:
            await rescale(world.backend, client, world.namespace, rules)

    asyncio.run(last())
    asyncio.run(world.backend.resize("night", 1))
    dry = api.act("policy", "op", dry_run=True).json()
    (target,) = dry["plan"]["targets"]
    assert (target["name"], target["instances"], "would resize" in dry["done"]) == ("night", 1, True)
    assert asyncio.run(world.backend.get("night")).wanted == 1
    assert api.act("policy", "op", dry_run=False).status_code == 200
    assert asyncio.run(world.backend.get("night")).wanted == target["target"]
    cluster = overview(api, '"targets": {"night"')["cluster"]
    assert cluster["next"]["name"] in ("day", "night")
    timeline = api.get("timeline")
    assert {window["name"] for window in timeline["windows"]} == {"day", "night"}
    (series,) = timeline["series"]
    assert (series["name"], series["points"][-1][1]) == ("night", 1)
    assert series["ahead"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-EDL-Request": "1", "Content-Type": "text/plain"},
        {"X-EDL-Request": "1", "Sec-Fetch-Site": "cross-site"},
        {"X-EDL-Request": "1", "Sec-Fetch-Site": "same-site"},
        {"X-EDL-Request": "1", "Origin": "http://evil.example"},
    ],
)
def test_a_forged_request_changes_nothing(world: World, api: Api, headers: dict[str, str]) -> None:
    """As one that another site's page sends with the user's cookie."""
    submit(world, "night", "nightly", kind="pool", bounds=Bounds(1, 3))
    answer = api.ask("/api/actions/stop", "admin", "POST", json={"job": "night"}, headers=headers)
    assert answer.status_code == 403
    assert list(world.jobs()) == ["night"]


@pytest.mark.usefixtures("world")
def test_a_request_that_is_none_is_refused(api: Api) -> None:
    """Whatever it is: nothing is done, and nothing breaks."""
    headers = {"X-EDL-Request": "1", "Content-Type": "application/json"}
    bodies = (b"", b"[]", b"{", b'{"job": 3}', b'{"job": "a", "more": 1}', b'{"job": ""}', b"1" * 5000)
    codes = [
        api.ask("/api/actions/stop", "admin", "POST", content=body, headers=headers).status_code for body in bodies
    ]
    assert codes == [422] * 6 + [413]
    assert api.act("explode", "admin").status_code == 404
    for query in ("instance=-1", "tail=0", f"text={'x' * 501}", "cursor=" + "x" * 61):
        assert api.ask(f"/api/log?job=a&{query}").status_code == 422


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


@pytest.mark.usefixtures("api")
def test_a_run_ends_with_a_note_of_its_results() -> None:
    """Written in the session that ends the run; a note of a user stays."""
    result = {"job": "night", "checkpoint": "/m", "metrics": {"accuracy": 0.9}, "answered": {"a:1": 7}}
    with create_session() as session:
        for run_id, note in (("manual__1", None), ("manual__2", ("mine", "1"))):
            run = DagRun(dag_id="nightly", run_id=run_id, run_type=DagRunType.MANUAL, state="running")
            run.run_after = run.queued_at or run.created_at or datetime.now(UTC)
            run.note = note
            session.add(run)
            session.flush()
            given = {"dag_run_id": run.id, "dag_id": "nightly", "run_id": run_id, "task_id": "train", "map_index": -1}
            for task_id, operator in (("train", "EdlDistillOperator"), ("other", "PythonOperator")):
                named = {**given, "task_id": task_id}
                session.execute(insert(XComModel).values(key="return_value", value=result, **named))
                session.execute(
                    insert(TaskInstance).values(
                        id=uuid.uuid4(), dag_id="nightly", run_id=run_id, task_id=task_id, map_index=-1,
                        operator=operator, pool="default_pool", pool_slots=1, try_number=1,
                    )
                )  # fmt: skip
            run_note.on_dag_run_success(run, "success")
    with create_session() as session:
        notes = [run.note for run in session.scalars(select(DagRun).order_by(DagRun.run_id))]
        session.query(XComModel).delete()
        for run in session.scalars(select(DagRun)):
            session.delete(run)
    assert notes == [
        "**Elastic deep learning**\n\n- **train**: accuracy 0.9 · 7 answers of 1 teacher · checkpoint /m",
        "mine",
    ]
