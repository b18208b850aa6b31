"""An `edl` command whose agents give up a generation without progress after 4 seconds instead of 20."""

from __future__ import annotations

from functools import partial

from edl_runtime.cli import main
from edl_runtime.elastic.agent import agent
from edl_runtime.elastic.rendezvous.generation import Timeouts
from edl_runtime.elastic.rendezvous.planner import plan_generation

LIMIT_S = 4.0

if __name__ == "__main__":
    agent.plan_generation = partial(plan_generation, timeouts=Timeouts(join_limit_s=LIMIT_S))
    main()
