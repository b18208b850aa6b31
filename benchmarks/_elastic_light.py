"""The training script of `elastic_scale.py`: the steps and groups of `elastic.init`'s loop, on numpy arrays.

Without Paddle, of which 64 processes would need 20 GB.
"""

from __future__ import annotations

import os
import time

import numpy as np
from _elastic_script import Script

from edl_runtime.checkpoint.file_format import Snapshot
from edl_runtime.elastic.comm.agent_protocol import (
    GenerationEntered,
    InitCalled,
    JoinGeneration,
    Leave,
    StepDone,
    WorkerFinished,
    WorkerReady,
    connect_to_agent,
)
from edl_runtime.elastic.comm.process_group import GroupSession, ProcessGroup
from edl_runtime.elastic.errors import GroupLostError
from edl_runtime.elastic.training.loop import REPORT_EVERY_S
from edl_runtime.elastic.training.train_state import share_state, state_receivers

WEIGHTS = 1000


class Training:
    """A model of ones, to which each step adds the mean over all ranks."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._agent = connect_to_agent(os.environ)
        self._agent.send(InitCalled())
        self._agent.handle_signals()
        self._session = GroupSession(self._agent)
        self._weights = np.ones(WEIGHTS, np.float32)
        self._step: int | None = None
        self._reported: tuple[int, float] = (0, 0.0)

    def run(self) -> None:
        """Train until this instance has to leave."""
        self._agent.send(WorkerReady(live=True))
        leave = self._next_generation()
        while leave is None:
            self._script.work(lambda: None)
            try:
                regroups = self._train()
            except GroupLostError as error:
                self._session.abandon(error, self._step)
                regroups = True
            if regroups:
                leave = self._next_generation()
        self._agent.send(WorkerFinished(step=self._step or 0, why="left"))

    def _next_generation(self) -> Leave | None:
        return self._session.next_generation(self._step, lambda _: None, self._enter)

    def _enter(self, group: ProcessGroup, join: JoinGeneration, steps: list[int | None]) -> None:
        receivers = state_receivers(steps)
        own = Snapshot(generation=join.generation, step=self._step or 0, arrays={"model": {"weights": self._weights}})
        snapshot = share_state(group, receivers, own)
        self._step, self._weights = snapshot.step, np.array(snapshot.arrays["model"]["weights"])
        self._agent.send(GenerationEntered(generation=join.generation, step=self._step, source="peer", live=True))

    def _train(self) -> bool:
        """Do a step; return whether this generation ends with it."""
        session, group = self._session, self._session.group
        votes = session.votes_to_stop()
        gradient = np.ones_like(self._weights)
        self._agent.waits_for((self._step or 0) + 1)
        try:
            (votes,) = group.all_reduce_counts(np.array([votes], np.int64))
            group.all_reduce(gradient)
        finally:
            self._agent.waits_for(None)
        self._weights += gradient / group.world_size
        self._step = (self._step or 0) + 1
        self._script.log_step(
            generation=session.generation, rank=group.rank, world_size=group.world_size, step=self._step
        )
        self._report()
        return bool(votes >= group.world_size)

    def _report(self) -> None:
        """Tell the agent of the step, as often as `elastic.init`'s loop does."""
        generation, now = self._session.generation, time.monotonic()
        if self._reported[0] == generation and now < self._reported[1] + REPORT_EVERY_S:
            return
        self._reported = generation, now
        step = self._step or 0
        self._agent.send(StepDone(generation=generation, step=step, at=time.time(), clock_s=now, epoch=1, samples=step))


if __name__ == "__main__":
    Training(Script()).run()
