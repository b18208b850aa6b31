"""What Airflow learns about this provider."""

from __future__ import annotations

from typing import Any

_NAME = "Elastic Deep Learning"


def get_provider_info() -> dict[str, Any]:
    """Return what the entry point `apache_airflow_provider` promises: see Airflow's provider_info.schema.json."""
    return {
        "package-name": "edl-airflow",
        "name": _NAME,
        "description": "Elastic training, and service distillation with elastic teacher pools.",
        "integrations": [{"integration-name": _NAME, "tags": ["software"]}],
        "operators": [
            {
                "integration-name": _NAME,
                "python-modules": [
                    "edl_airflow.operators.autoscale",
                    "edl_airflow.operators.distill",
                    "edl_airflow.operators.resize",
                    "edl_airflow.operators.teacher_pool",
                    "edl_airflow.operators.train",
                ],
            }
        ],
        "sensors": [
            {
                "integration-name": _NAME,
                "python-modules": [
                    "edl_airflow.sensors.checkpoint",
                    "edl_airflow.sensors.job",
                    "edl_airflow.sensors.teacher_pool",
                    "edl_airflow.sensors.traffic",
                ],
            }
        ],
        "hooks": [{"integration-name": _NAME, "python-modules": ["edl_airflow.hooks.edl"]}],
        "triggers": [
            {
                "integration-name": _NAME,
                "python-modules": [
                    "edl_airflow.triggers.checkpoint",
                    "edl_airflow.triggers.task",
                    "edl_airflow.triggers.jobs",
                    "edl_airflow.triggers.conditions",
                    "edl_airflow.triggers.conditions",
                ],
            }
        ],
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
                    "tls": {
                        "label": "Redis over TLS",
                        "schema": {"type": ["boolean", "null"], "default": False},
                    },
                    "namespace": {
                        "label": "Namespace",
                        "description": "Prefix of all keys, so that several teams share one Redis.",
                        "schema": {"type": ["string", "null"], "default": "default"},
                    },
                    "work_dir": {
                        "label": "Working folder",
                        "description": "Where the local backend keeps jobs and logs; ~/.edl when empty.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "kubernetes_conn_id": {
                        "label": "Kubernetes connection",
                        "description": "Id of the connection of type kubernetes; empty for the rights of the pod that "
                        "Airflow runs in.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "kubernetes_namespace": {
                        "label": "Kubernetes namespace",
                        "description": "Where pods run.",
                        "schema": {"type": ["string", "null"], "default": "default"},
                    },
                    "redis_for_pods": {
                        "label": "Redis for pods",
                        "description": "host:port at which pods reach Redis, if it is another than Airflow's.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "pod": {
                        "label": "Pod",
                        "description": 'What specs of pods leave open, as JSON: {"image": "…", "resources": {…}}.',
                        "schema": {"type": ["object", "string", "null"]},
                    },
                    "pass_on": {
                        "label": "Variables to pass on",
                        "description": "Names of the workers' and triggerers' environment variables that teachers and "
                        "trainers see too, as in AWS_*; the values are never written down.",
                        "schema": {"type": ["string", "null"]},
                    },
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
            "edl_airflow.links.StudentLogLink",
            "edl_airflow.links.StudentsLink",
            "edl_airflow.links.TeacherPoolLink",
            "edl_airflow.links.TrainerLogLink",
            "edl_airflow.links.TrainersLink",
        ],
    }
