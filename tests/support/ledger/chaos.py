"""Trainings by processes that are killed, stopped and sent back to checkpoints, with models that count their records.

    python chaos.py REDIS_URL FOLDER SEED...

Prints a line of JSON for each seed. This process plays the collective and the agents of a group; its children are the
ranks, each with a ledger and a copy of the model of its own. With the option --ack-only before the rest, models go
back to checkpoints and the ledger does not, as where a queue of shards knows nothing of the model's checkpoints.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import socket
import sys
import traceback
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np  # noqa: F401 - once, and not in each child
import redis
import redis.asyncio

from edl_runtime.errors import LedgerMissingError, StaleGenerationError
from edl_runtime.shards.blocking import BlockingLedger
from edl_runtime.shards.positions import Position, from_vector, to_vector
from edl_runtime.shards.state import LedgerState, Plan, Shard
from edl_runtime.store import keys

SHARDS = [f"shard-{number}" for number in range(12)]
PLAN = Plan(epochs=2, seed=5, shuffle=True)
MOST_RANKS = 4
SAVE_EVERY_STEPS = 4
REFUSED, NOT_REFUSED = 3, 4
"""Exit statuses of a rank that was left behind and tried to go on."""


def records_of(shard: str) -> int:
    return 1 + int(shard.rpartition("-")[2]) % 4


class Lost(Exception):  # noqa: N818 - what happened, not a mistake
    """A rank does not answer; or, for all of them, the ledger is gone."""


class Rank:
    """A child: it holds shards, and the model as a list of records."""

    def __init__(self, ledger: BlockingLedger) -> None:
        self.ledger = ledger
        self.held: list[Shard] = []
        self.at = self.step = 0
        self.position: Position | None = None
        self.applied: list[str] = []
        self.positions: dict[int, int] = {}

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, order.pop("do"))(**order)  # type: ignore[no-any-return]

    def begin(self, generation: int) -> dict[str, Any]:
        self.ledger.begin(generation)
        return {}

    def restore(self, generation: int, state: dict[str, Any] | None) -> dict[str, Any]:
        self.ledger.restore(msgspec.convert(state, LedgerState) if state else None, generation)
        return {}

    def release(self, step: int, positions: list[list[int]], alive: list[str]) -> dict[str, Any]:
        self.ledger.release(step, dict(positions), alive)  # type: ignore[arg-type]
        return {}

    def tell(self) -> dict[str, Any]:
        return {"step": self.step, "applied": self.applied, "positions": list(self.positions.items())}

    def adopt(self, step: int, applied: list[str], positions: list[list[int]]) -> dict[str, Any]:
        """Take over another rank's model, in which what this one did last may be already."""
        self.step, self.applied, self.positions = step, applied, dict(positions)  # type: ignore[arg-type]
        if self.held:
            self.at = max(self.at, self.positions.get(self.held[0].ticket, 0))
            self.acknowledge()
        return {}

    def read(self, rank: int, world_size: int, most: int) -> dict[str, Any]:
        """Read some records of the shard in hand: what this rank brings to the next step."""
        more = True
        if not self.held:
            leased = self.ledger.lease(most)
            more = leased is not None
            self.held = leased or []
            self.at = self.held[0].start if self.held else 0
        records: list[str] = []
        if self.held:
            shard = self.held[0]
            end = min(self.at + most, records_of(shard.name))
            records = [f"{shard.epoch}/{shard.name}/{number}" for number in range(self.at, end)]
            self.position = Position(shard.ticket, end)
        return {"records": records, "vector": to_vector(self.position, rank, world_size), "more": more}

    def apply(self, step: int, records: list[str], vector: list[int]) -> None:
        """Finish a step as all ranks do, and only then acknowledge."""
        self.step, self.positions = step, from_vector(vector)
        self.applied = self.applied + records
        if self.held:
            self.at = self.positions[self.held[0].ticket]
            self.acknowledge()

    def acknowledge(self) -> None:
        shard = self.held[0]
        if self.at >= records_of(shard.name):
            self.ledger.ack([shard], self.step)
            del self.held[0]
            self.at = self.held[0].start if self.held else 0

    def save(self, path: str) -> dict[str, Any]:
        state = msgspec.to_builtins(self.ledger.commit(self.step, self.positions))
        part = Path(path).with_suffix(".part")
        part.write_text(json.dumps({"ledger": state, **self.tell()}))
        part.rename(path)
        return {}


def be_rank(end: socket.socket, redis_url: str, job: str, name: str) -> NoReturn:
    status = 1
    try:
        with BlockingLedger(redis_url, "chaos", job, worker=name, shards=SHARDS, plan=PLAN, wait_s=10) as ledger:
            status = serve(end, Rank(ledger))
    except BaseException:  # noqa: BLE001 - what would be shown if it did not end without ado
        traceback.print_exc()
    finally:
        os._exit(status)


def serve(end: socket.socket, rank: Rank) -> int:
    with end.makefile() as lines:
        try:
            for line in lines:
                order = json.loads(line)
                if order["do"] == "end":
                    return 0
                answer = rank.do(order)
                if answer is not None:
                    end.sendall(json.dumps(answer).encode() + b"\n")
            rank.ledger.lease()  # left behind; it does not know why
        except StaleGenerationError:
            return REFUSED
        except (LedgerMissingError, OSError):
            return 0
    return NOT_REFUSED


class Member:
    """A rank as the group sees it."""

    def __init__(self, name: str, redis_url: str, job: str, others: list[Member]) -> None:
        self.name = name
        end, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            for inherited in (end, *[other.end for other in others]):
                os.close(inherited.fileno())
            be_rank(theirs, redis_url, job, name)
        theirs.close()
        self.end: socket.socket = end
        end.settimeout(20)
        self.lines = end.makefile()

    def say(self, what: str, **order: Any) -> None:
        with contextlib.suppress(OSError):
            self.end.sendall(json.dumps({"do": what, **order}).encode() + b"\n")

    def answer(self) -> Any:
        try:
            line = self.lines.readline()
        except ConnectionError:
            line = ""
        if not line:
            raise Lost(self.name)
        return json.loads(line)

    def ask(self, what: str, **order: Any) -> Any:
        self.say(what, **order)
        return self.answer()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def bury(self) -> int:
        """Return how it ended, once its end of the line is closed."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
            self.lines.close()
        self.end.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Training:
    """One run: a group from its start to the end of its data, under faults that a seed draws."""

    def __init__(self, redis_url: str, folder: Path, seed: int, *, ack_only: bool) -> None:
        self.draw = random.Random(seed)
        self.redis_url = redis_url
        self.job = f"{seed}-{uuid.uuid4().hex[:6]}"
        self.folder = folder / self.job
        self.folder.mkdir(parents=True)
        self.ack_only = ack_only
        self.members: list[Member] = []
        self.stopped: list[Member] = []
        self.checkpoints: list[Path] = []
        self.generation = self.born = self.step = 0
        self.seen: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        try:
            self.start_over()
            applied = self.train()
        finally:
            for member in self.members + self.stopped:
                member.kill(signal.SIGKILL)
                member.bury()
        counted = Counter(applied)
        wanted = {
            f"{epoch}/{shard}/{number}"
            for epoch in range(PLAN.epochs)
            for shard in SHARDS
            for number in range(records_of(shard))
        }
        return {
            "missing": len(wanted - counted.keys()),
            "doubled": sum(counted.values()) - len(counted),
            **{
                what: self.seen[what]
                for what in ("deaths", "rollbacks", "saved ahead", "forgotten", "refused", "not refused")
            },
        }

    def train(self) -> list[str]:
        while True:
            try:
                if not self.make_step():
                    return self.members[0].ask("tell")["applied"]  # type: ignore[no-any-return]
                chance = self.draw.random()
                if chance < 0.03:
                    raise Lost("everybody")  # noqa: TRY301 - the one way to lose a group
                if chance > 0.97 and not self.ack_only:
                    self.make_redis_forget()
            except Lost as lost:
                if self.draw.random() < 0.15 or str(lost) == "everybody":
                    self.lose(self.members)
                self.regroup()

    def make_step(self) -> bool:
        """Make one step of all ranks, perhaps with a fault; return whether there was anything left to do."""
        fault = self.draw.choice(["kill", "kill late", "ahead", "stop", "grow"]) if self.draw.random() < 0.16 else ""
        victims = self.draw.sample(self.members, self.draw.randint(1, max(1, len(self.members) - 1)))
        if fault == "grow" and len(self.members) < MOST_RANKS:
            raise Lost("nobody")
        for rank, member in enumerate(self.members):
            member.say("read", rank=rank, world_size=len(self.members), most=self.draw.randint(1, 2))
        if fault == "kill":
            self.lose(victims)
            raise Lost(fault)
        answers = [member.answer() for member in self.members]
        if not any(answer["more"] for answer in answers):
            return False
        self.step += 1
        records = [record for answer in answers for record in answer["records"]]
        vector = [sum(places) for places in zip(*(answer["vector"] for answer in answers), strict=True)]
        for member in victims if fault == "ahead" else self.members:
            member.say("apply", step=self.step, records=records, vector=vector)
        if fault in {"kill late", "ahead", "stop"}:
            if self.draw.random() < 0.5:
                victims[0].ask("tell")  # so it has acknowledged what it finished
            if fault == "ahead" and self.draw.random() < 0.5:
                self.save(victims[0])  # of a step that no survivor has
                self.seen["saved ahead"] += 1
            self.lose(victims, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
            raise Lost(fault)
        if self.step % SAVE_EVERY_STEPS == 0:
            self.save(self.members[0])
        return True

    def make_redis_forget(self) -> None:
        """As if it had been restarted: no rank can go on, so the group starts over."""
        self.seen["forgotten"] += 1
        with redis.Redis.from_url(self.redis_url) as client:
            client.delete(*keys.of_ledger("chaos", self.job))

    def save(self, member: Member) -> None:
        path = self.folder / f"{self.generation:04}-{self.step:05}"
        member.ask("save", path=str(path))
        self.checkpoints.append(path)

    def lose(self, victims: list[Member], number: int = signal.SIGKILL) -> None:
        for member in list(victims):
            member.kill(number)
            self.members = [other for other in self.members if other is not member]
            self.seen["deaths"] += 1
            if number == signal.SIGSTOP:
                self.stopped.append(member)
            else:
                member.bury()

    def regroup(self) -> None:
        """Go on with whoever answers, from the model that is furthest; from a checkpoint when there is none."""
        self.generation += 1
        states: dict[str, Any] = {}
        for member in list(self.members):
            try:
                state = member.ask("tell")
                while "step" not in state:  # what it read for the step that failed
                    state = member.answer()
                states[member.name] = state
                member.ask("begin", generation=self.generation)
            except Lost:
                states.pop(member.name, None)
                self.lose([member])
        if not self.members:
            self.start_over()
            return
        furthest = max(states.values(), key=lambda state: state["step"])
        alive = [member.name for member in self.members]
        self.step = furthest["step"]
        self.members[0].ask("release", step=self.step, positions=furthest["positions"], alive=alive)
        self.grow()
        for member in self.members:
            member.ask("begin", generation=self.generation)
            member.ask("adopt", **furthest)
        self.wake_the_left_behind()

    def start_over(self) -> None:
        """Begin with new processes and the newest checkpoint, or the one before when that is said to be torn."""
        self.seen["rollbacks"] += self.generation > 0
        self.generation += 1
        if len(self.checkpoints) > 1 and self.draw.random() < 0.2:
            self.checkpoints.pop()
        saved = json.loads(self.checkpoints[-1].read_text()) if self.checkpoints else None
        state = saved.pop("ledger") if saved else None
        self.grow()
        if self.ack_only and self.generation > 1:
            self.members[0].ask("begin", generation=self.generation)
            self.members[0].ask("release", step=1 << 40, positions=[], alive=[])
        else:
            self.members[0].ask("restore", generation=self.generation, state=state)
        self.step = saved["step"] if saved else 0
        for member in self.members:
            member.ask("begin", generation=self.generation)
            member.ask("adopt", **(saved or {"step": 0, "applied": [], "positions": []}))
        self.wake_the_left_behind()

    def grow(self) -> None:
        for _ in range(self.draw.randint(0 if self.members else 1, MOST_RANKS - len(self.members))):
            self.born += 1
            member = Member(f"rank-{self.born}", self.redis_url, self.job, self.members + self.stopped)
            self.members.append(member)

    def wake_the_left_behind(self) -> None:
        """Let those that were stopped, and are of an older generation now, try to go on."""
        for member in self.stopped:
            member.kill(signal.SIGCONT)
            status = member.bury()
            self.seen["refused"] += status == REFUSED
            self.seen["not refused"] += status == NOT_REFUSED
        self.stopped = []


def main() -> None:
    ack_only = "--ack-only" in sys.argv
    gc.freeze()  # children leave the memory alone that they share
    redis_url, folder, *seeds = [argument for argument in sys.argv[1:] if argument != "--ack-only"]
    for seed in map(int, seeds):
        result = Training(redis_url, Path(folder), seed, ack_only=ack_only).run()
        print(json.dumps({"seed": seed, **result}), flush=True)  # noqa: T201 - what is asked of it


if __name__ == "__main__":
    main()
