"""Settings of hypothesis: no time limit for an example, and the same examples in each CI run."""

from __future__ import annotations

import os

from hypothesis import settings
from support.depth import examples

settings.register_profile("edl", deadline=None, max_examples=examples(15, 200), derandomize="CI" in os.environ)
settings.load_profile("edl")
