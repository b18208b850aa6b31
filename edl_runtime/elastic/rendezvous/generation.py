"""Who trains together: the records that agents agree on through Redis. `planner` decides on them.

Times are seconds of the group's clock. It starts as Redis's Unix time and never goes back; while no agent sends
heartbeats, because Redis is away or all are stopped, it stands still, so that no lease runs out meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from edl_runtime.elastic.comm.agent_protocol import Gear


class TrainerMember(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's agent, as it registers itself with each beat.

    - `id`: "INDEX-BOOT": the instance's number in its job, and a word that is new with each start of its agent.
    - `host`, `store_port`, `trainer_port`: where its trainer listens when it is rank 0, and what a script of
      `paddle.distributed` takes for its own endpoint.
    - `ready`: its trainer is loaded and can be, or is, in a generation. `leaving`: it has been told to go.
    - `elastic`: its script is known to join generations by itself, so those of all instances do.
    - `called`: its trainer has called `elastic.init`. `uncalled_since`: since when, by the group's clock, the script of
      its trainer runs that is to call it and has not; 0 where there is none.
    - `live`: its trainer can go on to the next generation by itself. `standby`: another process is loaded.
    - `gear`: the fastest gear that the job's owner allows.
    - `up`: the last generation that its trainer was up in, 0 for none: a new trainer has been in none.
    - `lost`: the last generation that a trainer of it fell out of: it ended in it, or on the way to it.
    - `failures`: how many generations in a row its trainers did not come up in.
    - `step`: its trainer's last step, 0 for none, as it is told a few times a second. `waits_for`: the step at whose
      end, or before which, it waits for other ranks, 0 while it computes.
    - `moves`: how many pieces of state its trainer has read, written, given or taken, as it said last.
    - `advanced`: since the last beat there were more of them, or its trainer has yet to end a step, or to leave with a
      checkpoint, before the generation that counts.
    - `comm_failed`: the last generation whose communication has failed its trainer; `step` then is where that stands.
    - `stepped`: the last generation in which its trainer finished a step; `pause_s`: from the end of the last step
      before that generation, of this instance's trainer then, to the end of the first step in it, by this instance's
      clock; None when it had not trained before. `paused_in`: the generation of that last step.
    - `keeps`: its trainer keeps checkpoints, so that another can go on with its state.
    - `done`: its trainer has trained all there is, as have all others that train, or the one before it had (`up` is 0
      then); `finished`: and its script has ended.
    - `seen`: the highest generation that it knows of, also from checkpoints; a new number is above.
    - `fence`: from Redis, larger than those of all who registered before. Kept for as long as the agent lives.
    """

    id: str
    index: int
    host: str = "127.0.0.1"
    store_port: int = 0
    trainer_port: int = 0
    ready: bool = False
    leaving: bool = False
    elastic: bool = False
    called: bool = False
    uncalled_since: float = 0.0
    live: bool = False
    standby: bool = False
    gear: Gear = "live"
    up: int = 0
    lost: int = 0
    failures: int = 0
    step: int = 0
    comm_failed: int = 0
    waits_for: int = 0
    moves: int = 0
    advanced: bool = False
    stepped: int = 0
    pause_s: float | None = None
    paused_in: int = 0
    keeps: bool = True
    done: bool = False
    finished: bool = False
    seen: int = 0
    fence: int = 0

    @property
    def status(self) -> MemberStatus:
        """What others make of it."""
        if self.finished:
            return "finished"
        if self.leaving:
            return "leaving"
        return "ready" if self.ready else "loading"


MemberStatus = Literal["loading", "ready", "leaving", "finished"]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One membership of a trainer group. A member's rank is its place in `members` (ids).

    - `store`: "host:port" where rank 0 listens. `token`: by which its trainers know each other there; a secret.
    - `endpoints`: those of all ranks, for scripts of `paddle.distributed`.
    - `writer`: id of the member whose trainer writes a checkpoint before it makes room for its next one, "" if none.
    - `reason`: why there is a new one, in words.
    - `after`: the number of the one before, 0 for none.
    - `attempt`: how many before it, in a row, did not form. Each makes agents more patient with the next.
    - `setbacks`: how many before it, in a row, lost a member before they got anywhere. Each makes the next wait longer.
    - `barred`: ids that are left out for not having come up, until they have another trainer.
    """

    number: int
    members: tuple[str, ...]
    store: str
    endpoints: tuple[str, ...]
    gear: Gear
    reason: str
    proposed_by: str
    proposed_at: float
    writer: str = ""
    after: int = 0
    attempt: int = 0
    setbacks: int = 0
    barred: tuple[str, ...] = ()
    token: str = ""


class MemberLease(msgspec.Struct, frozen=True, kw_only=True):
    """A member as Redis has it.

    - `deadline`: when its lease runs out, unless it beats before.
    - `heartbeat_at`: when it last did.
    - `since`: since when its standing is what it is, or its trainer's fall the last.
    """

    member: TrainerMember
    deadline: float
    heartbeat_at: float
    since: float


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """That some member of `generation` may be dead, for the collectives of `by` have failed: why, and since when."""

    generation: int
    by: str
    reason: str
    since: float


class JobOutcome(msgspec.Struct, frozen=True):
    """How the job has ended, and why in words."""

    kind: Literal["done", "stopped", "failed"]
    reason: str = ""


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """All that Redis knows of a job's trainers in one moment.

    - `members`: those with a lease, by fence.
    - `granted`: members of the generation who have yet to come back to a Redis that was emptied, id → until when they
      are waited for.
    - `number`: the highest generation that there has been, also of earlier runs of the job.
    - `generation`: the one that counts, None before the first; `state`: whether all its members are up, or were once;
      `since`: since when it is in that state, and while it forms, since when none of its members has come on.
    - `resumed`: all its members have finished a step in it.
    - `stretch`: how many times longer than agreed all leases last, since most members renew theirs late.
    - `finished`: ids of those whose trainers have trained all there is, also in generations before; `left`: of its
      members who have gone as planned.
    - `suspicion`: that of this generation, if any.
    - `stop`: why the job is to end with a checkpoint, None while it is not.
    - `outcome`: how it has ended, None while it has not.
    - `quiet_until`: till then nothing is decided, for agents may yet come who know more than Redis.
    """

    now: float
    members: tuple[MemberLease, ...] = ()
    granted: Mapping[str, float] = {}
    number: int = 0
    generation: Generation | None = None
    state: Literal["forming", "active"] = "forming"
    since: float = 0.0
    resumed: bool = False
    stretch: float = 1.0
    finished: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    suspicion: Suspicion | None = None
    stop: str | None = None
    outcome: JobOutcome | None = None
    quiet_until: float = 0.0

    def find(self, member_id: str) -> MemberLease | None:
        """Return the member of this id, None when it has no lease."""
        return next((each for each in self.members if each.member.id == member_id), None)

    def rank(self, member_id: str) -> int | None:
        """Return the member's rank in the generation that counts, None when it is not in it."""
        members = self.generation.members if self.generation else ()
        return members.index(member_id) if member_id in members else None
