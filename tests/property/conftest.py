"""How hypothesis runs here: no time limit for one example on a busy machine, and the same examples in each CI run."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("edl", deadline=None, max_examples=60, derandomize="CI" in os.environ)
settings.load_profile("edl")
