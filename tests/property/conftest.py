"""Settings of hypothesis, and long time limits of Redis."""

from __future__ import annotations

import support.hypotheses  # noqa: F401
from support.slow_redis import redis_may_be_slow  # noqa: F401
