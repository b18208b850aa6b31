"""Traffic windows from YAML, JSON or Python: one schema.

time_zone: Europe/Berlin          # UTC by default
holidays: [2026-12-25]
windows:
  - name: evening
    start: 18:00
    end: 23:00
    days: [mon, tue, wed, thu, fri]   # or weekdays, weekend, holiday; all by default
    sizes:
      cluster: {gpu: 14}              # what training may use: numbers or shares, or one share of everything
      jobs: {nightly: 25%}            # the most instances, or a share of what training may use
      pools: {resnext: 2}
default:                              # the sizes of all other times
  cluster: 75%
traffic:                              # optional: while its need is known, training has the rest
  resource: gpu
  prometheus: {url: http://prometheus:9090, query: 'sum(rate(http_requests_total[5m]))', token_env: EDL_TRAFFIC_TOKEN}
  # or redis: {stream: web-load}, or csv: {path: /data/web.csv}
  times: 0.002                        # GPUs for one unit of the source, 1 by default
  headroom: 1.15                      # and the other fields of `forecast.ForecastOptions`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import date, datetime
from typing import Any

from edl_runtime.autoscale.traffic.forecast import ForecastOptions
from edl_runtime.autoscale.traffic.sources.spec import CsvFile, Prometheus, RedisStream, Traffic
from edl_runtime.autoscale.traffic.windows import DAYS, WEEK, Size, Sizes, TrafficWindows, Window
from edl_runtime.errors import SpecError
from edl_runtime.parsing import bounded_yaml_loader

_TIME = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)")
_GROUPS = {"weekdays": WEEK[:5], "weekend": WEEK[5:]}
_SOURCES: Mapping[str, type[Prometheus | RedisStream | CsvFile]] = {
    "prometheus": Prometheus,
    "redis": RedisStream,
    "csv": CsvFile,
}
_MANY = 1_000
_MOST_VALUES = 20 * _MANY  # names of fields count, too


def read_windows(text: str) -> TrafficWindows:
    """Return the windows in a text of YAML or JSON. Raises SpecError, with the line of the mistake."""
    data, lines = _parsed(text)
    try:
        return to_windows(data)
    except SpecError as error:
        raise SpecError(f"line {_line(error.field, lines)}: {error.field}", error.given, error.allowed) from None


def to_windows(data: object) -> TrafficWindows:
    """Return the windows that plain data describe, as in Python or an Airflow Variable's JSON. Raises SpecError."""
    top = _mapping("", data, {"time_zone", "holidays", "windows", "default", "traffic"})
    windows = top.get("windows", [])
    if not isinstance(windows, list | tuple) or len(windows) > _MANY:
        raise SpecError("windows", windows, f"a list of windows, {_MANY:,} at most")
    zone = top.get("time_zone", "UTC")
    if not isinstance(zone, str):
        raise SpecError("time_zone", zone, "a name of the tz database, as in Europe/Berlin")
    default = top.get("default")
    return TrafficWindows(
        windows=tuple(_window(f"windows[{number}]", window) for number, window in enumerate(windows)),
        default=None if default is None else _sizes("default", default),
        time_zone=zone,
        holidays=frozenset(_dates(top.get("holidays", []))),
        traffic=None if top.get("traffic") is None else _traffic("traffic", top["traffic"]),
    )


def _traffic(field: str, data: object) -> Traffic:
    careful = ForecastOptions.__struct_fields__
    given = _mapping(field, data, {"resource", "times", *_SOURCES, *careful})
    named = [name for name in _SOURCES if name in given]
    if len(named) != 1:
        raise SpecError(field, " and ".join(named) or "no source", f"one source: {', '.join(_SOURCES)}")
    forecast_options: dict[str, Any] = {
        name: _number(f"{field}.{name}", given[name]) for name in careful if name in given
    }
    if "slot_s" in forecast_options and forecast_options["slot_s"] == forecast_options["slot_s"] // 1:
        forecast_options["slot_s"] = int(forecast_options["slot_s"])
    try:
        return Traffic(
            resource=_text(f"{field}.resource", given.get("resource", "")),
            source=_source(f"{field}.{named[0]}", named[0], given[named[0]]),
            times=_number(f"{field}.times", given.get("times", 1.0)),
            forecast_options=ForecastOptions(**forecast_options),
        )
    except SpecError as error:
        raise _within(field, error) from None


def _source(field: str, name: str, data: object) -> Prometheus | RedisStream | CsvFile:
    kind, fields = _SOURCES[name], _SOURCES[name].__struct_fields__
    given = _mapping(field, data, {*fields})
    values: dict[str, Any] = {}
    for key, value in given.items():
        values[key] = (_number if key.endswith("_s") else _text)(f"{field}.{key}", value)
    for needed in fields[: len(fields) - len(kind.__struct_defaults__)]:
        if needed not in given:
            raise SpecError(f"{field}.{needed}", None, "given")
    try:
        return kind(**values)
    except SpecError as error:
        raise _within(field, error) from None


def _text(field: str, given: object) -> str:
    if not isinstance(given, str):
        raise SpecError(field, given, "a text")
    return given


def _number(field: str, given: object) -> float:
    if isinstance(given, int | float | str) and not isinstance(given, bool):
        with suppress(ValueError, OverflowError):
            return float(given)
    raise SpecError(field, given, "a number")


def _window(field: str, data: object) -> Window:
    given = _mapping(field, data, {"name", "start", "end", "days", "sizes"})
    for needed in ("name", "start", "end", "sizes"):
        if needed not in given:
            raise SpecError(f"{field}.{needed}", None, "given: a window has name, start, end and sizes")
    if not isinstance(given["name"], str):
        raise SpecError(f"{field}.name", given["name"], "a name")
    try:
        return Window(
            name=given["name"],
            start=_minutes(f"{field}.start", given["start"]),
            end=_minutes(f"{field}.end", given["end"]),
            days=frozenset(_days(f"{field}.days", given.get("days", DAYS))),
            sizes=_sizes(f"{field}.sizes", given["sizes"]),
        )
    except SpecError as error:
        raise _within(field, error) from None


def _sizes(field: str, data: object) -> Sizes:
    given = _mapping(field, data, {"cluster", "jobs", "pools"})
    cluster = given.get("cluster", {})
    if not isinstance(cluster, Mapping):
        size = _size(f"{field}.cluster", cluster)
        if not size.share:
            raise SpecError(f"{field}.cluster", cluster, "a share as in 40%, or numbers by resource as in {gpu: 14}")
        cluster = {"*": cluster}
    try:
        return Sizes(
            cluster=_each_size(f"{field}.cluster", cluster),
            jobs=_each_size(f"{field}.jobs", given.get("jobs", {})),
            pools=_each_size(f"{field}.pools", given.get("pools", {})),
        )
    except SpecError as error:
        raise _within(field, error) from None


def _each_size(field: str, data: object) -> dict[str, Size]:
    return {name: _size(f"{field}.{name}", size) for name, size in _mapping(field, data).items()}


def _size(field: str, given: object) -> Size:
    text = str(given).strip()
    number = text.removesuffix("%").rstrip()
    if isinstance(given, bool) or not isinstance(given, int | float | str) or not _NUMBER.fullmatch(number):
        raise SpecError(field, given, "a number, or a share as in 40%")
    try:
        return Size(float(number) / 100, share=True) if text.endswith("%") else Size(float(number))
    except SpecError as error:
        raise SpecError(field, given, error.allowed) from None


def _minutes(field: str, given: object) -> int:
    match = _TIME.fullmatch(given.strip()) if isinstance(given, str) else None
    minutes = int(match[1]) * 60 + int(match[2]) if match else None
    if minutes is None or minutes > 24 * 60:
        raise SpecError(field, given, "a time of day, 00:00 to 24:00, as text")
    return minutes


def _days(field: str, given: object) -> Iterable[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple):
        raise SpecError(field, given, f"a list of days: {', '.join((*DAYS, *_GROUPS))}")
    for name in names:
        if not isinstance(name, str) or name.lower() not in (*DAYS, *_GROUPS):
            raise SpecError(field, name, f"some of {', '.join((*DAYS, *_GROUPS))}")
        yield from _GROUPS.get(name.lower(), (name.lower(),))


def _dates(given: object) -> Iterable[date]:
    if not isinstance(given, list | tuple):
        raise SpecError("holidays", given, "a list of dates, as in [2026-12-25]")
    for number, day in enumerate(given):
        try:
            yield _date(day)
        except (TypeError, ValueError):
            raise SpecError(f"holidays[{number}]", day, "a date, as in 2026-12-25") from None


def _date(given: Any) -> date:
    if isinstance(given, datetime):  # a date, too, and yet equal to none
        return given.date()
    return given if isinstance(given, date) else date.fromisoformat(given)


def _mapping(field: str, data: object, known: set[str] | None = None) -> dict[str, Any]:
    name = field or "traffic windows"
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        fields = f" of {', '.join(sorted(known))}" if known else ""
        raise SpecError(name, data, f"a mapping{fields}")
    if known and (unknown := sorted({*data} - known)):
        raise SpecError(f"{field}.{unknown[0]}".lstrip("."), data[unknown[0]], f"one of {', '.join(sorted(known))}")
    return {**data}


def _within(field: str, error: SpecError) -> SpecError:
    """Return the error with the outer field's name before its own, unless it has that."""
    inner = error.field if error.field.startswith(field) else f"{field}.{error.field}"
    return SpecError(inner, error.given, error.allowed)


def _parsed(text: str) -> tuple[object, dict[str, int]]:
    """Return plain data, and the line of each field."""
    import yaml

    try:
        root = yaml.compose(text, Loader=bounded_yaml_loader(_MOST_VALUES))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise SpecError(f"{where}traffic windows", problem, "one document of YAML or JSON") from None
    lines: dict[str, int] = {"": 1}
    return (None if root is None else _plain(yaml, root, "", lines)), lines


def _plain(yaml: Any, node: Any, field: str, lines: dict[str, int]) -> Any:
    lines.setdefault(field, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(yaml, each, f"{field}[{number}]", lines) for number, each in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                allowed = "a text before each colon; templates, as in {{ name }}, are not filled in"
                raise SpecError(f"line {key.start_mark.line + 1}: {field}", "a key that is no text", allowed)
            name = f"{field}.{key.value}".lstrip(".")
            if key.value in mapping:
                raise SpecError(f"line {key.start_mark.line + 1}: {name}", "a second value", "one value for each field")
            lines[name] = key.start_mark.line + 1
            mapping[key.value] = _plain(yaml, value, name, lines)
        return mapping
    if node.style is None and node.value in ("", "~", "null"):
        return None
    return float(node.value) if node.style is None and _NUMBER.fullmatch(node.value) else node.value


def _line(field: str, lines: Mapping[str, int]) -> int:
    """Return the line of a field, or else of the innermost field around it."""
    while field not in lines:
        field = re.sub(r"(^|\.)[^.\[]*$|\[\d+\]$", "", field)
    return lines[field]
