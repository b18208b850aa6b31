"""Operators' arguments: specs with templates inside, as dicts or from upstream tasks; conversions and checks."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

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


Reader: TypeAlias = Callable[[str, Any], Any]
"""Returns what an argument means, given its name and value. Raises SpecError that names it."""


class Maybe(NamedTuple):
    """An argument that may be None."""

    kind: type[Spec] | Reader


Arguments: TypeAlias = Mapping[str, "type[Spec] | Reader | Maybe"]
"""What each argument of an operator is: a spec, or what a function makes of it."""


def as_spec(field: str, kind: type[AnySpec], value: Any) -> AnySpec:
    """Return a spec as it is, or make it from a dict of fields, which may be text. Raises SpecError naming `field`.

    Bounds may be "1:3", "2" or 2, and a Checkpoint a path or URL.
    """
    if kind is Checkpoint and isinstance(value, str | PurePath):
        value = Checkpoint(url=str(value))
    elif kind is Bounds and isinstance(value, str | int):
        value = Bounds.parse(str(value), field)
    elif kind is Bounds and not isinstance(value, Bounds | dict):
        raise SpecError(field, value, "Bounds, a dict of their fields, 'min:max' or a number")
    try:
        return value if isinstance(value, kind) else kind.read(field, value, strict=False)
    except SpecError as error:
        raise error.of("bounds", field) from None


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


def check_stream(field: str, stream: object) -> str:
    """Return `stream` if it is a valid name. Raises SpecError."""
    if not isinstance(stream, str) or not re.fullmatch(r"[^{}\s]+", stream):
        raise SpecError(field, stream, "'DAG/TASK' of the task that trains, or the name of a job")
    return stream


def as_seconds(field: str, value: object) -> float:
    """Return `value` if it is a number of seconds above 0. Raises SpecError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise SpecError(field, value, "a number of seconds above 0")
    return value


def dag_folder(task: BaseOperator) -> Path:
    """Return the folder of the DAG's file, for relative paths; the working folder without a DAG."""
    return Path(task.dag.fileloc).absolute().parent if task.has_dag() else Path.cwd()  # type: ignore[no-untyped-call]


class TemplatedOperator(BaseOperator):
    """Renders templates inside spec structs, too; has `EdlRetryPolicy` by default.

    Templates become text whatever the DAG's `render_template_as_native_obj` is, because "24" in a command is a word and
    not a number.
    """

    arguments: ClassVar[Arguments] = {}

    def __init__(self, *, retry_policy: RetryPolicy | None = DEFAULT_RETRY_POLICY, **kwargs: Any) -> None:
        if retry_policy is not None and not isinstance(retry_policy, RetryPolicy):
            raise SpecError("retry_policy", retry_policy, "a RetryPolicy, as EdlRetryPolicy(), or None")
        super().__init__(retry_policy=retry_policy, **kwargs)
        self.render_template_as_native_obj = False

    def check_arguments(self) -> None:
        """Raise SpecError for what is known to be wrong before the task runs; for the end of constructors."""
        for field, kind in self.arguments.items():
            self._read(field, getattr(self, field), kind, only_known=True)

    def argument(self, field: str) -> Any:
        """Return what a rendered argument means. Raises SpecError."""
        return self._read(field, getattr(self, field), self.arguments[field])

    def _read(self, field: str, value: Any, kind: type[Spec] | Reader | Maybe, *, only_known: bool = False) -> Any:
        if isinstance(kind, Maybe):
            return None if value is None else self._read(field, value, kind.kind, only_known=only_known)
        is_open = only_known and field in self.template_fields
        if not isinstance(kind, type):
            return None if is_open and has_template(value) else kind(field, value)
        if is_open and isinstance(value, dict) and has_template(value):
            return _check_fields(field, kind, value)
        if is_open and (is_output(value) or (kind in (Bounds, Checkpoint) and has_template(value))):
            return None
        return as_spec(field, kind, value)

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


def _check_fields(field: str, kind: type[Spec], value: dict[str, Any]) -> None:
    """Raise SpecError for fields of a spec that are wrong, as far as they are known before the task runs."""
    try:
        check_fields(field, kind, value)
        kind.check_each(value, strict=False, is_open=has_template)
    except SpecError as error:
        raise error.of("bounds", field) from None
