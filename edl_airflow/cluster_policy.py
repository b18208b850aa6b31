"""Reports mistakes in mapped tasks when the DAG file is parsed; Airflow makes their operators only at run time.

Registered by the entry point `airflow.policy`. Every process of Airflow imports this module, so it imports other
modules of ours only once it meets one of our tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from airflow.exceptions import AirflowClusterPolicyViolation
from airflow.policies import hookimpl


@hookimpl
def task_policy(task: Any) -> None:
    """Make the operators of a mapped task of ours, as far as their arguments are known, and drop them.

    Raises AirflowClusterPolicyViolation, which becomes the DAG's import error. Skips subclasses of ours: their
    constructors may do what must not happen at parse time.
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
    """Yield arguments of mapped operators: each value given to `.expand` or `.expand_kwargs` at least once.

    The output of an upstream task stays as it is in template fields; arguments with one in another field are left out.
    """
    from edl_airflow.operators.templates import is_output

    for mapped in _together(given) if isinstance(given, dict) else _values(given):
        if not is_output(mapped) and not any(is_output(mapped[name]) for name in mapped.keys() - set(template_fields)):
            yield mapped


def _together(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield each value of each field at least once, with some value of the others; nothing if a field is empty."""
    columns = {name: list(_values(of)) for name, of in given.items()}
    if all(columns.values()):
        for at in range(max(map(len, columns.values()))):
            yield {name: column[min(at, len(column) - 1)] for name, column in columns.items()}


def _values(given: Any) -> Iterable[Any]:
    """Return the values that Airflow maps over; the output of an upstream task counts as one value."""
    if isinstance(given, Mapping):
        return given.items()
    return given if isinstance(given, Sequence) else [given]
