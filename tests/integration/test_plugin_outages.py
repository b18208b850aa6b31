"""What is away or hangs: the page says so at once, to all viewers, and without a log full of it."""

from __future__ import annotations

import json
import os
import socket
import warnings
from typing import Any

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs
from support.airflow.page import Api, overview, submit
from support.airflow.world import World
from support.teachers.process import wait_until

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from airflow.utils.session import create_session

    from edl_airflow.plugin import app, past

VIEWERS = 8


def test_all_who_wait_for_the_timeline_of_a_redis_that_hangs_get_one_answer(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once for all of them, not once more for each behind the other."""
    asked: list[str] = []
    read_points = past.read_points

    async def counted(client: Any, *where: str, **more: Any) -> Any:
        asked.append(where[0])
        return await read_points(client, *where, **more)

    monkeypatch.setattr(past, "read_points", counted)
    monkeypatch.setattr("edl_runtime.store.redis_client.ANSWER_TIMEOUT_S", 0.3)
    submit(world, "night", "nightly")
    with socket.create_server(("127.0.0.1", 0), backlog=VIEWERS * 8) as silent:  # takes connections and says nothing
        world.connect_to(f"redis://:secret@127.0.0.1:{silent.getsockname()[1]}")
        overview(api, "no answer in time")
        answers = api.ask_at_once("/api/timeline", VIEWERS)
    assert {answer.status_code for answer in answers} == {503}
    assert len(asked) == 1
    world.connect_to(world.redis_url)
    wait_until(lambda: api.ask("/api/timeline").status_code == 200)


def test_a_database_that_fails_is_said_and_logged_once(world: World, api: Api) -> None:
    """Whatever the page asks, for as long as it asks; it goes on when the database does."""
    submit(world, "night", "nightly")
    overview(api, "night")
    renamed("dag", "dag_away")
    try:
        with capture_logs() as logs:
            answers = [api.ask(f"/api/{path}") for _ in range(3) for path in ("overview", "job?job=night")]
    finally:
        renamed("dag_away", "dag")
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.json()["error"] for answer in answers} == {
        "Airflow can't answer now (OperationalError, see the API server's log)."
    }
    assert all("default-src 'none'" in answer.headers["content-security-policy"] for answer in answers)
    assert [entry["path"] for entry in logs if entry["event"] == "page.not_answered"] == ["/api/overview", "/api/job"]
    assert [job["name"] for job in api.get("overview")["jobs"]] == ["night"]


@pytest.mark.usefixtures("world")
def test_a_cluster_that_hangs_is_said_before_the_page_gives_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no state is needed, as for a log: its client tries on for minutes."""
    monkeypatch.setattr(app, "LONGEST_S", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=VIEWERS) as silent:
        cluster = kube_config(f"http://127.0.0.1:{silent.getsockname()[1]}")
        given = {"conn_type": "kubernetes", "extra": {"kube_config": json.dumps(cluster)}}
        monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(given))
        edl = json.loads(os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
        edl["password"] = edl["password"] or "secret"
        edl["extra"] |= {"backend": "kubernetes", "kubernetes_conn_id": "cluster"}
        monkeypatch.setenv("AIRFLOW_CONN_AWAY", json.dumps(edl))
        for path in ("overview?conn=away", "log?conn=away&job=night", "log/download?conn=away&job=night"):
            answer = api.ask(f"/api/{path}", "admin")
            assert (answer.status_code, answer.json()["error"]) == (503, "The backend has not answered within 0.5 s")


@pytest.mark.usefixtures("world")
def test_a_connection_that_was_edited_wrongly_is_explained_to_who_may_read_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To others there is none."""
    given = {**json.loads(os.environ["AIRFLOW_CONN_EDL_DEFAULT"]), "extra": {"namespace": "a b"}}
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", json.dumps(given))
    answers = {role: api.ask("/api/overview?conn=wrong", role) for role in ("admin", "viewer")}
    assert {answer.status_code for answer in answers.values()} == {404}
    assert "field 'Namespace'" in answers["admin"].json()["error"]
    assert answers["viewer"].json()["error"].startswith("There is no such connection of type edl. Add one")


def kube_config(server: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "users": [{"name": "one", "user": {"token": "a-token"}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "current-context": "one",
    }


def renamed(table: str, name: str) -> None:
    with create_session() as session:
        session.execute(text(f"ALTER TABLE {table} RENAME TO {name}"))
