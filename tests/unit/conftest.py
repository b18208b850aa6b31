"""No example of hypothesis has a time limit, whichever tests run beside these."""

from __future__ import annotations

import support.hypotheses  # noqa: F401
