"""Depth of tests: `make test` tests each behaviour once, `make test-deep` longer and in many variants."""

from __future__ import annotations

import os

DEEP = os.environ.get("EDL_TEST_DEEP") == "1"


def examples(few: int, many: int) -> int:
    """Return how many examples, seeds or rounds to try: `few`, or `many` in `make test-deep`."""
    return many if DEEP else few
