"""What documents tell people to copy works as it stands, and leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_dag_to_copy_is_a_dag() -> None:
    """The README's DAG is valid Python that makes a DAG of one distillation task."""
    from edl_airflow.operators.distill import EdlDistillOperator

    (source,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "with DAG" in block]
    made: dict[str, Any] = {}
    exec(compile(source.replace("\n):\n", "\n) as dag:\n"), "README.md", "exec"), made)

    (task,) = made["dag"].tasks
    assert isinstance(task, EdlDistillOperator)
    assert task.deferrable
    assert task.retries == 1


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/distillation.md",
        "docs/elastic-training.md",
        "docs/kubernetes.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ],
)
def test_every_file_it_links_to_is_there(page: str) -> None:
    """No link to a file of the project is dead."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link.partition("#")[0]).exists()] == []
