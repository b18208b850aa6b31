"""What documents tell people to copy works as it stands, and leads somewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.paths import ROOT

README = (ROOT / "README.md").read_text()


def dags() -> list[str]:
    return [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "with DAG" in block]


def test_the_dag_to_copy_is_a_dag() -> None:
    """The README's DAG is valid Python that makes a DAG of one distillation task."""
    from edl_airflow.operators.distill import EdlDistillOperator

    made: dict[str, Any] = {}
    exec(compile(dags()[0].replace("\n):\n", "\n) as dag:\n"), "README.md", "exec"), made)

    (task,) = made["dag"].tasks
    assert isinstance(task, EdlDistillOperator)
    assert task.deferrable
    assert task.retries == 1


def test_the_dag_that_rescales_is_a_dag() -> None:
    """Beside a file of windows, as the one of our own DAGs."""
    from edl_airflow.operators.autoscale import EdlAutoscaleOperator

    made: dict[str, Any] = {"__file__": str(ROOT / "dags" / "rescale.py")}
    exec(compile(dags()[1].replace("1}):\n", "1}) as dag:\n"), "README.md", "exec"), made)

    (task,) = made["dag"].tasks
    assert isinstance(task, EdlAutoscaleOperator)
    assert task.lead_s == 300, "jobs shrink by the pass before a window begins"


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/distillation.md",
        "docs/elastic-training.md",
        "docs/kubernetes.md",
        "docs/releasing.md",
        "docs/rescaling.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ],
)
def test_every_file_it_links_to_is_there(page: str) -> None:
    """No link to a file of the project is dead."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link.partition("#")[0]).exists()] == []
