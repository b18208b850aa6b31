"""Operators' arguments: specs with templates inside, as dicts or from upstream tasks; conversions and checks."""

from __future__ import annotations

import math
import re
import time
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from airflow.sdk import BaseOperator, RetryPolicy
from airflow.sdk.definitions._internal.mixins import ResolveMixin  # XComArg, and what a mapped group of tasks gets
from airflow.sdk.serde import allow_class

from edl_airflow.failures import failing_without_retry
from edl_airflow.retry_policy import EdlRetryPolicy
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds, Checkpoint, Spec, TeacherSpec, TrainerSpec, check_fields

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context

DEFAULT_RETRY_POLICY = EdlRetryPolicy()

AnySpec = TypeVar("AnySpec", bound=Spec)

for spec in (Bounds, Checkpoint, TeacherSpec, TrainerSpec):
    allow_class(spec)  # so that XCom may deserialise it


def has_template(value: object) -> bool:
    """Whether `value`, a string or a spec, has a part that is only known when the task runs."""
    if isinstance(value, msgspec.Struct):
        return has_template(msgspec.to_builtins(value))
    if isinstance(value, dict):
        return any(map(has_template, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_template, value))
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    return is_output(value)


def is_output(value: object) -> bool:
    """Whether `value` is the output of an upstream task."""
    return isinstance(value, ResolveMixin)


def as_spec(field: str, kind: type[AnySpec], value: object) -> AnySpec:
    """Return a spec as it is, or make it from a dict of fields, which may be text. Raises SpecError naming `field`."""
    return value if isinstance(value, kind) else kind.read(field, value, strict=False)


def check_spec(field: str, kind: type[Spec], value: object) -> None:
    """Raise SpecError if `value`, as far as it is known before the task runs, is no valid `kind`."""
    if isinstance(value, dict) and has_template(value):
        check_fields(field, kind, value)
        kind.check_each(value, strict=False, is_open=has_template)
    elif not is_output(value):
        as_spec(field, kind, value)


def as_bounds(field: str, value: object) -> Bounds:
    """Return bounds from "1:3", "2", 2, a Bounds or a dict of its fields. Raises SpecError naming `field`."""
    if isinstance(value, str | int):
        return Bounds.parse(str(value), field)
    if not isinstance(value, Bounds | dict):
        raise SpecError(field, value, "Bounds, a dict of their fields, 'min:max' or a number")
    try:
        return as_spec(field, Bounds, value)
    except SpecError as error:
        raise error.of("bounds", field) from None


def check_bounds(field: str, value: object) -> None:
    """Raise SpecError if `value`, as far as it is known before the task runs, is no valid bounds."""
    if not isinstance(value, dict):
        if not has_template(value):
            as_bounds(field, value)
        return
    try:
        check_spec(field, Bounds, value)
    except SpecError as error:
        raise error.of("bounds", field) from None


def check_checkpoint(value: object) -> None:
    """Raise SpecError if `value`, as far as it is known before the task runs, is no valid checkpoint."""
    if isinstance(value, dict):
        check_spec("checkpoint", Checkpoint, value)
    elif not has_template(value):
        as_checkpoint(value)


def check_connection(conn_id: Any) -> str:
    """Return `conn_id` if it is valid or not known yet. Raises SpecError."""
    if not is_output(conn_id) and (not isinstance(conn_id, str) or not conn_id):
        raise SpecError("edl_conn_id", conn_id, "the id of an Airflow connection, as 'edl_default'")
    return conn_id  # type: ignore[no-any-return]


def check_deferrable(deferrable: object) -> bool:
    """Return `deferrable` if it is True or False. Raises SpecError."""
    if not isinstance(deferrable, bool):
        raise SpecError("deferrable", deferrable, "True or False")
    return deferrable


def as_count(field: str, value: object) -> int:
    """Return `value`, a number or its text, as a whole number, 1 or more. Raises SpecError naming `field`."""
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise SpecError(field, value, "a whole number, 1 or more")
    return count


def as_flag(field: str, value: object) -> bool:
    """Return `value`, a bool or its text, as a bool. Raises SpecError naming `field`."""
    flags = {"true": True, "false": False}
    if str(value).lower() not in flags:
        raise SpecError(field, value, "true or false")
    return flags[str(value).lower()]


def as_number(field: str, value: object, allowed: str) -> float:
    """Return `value`, a number or its text, as a number. Raises SpecError naming `field` and `allowed`."""
    try:
        return float(str(value))
    except ValueError:
        raise SpecError(field, value, allowed) from None


def path_text(value: object) -> Any:
    """Return a path as text, so that templates in it are rendered, and anything else as it is."""
    return str(value) if isinstance(value, PurePath) else value


def as_checkpoint(checkpoint: object) -> Checkpoint | None:
    """Return a Checkpoint from one, from a dict of its fields, or from a path or URL. Raises SpecError."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, str | PurePath):
        return Checkpoint(url=str(checkpoint))
    return as_spec("checkpoint", Checkpoint, checkpoint)


def check_stream(stream: object) -> str:
    """Return `stream` if it is a valid name. Raises SpecError."""
    if not isinstance(stream, str) or not re.fullmatch(r"[^{}\s]+", stream):
        raise SpecError("stream", stream, "'DAG/TASK' of the task that trains, or the name of a job")
    return stream


def check_seconds(field: str, value: object) -> None:
    """Raise SpecError unless `value` is a number of seconds above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise SpecError(field, value, "a number of seconds above 0")


def dag_folder(task: BaseOperator) -> Path:
    """Return the folder of the DAG's file, for relative paths; the working folder without a DAG."""
    return Path(task.dag.fileloc).absolute().parent if task.has_dag() else Path.cwd()  # type: ignore[no-untyped-call]


class TemplatedOperator(BaseOperator):
    """Renders templates inside spec structs, too; has `EdlRetryPolicy` by default.

    Templates become text whatever the DAG's `render_template_as_native_obj` is, because "24" in a command is a word and
    not a number.
    """

    def __init__(self, *, retry_policy: RetryPolicy | None = DEFAULT_RETRY_POLICY, **kwargs: Any) -> None:
        if retry_policy is not None and not isinstance(retry_policy, RetryPolicy):
            raise SpecError("retry_policy", retry_policy, "a RetryPolicy, as EdlRetryPolicy(), or None")
        super().__init__(retry_policy=retry_policy, **kwargs)
        self.render_template_as_native_obj = False

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        """Render `content` as Airflow does, specs included. Raises SpecError for an invalid spec."""
        if not isinstance(content, Spec) or id(content) in (
            seen_oids or ()
        ):  # outputs of upstream tasks stay as they are
            return super().render_template(content, context, jinja_env, seen_oids)
        rendered = super().render_template(msgspec.to_builtins(content), context, jinja_env, seen_oids)
        with failing_without_retry():
            return type(content).read(type(content).__name__, rendered, strict=False)


def task_deadline(operator: BaseOperator) -> float | None:
    """Return the end of `execution_timeout` for a task that starts now; Airflow does not apply it while deferred."""
    limit = operator.execution_timeout
    return time.time() + limit.total_seconds() if limit else None


def run_start(context: Context) -> datetime:
    """Return when the DAG run has started: the same for every try, until a user clears an ended run."""
    run: Any = context.get("dag_run")
    return (run.start_date if run else None) or datetime.now(UTC)
