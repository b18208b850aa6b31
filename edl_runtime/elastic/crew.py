"""An instance's trainer and its standby: begun, told, heard and ended as `gears` orders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import assert_never

import msgspec

from edl_runtime.elastic.environment import Communication, plain_environment
from edl_runtime.elastic.falls import Fall
from edl_runtime.elastic.gears import Begin, Kill, Mine, Order, Phase, Retire, Run, Spare, Tell, Terminate
from edl_runtime.elastic.messages import (
    Beat,
    Elastic,
    Failed,
    Finished,
    Join,
    Leave,
    Loaded,
    Lost,
    Note,
    Ready,
    Saved,
    Stepped,
    Unsaved,
    Up,
)
from edl_runtime.elastic.script import Script
from edl_runtime.elastic.trainers import Ended, Heard, Trainer
from edl_runtime.log import get_logger

log = get_logger(__name__)

RETIRED_S = 10.0
"""How long a trainer may take to end that has said why it fails, or that has left and ends beside the next one."""

News = Up | Stepped | Lost | Saved | Unsaved | Note
"""What a trainer says that concerns others."""


class Crew:
    """The processes of one instance. Attended to by `tasks`; `heard` is called after each thing that any of them says.

    - `mine`: how far the trainer is.
    - `live`, `seen`, `waits_for`, `moves`: as the trainer said last. `keeps`: it keeps checkpoints, as far as is known.
    - `checkpoint`: where the script keeps them, as it said; "" for nowhere, or while it has not said so.
    - `finished`: the trainer has trained all there is and has ended.
    """

    def __init__(
        self,
        script: Script,
        member: str,
        environ: Mapping[str, str],
        communication: Communication,
        *,
        tasks: asyncio.TaskGroup,
        heard: Callable[[Heard], None],
    ) -> None:
        self.mine = Mine()
        self.live = False
        self.seen = 0
        self.waits_for = 0
        self.moves = 0
        self.finished = False
        self._falls: list[Fall] = []
        self._news: list[News] = []
        self._spoke = False
        self._script = script
        self._member = member
        self._environ = environ
        self._communication = communication
        self._tasks = tasks
        self._heard = heard
        self._trainer: Trainer | None = None
        self._standby: Trainer | None = None
        self._retired: list[Trainer] = []
        self._begun_at = 0.0
        self._killed: Kill | None = None
        self._said_last: Failed | None = None
        self._stepped = self._writes = self._called = False
        self.keeps = True
        self.checkpoint = ""

    @property
    def elastic(self) -> bool:
        """Whether the script joins generations by itself, as far as is known by now."""
        return self._script.elastic

    @property
    def called(self) -> bool:
        """Whether the trainer has called `elastic.init`."""
        return self._called

    @property
    def pid(self) -> int:
        """The trainer's process id, 0 without one."""
        return self._trainer.pid if self._trainer else 0

    def take_falls(self) -> list[Fall]:
        """Return the trainers that fell since this was last asked."""
        falls, self._falls = self._falls, []
        return falls

    def take_news(self) -> list[News]:
        """Return what the trainer said since this was last asked, in order."""
        news, self._news = self._news, []
        return news

    def take_spoke(self) -> bool:
        """Return whether the trainer said anything since this was last asked."""
        spoke, self._spoke = self._spoke, False
        return spoke

    @property
    def stopped(self) -> bool:
        """Whether the system has stopped the trainer's process, as by SIGSTOP."""
        return self._trainer is not None and self._trainer.state == "stopped"

    @property
    def falling(self) -> bool:
        """Whether the trainer is to be judged as soon as its end is known: the others may notice it sooner."""
        if self._trainer is None or self.mine.phase != "member":
            return False
        killed = self._killed is not None and not self._killed.planned
        failed = self._said_last is not None  # which it says before its connections to others end
        return killed or (self.elastic and (failed or self._trainer.state in ("zombie", "gone")))

    @property
    def cpu_s(self) -> float:
        """How much processor time the trainer's process has used, 0 without one."""
        return self._trainer.cpu_s if self._trainer else 0.0

    def take_for_elastic(self) -> None:
        """Go on with the script as one that joins generations by itself, since a trainer of this job has said so.

        One that was started for a generation, as others are, is not in it, and joins a later one.
        """
        if self.elastic:
            return
        self._script = self._script.that_joins()
        self._end_standby()  # it lacks what such a script imports
        self._change(up=0, peers=())
        if self.mine.phase == "member":
            self._phase("starting")
        log.info("script.elastic", generation=self.mine.told)

    def dismiss(self) -> None:
        """End all processes at once; nothing is heard of them any more."""
        for trainer in (self._trainer, self._standby, *self._retired):
            if trainer:
                trainer.kill()
        self._trainer = self._standby = None
        self._retired.clear()

    async def carry_out(self, order: Order) -> None:
        """Do it, and note in `mine` that it is done. Raises OSError when no process can be begun."""
        match order:
            case Begin():
                await self._begin(fresh=order.fresh)
            case Spare():
                self._standby = await self._new(nice=True)
                self._change(spare="loading")
            case Retire():
                self._retire()
            case Run():
                self._run(order)
            case Tell():
                self._tell(order)
            case Terminate():
                self._phase("leaving")
                if self._trainer:
                    self._trainer.terminate()
            case Kill():
                self._kill(order)
            case _:
                assert_never(order)

    async def _begin(self, *, fresh: bool) -> None:
        if fresh:
            self._end_standby()
        loaded = self.mine.spare == "loaded"
        self._trainer = self._standby or await self._new(nice=False)
        self._standby = None
        self.live, self.waits_for, self.moves, self._killed, self._said_last = False, 0, 0, None, None
        self._stepped = self._writes = self._called = False
        self.keeps = True
        self._begun_at = time.monotonic()
        self._change(spare="absent", up=0, fallen=0, aborted=0, left=False, peers=())
        self._phase("loaded" if loaded else "loading")
        log.info("trainer.begun", pid=self._trainer.pid, loaded=loaded)

    def _end_standby(self) -> None:
        if self._standby:
            self._standby.kill()
            self._standby = None
            self._change(spare="absent")

    def _retire(self) -> None:
        if self._trainer:
            self._retired.append(self._trainer)
            self._end_in_time()
        self._trainer = None
        self._phase("absent")

    async def _new(self, *, nice: bool) -> Trainer:
        trainer = await Trainer.begin(self._script, self._environ, nice=nice)
        self._tasks.create_task(trainer.attend(self._hear))
        return trainer

    def _run(self, order: Run) -> None:
        assert self._trainer is not None  # noqa: S101 -- only what is loaded is told to run
        if order.generation is None:
            self._trainer.start({})
            self._phase("starting")
            return
        number = order.generation.number
        self._trainer.start(plain_environment(order.generation, self._member, self._communication))
        self._change(told=number, up=number, peers=order.generation.members)
        self._phase("member")

    def _tell(self, order: Tell) -> None:
        assert self._trainer is not None  # noqa: S101 -- only what runs is told something
        match order.message:
            case Join(generation=number):
                self._change(told=number, peers=order.generation.members if order.generation else ())
                self._phase("member")
            case Leave(checkpoint=writes):
                self._writes = writes
                self._phase("leaving")
            case message:
                self._change(aborted=getattr(message, "generation", 0))
        self._trainer.say(order.message)

    def _kill(self, order: Kill) -> None:
        if self._trainer and self._killed is None:
            self._killed = order
            self._trainer.kill()

    def _hear(self, trainer: Trainer, said: Heard) -> None:
        if trainer is self._trainer:
            self._spoke = True
            self._hear_trainer(said)
        elif trainer is self._standby:
            self._hear_standby(said)
        elif isinstance(said, Ended) and trainer in self._retired:
            self._retired.remove(trainer)
        self._heard(said)

    def _hear_standby(self, said: Heard) -> None:
        if isinstance(said, Loaded):
            self._change(spare="loaded")
            log.info("standby.loaded")
        elif isinstance(said, Ended):
            self._standby = None
            self._change(spare="failed")
            log.warning("standby.ended", exit_code=said.exit_code)

    def _hear_trainer(self, said: Heard) -> None:
        match said:
            case Loaded():
                self._phase("loaded")
            case Elastic(checkpoint=checkpoint):
                self.keeps, self.checkpoint, self._called = bool(checkpoint), checkpoint, True
                self.take_for_elastic()
            case Ready():
                self.live, self.seen = said.live, said.seen
                if self.mine.phase == "starting":
                    self._phase("ready")
            case Up() | Lost() | Stepped() | Saved() | Unsaved() | Note():
                self._hear_news(said)
            case Beat():
                self._hear_beat(said)
            case Finished():
                self._change(left=said.why == "left")
                self._phase("done" if said.why == "done" else "leaving")
            case Failed():
                self._said_last = said
                self._end_in_time()
            case Ended():
                self._end(said.exit_code)

    def _end_in_time(self) -> None:
        """Have a trainer that is about to end not take for ever."""
        if self._trainer:
            asyncio.get_running_loop().call_later(RETIRED_S, self._trainer.kill)

    def _hear_beat(self, said: Beat) -> None:
        if self.mine.phase == "leaving" and said.moves > self.moves:
            self._phase("leaving")  # while it writes its checkpoint it is not late
        self.waits_for, self.moves = said.waits_for or 0, said.moves

    def _hear_news(self, said: News) -> None:
        if isinstance(said, Up):
            self.live = said.live
            self._change(up=said.generation, since=time.monotonic())
        elif isinstance(said, Lost):
            self._change(fallen=max(self.mine.fallen, said.generation))
        elif isinstance(said, Stepped):
            self._stepped = True
        self._news.append(said)

    def _end(self, exit_code: int) -> None:
        mine, self._trainer = self.mine, None
        self.waits_for = 0
        all_trained = mine.phase == "done" or (mine.phase == "member" and not self.elastic)
        planned = mine.phase == "leaving" or (self._killed is not None and self._killed.planned)
        unwritten = self._writes and self.keeps and mine.up > 0 and mine.phase == "leaving" and not mine.left
        if exit_code == 0 and all_trained:
            self.finished = True
        elif unwritten or not planned:
            self._falls.append(self._fall(exit_code, unwritten=unwritten))  # whoever judges it says so
        if planned or self.finished:
            killed = {"killed": self._killed.why} if self._killed else {}
            log.info("trainer.ended", exit_code=exit_code, generation=mine.told, **killed)
        self._phase("absent")

    def _fall(self, exit_code: int, *, unwritten: bool) -> Fall:
        return Fall(
            exit_code=exit_code,
            said=self._said_last,
            killed=self._killed.why if self._killed else "",
            elastic=self.elastic,
            generation=self.mine.told,
            was_up=self.mine.up >= self.mine.told,
            stepped=self._stepped,
            lived_s=time.monotonic() - self._begun_at,
            called=self._called,
            unwritten=unwritten,
        )

    def _phase(self, phase: Phase) -> None:
        self._change(phase=phase, since=time.monotonic())

    def _change(self, **changes: object) -> None:
        self.mine = msgspec.structs.replace(self.mine, **changes)
