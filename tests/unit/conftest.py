"""No example of hypothesis has a time limit, whichever tests run beside these, and Redis may be slow."""

from __future__ import annotations

import support.hypotheses  # noqa: F401
from support.slow_redis import redis_may_be_slow  # noqa: F401
