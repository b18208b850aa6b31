"""The Airflow plugin: the page *EDL* in the navigation and as tabs, the notes of runs, and a timetable."""

from __future__ import annotations

from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin

from edl_airflow.links import URL_PREFIX, page_url
from edl_airflow.plugin import run_note
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


_RUN = "dag_id={DAG_ID}&run_id={RUN_ID}"


class EdlPlugin(AirflowPlugin):
    """Registered by the entry point `airflow.plugins`, or by `plugins/edl_plugin.py` where that is missing."""

    name = "edl"
    fastapi_apps = [{"name": "edl", "app": _LazyApp(), "url_prefix": URL_PREFIX}]  # noqa: RUF012 (Airflow's way)
    external_views = [  # noqa: RUF012 (Airflow's way)
        {
            "name": "EDL",
            "href": page_url(),
            "destination": "nav",
            "url_route": "edl",
            "nav_top_level": True,
            "icon": f"{page_url()}static/icon.svg",
            "icon_dark_mode": f"{page_url()}static/icon-dark.svg",
        },
        {"name": "EDL", "href": f"{page_url()}?{_RUN}", "destination": "dag_run", "url_route": "edl-run"},
        {
            "name": "EDL",
            "href": f"{page_url()}?{_RUN}&task_id={{TASK_ID}}&map_index={{MAP_INDEX}}",
            "destination": "task_instance",
            "url_route": "edl-task",
        },
    ]
    listeners = [run_note]  # noqa: RUF012 (Airflow's way)
    timetables = [TrafficWindowTimetable]  # noqa: RUF012 (Airflow's way)
