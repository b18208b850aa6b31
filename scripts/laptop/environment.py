"""Environment variables of Airflow's components and its command on one machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

USER = "admin"


def command_environment(
    *,
    home: Path,
    dags: Path,
    redis_url: str,
    work_dir: Path,
    connections: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, str]:
    """Return the variables that the `airflow` command needs. They contain a password."""
    known = {"edl_default": _connection(redis_url, work_dir), **(connections or {})}
    return {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        **{f"AIRFLOW_CONN_{conn_id.upper()}": json.dumps(connection) for conn_id, connection in known.items()},
    }


def components_environment(
    environ: Mapping[str, str],
    *,
    home: Path,
    dags: Path,
    port: int,
    redis_url: str,
    work_dir: Path,
    passwords: Path,
    options: Mapping[str, str] | None = None,
    connections: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, str]:
    """Return `environ` without variables of another Airflow, and with those of this one.

    The API server listens on loopback only. Intervals are short, so that DAG files and tasks are picked up quickly.
    Connections to the database are not limited: once the API server's threads had all of them, its event loop would
    block until one is free, which waits for the loop; so it stood still for minutes, with SQLite's lock.
    `options` override Airflow's options, as in {"CORE__PARALLELISM": "8"}; `connections` are further connections by id,
    or another `edl_default`.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(("AIRFLOW", "EDL_"))}
    url = f"http://127.0.0.1:{port}"
    settings = {
        "CORE__PARALLELISM": "4",
        "CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
        "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
        "API__HOST": "127.0.0.1",
        "API__PORT": str(port),
        "API__BASE_URL": url,
        "DATABASE__SQL_ALCHEMY_MAX_OVERFLOW": "-1",
        "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
        "SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
        "TRIGGERER__JOB_HEARTBEAT_SEC": "1",
        "WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        **(options or {}),
    }
    return {
        **kept,
        **command_environment(home=home, dags=dags, redis_url=redis_url, work_dir=work_dir, connections=connections),
        **{f"AIRFLOW__{name}": value for name, value in settings.items()},
    }


def _connection(redis_url: str, work_dir: Path) -> dict[str, Any]:
    redis = urlsplit(redis_url)
    return {
        "conn_type": "edl",
        "host": redis.hostname,
        "port": redis.port,
        "password": unquote(redis.password or ""),
        "extra": {"backend": "local", "work_dir": str(work_dir)},
    }
