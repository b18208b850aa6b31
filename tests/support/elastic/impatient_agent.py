"""An `edl` command whose agents give a generation up of which nothing comes for a few seconds, and not for 20."""

from __future__ import annotations

from functools import partial

from edl_runtime.cli import main
from edl_runtime.elastic import leading
from edl_runtime.elastic.agreement import decide, waits_for
from edl_runtime.elastic.roll import Times

LIMIT_S = 4.0

if __name__ == "__main__":
    times = Times(join_limit_s=LIMIT_S)
    leading.decide = partial(decide, times=times)
    leading.waits_for = partial(waits_for, times=times)
    main()
