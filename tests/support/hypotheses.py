"""Settings of hypothesis: no time limits for examples and for making them, and the same examples in each CI run."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from support.depth import examples

settings.register_profile(
    "edl",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=examples(15, 200),
    derandomize="CI" in os.environ,
)
settings.load_profile("edl")
