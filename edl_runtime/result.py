"""The result of a training script.

It is a small JSON file (a pod's termination message on Kubernetes), so it outlives Redis and the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings

RESULT_LIMIT = 4096
"""Bytes: the limit of a pod's termination message."""


def write_result(
    *,
    checkpoint: str = "",
    metrics: Mapping[str, Any] | None = None,
    not_finite: Mapping[str, int] | None = None,
    settings: RuntimeSettings | None = None,
) -> None:
    """Hand `checkpoint` (path or URL of the trained model) and `metrics` (JSON) to the task that started this script.

    `not_finite`: since which step the loss, the gradients or metrics are NaN or infinite, of those that are. A relative
    path is made absolute. `settings` are by default those of the environment. Does nothing if the script was
    started by hand. Raises SpecError for more than 4096 bytes of JSON.
    """
    settings = settings or RuntimeSettings.from_env(os.environ)
    if not settings.result_file:
        return
    if checkpoint and "://" not in checkpoint:
        checkpoint = str(Path(checkpoint).absolute())
    result = {"checkpoint": checkpoint, "metrics": dict(metrics or {})}
    content = msgspec.json.encode(result | ({"not_finite": dict(not_finite)} if not_finite else {}))
    if len(content) > RESULT_LIMIT:
        raise SpecError(
            "metrics", f"{len(content)} bytes of JSON", f"at most {RESULT_LIMIT} with the checkpoint's path"
        )
    target = Path(settings.result_file)
    partial = target.with_name(f"{target.name}.partial")
    partial.write_bytes(content)
    partial.replace(target)
