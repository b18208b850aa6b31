"""The user of a request and what they may see and do.

A job belongs to the DAG whose task has started it: who may read that DAG's task instances sees it, who may read the
task's log reads its log, who may trigger runs of that DAG may change it. Jobs that no task has started are shown to
those who may read all DAGs. To change them needs the plugin's own permission, PUT on the view "EDL", and that of
changing the connection: Airflow's SimpleAuthManager gives plugins' views to everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import cache
from typing import Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.base_auth_manager import ResourceMethod
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.batch_apis import IsAuthorizedDagRequest
from airflow.api_fastapi.auth.managers.models.resource_details import (
    AccessView,
    ConnectionDetails,
    DagAccessEntity,
    DagDetails,
)
from airflow.api_fastapi.core_api.security import bearer_scheme, get_user
from airflow.models.dag import DagModel
from airflow.models.team import Team
from airflow.utils.session import create_session
from fastapi import HTTPException, Request

from edl_airflow.plugin.rights import Rights
from edl_airflow.plugin.shared_answers import SharedAnswers

VIEW = "EDL"
"""The plugin's view, as auth managers know it: `can_edit on EDL` in FAB, see `_register_view`."""

ALL_DAGS = "~"
"""Stands for all DAGs, as in Airflow's REST API: no DAG's id. A question without an id is in FAB one about any DAG."""

CACHED_S = 5.0
MOST_CACHED = 1_000


async def user_of(request: Request) -> BaseUser | None:
    """Return the user of the token or cookie, None if nobody is logged in."""
    try:
        return await get_user(request, None, await bearer_scheme(request))
    except HTTPException:
        return None


def rights_of(user: BaseUser, dag_ids: Collection[str], conn_id: str) -> Rights:
    """Return a user's rights on jobs of these DAGs in this connection.

    Asks about all DAGs at once. Reads Airflow's database, so call it in a thread.
    """
    manager = get_auth_manager()
    known = set(dag_ids) - {""}
    teams = DagModel.get_dag_id_to_team_name_mapping(sorted(known)) if known else {}
    by_team: dict[str | None, set[str]] = {}
    for dag_id in known:
        by_team.setdefault(teams.get(dag_id), set()).add(dag_id)
    every_dag = [DagDetails(id=ALL_DAGS, team_name=team) for team in (None, *sorted(Team.get_all_team_names()))]

    def allowed(dags: Collection[str], method: ResourceMethod, entity: DagAccessEntity | None) -> frozenset[str]:
        """Return those of which this is allowed: of all, or else of the halves, until none is denied in a part."""
        found: set[str] = set()
        parts = [sorted(dags)] if dags else []
        while parts:
            part = parts.pop()
            asked: list[IsAuthorizedDagRequest] = [
                {"method": method, "access_entity": entity, "details": details}
                for dag_id in part
                for details in ([DagDetails(id=dag_id, team_name=teams.get(dag_id))] if dag_id else every_dag)
            ]
            if manager.batch_is_authorized_dag(asked, user=user):
                found.update(part)
            elif len(part) > 1:
                middle = len(part) // 2
                parts += [part[:middle], part[middle:]]
        return frozenset(found)

    readable = set(allowed({""}, "GET", None))
    for team, dags in by_team.items():
        readable |= manager.filter_authorized_dag_ids(dag_ids=dags, user=user, method="GET", team_name=team)
    sees = allowed(readable, "GET", DagAccessEntity.TASK_INSTANCE)
    changes = allowed(sees - {""}, "PUT", DagAccessEntity.RUN)
    if "" in sees and _may_change_others(user, conn_id):
        changes |= {""}
    return Rights(
        sees=sees,
        reads_log=allowed(sees, "GET", DagAccessEntity.TASK_LOGS),
        changes=changes,
        cluster=manager.is_authorized_view(access_view=AccessView.CLUSTER_ACTIVITY, user=user),
    )


def _may_change_others(user: BaseUser, conn_id: str) -> bool:
    manager = get_auth_manager()
    _register_view()
    return manager.is_authorized_custom_view(
        method="PUT", resource_name=VIEW, user=user
    ) and manager.is_authorized_connection(method="PUT", details=ConnectionDetails(conn_id=conn_id), user=user)


@cache
def _register_view() -> None:
    """Make the view known to FAB, whose roles can have permissions only on views that it knows; Admin has it then."""
    manager: Any = get_auth_manager()
    if app := getattr(manager, "flask_app", None):
        with create_session(), app.app_context():  # its security manager has the same session of this thread
            security = manager.security_manager
            security.add_permission_to_role(security.find_role("Admin"), security.create_permission("can_edit", VIEW))


def readable_connections(user: BaseUser, conn_ids: Collection[str]) -> set[str]:
    """Return those of these connections that the user may read in Airflow. Call it in a thread, as `rights_of`."""
    return get_auth_manager().filter_authorized_connections(conn_ids=set(conn_ids), user=user)


class RightsCache:
    """Keeps rights for seconds, so that a poll of a page with many jobs costs no query. Not for changes and logs.

    Those who ask at a time share one answer. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._kept = SharedAnswers[tuple[str, frozenset[str], str], Rights](MOST_CACHED)

    async def of(self, user: BaseUser, dag_ids: Collection[str], conn_id: str) -> Rights:
        """Return a user's rights as they were within the last seconds."""
        key = (str(user.get_id()), frozenset(dag_ids), conn_id)
        return await self._kept.get(key, lambda: asyncio.to_thread(rights_of, user, dag_ids, conn_id), holds_s=CACHED_S)
