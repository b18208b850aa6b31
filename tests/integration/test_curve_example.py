"""The pictures that scripts of examples draw of what jobs have reported."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import EXAMPLES

from edl_runtime.progress import Progress, publish_progress
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

pytestmark = pytest.mark.slow

CURVE = EXAMPLES / "elastic_train" / "curve.py"
REPORT = EXAMPLES / "mnist_distill" / "report.py"


def draw(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("matplotlib")
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )


async def report(settings: RuntimeSettings) -> None:
    """Report three steps of a job `digits`."""
    async with connect(settings.redis_url) as client:
        for step, instances, metrics in ((1, 1, {}), (2, 1, {"top-1": 0.5}), (3, 2, {"top-1": 0.6})):
            progress = Progress(step=step, updated_at=step, loss=1 / step, instances=instances, metrics=metrics)
            await publish_progress(client, settings.namespace, "digits", progress)


def test_a_jobs_curve_has_its_loss_its_metrics_and_its_instances(tmp_path: Path, settings: RuntimeSettings) -> None:
    """Metrics that come later, and instances that change; a job without a curve is an error that names it."""
    asyncio.run(report(settings))
    given = settings.to_env()
    drawn = draw(str(CURVE), "digits", str(tmp_path / "curve.svg"), **given)
    assert drawn.returncode == 0, drawn.stderr
    text = Path(drawn.stdout.strip()).read_text()
    assert [label for label in ("loss", "top-1", "instances", "seconds") if f">{label}<" not in text] == []
    refused = draw(str(CURVE), "letters", str(tmp_path / "none.svg"), **given)
    assert refused.returncode == 1
    assert refused.stderr.startswith("curve.py: job: got 'letters'")
    assert not (tmp_path / "none.svg").exists()


def test_a_result_is_drawn_with_both_students_and_the_teacher(tmp_path: Path) -> None:
    way = {"accuracies": [0.7, 0.8], "accuracy_mean": 0.75, "accuracy_spread": 0.07, "samples_per_s": 100}
    metrics = {"labels": 100, "images": 4000, "seeds": [0, 1], "teacher_accuracy": 0.97, "answered": {}}
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"metrics": {**metrics, "alone": way, "distilled": way}}))
    drawn = draw(str(REPORT), str(result), "--picture", str(tmp_path / "accuracies.svg"))
    assert drawn.returncode == 0, drawn.stderr
    text = (tmp_path / "accuracies.svg").read_text()
    assert [label for label in ("student alone", "student distilled", "teacher") if f">{label}<" not in text] == []
