"""Commands in README and docs are commands: programs take their flags, and files and folders of ours are there."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from support.docs_pages import PAGES, blocks
from support.paths import DEPLOY, ROOT

from edl_runtime.cli import edl

SHOWN = [*PAGES, *sorted(ROOT.glob("examples/*/README.md"))]
INDENTED = re.compile(r"(?:^    \S.*\n)+", re.MULTILINE)
STARTS = re.compile(r"(?:\w+=\S* )*(?:\$ )?(edl [a-z].*)")
OURS = re.compile(r"(?<![\w./-])((?:deploy|examples|dags|scripts|benchmarks|tests)/[\w./-]+)")


def lines() -> Iterator[tuple[str, str]]:
    """Yield each line of the shell's code, continued lines as one, with the page it is on."""
    for page in SHOWN:
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
        context = click.Context(command, info_name=name, parent=context, **command.context_settings)
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


PROGRAMS = re.compile(r"(?:\w+=\S* )*(?:airflow|docker|edl|export|for|helm|kind|kubectl|openssl|pip|python)\b")
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{line}")
    for page in SHOWN
    for line, language, block in blocks(page, "sh", "bash", "")
    if language or PROGRAMS.match(block)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_shell_can_read_a_block(block: str) -> None:
    """Quotes, loops and here-documents end; nothing is run."""
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def commands_of(program: str) -> list[Any]:
    """Return the commands of a program, with the page as the id of a case."""
    found = {(page, line) for page, line in lines() if re.match(rf"(?:\w+=\S* )*{program} ", line)}
    return [pytest.param(line, id=f"{page}-{line[:60]}") for page, line in sorted(found)]


def words_of(line: str) -> list[str]:
    """Return the words of a command, up to what follows it or where its output goes."""
    words = shlex.split(re.sub(r"\$\([^()]*\)", "X", line).replace("…", "X"), comments=True)
    ends = [words.index(end) for end in ("&", "|", ">", "&&", "||") if end in words]
    return words[: min(ends, default=len(words))]


@pytest.mark.parametrize("line", commands_of("kubectl"))
def test_kubectl_takes_the_command(line: str) -> None:
    """Its own parser reads it, where it is installed; and objects of ours have the names that deploy/ gives them."""
    words = words_of(line)
    ours = {f"{one['kind'].lower()}/{one['metadata']['name']}" for one in objects()}
    named = re.findall(r"\b(?:deployment|statefulset|service|configmap)/[\w-]+", line)
    assert [name for name in named if name not in ours] == []
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    done = subprocess.run([*words, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def objects() -> list[Any]:
    """Return all objects of the manifests in deploy/."""
    files = [file for file in DEPLOY.glob("*.yaml") if file.name != "airflow-values.yaml"]
    return [one for file in files for one in yaml.safe_load_all(file.read_text()) if "kind" in one]


@pytest.mark.parametrize("line", commands_of("helm .* --set"))
def test_the_chart_has_the_values_that_helm_sets(line: str) -> None:
    values = yaml.safe_load((DEPLOY / "chart" / "values.yaml").read_text())
    words = words_of(line)
    paths = [each.partition("=")[0] for word in words if "=" in word for each in word.split(",")]
    assert paths or "-f" in words
    for path in paths:
        found = values
        for part in path.split("."):
            assert part in found, path
            found = found[part]


@pytest.mark.parametrize("line", commands_of("docker build"))
def test_an_image_is_built_with_arguments_that_its_file_has(line: str) -> None:
    words = words_of(line)
    text = (ROOT / words[words.index("-f") + 1]).read_text()
    given = [after.partition("=")[0] for word, after in itertools.pairwise(words) if word == "--build-arg"]
    assert [name for name in given if not re.search(rf"(?m)^ARG {name}\b", text)] == []


@pytest.mark.parametrize("line", commands_of("(?:.venv/bin/)?airflow"))
def test_airflow_takes_the_command(line: str) -> None:
    """Its own parser reads it."""
    from airflow.cli.cli_parser import get_parser

    get_parser().parse_args(words_of(line)[1:])


TEXTS = [*SHOWN, ROOT / "CONTRIBUTING.md"]
each_text = pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))


@each_text
def test_extras_targets_and_modules_that_a_page_names_are_there(page: Path) -> None:
    """`edl-airflow[EXTRA]`, `make TARGET` and `python -m MODULE`, in text and commands."""
    text = page.read_text()
    extras = {extra.strip() for found in re.findall(r"edl-airflow\[([\w, -]+)\]", text) for extra in found.split(",")}
    assert extras <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    targets = set(re.findall(r"(?m)(?:^ *|`)(?:[A-Z_]+=\S* )?make ([a-z][a-z-]*)\b", text))
    assert targets <= set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    modules = re.findall(r"python (?:-u )?-m (edl_(?:runtime|airflow)[\w.]*)", text)
    assert [module for module in modules if not find_spec(module)] == []


def test_pages_that_code_and_manifests_name_are_there() -> None:
    """As in a comment that says where something is explained."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    texts = {
        name: (ROOT / name) for name in files if name.endswith((".py", ".yaml", ".toml", ".lua", "Makefile", "file"))
    }
    named = {
        (name, page)
        for name, file in texts.items()
        if file.is_file()
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text())
    }
    assert len(named) > 10
    assert sorted((name, page) for name, page in named if not (ROOT / page).exists()) == []
