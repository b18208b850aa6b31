"""The Airflow plugin: pages about jobs, pools and rescaling, behind Airflow's login, and a timetable."""

from __future__ import annotations

from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin

from edl_airflow.links import URL_PREFIX
from edl_airflow.timetables.traffic_window import TrafficWindowTimetable


class _LazyApp:
    """An ASGI app that is built on its first call, because workers load plugins, too, and do not need FastAPI."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            from edl_airflow.plugin.app import make_app

            self._app = make_app()
        await self._app(scope, receive, send)


class EdlPlugin(AirflowPlugin):
    """Registered by the entry point `airflow.plugins`, or by `plugins/edl_plugin.py` where that is missing."""

    name = "edl"
    fastapi_apps = [{"name": "edl", "app": _LazyApp(), "url_prefix": URL_PREFIX}]  # noqa: RUF012 (Airflow's way)
    timetables = [TrafficWindowTimetable]  # noqa: RUF012 (Airflow's way)
