"""Metadata of this provider for Airflow."""

from __future__ import annotations

from typing import Any

_NAME = "Elastic Deep Learning"


def get_provider_info() -> dict[str, Any]:
    """Return the provider's metadata, as Airflow's provider_info.schema.json defines them."""
    return {
        "package-name": "edl-airflow",
        "name": _NAME,
        "description": "Elastic training, and service distillation with elastic teacher pools.",
        "integrations": [{"integration-name": _NAME, "tags": ["software"]}],
        "operators": _modules(
            "operators", "autoscale", "distill", "register_servers", "resize", "teacher_pool", "train"
        ),
        "sensors": _modules("sensors", "checkpoint", "job", "teacher_pool", "traffic"),
        "hooks": _modules("hooks", "edl"),
        "triggers": _modules("triggers", "checkpoint", "jobs", "task"),
        "connection-types": [
            {
                "connection-type": "edl",
                "hook-class-name": "edl_airflow.hooks.edl.EdlHook",
                "hook-name": _NAME,
                "conn-fields": {
                    "backend": {
                        "label": "Backend",
                        "description": "Where teachers and students run.",
                        "schema": {"type": "string", "enum": ["local", "kubernetes"], "default": "local"},
                    },
                    "tls": {"label": "Redis over TLS", "schema": {"type": ["boolean", "null"], "default": False}},
                    "namespace": _field(
                        "Namespace", "Prefix of all keys, so that several teams share one Redis.", default="default"
                    ),
                    "work_dir": _field(
                        "Working folder", "Where the local backend keeps jobs and logs; ~/.edl when empty."
                    ),
                    "kubernetes_conn_id": _field(
                        "Kubernetes connection",
                        "Id of the connection of type kubernetes; empty for the service account of Airflow's pod.",
                    ),
                    "kubernetes_namespace": _field("Kubernetes namespace", "Where pods run.", default="default"),
                    "redis_for_pods": _field(
                        "Redis for pods", "host:port at which pods reach Redis, if it is another than Airflow's."
                    ),
                    "pod": {
                        "label": "Pod",
                        "description": 'Defaults for the pods of specs, as JSON: {"image": "…", "resources": {…}}.',
                        "schema": {"type": ["object", "string", "null"]},
                    },
                    "pass_on": _field(
                        "Variables to pass on",
                        "Names of environment variables of Airflow's workers and triggerers that teachers and trainers "
                        "get, too, as in AWS_*; the values are never written to disk.",
                    ),
                },
                "ui-field-behaviour": {
                    "hidden-fields": ["schema", "extra"],
                    "relabeling": {
                        "host": "Redis host",
                        "port": "Redis port",
                        "login": "Redis user",
                        "password": "Redis password",
                    },
                    "placeholders": {"host": "127.0.0.1", "port": "6379"},
                },
            }
        ],
        "extra-links": [
            "edl_airflow.links.RescalingLink",
            "edl_airflow.links.ResizedLink",
            "edl_airflow.links.StudentsLink",
            "edl_airflow.links.TeacherPoolLink",
            "edl_airflow.links.TrainersLink",
        ],
    }


def _modules(package: str, *names: str) -> list[dict[str, Any]]:
    return [{"integration-name": _NAME, "python-modules": [f"edl_airflow.{package}.{name}" for name in names]}]


def _field(label: str, description: str, **schema: Any) -> dict[str, Any]:
    """Return a text field of the connection's form, which may be empty."""
    return {"label": label, "description": description, "schema": {"type": ["string", "null"], **schema}}
