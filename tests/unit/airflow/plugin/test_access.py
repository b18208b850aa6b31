"""A user's rights on jobs of many DAGs: what they are, and how much is asked for them."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from edl_airflow.plugin.rights import Rights

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    from edl_airflow.plugin import access
    from edl_airflow.plugin.access import RightsCache, rights_of

DAGS = tuple(f"dag-{number:03}" for number in range(100))
USER = SimpleAuthManagerUser(username="ann", role="user")

Manager = TypeVar("Manager", bound=SimpleAuthManager)


class Counting(SimpleAuthManager):
    """Answers a list of questions at once, as managers that ask a server do; counts how often it is asked.

    As in FAB, a question about no DAG is one about any. `denied` gets "" for all DAGs.
    """

    def __init__(self, denied: Callable[[str, DagAccessEntity | None], bool] = lambda *_: False) -> None:
        super().__init__()
        self.denied = denied
        self.asked = 0

    def batch_is_authorized_dag(self, requests: Sequence[Any], **_: Any) -> bool:
        self.asked += 1
        return all(self._may(one.get("details"), one.get("access_entity")) for one in requests)

    def filter_authorized_dag_ids(self, *, dag_ids: set[str], **_: Any) -> set[str]:
        self.asked += 1
        return {dag_id for dag_id in dag_ids if not self.denied(dag_id, None)}

    def is_authorized_dag(self, *, access_entity: Any = None, details: Any = None, **_: Any) -> bool:
        self.asked += 1
        return self._may(details, access_entity)

    def _may(self, details: Any, entity: DagAccessEntity | None) -> bool:
        asked = details and details.id
        return not asked or not self.denied("" if asked == access.ALL_DAGS else asked, entity)


@pytest.fixture
def using(monkeypatch: pytest.MonkeyPatch) -> Callable[[Manager], Manager]:
    """Let this auth manager be Airflow's; no DAG is a team's."""

    def use(manager: Manager) -> Manager:
        monkeypatch.setattr(access, "get_auth_manager", lambda: manager)
        monkeypatch.setattr(access.DagModel, "get_dag_id_to_team_name_mapping", lambda _: {})
        monkeypatch.setattr(access.Team, "get_all_team_names", set)
        return manager

    return use


def test_a_hundred_dags_cost_a_few_questions(using: Callable[[Counting], Counting]) -> None:
    """Not six for each; who may do all is found at once."""
    manager = using(Counting())
    rights = rights_of(USER, {"", *DAGS}, "edl_default")
    assert rights.sees == rights.reads_log == {"", *DAGS}
    assert rights.changes == {*DAGS}, "those of no DAG need other rights"
    assert manager.asked == 5


@pytest.mark.parametrize("denied", [set(), {"dag-007"}, {*DAGS[::3], ""}, {*DAGS, ""}])
def test_what_is_denied_is_denied_for_its_dag_alone(using: Callable[[Counting], Counting], denied: set[str]) -> None:
    """Whichever the question is, and however many DAGs it is denied for."""
    everything = {"", *DAGS}
    for entity in (None, DagAccessEntity.TASK_INSTANCE, DagAccessEntity.TASK_LOGS, DagAccessEntity.RUN):
        manager = using(Counting(lambda dag_id, asked, entity=entity: asked == entity and dag_id in denied))
        rights = rights_of(USER, everything, "edl_default")
        rest = everything - denied
        hides = entity in (None, DagAccessEntity.TASK_INSTANCE)
        assert rights.sees == (rest if hides else everything)
        assert rights.reads_log == (everything if entity is DagAccessEntity.RUN else rest)
        assert rights.changes == (everything if entity is DagAccessEntity.TASK_LOGS else rest) - {""}
        assert manager.asked <= 3 * len(everything)


def test_who_reads_one_dag_sees_no_jobs_of_none(using: Callable[[Counting], Counting]) -> None:
    """Though such a user may list DAGs in FAB, which is what a question without a DAG's id means there."""
    using(Counting(lambda dag_id, _: dag_id != "mine"))
    rights = rights_of(USER, {"", "mine", "others"}, "edl_default")
    assert rights.sees == rights.reads_log == rights.changes == {"mine"}
    assert not rights.runs_policy


@pytest.mark.parametrize(("teams", "sees"), [(["red"], {"mine"}), (["red", "blue"], {"", "mine", "others"})])
def test_a_user_of_one_team_sees_no_jobs_of_none(
    using: Callable[[SimpleAuthManager], SimpleAuthManager],
    monkeypatch: pytest.MonkeyPatch,
    teams: list[str],
    sees: set[str],
) -> None:
    """And doesn't run the policy, which resizes those of other teams; who is in all teams does."""
    using(SimpleAuthManager())  # type: ignore[no-untyped-call]
    monkeypatch.setattr(access.Team, "get_all_team_names", lambda: {"red", "blue"})
    monkeypatch.setattr(access.DagModel, "get_dag_id_to_team_name_mapping", lambda _: {"mine": "red", "others": "blue"})
    op = SimpleAuthManagerUser(username="bob", role="op", teams=teams)
    rights = rights_of(op, {"", "mine", "others"}, "edl_default")
    assert rights.sees == rights.reads_log == rights.changes == sees
    assert rights.runs_policy == ("" in sees)


async def test_those_who_ask_at_a_time_share_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tabs of a user do; an error is told to all, and asked again."""
    may, asked = threading.Event(), list[frozenset[str]]()
    rights = Rights(sees=frozenset(), reads_log=frozenset(), changes=frozenset(), cluster=False)

    def ask(_user: Any, dag_ids: frozenset[str], _conn_id: str) -> Rights:
        asked.append(dag_ids)
        may.wait(60)
        if len(asked) == 1:
            raise OSError("the database is away")
        return rights

    monkeypatch.setattr(access, "rights_of", ask)
    monkeypatch.setattr(access, "CACHED_S", 3600.0)
    kept = RightsCache()
    waiting = [asyncio.ensure_future(kept.of(USER, {"a"}, "edl_default")) for _ in range(10)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    may.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [asyncio.CancelledError, *[OSError] * 9]
    assert [await kept.of(USER, {"a"}, "edl_default") for _ in range(10)] == [rights] * 10
    assert asked == [{"a"}] * 2
