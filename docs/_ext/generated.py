"""Lists of the reference, made from the code: a page has `<!-- generated: NAME -->` where the list stands.

Each function of `LISTS` returns Markdown. What the code doesn't describe is an error here, so no list is out of date.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from os.path import relpath
from pathlib import Path
from types import ModuleType
from typing import Any, Self, get_args

import click
import msgspec
from sphinx.application import Sphinx

import edl_airflow.failures
import edl_runtime
from edl_airflow.provider_info import get_provider_info
from edl_runtime import settings
from edl_runtime.checkpoint.errors import FolderHolder, UnreadableCheckpointError
from edl_runtime.cli import SUMMARIES, edl
from edl_runtime.controller import vitals
from edl_runtime.distill import metrics as reader_metrics
from edl_runtime.elastic.rendezvous.redis_store import Event, EventKind
from edl_runtime.errors import EdlError
from edl_runtime.gateway import metrics as gateway_metrics
from edl_runtime.monitor import exporter
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.store import keys
from edl_runtime.teacher.metrics import TeacherMetrics

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
RUNTIME = Path(edl_runtime.__file__).parent
HEXADECIMAL = re.compile(r"\b[0-9a-f]{32}\b")
WITHOUT_TEXT = {UnreadableCheckpointError, ProtocolError}
"""Errors whose text is that of their subclasses, or of who raises them."""
ROOT = RUNTIME.parent


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; cells are one line each."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def items_of(docstring: str | None) -> dict[str, str]:
    """Return the items of a docstring's list, "- `name`, `other` (…): meaning", by name."""
    found: dict[str, str] = {}
    for item in re.findall(r"(?m)^- (`.*(?:\n  .*)*)", inspect.cleandoc(docstring or "")):
        names, _, meaning = item.partition(":")
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), meaning.strip())
    return found


def summary_of(thing: object) -> str:
    """Return the first sentence of a docstring."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)0-9])\. (?=[A-Z])", text)[0].rstrip(".") + "." * bool(text)


def variables() -> str:
    """All settings with their variables and defaults, and the variables of others."""
    meanings = items_of(settings.RuntimeSettings.__doc__)
    rows = [
        [f"`EDL_{field.name.upper()}`", f"`{field.default}`" if field.default != "" else "", meanings[field.name]]
        for field in msgspec.structs.fields(settings.RuntimeSettings)
    ]
    others = [
        [", ".join(f"`{name}`" for name in names), summary_of(function).removeprefix("Return ")]
        for _, function in inspect.getmembers(settings, inspect.isfunction)
        if function.__module__ == settings.__name__ and (names := _variables_in(function))
    ]
    ours = table(["variable", "default", "meaning"], rows)
    return f"{ours}\n\n## Of others\n\n{table(['variables', 'what is read from them'], others)}"


def _variables_in(function: Callable[..., Any]) -> list[str]:
    tree = ast.parse(inspect.getsource(function))
    body = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = {str(node.value) for node in body if re.fullmatch(r"[A-Z]+(_[A-Z]+)*", str(node.value))}
    return sorted(name for name in names if name == "KUBECONFIG" or "_" in name)


def commands() -> str:
    """Each command with its usage, help, arguments and options."""
    return "\n\n".join(text for name in SUMMARIES for text in _command(["edl", name], _subcommand(edl, name)))


def _subcommand(group: click.Group, name: str) -> click.Command:
    command = group.get_command(click.Context(group), name)
    assert command, name  # noqa: S101 - of the group's own list
    return command


def _command(path: list[str], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(path))
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    yield f"{'#' * len(path)} {' '.join(path)}\n\n```text\n{usage}\n```\n\n{_plain(command.help or '')}"
    records = [each.get_help_record(context) for each in command.get_params(context)]
    yield table(
        ["option", "meaning"], [[f"`{record[0]}`", _plain(record[1])] for record in records if record and record[1]]
    )
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from _command([*path, name], _subcommand(command, name))


def _plain(text: str) -> str:
    """Return a help text as Markdown: its blanks and marks mean themselves."""
    paragraphs = inspect.cleandoc(text.replace("\b\n", "\b")).split("\n\n")
    shown = [
        f"```text\n{each[1:]}\n```" if each.startswith("\b") else re.sub(r"(?=[*_<>\[\]])", r"\\", each)
        for each in paragraphs
    ]
    return "\n\n".join(shown)


def metrics() -> str:
    """The metrics of teachers, students, `edl gateway`, `edl controller` and `edl monitor`."""
    teacher = [
        [f"`{each.name}{'_total' * (each.type == 'counter')}`", each.documentation] for each in _teacher_metrics()
    ]
    kinds = ((reader_metrics._COUNTERS, "_total"), (reader_metrics._GAUGES, ""))  # noqa: SLF001 - read, not used
    student = [
        [f"`edl_distill_{name}{end}`", f"`{label}`" if label else "", meaning]
        for listed, end in kinds
        for name, label, meaning, _ in listed
    ]
    gateway = [
        [f"`edl_gateway_{name}{end}`", "`pool`", meaning]
        for listed, end in ((gateway_metrics._COUNTERS, "_total"), (gateway_metrics._GAUGES, ""))  # noqa: SLF001 - as above
        for name, meaning, _ in listed
    ]
    monitor = [
        [f"`{name}`", ", ".join(f"`{label}`" for label in labels), meaning]
        for name, meaning, labels in exporter._METRICS  # noqa: SLF001 - as above
    ]
    controller = [
        *([f"`edl_controller_{name}_total`", f"`{label}`", meaning] for name, label, meaning, _ in vitals.COUNTERS),
        *([f"`edl_controller_{name}`", "", meaning] for name, meaning, _ in vitals.GAUGES),
    ]
    head = ["metric", "labels", "meaning"]
    return (
        f"## Of a teacher\n\n{table(['metric', 'meaning'], teacher)}\n\n## Of a student\n\n{table(head, student)}\n\n"
        f"## Of `edl gateway`\n\n{table(head, gateway)}\n\n## Of `edl controller`\n\n{table(head, controller)}\n\n"
        f"## Of `edl monitor`\n\n{table(head, monitor)}"
    )


def _teacher_metrics() -> Iterator[Any]:
    counted = TeacherMetrics()
    for file in sorted((RUNTIME / "teacher").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            is_gauge = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("metrics.gauges[")
            if is_gauge and isinstance(node.value, ast.Tuple):
                name = ast.literal_eval(node.targets[0].slice)  # type: ignore[attr-defined]
                counted.gauges[name] = ast.literal_eval(node.value.elts[0]), float
    return counted.collect()


def redis_keys() -> str:
    """Every key with its content, and how it is written."""
    content = "\n".join(re.findall(r"(?m)^\|.*$", keys.__doc__ or ""))
    service = keys.Service("NAMESPACE", "POOL", "teachers")
    made = []
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        given = [service if each == "service" else each.upper() for each in inspect.signature(function).parameters]
        calls = [given]
        if name == "ledger_keys":
            calls = [[*given[:2], of] for of in get_args(keys.LedgerOf)]
        for call in calls:
            result = function(*call)
            written = [result] if isinstance(result, str) else result
            made += [[name, f"`{re.sub(HEXADECIMAL, 'DIGEST', key)}`"] for key in written]
    return f"{content}\n\n## How they are written\n\n{table(['of', 'key'], made)}"


def events() -> str:
    """The kinds of events, and what the docstring says of them."""
    kinds = ", ".join(f"`{kind}`" for kind in get_args(EventKind))
    text = (inspect.getdoc(Event) or "").partition("\n\n")[2]
    text = re.sub(r'"(\w+)"', r"`\1`", text)
    assert all(f"`{kind}`" in text for kind in get_args(EventKind)), "an event that nothing describes"  # noqa: S101
    return f"{kinds}.\n\n{text}"


def connection() -> str:
    """The connection's form, field by field."""
    form = get_provider_info()["connection-types"][0]
    named = form["ui-field-behaviour"]["relabeling"]
    rows = [[label, f"`{key}`", "", ""] for key, label in named.items()]
    for key, field in form["conn-fields"].items():
        default = field["schema"].get("default", "")
        rows.append([field["label"], f"extra `{key}`", f"`{default}`" if default else "", field.get("description", "")])
    return table(["field", "key", "default", "meaning"], rows)


def errors() -> str:
    """Every error with its text, and where it is raised from."""
    parts = []
    for package, found in _errors().items():
        rows = [[f"`{error.__name__}`", summary_of(error), _text_of(error)] for error in found]
        parts.append(f"## {package}\n\n{table(['error', 'when', 'its text'], rows)}")
    return "\n\n".join(parts)


def _errors() -> dict[str, list[type[EdlError]]]:
    found: dict[str, list[type[EdlError]]] = {}
    modules: list[ModuleType] = [importlib.import_module("edl_runtime.errors"), edl_airflow.failures]
    names = [each.name for each in pkgutil.walk_packages([str(RUNTIME)], "edl_runtime.")]
    modules += [importlib.import_module(name) for name in names if re.fullmatch(r"edl_runtime\.\w+\.errors", name)]
    for module in modules:
        classes = [each for _, each in inspect.getmembers(module, inspect.isclass)]
        own = [each for each in classes if issubclass(each, Exception) and each.__module__ == module.__name__]
        if own:
            found[module.__name__] = sorted(own, key=lambda each: each.__name__)
    return found


class _Number(float):
    """A number that is shown as its name."""

    name = ""

    def __format__(self, spec: str) -> str:
        return self.name

    __str__ = __repr__ = lambda self: self.name  # type: ignore[assignment]


class _Moment(datetime):
    """A time that is shown as its name, in capitals."""

    name = ""

    def __format__(self, spec: str) -> str:
        return self.name

    def astimezone(self, _: object = None) -> Self:
        return self


def _stand_in(kind: str, name: str) -> Any:
    """Return something of a field's type, whose text is the field's name in capitals."""
    if kind.startswith(("Sequence", "tuple", "list")):
        return [name]
    if kind in {"float", "int"}:
        number = _Number(1)
        number.name = name
        return number
    if kind == "datetime":
        moment = _Moment(2000, 1, 1)
        moment.name = name
        return moment
    if kind == "FolderHolder":
        return FolderHolder(namespace="NAMESPACE", job="JOB", since=0.0, task="TASK")
    if kind == "UnreadableCheckpointError":
        return UnreadableCheckpointError("URL", "PROBLEM")
    return {"bool": False}.get(kind, name)


def _text_of(error: type[EdlError]) -> str:
    """Return the error's text with its fields' names in capitals; "" for one whose text is its caller's."""
    if not inspect.isfunction(error.__str__) or error in WITHOUT_TEXT:
        return ""
    takes = inspect.signature(error).parameters.values() if inspect.isfunction(error.__init__) else ()
    given = {each.name: _stand_in(str(each.annotation), each.name.upper()) for each in takes}
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "SINCE", str(error(**given)))
    return re.sub(r"(?=[*<>\[\]])", r"\\", text.replace("`", ""))


def examples() -> str:
    """Each folder of examples/: its title, its first picture, what its page begins with, and its DAGs."""
    return "\n\n".join(_example(page_of(folder)) for folder in example_folders())


def example_folders() -> list[Path]:
    """Return the folders of examples/ that have files of their own."""
    return sorted({file.parent for file in (ROOT / "examples").glob("*/*") if file.is_file()})


def page_of(example: Path) -> Path:
    """Return an example's page: its README, or else the tutorial of its name."""
    readme = example / "README.md"
    return readme if readme.exists() else ROOT / "docs" / "tutorials" / f"{example.name.replace('_', '-')}.md"


def _example(page: Path) -> str:
    title, _, text = page.read_text().removeprefix("# ").partition("\n\n")
    told = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text.partition("\n\n")[0])
    here = relpath(page.parent, ROOT / "docs" / "examples")
    shown = re.search(r"!\[([^\]]*)\]\(([^)]+)\)", text)
    picture = f"\n\n![{shown[1]}]({here}/{shown[2]})" if shown else ""
    dags = sorted(set(re.findall(r"dags/(\w+)\.py", text)))
    links = ", ".join(f"[`{name}`](../../dags/{name}.py)" for name in dags)
    in_airflow = f"\n\nIn Airflow: {links}" if dags else ""
    return f"## [{title}]({here}/{page.name})\n\n{told}{picture}{in_airflow}"


LISTS = {
    each.__name__: each for each in (variables, commands, metrics, redis_keys, events, connection, errors, examples)
}


def fill(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 - Sphinx's signature
    """Put the lists into a page."""
    source[0] = MARKER.sub(lambda marker: LISTS[marker[1]](), source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
