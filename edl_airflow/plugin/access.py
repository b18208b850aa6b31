"""The user of a request and their permissions. The one module with imports that Airflow does not declare public."""

from __future__ import annotations

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import bearer_scheme, get_user
from airflow.models.dag import DagModel
from fastapi import HTTPException, Request


async def user_of(request: Request) -> BaseUser | None:
    """Return the user of the token or cookie, None if nobody is logged in."""
    try:
        return await get_user(request, None, await bearer_scheme(request))
    except HTTPException:
        return None


def may_read_logs(user: BaseUser, dag_id: str) -> bool:
    """Return whether `user` may read the logs of this DAG's tasks; with an empty `dag_id`, of all DAGs.

    Reads Airflow's database, so call it in a thread.
    """
    manager = get_auth_manager()
    details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id)) if dag_id else None
    return all(
        manager.is_authorized_dag(method="GET", access_entity=entity, details=details, user=user)
        for entity in (None, DagAccessEntity.TASK_LOGS)
    )


def may_see_cluster(user: BaseUser) -> bool:
    """Return whether `user` may see Airflow's page "Cluster activity"."""
    return get_auth_manager().is_authorized_view(access_view=AccessView.CLUSTER_ACTIVITY, user=user)
