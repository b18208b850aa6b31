"""What Airflow learns about the provider, and what learning it costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import resources
from importlib.metadata import entry_points
from pkgutil import resolve_name

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from support.paths import ROOT

import edl_runtime
from edl_airflow import links
from edl_airflow.hooks.edl import EXTRA_FIELDS
from edl_airflow.provider_info import get_provider_info

PACKAGE = ROOT / "edl_airflow"


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
    assert set(connection["conn-fields"]) == EXTRA_FIELDS


def test_the_registrys_file_fits_its_schema() -> None:
    """It says what the registry shows: this version, and the plugin that the entry point registers."""
    info = yaml.safe_load((PACKAGE / "provider.yaml").read_text())
    schema = json.loads((resources.files("airflow") / "provider.yaml.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(info)
    assert info["versions"][0] == edl_runtime.__version__
    (plugin,) = info["plugins"]
    (point,) = {point for point in entry_points(group="airflow.plugins") if "edl_airflow" in point.value}
    assert (plugin["name"], resolve_name(plugin["plugin-class"])) == (point.name, point.load())


@pytest.mark.parametrize("kind", ["operators", "sensors", "hooks", "triggers"])
def test_it_names_each_module_of_a_kind(kind: str) -> None:
    """Those that define one for users; base classes are not."""
    defines = re.compile(rf"^class Edl\w+{kind.removesuffix('s').title()}\(|^class EdlHook\(", re.MULTILINE)
    there = {file.stem for file in (PACKAGE / kind).glob("*.py") if defines.search(file.read_text())} - {"base"}
    (named,) = get_provider_info()[kind]
    assert named["python-modules"] == [f"edl_airflow.{kind}.{name}" for name in sorted(there)]


def test_everything_it_names_is_there() -> None:
    """The hook and all links."""
    info = get_provider_info()
    (connection,) = info["connection-types"]
    hook = resolve_name(connection["hook-class-name"])
    assert (hook.conn_type, hook.hook_name) == (connection["connection-type"], connection["hook-name"])
    assert [resolve_name(link).__name__ for link in info["extra-links"]] == sorted(
        name for name in vars(links) if name.endswith("Link") and name != "BaseOperatorLink"
    )
    assert all(resolve_name(link)().name for link in info["extra-links"])


def test_the_provider_is_an_entry_point() -> None:
    """By which Airflow finds it."""
    found = [point for point in entry_points(group="apache_airflow_provider") if "edl_airflow" in point.value]
    assert {point.load() for point in found} == {get_provider_info}


@pytest.mark.slow
def test_importing_an_operator_is_cheap() -> None:
    """It loads no heavy library that Airflow's own SDK has not loaded."""
    code = """
import sys
import airflow.sdk
airflow.sdk.BaseOperator, airflow.sdk.BaseHook, airflow.sdk.conf, airflow.sdk.BaseOperatorLink
before = set(sys.modules)
import edl_airflow.operators.distill
heavy = {"paddle", "kubernetes", "redis", "numpy", "fastapi", "kubernetes_asyncio"} & (set(sys.modules) - before)
print(sorted(heavy))
"""
    assert _python(code) == "[]"


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
