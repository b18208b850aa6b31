"""The page's actions: who may do them to what, what comes of them, and what the audit log says."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from support.airflow.page import TASK, Api, add_task, audit, overview, submit
from support.airflow.world import World, registered
from support.autoscale.prometheus_server import prometheus

from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.registry.directory import Directory
from edl_runtime.specs import Bounds
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from airflow.models.log import Log

    from edl_airflow.plugin import actions

HAND = "127.0.0.1:4711"
POOL: dict[str, Any] = {"kind": "pool", "bounds": Bounds(1, 3)}


def teachers(world: World, pool: str) -> list[str]:
    async def ask() -> list[str]:
        async with connect(world.redis_url) as client:
            return [member.address for member in await Directory(client, world.namespace).members(pool)]

    return asyncio.run(ask())


def make_pass(world: World, **windows: Any) -> None:
    """Let the policy run as its own task does, by these windows."""

    async def run() -> None:
        async with connect(world.redis_url) as client:
            await rescale(world.backend, client, world.namespace, RescalingRules(windows=to_windows(windows)))

    asyncio.run(run())


def kept_pass(world: World, change: Callable[[Any], None] = lambda _: None) -> str:
    """Return the last pass as it is kept in Redis, changed as somebody may who can write there."""

    async def run() -> str:
        async with connect(world.redis_url) as client:
            kept = msgspec.json.decode(await client.get(keys.plan(world.namespace, world.backend.place)))
            change(kept)
            text = msgspec.json.encode(kept).decode()
            await client.set(keys.plan(world.namespace, world.backend.place), text)
            return text

    return asyncio.run(run())


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
    """A dry run tells what the real one then does; without a last pass its traffic windows are unknown."""
    submit(world, "night", "nightly", **POOL)
    overview(api, '"state": "running"')
    unknown = api.act("policy", "op")
    assert (unknown.status_code, "traffic windows are unknown" in unknown.json()["error"]) == (409, True)
    before, after = ((datetime.now(UTC) + timedelta(hours=hours)).strftime("%H:00") for hours in (-6, 6))
    sizes = [("now", before, after, 2), ("next", after, before, 2)]
    make_pass(
        world,
        windows=[{"name": name, "start": a, "end": b, "sizes": {"pools": {"night": n}}} for name, a, b, n in sizes],
    )
    asyncio.run(world.backend.resize("night", 3))
    dry = api.act("policy", "op", dry_run=True).json()
    (target,) = dry["plan"]["targets"]
    assert (target["name"], target["instances"], target["target"]) == ("night", 3, 1)
    assert dry["done"] == "The policy would resize 1 of 1 jobs and pools."
    assert asyncio.run(world.backend.get("night")).wanted == 3
    done = api.act("policy", "op", dry_run=False)
    assert (done.status_code, done.json()["done"]) == (200, "The policy has resized 1 of 1 jobs and pools.")
    assert asyncio.run(world.backend.get("night")).wanted == 1
    cluster = overview(api, '"targets": {"night"')["cluster"]
    assert cluster["next"]["name"] == "next"
    timeline = api.get("timeline")
    assert {window["name"] for window in timeline["windows"]} == {"now", "next"}
    (series,) = timeline["series"]
    assert series["name"] == "night"
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


def test_an_action_names_its_one_target(world: World, api: Api) -> None:
    """A second one, whose owner nobody would ask, is refused by its name, as is one that is missing."""
    submit(world, "mine", "nightly", **POOL)
    with registered(world, "payroll", HAND):
        for action, field, body in (
            ("drain", "job", {"job": "mine", "pool": "payroll", "teacher": HAND}),
            ("undrain", "job", {"job": "mine", "pool": "payroll", "teacher": HAND}),
            ("policy", "job", {"job": "mine", "dry_run": False}),
            ("policy", "pool", {"pool": "mine", "dry_run": False}),
            ("resize", "pool", {"job": "mine", "pool": "payroll", "instances": 2}),
            ("stop", "teacher", {"job": "mine", "teacher": HAND}),
            ("drain", "pool", {"teacher": HAND}),
            ("drain", "teacher", {"pool": "payroll"}),
            ("resize", "instances", {"job": "mine"}),
            ("resize", "instances", {"job": "mine", "instances": 0}),
            ("stop", "job", {}),
        ):
            answer = api.act(action, "user", **body)
            named = f"`{field}`" in answer.text or f"$.{field}" in answer.text
            assert (action, field, answer.status_code, named) == (action, field, 422, True)
        assert teachers(world, "payroll") == [HAND]
    assert asyncio.run(world.backend.get("mine")).wanted == 1


def test_a_pool_s_owner_decides_about_its_teachers(world: World, api: Api) -> None:
    """A job of the pool's name, or a pool of it that has ended, gives no right on teachers started by hand."""
    submit(world, "by-hand", "nightly")
    with registered(world, "by-hand", HAND):
        assert api.act("drain", "user", pool="by-hand", teacher=HAND).status_code == 403
        asyncio.run(world.backend.delete("by-hand"))
        assert api.act("drain", "user", pool="by-hand", teacher=HAND).status_code == 403, "its log is there still"
        submit(world, "by-hand", "secret", **POOL)
        assert api.act("drain", "user", pool="by-hand", teacher=HAND).status_code == 403
        assert teachers(world, "by-hand") == [HAND]
        asyncio.run(world.backend.delete("by-hand"))
        add_task()
        submit(world, "by-hand", "nightly", **POOL)
        assert api.act("drain", "user", pool="by-hand", teacher=HAND).status_code == 200
    assert [row[2] for row in audit()] == [None, None, "secret", "nightly"]


def test_a_try_s_task_is_believed_only_for_the_job_s_own_dag(world: World, api: Api) -> None:
    """Who starts a job chooses its token: a try of one DAG in it gives no rights on the jobs of another."""
    add_task()
    submit(world, "payroll", "secret", **POOL)  # with a try of "nightly"
    assert api.act("stop", "user", job="payroll").status_code == 403
    assert [row[2:] for row in audit()] == [("secret", "no permission")]


def test_the_policy_needs_the_right_on_what_no_dag_owns(world: World, api: Api) -> None:
    """It resizes jobs of all DAGs, whoever may change some."""
    submit(world, "night", "nightly", **POOL)
    make_pass(world, windows=[], default={"pools": {"night": 2}})
    asyncio.run(world.backend.resize("night", 3))
    assert api.act("policy", "user", dry_run=False).status_code == 403
    assert asyncio.run(world.backend.get("night")).wanted == 3
    assert api.act("policy", "op", dry_run=False).status_code == 200
    assert asyncio.run(world.backend.get("night")).wanted == 1


def test_a_traffic_source_is_not_kept_and_its_pass_is_left_to_its_task(world: World, api: Api) -> None:
    """The API server neither knows where the traffic is measured, nor runs such rules without it."""
    submit(world, "night", "nightly", **POOL)
    load = world.folder / "load.csv"
    load.write_text("time,needed\n")
    make_pass(world, windows=[], default={}, traffic={"resource": "cpu", "csv": {"path": str(load)}})
    assert str(load) not in json.dumps(json.loads(kept_pass(world))["rules"])
    for dry_run in (True, False):
        refused = api.act("policy", "op", dry_run=dry_run)
        assert (refused.status_code, refused.json()["error"]) == (
            409,
            "The last pass followed traffic, which only its own task reads: run that task.",
        )


def test_a_source_written_into_redis_is_never_read(world: World, api: Api) -> None:
    """Whoever can write there, as any job can, could else name files, addresses and tokens to the API server."""
    submit(world, "night", "nightly", **POOL)
    make_pass(world, windows=[], default={})
    with prometheus() as measured:
        source = {"type": "prometheus", "url": measured.url, "query": "up"}

        def smuggle(kept: Any) -> None:
            kept["rules"]["windows"]["traffic"] = {"resource": "cpu", "source": source}

        kept_pass(world, smuggle)
        assert api.act("policy", "op").status_code == 200
        assert measured.queries == []


@pytest.mark.parametrize(
    ("action", "size", "body"),
    [
        ("resume", 0, {}),
        ("resize", 1, {"instances": 2}),
        pytest.param("stop", 1, {}, marks=pytest.mark.deep),
        pytest.param("suspend", 1, {}, marks=pytest.mark.deep),
    ],
)
def test_what_has_begun_meanwhile_is_left_alone(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch, *, action: str, size: int, body: dict[str, int]
) -> None:
    """The user's rights were asked for the job that was there, and hold for no later one of its name."""
    ask = actions.rights_of

    def replaced(*given: Any) -> Any:
        asyncio.run(world.backend.delete("night"))
        submit(world, "night", "secret", **POOL)
        return ask(*given)

    monkeypatch.setattr(actions, "rights_of", replaced)
    submit(world, "night", "nightly", **POOL)
    asyncio.run(world.backend.resize("night", size))
    answer = api.act(action, "user", job="night", **body)
    assert (answer.status_code, "not the job any more" in answer.text) == (409, True)
    now = asyncio.run(world.backend.get("night"))
    assert (now.wanted, now.token.partition("/")[0]) == (1, "secret")
    assert "not the job any more" in audit()[-1][3]


@pytest.mark.parametrize(
    ("action", "body", "given"),
    [
        ("checkpoint", {"job": "night"}, {"elastic": True}),
        ("drain", {"pool": "night", "teacher": HAND}, POOL),
        ("undrain", {"pool": "night", "teacher": HAND}, POOL),
    ],
)
def test_what_redis_keeps_by_names_is_left_alone_once_the_name_is_another_s(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch, *, action: str, body: dict[str, str], given: dict[str, Any]
) -> None:
    """Its trainers write no checkpoint for a former owner, and its teachers stay."""
    submit(world, "night", "nightly", **given)
    ask = actions.rights_of

    def replaced(*asked: Any) -> Any:
        asyncio.run(world.backend.delete("night"))
        submit(world, "night", "secret", **given)
        return ask(*asked)

    monkeypatch.setattr(actions, "rights_of", replaced)
    with registered(world, "night", HAND):
        answer = api.act(action, "user", **body)
        assert (answer.status_code, "not the job any more" in answer.text) == (409, True)
        assert teachers(world, "night") == [HAND]


def test_an_action_tells_when_the_audit_log_could_not_be_written(world: World, api: Api, airflow_database: Any) -> None:
    """What was done is done, and not an error; the entry is in the API server's log."""
    submit(world, "night", "nightly", **POOL)
    bind = airflow_database.get_bind()
    Log.__table__.drop(bind)
    try:
        with capture_logs() as logs:
            done = api.act("resize", "user", job="night", instances=2)
            refused = api.act("resize", "user", job="night", instances=9)
    finally:
        Log.__table__.create(bind)
    assert (done.status_code, refused.status_code) == (200, 422)
    assert done.json()["done"] == "night will have 2 instances. Airflow's audit log could not be written."
    lost = [(entry["action"], entry["user"], entry["dag_id"], entry["job"]) for entry in logs if "cause" in entry]
    assert lost == [("resize", "the user", TASK.dag_id, "night")] * 2


def test_the_audit_log_has_refusals_and_no_names_of_others(world: World, api: Api) -> None:
    """A job that does not exist is answered as a hidden one, and the entry lists none that there are."""
    submit(world, "payroll", "secret")
    assert api.act("stop", "admin", job="nobody").status_code == 403
    assert api.act("drain", "op", pool="nobody", teacher="t").status_code == 409
    assert api.act("suspend", "user", job="payroll").status_code == 403
    outcomes = [outcome for *_, outcome in audit()]
    assert outcomes[0] == "failed: there is no such job or pool"
    assert outcomes[1].startswith("failed: ")
    assert outcomes[2] == "no permission"
    assert "payroll" not in json.dumps(outcomes)
