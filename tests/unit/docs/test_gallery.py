"""Each example has what the gallery shows of it."""

from __future__ import annotations

import re
from pathlib import Path

import generated
import pytest
from support.paths import DAGS, ROOT

EXAMPLES = generated.example_folders()
WITHOUT_DAG = {"llm_teachers"}
"""Examples of servers that others start: a DAG uses them by EdlRegisterServersOperator."""

MOST_BYTES = 100_000

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda folder: folder.name)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 10


@each_example
def test_an_example_has_a_page_on_the_site(example: Path) -> None:
    """A README, which a page of docs/examples shows, or a tutorial of its name."""
    page = generated.page_of(example)
    assert page.exists(), f"write {example.name}/README.md"
    if page.name == "README.md":
        shows = ROOT / "docs" / "examples" / f"{example.name}.md"
        wanted = f"```{{include}} ../../examples/{example.name}/README.md\n```\n"
        assert shows.exists(), f"write {shows} with {wanted!r}"
        assert shows.read_text() == wanted


@each_example
def test_an_example_shows_a_picture_that_it_has_made(example: Path) -> None:
    """`make gallery` makes it, or the commands of its page; it is small."""
    page = generated.page_of(example)
    pictures = [page.parent / path for path in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())]
    assert pictures, f"show a picture on {page}"
    assert [picture for picture in pictures if not 0 < picture.stat().st_size <= MOST_BYTES] == []


@each_example
def test_an_example_has_a_dag_that_runs_it(example: Path) -> None:
    """Its page names the DAG; tests/unit/airflow/test_dags.py imports all of them."""
    if example.name in WITHOUT_DAG:
        return
    named = set(re.findall(r"dags/(\w+\.py)", generated.page_of(example).read_text()))
    assert named, "write a DAG, and name it on the page"
    for name in named:
        assert f'"{example.name}"' in (DAGS / name).read_text() or f"/{example.name}/" in (DAGS / name).read_text()
