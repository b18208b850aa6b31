"""The records that agents share through Redis: members, generations, and the view of the whole group.

Times are seconds of the group's clock. It starts as Redis's Unix time and never goes back; while no agent sends
heartbeats, because Redis is unavailable or all are stopped, it stands still, so that no lease expires meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from edl_runtime.elastic.comm.agent_protocol import Gear


class TrainerMember(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's agent, as it registers itself with each heartbeat.

    - `id`: "INDEX-BOOT": the instance's number in its job, and a random suffix for each start of its agent.
    - `host`, `store_port`, `trainer_port`: where its worker listens as rank 0, and the endpoint of plain scripts.
    - `ready`: its worker can be, or is, in a generation. `leaving`: it has been told to leave.
    - `elastic`: its script is known to join generations by itself, so those of all instances do.
    - `called`: its worker has called `elastic.init`. `uncalled_since`: since when its script runs that has to and has
      not; 0 otherwise.
    - `live`: its worker can enter the next generation by itself. `standby`: another process is loaded.
    - `gear`: the fastest gear that the job's owner allows.
    - `up`: the last generation that its worker has entered, 0 for none.
    - `lost`: the last generation that a worker of it failed in, or on the way to.
    - `failures`: how many generations in a row its workers failed to enter.
    - `step`: its worker's last step, 0 for none, a few times a second. `waits_for`: the step at which it waits for
      other ranks, 0 while it computes.
    - `moves`: how many pieces of state its worker has read, written, sent or received. `advanced`: more of them since
      the last heartbeat, or its worker is still busy before it comes to the current generation.
    - `comm_failed`: the last generation whose communication failed its worker, which is at `step` then.
    - `stepped`: the last generation in which its worker finished a step; `pause_s`: between the last step before that
      generation, in generation `paused_in`, and the first in it, by this instance's clock; None without one before.
    - `keeps`: its worker keeps checkpoints, so that another can restore its state.
    - `done`: its worker, or the one before it (`up` is 0 then), has trained everything, as have all others that train;
      `finished`: and its script has ended.
    - `seen`: the highest generation that it knows of, also from checkpoints; a new number is above.
    - `fence`: from Redis, larger than those of all who registered before; kept for as long as the agent lives.
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
        """The status that other members see."""
        if self.finished:
            return "finished"
        if self.leaving:
            return "leaving"
        return "ready" if self.ready else "loading"


MemberStatus = Literal["loading", "ready", "leaving", "finished"]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One membership of a training group. A member's rank is its index in `members` (ids).

    - `store`: "host:port" where rank 0 listens. `token`: secret of its workers.
    - `endpoints`: of all ranks, for scripts of `paddle.distributed`.
    - `writer`: id of the member whose worker writes a checkpoint before it is replaced, "" if none.
    - `reason`: why there is a new one. `after`: the number of the one before, 0 for none.
    - `attempt`: how many before it, in a row, did not form. Each doubles the time limit of the next.
    - `setbacks`: how many before it, in a row, lost a member before they made progress. Each delays the next longer.
    - `excluded`: ids that are excluded for not having entered, until they have another worker.
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
    excluded: tuple[str, ...] = ()
    token: str = ""


class MemberLease(msgspec.Struct, frozen=True, kw_only=True):
    """A member as Redis has it.

    `deadline`: when its lease expires. `heartbeat_at`: of the last one. `since`: when its status last changed, or its
    worker failed.
    """

    member: TrainerMember
    deadline: float
    heartbeat_at: float
    since: float


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """Some member of `generation` may be dead, because the communication of member `by` has failed."""

    generation: int
    by: str
    reason: str
    since: float


class JobOutcome(msgspec.Struct, frozen=True):
    """How the job has ended, and why."""

    kind: Literal["done", "stopped", "failed"]
    reason: str = ""


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """All that Redis knows of a job's group at one moment.

    - `members`: those with a lease, by fence.
    - `granted`: members of the generation that have yet to return to a Redis that lost its data, id → until when.
    - `number`: the highest generation ever, that of earlier runs of the job included.
    - `generation`: the current one, None before the first. `state`: "active" once all its members have entered it.
      `since`: when that state began; while it forms, when a member last made progress.
    - `resumed`: all its members have finished a step in it.
    - `stretch`: how many times longer all leases last, because most members renew theirs late.
    - `finished`: ids of those whose workers have trained everything, in any generation; `left`: of its members that
      have left as planned.
    - `suspicion`: of this generation, if any.
    - `stop`: why the job has to end with a checkpoint, None if it has not.
    - `outcome`: how it has ended, None while it has not.
    - `quiet_until`: no decisions until then, because agents may return that know more than Redis.
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
        """Return the member with this id, None without a lease."""
        return next((each for each in self.members if each.member.id == member_id), None)

    def rank(self, member_id: str) -> int | None:
        """Return the member's rank in the current generation, None when it is not in it."""
        members = self.generation.members if self.generation else ()
        return members.index(member_id) if member_id in members else None
