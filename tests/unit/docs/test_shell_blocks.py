"""Commands in README and docs are commands: `edl` takes their flags, and files and folders of ours are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from support.docs_pages import PAGES, blocks
from support.paths import ROOT

from edl_runtime.cli import edl

INDENTED = re.compile(r"(?:^    \S.*\n)+", re.MULTILINE)
STARTS = re.compile(r"(?:\w+=\S* )*(?:\$ )?(edl [a-z].*)")
OURS = re.compile(r"(?<![\w./-])((?:deploy|examples|dags|scripts|benchmarks|tests)/[\w./-]+)")


def lines() -> Iterator[tuple[str, str]]:
    """Yield each line of the shell's code, continued lines as one, with the page it is on."""
    for page in PAGES:
        indented = [found[0] for found in INDENTED.finditer(page.read_text())]
        shell = [block for _, _, block in blocks(page, "sh", "bash", "console", "")]
        for block in (*indented, *shell):
            for line in block.replace("\\\n", " ").splitlines():
                yield str(page.relative_to(ROOT)), line.strip()


COMMANDS = sorted({(page, found[1]) for page, line in lines() if (found := STARTS.match(line))})


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_edl_takes_the_command(page: str, line: str) -> None:  # noqa: ARG001 - it names the case
    """Its own parser reads it, so flags, choices and the number of arguments are right; nothing is run."""
    words = shlex.split(line.replace("…", "X").replace("...", "X"), comments=True)
    for end in ("&", "|", ">", "&&", "2>"):
        words = words[: words.index(end)] if end in words else words
    command: click.Command = edl
    context = click.Context(edl, info_name="edl")
    words = words[1:]
    while isinstance(command, click.Group):
        name = words.pop(0)
        assert name in command.list_commands(context), name
        found = command.get_command(context, name)
        assert found
        command = found
        context = click.Context(command, info_name=name, parent=context)
    parser = command.make_parser(context)
    _, _, order = parser.parse_args(words)
    given = {parameter.name for parameter in order}
    required = {each.name for each in command.params if isinstance(each, click.Argument) and each.required}
    assert required <= given, "an argument is missing"


def test_files_that_commands_name_are_there() -> None:
    """Of this repository, from whose folder the pages' commands are run."""
    named = {(page, path) for page, line in lines() for path in OURS.findall(line.partition(" #")[0])}
    assert len(named) > 10
    assert [each for each in sorted(named) if not (ROOT / each[1]).exists()] == []
