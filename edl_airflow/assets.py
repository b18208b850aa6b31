"""Assets with events about the jobs of a connection."""

from __future__ import annotations

from airflow.sdk import Asset, AssetWatcher

from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.triggers.jobs import EdlJobsTrigger


def jobs_asset(edl_conn_id: str = DEFAULT_CONN_ID) -> Asset:
    """Return the asset "edl_jobs:CONN_ID", which has an event when jobs or pools are submitted, end or become pending.

    A DAG that is scheduled on it runs some seconds later; see `EdlJobsTrigger`. `edl_conn_id` names the connection.
    """
    watcher = AssetWatcher(name="changes", trigger=EdlJobsTrigger(edl_conn_id=edl_conn_id))
    return Asset(f"edl_jobs:{edl_conn_id}", watchers=[watcher])
