"""Traffic windows in DAGs: reads them, finds a task's window, and sizes a job or pool by it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
from airflow.sdk import Variable
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType

from edl_airflow.operators.templates import has_template
from edl_airflow.results import WindowResult
from edl_runtime.autoscale.traffic.schema import read_windows, to_windows
from edl_runtime.autoscale.traffic.sources.spec import Traffic
from edl_runtime.autoscale.traffic.windows import (
    DAYS,
    WEEK,
    Size,
    Sizes,
    TrafficWindows,
    Window,
    WindowSpan,
    format_clock,
)
from edl_runtime.backends.interface import JobStatus, Scaling
from edl_runtime.errors import SpecError
from edl_runtime.pods import format_amount

if TYPE_CHECKING:
    from airflow.sdk import Context

_ALL = Size(1.0, share=True)


class WindowTarget(NamedTuple):
    """How many instances a job or pool should have, 0 to suspend it, and why."""

    instances: int
    reason: str


def own_size(sizes: Sizes, status: JobStatus) -> Size | None:
    """Return the window's own size for the job or pool, None for none."""
    return (sizes.pools if status.kind == "pool" else sizes.jobs).get(status.name)


def target_in_window(
    window: str, sizes: Sizes, status: JobStatus, scaling: Scaling, room: Mapping[str, float]
) -> WindowTarget:
    """Return the size of a job or pool in a window that leaves this `room` to training.

    The window's own size for it, else as much as there is room for, up to its maximum. Below its minimum it is
    suspended if it can resume, and else keeps its minimum.
    """
    kind: Literal["jobs", "pools"] = "pools" if status.kind == "pool" else "jobs"
    size = own_size(sizes, status)
    asked = Sizes(**{kind: {status.name: size or _ALL}})
    most = asked.most(kind, status.name, scaling.resources, room)
    low, high = scaling.bounds.min, scaling.bounds.max
    why = f"window {window!r} has {_describe(size)}"
    if most is None or most >= high:
        return WindowTarget(high, why if most == high else f"{why}, and its maximum is {high}")
    if size is None or size.share:
        why = f"{why}, which is {most}"
    if most >= low:
        return WindowTarget(most, why)
    if scaling.resumes or status.is_suspended:
        return WindowTarget(0, f"{why}, and its minimum is {low}: it waits until there is more")
    return WindowTarget(low, f"{why}, and its minimum is {low}, which it keeps: it could not resume")


def _describe(size: Size | None) -> str:
    if size is None:
        return "no size for it but what training may use"
    return f"{size} of what training may use for it" if size.share else f"{size} for it"


Windows: TypeAlias = TrafficWindows | Mapping[str, Any] | Path | str
"""Traffic windows, or their source: a mapping, the Path of a file, "variable:NAME" for an Airflow Variable, or a text;
all but the mapping in YAML or JSON. See `edl_runtime.autoscale.traffic.schema`."""

ALLOWED = "traffic windows as a mapping, a Path of a YAML file, 'variable:NAME', or a text of YAML or JSON"
VARIABLE = "variable:"


def load_windows(given: object, *, folder: Path | None = None) -> TrafficWindows:
    """Read traffic windows, see `Windows`. A relative path starts from `folder`, by default that of the calling file.

    Raises SpecError with the line of the mistake, and the name of the file or Variable.
    """
    if isinstance(given, TrafficWindows):
        return given
    if isinstance(given, Mapping):
        return _with_source("windows", lambda: to_windows(given))
    if isinstance(given, Path):
        file = (folder or caller_folder()) / given
        return _with_source(f"windows, {file}", lambda: read_windows(_content(file)))
    if isinstance(given, str) and given.startswith(VARIABLE):
        name = given.removeprefix(VARIABLE).strip()
        return _with_source(f"windows, Variable {name!r}", lambda: read_windows(_variable(name)))
    if isinstance(given, str) and ("\n" in given or given.lstrip().startswith("{")):
        return _with_source("windows", lambda: read_windows(given))
    is_path = isinstance(given, str) and given.endswith((".yaml", ".yml", ".json"))
    raise SpecError(
        "windows", given, f"Path({given!r}) where that file is meant; else {ALLOWED}" if is_path else ALLOWED
    )


def windows_field(given: object, folder: Path) -> Any:
    """Return an operator's argument `windows` as a templated field: plain data, which is read and checked now.

    A Variable or a template stays as it is, for the run.
    """
    if isinstance(given, TrafficWindows | Path) or is_known_at_parse(given):
        return windows_to_data(load_windows(given, folder=folder))
    return given


def is_known_at_parse(field: object) -> bool:
    """Whether an operator's windows are known when its DAG's file is read."""
    return not has_template(field) and not (isinstance(field, str) and field.startswith(VARIABLE))


def caller_folder() -> Path:
    """Return the folder of the code that called this function's caller."""
    return Path(sys._getframe(2).f_code.co_filename).absolute().parent  # noqa: SLF001 (as Airflow finds a DAG's)


def window_for_run(
    windows: TrafficWindows, context: Context | Mapping[str, Any], now: datetime | None = None
) -> WindowSpan:
    """Return a task's window: that of its run, by a `TrafficWindowTimetable`, else the one at `now` (the current time).

    The run's window does not count if it has ended or was changed. So a task on a machine whose clock is slow gets the
    window that has begun, and a late task does not get an old window.
    """
    now = now or datetime.now(UTC)
    start, end = context.get("data_interval_start"), context.get("data_interval_end")
    if start and end and now < end:
        span = windows.at(start)
        if (span.start, span.end) == (start, end):
            return span
    return windows.at(now)


def sizes_by_name(windows: TrafficWindows) -> dict[str, Sizes]:
    """Return the sizes of each window by name, and of "default" if there is one."""
    default = {} if windows.default is None else {"default": windows.default}
    return {**{window.name: window.sizes for window in windows.windows}, **default}


def check_window(windows: TrafficWindows, name: object, field: str = "window") -> Sizes:
    """Return the sizes of a window by its name. Raises SpecError that names the known ones."""
    known = sizes_by_name(windows)
    if not isinstance(name, str) or name not in known:
        raise SpecError(field, name, f"one of {', '.join(map(repr, known))}")
    return known[name]


def to_window_result(span: WindowSpan) -> WindowResult:
    """Return a window in the form of tasks' results."""
    start, end = (moment.isoformat() if moment else None for moment in (span.start, span.end))
    return WindowResult(window=span.name, start=start, end=end, sizes=_sizes_data(span.sizes))


def windows_to_data(windows: TrafficWindows) -> dict[str, Any]:
    """Return windows as plain data of the schema, in a stable order."""
    data: dict[str, Any] = {"time_zone": windows.time_zone}
    if windows.holidays:
        data["holidays"] = [day.isoformat() for day in sorted(windows.holidays)]
    data["windows"] = [_window_data(window) for window in windows.windows]
    if windows.default is not None:
        data["default"] = _sizes_data(windows.default)
    if windows.traffic is not None:
        data["traffic"] = _traffic_data(windows.traffic)
    return data


def capacity_in_window(sizes: Sizes, total: Mapping[str, float], quota: Mapping[str, float]) -> dict[str, float]:
    """Return what training may use in a window: its share of all nodes, within the quota."""
    return {name: min(amount, quota.get(name, amount)) for name, amount in sizes.capacity(total).items()}


def describe_sizes(sizes: Sizes) -> str:
    """Return sizes in words, as in "at most 4 gpu, nightly at most 2"; "all" without limits."""
    named = [
        f"{format_amount(size.amount, resource)} {resource}" if not size.share else f"{size} of {resource}"
        for resource, size in sorted(sizes.cluster.items())
        if resource != "*"
    ]
    if rest := sizes.cluster.get("*"):
        named.append(f"{rest} of the rest" if named else f"{rest} of all")
    members = [f"{name} at most {size}" for each in (sizes.jobs, sizes.pools) for name, size in sorted(each.items())]
    return ", ".join([f"at most {' and '.join(named)}"] * bool(named) + members) or "all"


def describe_days(days: Iterable[str]) -> str:
    """Return days in words, as in "mon to fri, holiday"; empty for all."""
    given = {*days}
    if given == {*DAYS}:
        return ""
    runs: list[list[str]] = []
    for number, day in enumerate(WEEK):
        if day in given and runs and WEEK[number - 1] in runs[-1]:
            runs[-1].append(day)
        elif day in given:
            runs.append([day])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    return ", ".join([*parts, *(["holiday"] if "holiday" in given else [])])


def _traffic_data(traffic: Traffic) -> dict[str, Any]:
    source = msgspec.to_builtins(traffic.source)
    kind = source.pop("type")
    careful = msgspec.to_builtins(traffic.forecast_options)
    return {"resource": traffic.resource, kind: source, "times": traffic.times, **careful}


def _window_data(window: Window) -> dict[str, Any]:
    data: dict[str, Any] = {"name": window.name, "start": format_clock(window.start), "end": format_clock(window.end)}
    if window.days != {*DAYS}:
        data["days"] = [day for day in DAYS if day in window.days]
    return {**data, "sizes": _sizes_data(window.sizes)}


def _sizes_data(sizes: Sizes) -> dict[str, Any]:
    data = {
        kind: {name: _size_data(size) for name, size in sorted(getattr(sizes, kind).items())}
        for kind in ("cluster", "jobs", "pools")
    }
    return {kind: sizes for kind, sizes in data.items() if sizes}


def _size_data(size: Size) -> int | float | str:
    """Return a size in the schema, which has no exponents."""
    if size.share:
        return f"{format(Decimal(f'{size.amount * 100:.12g}').normalize(), 'f')}%"
    if size.amount == int(size.amount):
        return int(size.amount)
    return size.amount if "e" not in repr(size.amount) else format(Decimal(repr(size.amount)), "f")


def _with_source(field: str, read: Callable[[], TrafficWindows]) -> TrafficWindows:
    """Read windows; add the source to an error's field."""
    try:
        return read()
    except SpecError as error:
        where = error.field if error.field.startswith(field) else f"{field}, {error.field}"
        raise SpecError(where, error.given, error.allowed) from None


def _content(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("file", str(error), "a readable file of YAML") from None


def _variable(name: str) -> str:
    """Return a Variable's content. Raises SpecError if it does not exist."""
    try:
        return str(Variable.get(name))
    except AirflowRuntimeError as error:
        if error.error.error != ErrorType.VARIABLE_NOT_FOUND:
            raise
        raise SpecError("name", name, "an existing Airflow Variable") from None
