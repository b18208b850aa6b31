"""What documents tell people to copy works as it stands, and leads somewhere."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.paths import ROOT

from edl_airflow.triggers import jobs
from edl_runtime import specs
from edl_runtime.autoscale.cluster import throughput
from edl_runtime.autoscale.policy import decide
from edl_runtime.compat.cloud_reader import cloud_reader
from edl_runtime.distill import batching, bottleneck, dispatch_policy, teacher_connections
from edl_runtime.elastic.api import Run
from edl_runtime.elastic.data import sharded
from edl_runtime.elastic.training import optimizer_step
from edl_runtime.protocol import client
from edl_runtime.settings import RuntimeSettings
from edl_runtime.teacher.http import admission

README = (ROOT / "README.md").read_text()


def dags() -> list[str]:
    return [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "with DAG" in block]


def default(function: Callable[..., Any], name: str) -> Any:
    """Return what an argument is unless given."""
    return inspect.signature(function).parameters[name].default


def test_the_dag_to_copy_is_a_dag() -> None:
    """The README's DAG is valid Python that makes a DAG of one distillation task."""
    from edl_airflow.operators.distill import EdlDistillOperator

    made: dict[str, Any] = {}
    exec(compile(dags()[0].replace("\n):\n", "\n) as dag:\n"), "README.md", "exec"), made)

    (task,) = made["dag"].tasks
    assert isinstance(task, EdlDistillOperator)
    assert task.deferrable
    assert task.retries == 1


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *(str(page.relative_to(ROOT)) for folder in ("docs", "examples") for page in ROOT.glob(f"{folder}/**/*.md")),
]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_it_links_to_is_there(page: str) -> None:
    """No link to a file of the project is dead."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize(
    ("page", "words", "number", "promised"),
    [
        ("how-to/distillation", "takes more than 20 s counts as hung", specs.HUNG_AFTER_S, 20),
        ("concepts/distillation", "requests of 256 KB and more lie in memory", client.MIN_SHARED_BYTES, 256 << 10),
        ("concepts/distillation", "up to `--max-batch` rows (64)", specs.MAX_BATCH, 64),
        (
            "concepts/distillation",
            "0.1 s at first and twice as long each time, 30 s at most",
            teacher_connections.LONGEST_QUARANTINE_S,
            30,
        ),
        ("concepts/distillation", "fail for ten seconds", batching.MIN_FAILING_S, 10),
        ("concepts/distillation", "three times as long as usual", dispatch_policy.HEDGE_AFTER_MEDIANS, 3),
        ("concepts/distillation", "at most one request in ten", dispatch_policy.HEDGES_PER_REQUEST, 0.1),
        ("how-to/distillation", "It has to be so for 20 s", bottleneck.SETTLED_S, 20),
        ("how-to/data", "leased to one for `timeout_s` (1,200)", default(cloud_reader, "timeout_s"), 1200),
        ("how-to/data", "more often than `retries` (3)", default(cloud_reader, "retries"), 3),
        ("concepts/elastic-training", "twice as long, 30 s at most", sharded.MAX_RETRY_HOLD_S, 30),
        (
            "concepts/elastic-training",
            "After three failures (`failure_limit`)",
            default(Run.shards, "failure_limit"),
            3,
        ),
        ("concepts/elastic-training", "`EDL_STEP_LIMIT_S` (600)", RuntimeSettings().step_limit_s, 600),
        ("how-to/checkpoints", "Three are kept", specs.Checkpoint(url="kept").keep_last, 3),
        ("how-to/checkpoints", "Three are kept", RuntimeSettings().checkpoint_keep_last, 3),
        ("how-to/production", "up to 1 GB of freed gradients", optimizer_step._MOST_KEPT, 1 << 30),
        ("how-to/production", "up to 512 MB for requests", admission.MAX_SIDE_BYTES, 512 << 20),
        ("how-to/rescaling", "takes room from others at most every five", decide.RESIZE_COOLDOWN_S, 300),
        ("how-to/rescaling", "makes up for its pause within fifteen", decide.PAYBACK_WINDOW_S, 900),
        ("how-to/rescaling", "has waited for four hours", decide.STARVATION_S, 4 * 3600),
        ("how-to/rescaling", "kept for a week", throughput.KEPT_S, 7 * 86_400),
        ("how-to/rescaling", "looks at the jobs every two seconds", jobs.POLL_INTERVAL_S, 2),
    ],
)
def test_numbers_in_documents_are_those_of_the_code(page: str, words: str, number: float, promised: float) -> None:
    """What people read is what they get where they say nothing else."""
    text = (ROOT / (page if page.endswith(".md") else f"docs/{page}.md")).read_text()
    assert words in " ".join(text.split())
    assert number == promised
