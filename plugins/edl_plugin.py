"""For deployments that mount a plugins folder and do not install the distribution `edl-airflow`.

Where it is installed, its entry point registers the plugin already, and a second one of that name would be an error.
"""

from importlib.metadata import entry_points

if not any(point.value == "edl_airflow.plugin:EdlPlugin" for point in entry_points(group="airflow.plugins")):
    from edl_airflow.plugin import EdlPlugin

    __all__ = ["EdlPlugin"]
