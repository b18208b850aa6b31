"""An operator with templates in its fields, and its connection."""

from __future__ import annotations

from typing import Any

from edl_airflow.hooks.edl import EdlConnection
from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.runtime.spec import LocalBackendRef
from edl_runtime.specs import TeacherSpec, TrainerSpec

TEACHER = TeacherSpec(model="/models/{{ params.high }}", outputs=("logits",))
CONNECTION = EdlConnection(redis_url="redis://nowhere:1/0", namespace="team", place=LocalBackendRef("/w"))
STUDENT = TrainerSpec(command=("python", "s.py", "{{ run_id }}"), env={"LOW": "{{ params.low }}"})


def distill(**changes: Any) -> EdlDistillOperator:
    """A distill task with a pool of its own, unless changed."""
    given = {"task_id": "distill", "student": STUDENT, "teacher": TEACHER, "teachers": "1:3", "deferrable": True}
    return EdlDistillOperator(**{**given, **changes})
