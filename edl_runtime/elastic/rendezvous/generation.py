"""The records that agents share through Redis, and which of a generation's members are present, lost or new. Pure.

Times are seconds of the group's clock. It starts as Redis's Unix time and never goes back; while no agent sends
heartbeats, because Redis is unavailable or all are stopped, it stands still, so that no lease expires meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    - `compute_s`: how long its worker computes in a step of its generation, without the wait for other ranks; 0 while
      unknown. `slow`: how many times as long as its peers, if that is long and has been for long; else 0.
    - `keeps`: its worker keeps checkpoints, so that another can restore its state.
    - `saving`: the number of the request for a checkpoint that its worker is to answer, or answers; 0 for none.
    - `unsaved`: why its worker can't write the last checkpoint, which it tries again; empty otherwise.
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
    compute_s: float = 0.0
    slow: float = 0.0
    keeps: bool = True
    saving: int = 0
    unsaved: str = ""
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


FIRST_TO_ACT = 3


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
    - `checkpoint_asked`: the number of the last request for a checkpoint, 0 for none, made in generation
      `checkpoint_asked_in`; `checkpoint_answered`: of the last that was answered.
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
    checkpoint_asked: int = 0
    checkpoint_asked_in: int = 0
    checkpoint_answered: int = 0
    quiet_until: float = 0.0

    def find(self, member_id: str) -> MemberLease | None:
        """Return the member with this id, None without a lease."""
        return next((each for each in self.members if each.member.id == member_id), None)

    def acts_first(self, member_id: str) -> bool:
        """Whether this member decides at once what is next: the first few do, the others only if these don't.

        Else all of a large group would decide, and propose, the same at the same moment.
        """
        return member_id in {each.member.id for each in self.members[:FIRST_TO_ACT]}

    def rank(self, member_id: str) -> int | None:
        """Return the member's rank in the current generation, None when it is not in it."""
        members = self.generation.members if self.generation else ()
        return members.index(member_id) if member_id in members else None


# Participants: who of a generation is present, lost and why, and new


MAX_DOUBLINGS = 4


class LossReason(msgspec.Struct, frozen=True):
    """Why members are not in their generation any more, for one and for several. `planned`: they have left."""

    one: str
    many: str
    planned: bool = False

    def of(self, ids: Sequence[str]) -> str:
        """Return the sentence about these members."""
        return (self.one if len(ids) == 1 else self.many).format(name_instances(ids))


LEFT = LossReason("{} has left", "{} have left", planned=True)
RESTARTED = LossReason("{} was restarted", "{} were restarted")
GONE = LossReason("{} is gone", "{} are gone")
REJOINS = LossReason("the worker of {} joins again", "the workers of {} join again")
ENDED = LossReason("the worker of {} has ended", "the workers of {} have ended")
SILENT = LossReason("{} does not respond", "{} do not respond")


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long agents wait, in seconds.

    - `join_settle_s`, `leave_settle_s`: for others that join or leave at the same time.
    - `confirm_s`: for a heartbeat of a member that may be dead.
    - `join_limit_s`: for progress of a generation that forms; doubled with each that did not form in a row, up to 16
      times.
    - `retry_s`: until a member whose worker failed to enter is added again to others that train; doubled likewise.
    - `standby_s`: for the standbys of those that train, before a member is added in the slowest gear.
    - `report_s`: for the survivors of a loss to report their step.
    - `setback_s`: from one generation to the next once two in a row have lost a member before they made progress;
      doubled with each more, up to 16 times.
    - `init_s`: for a script to call `elastic.init`, until an event reports that no instance has: its imports take
      seconds.
    - `plain_s`: how long a generation of plain scripts, which report no steps, has to be up to have made progress.
    """

    join_settle_s: float = 0.3
    leave_settle_s: float = 0.1
    confirm_s: float = 1.0
    join_limit_s: float = 20.0
    retry_s: float = 10.0
    standby_s: float = 15.0
    report_s: float = 1.0
    setback_s: float = 3.0
    init_s: float = 10.0
    plain_s: float = 60.0

    def limit_s(self, generation: Generation) -> float:
        """How long this generation may form without progress."""
        return doubled(self.join_limit_s, generation.attempt)

    def apart_s(self, setbacks: int) -> float:
        """How long after a generation the next comes at the earliest, after so many setbacks in a row."""
        return doubled(self.setback_s, setbacks - 2) if setbacks > 1 else 0.0

    def stretched(self, by: float) -> Timeouts:
        """Return these for a group whose agents are late: waits for their reports last so many times longer."""
        return msgspec.structs.replace(
            self, confirm_s=by * self.confirm_s, report_s=by * self.report_s, join_limit_s=by * self.join_limit_s
        )


DEFAULT_TIMEOUTS = Timeouts()


class Participants(msgspec.Struct, frozen=True, kw_only=True):
    """The current generation's members: who stays, who is `lost` and why, and who may return (`away`).

    - `late`: did not enter in time and stay anyway. `newcomers`: ready and not in it, or with another worker.
    - `overdue`: it forms and has made no progress for too long. `broken`: a member lost the connection to the others.
    - `over`: members have trained everything: those whose script still runs are `done`, and not lost.
    - `never_forms`: it is over before it has formed: who trained before stays, and nobody joins.
    """

    stay: list[MemberLease]
    late: list[MemberLease]
    lost: Mapping[str, LossReason]
    silent: list[str]
    away: list[str]
    newcomers: list[MemberLease]
    excluded: tuple[str, ...]
    forming: bool
    overdue: bool
    broken: bool
    done: list[MemberLease]
    over: bool
    never_forms: bool

    @property
    def urgent(self) -> bool:
        """Whether the generation can't continue."""
        return bool(self.lost) or self.overdue or self.broken or self.never_forms

    @property
    def failed(self) -> bool:
        """Whether something went wrong, and was not planned."""
        return self.overdue or self.broken or any(not each.planned for each in self.lost.values())

    @property
    def leaves(self) -> bool:
        """Whether a member has left, or was told to."""
        left = any(each.planned for each in self.lost.values())
        return left or any(each.member.leaving for each in self.stay)


def assess_participants(view: GroupView, timeouts: Timeouts) -> Participants:
    """Return the state of the current generation, and who else could be in the next."""
    current = view.generation
    members = current.members if current else ()
    known = {each.member.id: each for each in view.members}
    forming = current is not None and view.state == "forming"
    over = is_training_over(view)
    never_forms = over and forming
    done = [
        known[each]
        for each in members
        if each in known and has_finished_training(known[each]) and each not in view.finished
    ]
    ids = [each for each in members if each not in view.finished and known.get(each) not in done]
    lost = {each: why for each in ids if (why := _loss_reason(view, each, known.get(each), timeouts))}
    if never_forms:  # who is lost then changes nothing
        lost = {}
    stay = {each: known[each] for each in ids if each in known and each not in lost}
    if never_forms:
        stay = {each: there for each, there in stay.items() if has_trained(there)}
    suspected_at = view.suspicion.since if view.suspicion else -math.inf
    overdue = current is not None and forming and not never_forms and view.now >= view.since + timeouts.limit_s(current)
    excluded = {each for each, there in known.items() if _is_excluded(view, there)}
    closed = view.stop is not None or never_forms or (over and bool(stay))
    come = [] if closed else [known[each] for each in known if each not in {*stay, *excluded}]
    return Participants(
        stay=list(stay.values()),
        late=[each for each in stay.values() if current and overdue and each.member.up < current.number],
        lost=lost,
        silent=[each for each, there in stay.items() if there.heartbeat_at < suspected_at],
        away=[each for each in ids if each in view.granted and each not in known],
        newcomers=[
            each
            for each in come
            if each.member.status == "ready" and not each.member.up and each.heartbeat_at >= suspected_at
        ],
        excluded=tuple(sorted(excluded)),
        forming=forming,
        overdue=overdue,
        broken=view.suspicion is not None,
        done=done,
        over=over,
        never_forms=never_forms,
    )


def is_training_over(view: GroupView) -> bool:
    """Whether members of the current generation, and so all that train with them, have trained everything.

    Plain scripts report that only when they end, each for itself.
    """
    done = view.finished | {each.member.id for each in view.members if each.member.done}
    elastic = any(each.member.elastic for each in view.members)
    return elastic and view.generation is not None and not done.isdisjoint(view.generation.members)


def has_finished_training(there: MemberLease) -> bool:
    """Whether its script has trained everything, and still runs."""
    return there.member.done and bool(there.member.up)


def has_trained(there: MemberLease) -> bool:
    """Whether it has the state, or had it when everything was trained."""
    return bool(there.member.up) or there.member.done


def _loss_reason(view: GroupView, member_id: str, there: MemberLease | None, timeouts: Timeouts) -> LossReason | None:
    """Return why a member of the generation is not in it any more, None for one that is."""
    number = view.generation.number if view.generation else 0
    if there is None:
        if member_id in view.left:
            return LEFT
        if any(each.member.index == instance_index(member_id) for each in view.members):
            return RESTARTED
        return None if member_id in view.granted else GONE
    member = there.member
    active = view.state == "active"  # before that workers are replaced as planned, unless their instance leaves
    out = active and member.up < number
    if member.lost >= number or out or (not member.ready and (active or member.leaving)):
        what = REJOINS if out and member.lost < number else ENDED
        return LEFT if member.leaving else what
    suspicion = view.suspicion
    if suspicion and there.heartbeat_at < suspicion.since and view.now >= suspicion.since + timeouts.confirm_s:
        return SILENT
    return None


def _is_excluded(view: GroupView, there: MemberLease) -> bool:
    """Whether it failed to enter the last generation that it was in, and still has the same worker."""
    current = view.generation
    return current is not None and there.member.id in current.excluded and there.since <= current.proposed_at


def doubled(seconds: float, times: int) -> float:
    """Return the seconds, doubled so many times, up to a limit."""
    return seconds * float(2 ** min(times, MAX_DOUBLINGS))


def instance_index(member_id: str) -> int:
    """Return the instance number in an agent's id."""
    return int(member_id.partition("-")[0])


def name_instances(ids: Iterable[str], one: str = "", many: str = "") -> str:
    """Name instances: "instance 2", "instances 0, 2 and 3"; with a verb for one or many of them."""
    *others, last = map(str, sorted(map(instance_index, ids)))
    if others:
        return f"instances {', '.join(others)} and {last} {many}".rstrip()
    return f"instance {last} {one}".rstrip()
