"""Finds the mistakes of mapped tasks when a DAG file is read; Airflow makes operators of them only when they run.

Registered by the entry point `airflow.policy`. Every process of Airflow imports this, so nothing else of ours is
imported before there is a task of ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from airflow.exceptions import AirflowClusterPolicyViolation
from airflow.policies import hookimpl


@hookimpl
def task_policy(task: Any) -> None:
    """Make the operators of a mapped task of ours, as far as their arguments are known, and forget them.

    Raises AirflowClusterPolicyViolation, which is the DAG's import error, for what no operator can be made of. Leaves
    classes that extend ours to the task: theirs is the right to do at their making what is not for a DAG file.
    """
    mapping = getattr(task, "expand_input", None)
    if mapping is None or not task.operator_class.__module__.startswith("edl_airflow."):
        return
    for mapped in known_arguments(mapping.value, task.template_fields):
        try:
            task.unmap(mapped)
        except Exception as error:
            raise AirflowClusterPolicyViolation(f"task {task.task_id!r}: {error}") from error


def known_arguments(given: Any, template_fields: Collection[str]) -> Iterator[Mapping[str, Any]]:
    """Yield what is mapped to some operators: each value that `.expand` or `.expand_kwargs` was given, at least once.

    What an upstream task returns stands for itself where the field is a template, as it does where nothing is mapped.
    Operators that need to know it before they run are left out.
    """
    from edl_airflow.operators.templates import is_output

    for mapped in _together(given) if isinstance(given, dict) else _values(given):
        if not is_output(mapped) and not any(is_output(mapped[name]) for name in mapped.keys() - set(template_fields)):
            yield mapped


def _together(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield each value of each field, beside some of the other fields': none where a field has none."""
    columns = {name: list(_values(of)) for name, of in given.items()}
    if all(columns.values()):
        for at in range(max(map(len, columns.values()))):
            yield {name: column[min(at, len(column) - 1)] for name, column in columns.items()}


def _values(given: Any) -> Iterable[Any]:
    """Return what Airflow maps over, as it does; what an upstream task returns is one value here."""
    if isinstance(given, Mapping):
        return given.items()
    return given if isinstance(given, Sequence) else [given]
