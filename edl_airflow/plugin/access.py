"""The user of a request and what they may see and do.

A job belongs to the DAG whose task has started it: who may read that DAG's task instances sees it, who may read the
task's log reads its log, who may trigger runs of that DAG may change it. Jobs that no task has started are shown to
those who may read all DAGs. To change them needs the plugin's own permission, PUT on the view "EDL", and that of
changing the connection: Airflow's SimpleAuthManager gives plugins' views to everybody.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.base_auth_manager import ResourceMethod
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import (
    AccessView,
    ConnectionDetails,
    DagAccessEntity,
    DagDetails,
)
from airflow.api_fastapi.core_api.security import bearer_scheme, get_user
from airflow.models.dag import DagModel
from fastapi import HTTPException, Request

from edl_airflow.plugin.rights import Rights

VIEW = "EDL"
"""The plugin's view, as auth managers know it: `can_edit on EDL` in FAB."""

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

    Reads Airflow's database, so call it in a thread.
    """
    manager = get_auth_manager()
    known = sorted(set(dag_ids) - {""})
    teams = DagModel.get_dag_id_to_team_name_mapping(known) if known else {}

    def may(method: ResourceMethod, entity: DagAccessEntity, dag_id: str) -> bool:
        checks: tuple[tuple[ResourceMethod, DagAccessEntity | None], ...] = (("GET", None), (method, entity))
        details = DagDetails(id=dag_id, team_name=teams.get(dag_id)) if dag_id else None
        return all(
            manager.is_authorized_dag(method=verb, access_entity=each, details=details, user=user)
            for verb, each in checks
        )

    sees = {dag_id for dag_id in ("", *known) if may("GET", DagAccessEntity.TASK_INSTANCE, dag_id)}
    changes = {dag_id for dag_id in sees - {""} if may("PUT", DagAccessEntity.RUN, dag_id)}
    if "" in sees and _may_change_others(user, conn_id):
        changes.add("")
    return Rights(
        sees=frozenset(sees),
        reads_log=frozenset(dag_id for dag_id in sees if may("GET", DagAccessEntity.TASK_LOGS, dag_id)),
        changes=frozenset(changes),
        cluster=manager.is_authorized_view(access_view=AccessView.CLUSTER_ACTIVITY, user=user),
    )


def _may_change_others(user: BaseUser, conn_id: str) -> bool:
    manager = get_auth_manager()
    return manager.is_authorized_custom_view(
        method="PUT", resource_name=VIEW, user=user
    ) and manager.is_authorized_connection(method="PUT", details=ConnectionDetails(conn_id=conn_id), user=user)


class RightsCache:
    """Keeps rights for seconds, so that a poll of a page with many jobs costs no query. Not for changes and logs."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, frozenset[str], str], tuple[float, Rights]] = OrderedDict()

    def rights_of(self, user: BaseUser, dag_ids: Collection[str], conn_id: str) -> Rights:
        """Return a user's rights as they were within the last seconds; call it in a thread, too."""
        key = (str(user.get_id()), frozenset(dag_ids), conn_id)
        found = self.known(*key)
        if found is None:
            found = rights_of(user, dag_ids, conn_id)
            self._kept[key] = (time.monotonic(), found)
            while len(self._kept) > MOST_CACHED:
                self._kept.popitem(last=False)
        return found

    def known(self, user_id: str, dag_ids: frozenset[str], conn_id: str) -> Rights | None:
        """Return rights that are kept, without asking anybody."""
        at, found = self._kept.get((user_id, dag_ids, conn_id), (0.0, None))
        return found if time.monotonic() - at < CACHED_S else None
