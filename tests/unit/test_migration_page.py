"""What docs/migration/from-edl.md and the quick start's page name of ours exists."""

from __future__ import annotations

import re

import click
import msgspec
import pytest
from support.paths import ROOT

from edl_runtime.cli import SUMMARIES, edl
from edl_runtime.compat.paddle_edl import DistillReader
from edl_runtime.elastic.api import Run
from edl_runtime.elastic.data.indexed import IndexedData
from edl_runtime.settings import RuntimeSettings
from edl_runtime.shards.tasks import TaskQueue

PAGE = (ROOT / "docs/migration/from-edl.md").read_text()
OURS = "\n".join(line.split("|", 2)[-1] if line.startswith("|") else line for line in PAGE.splitlines())
"""The page without the left columns of its tables, which name what EDL had."""

QUICK_START = (ROOT / "examples/paddle_serving/README.md").read_text().replace("\\\n", "")
SPANS = re.findall(r"`([^`\n]+)`", PAGE + QUICK_START) + re.findall(r"^edl .*$", QUICK_START, re.MULTILINE)
COMMANDS = sorted({span for span in SPANS if re.search(r"\bedl [a-z]", span)})
FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def flags_of(subcommand: str) -> set[str]:
    command = edl.get_command(click.Context(edl), subcommand)
    assert command is not None, f"there is no `edl {subcommand}`"
    return {flag for parameter in command.params for flag in parameter.opts}


@pytest.mark.parametrize("span", COMMANDS)
def test_commands_take_the_flags_that_stand_behind_them(span: str) -> None:
    _, _, subcommand, own = re.split(r"\b(edl) ([a-z]+)", span.partition(" -- ")[0], maxsplit=1)
    assert set(FLAG.findall(own)) - flags_of(subcommand) == set()


def test_flags_alone_are_those_of_some_command() -> None:
    known = set().union(*map(flags_of, SUMMARIES))
    alone = {flag for span in re.findall(r"`(-[^`\n]+)`", OURS) for flag in FLAG.findall(span)}
    assert alone
    assert alone - known == set()


def test_variables_are_settings() -> None:
    settings = {f"EDL_{field.name.upper()}" for field in msgspec.structs.fields(RuntimeSettings)}
    named = set(re.findall(r"(?<!_)EDL_[A-Z_]+", OURS))
    assert len(named) > 10
    assert named - settings == set()


@pytest.mark.parametrize(
    ("owner", "named"),
    [
        (DistillReader, re.findall(r"`(set_\w+|print_config|close)\(?", PAGE)),
        (Run, re.findall(r"`run\.(\w+)", PAGE)),
        (TaskQueue, re.findall(r"`TaskQueue\.(\w+)", PAGE)),
        (IndexedData, re.findall(r"`data\.(\w+)", PAGE)),
    ],
)
def test_methods_exist(owner: type, named: list[str]) -> None:
    assert named
    assert [name for name in named if not hasattr(owner, name)] == []
