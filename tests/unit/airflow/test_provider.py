"""What Airflow learns about the provider, and what learning it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from importlib.metadata import entry_points
from pkgutil import resolve_name

import jsonschema  # type: ignore[import-untyped]
import pytest
from support.depth import DEEP, examples
from support.paths import ROOT

from edl_airflow.provider_info import get_provider_info


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def test_the_provider_info_fits_airflows_schemas() -> None:
    """Its own fields, and how the connection's form looks."""
    folder = resources.files("airflow")
    jsonschema.validate(get_provider_info(), json.loads((folder / "provider_info.schema.json").read_text()))
    (connection,) = get_provider_info()["connection-types"]
    behaviour = {name.replace("-", "_"): value for name, value in connection["ui-field-behaviour"].items()}
    form = json.loads((folder / "customized_form_field_behaviours.schema.json").read_text())
    jsonschema.validate(behaviour, form)
    for field in connection["conn-fields"].values():
        jsonschema.Draft7Validator.check_schema(field["schema"])


def test_everything_it_names_is_there() -> None:
    """Modules, the hook and the links."""
    info = get_provider_info()
    for kind in ("operators", "sensors", "hooks", "triggers"):
        for module in info[kind][0]["python-modules"]:
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
    (connection,) = info["connection-types"]
    hook = resolve_name(connection["hook-class-name"])
    assert (hook.conn_type, hook.hook_name) == (connection["connection-type"], connection["hook-name"])
    for link in info["extra-links"]:
        assert resolve_name(link)().name


def test_the_provider_is_an_entry_point() -> None:
    """By which Airflow finds it."""
    found = [point for point in entry_points(group="apache_airflow_provider") if "edl_airflow" in point.value]
    assert {point.load() for point in found} == {get_provider_info}


@pytest.mark.slow
def test_importing_an_operator_is_cheap() -> None:
    """It loads no heavy library, and takes 0.1 s of the processor's time at most beyond Airflow's own SDK, at best."""
    code = """
import sys, time
import airflow.sdk
airflow.sdk.BaseOperator, airflow.sdk.BaseHook, airflow.sdk.conf, airflow.sdk.BaseOperatorLink
started = time.process_time()
import edl_airflow.operators.distill
took_s = time.process_time() - started
heavy = {"paddle", "kubernetes", "redis", "numpy", "fastapi", "kubernetes_asyncio"} & (set(sys.modules) - before)
print(took_s, sorted(heavy))
""".replace("started = time", "before = set(sys.modules)\nstarted = time", 1)
    measured = [_python(code).split(" ", 1) for _ in range(examples(1, 5))]
    assert {heavy for _, heavy in measured} == {"[]"}
    assert not DEEP or min(float(took_s) for took_s, _ in measured) <= 0.1


@pytest.mark.slow
def test_the_plugins_folder_adds_nothing_where_the_entry_point_does() -> None:
    """Airflow stops loading plugins at the second of the same name."""
    code = f"""
import importlib.metadata, runpy
from airflow.sdk.plugins_manager import AirflowPlugin
def plugins():
    found = runpy.run_path({str(ROOT / "plugins" / "edl_plugin.py")!r})
    return [name for name, value in found.items() if isinstance(value, type) and issubclass(value, AirflowPlugin)]
with_it = plugins()
importlib.metadata.entry_points = lambda **_: []
print(with_it, plugins())
"""
    assert _python(code) == "[] ['EdlPlugin']"
