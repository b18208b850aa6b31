"""Who of a generation is there, who is lost and why, and who is new: the first step of `planner`. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from edl_runtime.elastic.rendezvous.generation import Generation, GroupView, MemberLease

MAX_DOUBLINGS = 4


class LossReason(msgspec.Struct, frozen=True):
    """Why members are not in their generation any more, in words for one and for many. `planned`: they have left."""

    one: str
    many: str
    planned: bool = False

    def of(self, ids: Sequence[str]) -> str:
        """Return the sentence about these members."""
        return (self.one if len(ids) == 1 else self.many).format(name_instances(ids))


LEFT = LossReason("{} has left", "{} have left", planned=True)
RESTARTED = LossReason("{} was started anew", "{} were started anew")
GONE = LossReason("{} is gone", "{} are gone")
REJOINS = LossReason("the trainer of {} joins anew", "the trainers of {} join anew")
ENDED = LossReason("the trainer of {} has ended", "the trainers of {} have ended")
SILENT = LossReason("{} does not answer", "{} do not answer")


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long agents wait for what, in seconds.

    - `join_settle_s`, `leave_settle_s`: for others who come or go at the same time.
    - `confirm_s`: for a member to beat after somebody suspected it.
    - `join_limit_s`: for a generation that forms to come on; twice as long with each that did not in a row, up to 16
      times.
    - `retry_s`: until a member whose trainer did not come up is added again to others who train; doubled likewise.
    - `standby_s`: for the standbys of those who train, before somebody is added in the slowest gear.
    - `say_s`: for the survivors of a loss to say at which step they stand.
    - `setback_s`: from one generation to the next once two in a row have lost a member before they got anywhere;
      doubled with each more, up to 16 times.
    - `init_s`: for a script to call `elastic.init`, until it is told that no instance has. Before that it imports what
      it needs, which takes seconds on a busy machine, though Paddle is loaded before. Loading data may take longer.
    - `plain_s`: how long a generation of scripts that tell of no steps has to be up to have got somewhere.
    """

    join_settle_s: float = 0.3
    leave_settle_s: float = 0.1
    confirm_s: float = 1.0
    join_limit_s: float = 20.0
    retry_s: float = 10.0
    standby_s: float = 15.0
    say_s: float = 1.0
    setback_s: float = 3.0
    init_s: float = 10.0
    plain_s: float = 60.0

    def limit_s(self, generation: Generation) -> float:
        """How long nothing may come of this generation while it forms."""
        return doubled(self.join_limit_s, generation.attempt)

    def apart_s(self, setbacks: int) -> float:
        """How long after a generation the next comes at the soonest, after so many setbacks in a row."""
        return doubled(self.setback_s, setbacks - 2) if setbacks > 1 else 0.0

    def stretched(self, by: float) -> Timeouts:
        """Return these for a group whose agents are late to say anything: so many times longer waits for their word."""
        return msgspec.structs.replace(
            self, confirm_s=by * self.confirm_s, say_s=by * self.say_s, join_limit_s=by * self.join_limit_s
        )


DEFAULT_TIMEOUTS = Timeouts()


class Participants(msgspec.Struct, frozen=True, kw_only=True):
    """The present generation's members: those who `stay`, those `lost` and why, and those nobody can tell of yet.

    `late` ones did not come up in time and stay all the same. `newcomers` are ready and not in it, or have another
    trainer. It is `overdue` when it forms and for too long nothing has come of it, and `broken` when somebody lost the
    others. The training is `over` when members have trained all there is: those whose script still runs are `done`, and
    no loss any more. It is `moot` when it has yet to form then, so never will: who trained before stays, and nobody
    joins.
    """

    stay: list[MemberLease]
    late: list[MemberLease]
    lost: Mapping[str, LossReason]
    silent: list[str]
    away: list[str]
    newcomers: list[MemberLease]
    barred: tuple[str, ...]
    forming: bool
    overdue: bool
    broken: bool
    done: list[MemberLease]
    over: bool
    moot: bool

    @property
    def urgent(self) -> bool:
        """Whether the generation can't go on."""
        return bool(self.lost) or self.overdue or self.broken or self.moot

    @property
    def failed(self) -> bool:
        """Whether that is since something went wrong, and not as planned."""
        return self.overdue or self.broken or any(not each.planned for each in self.lost.values())

    @property
    def leaves(self) -> bool:
        """Whether a member has left, or was told to."""
        left = any(each.planned for each in self.lost.values())
        return left or any(each.member.leaving for each in self.stay)


def assess_participants(view: GroupView, timeouts: Timeouts) -> Participants:
    """Return how the present generation stands, and who else could be in the next."""
    current = view.generation
    members = current.members if current else ()
    known = {each.member.id: each for each in view.members}
    forming = current is not None and view.state == "forming"
    over = is_training_over(view)
    moot = over and forming
    done = [
        known[each]
        for each in members
        if each in known and has_finished_training(known[each]) and each not in view.finished
    ]
    ids = [each for each in members if each not in view.finished and known.get(each) not in done]
    lost = {} if moot else {each: why for each in ids if (why := _loss_reason(view, each, known.get(each), timeouts))}
    stay = {each: known[each] for each in ids if each in known and each not in lost}
    if moot:
        stay = {each: there for each, there in stay.items() if has_trained(there)}
    suspected_at = view.suspicion.since if view.suspicion else -math.inf
    overdue = current is not None and forming and not moot and view.now >= view.since + timeouts.limit_s(current)
    barred = {each for each, there in known.items() if _is_barred(view, there)}
    closed = view.stop is not None or moot or (over and bool(stay))
    come = [] if closed else [known[each] for each in known if each not in {*stay, *barred}]
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
        barred=tuple(sorted(barred)),
        forming=forming,
        overdue=overdue,
        broken=view.suspicion is not None,
        done=done,
        over=over,
        moot=moot,
    )


def is_training_over(view: GroupView) -> bool:
    """Whether members of the present generation have trained all there is, and so have all who train with them.

    Plain scripts do not tell before they end, and then of themselves only.
    """
    done = view.finished | {each.member.id for each in view.members if each.member.done}
    elastic = any(each.member.elastic for each in view.members)
    return elastic and view.generation is not None and not done.isdisjoint(view.generation.members)


def has_finished_training(there: MemberLease) -> bool:
    """Whether its script has trained all there is, and still runs."""
    return there.member.done and bool(there.member.up)


def has_trained(there: MemberLease) -> bool:
    """Whether it has the state, or had it when all was trained."""
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
    active = view.state == "active"  # before, trainers are replaced as planned, but for those of who leaves
    out = active and member.up < number
    if member.lost >= number or out or (not member.ready and (active or member.leaving)):
        what = REJOINS if out and member.lost < number else ENDED
        return LEFT if member.leaving else what
    suspicion = view.suspicion
    if suspicion and there.heartbeat_at < suspicion.since and view.now >= suspicion.since + timeouts.confirm_s:
        return SILENT
    return None


def _is_barred(view: GroupView, there: MemberLease) -> bool:
    """Whether it did not come up when last it was to, and still has the trainer of then."""
    current = view.generation
    return current is not None and there.member.id in current.barred and there.since <= current.proposed_at


def doubled(seconds: float, timeouts: int) -> float:
    """Return so many seconds, doubled so many times, up to a limit."""
    return seconds * float(2 ** min(timeouts, MAX_DOUBLINGS))


def instance_index(member_id: str) -> int:
    """Return the number of the instance whose agent has this id."""
    return int(member_id.partition("-")[0])


def name_instances(ids: Iterable[str], one: str = "", many: str = "") -> str:
    """Name instances: "instance 2", "instances 0, 2 and 3"; with a verb for one or many of them."""
    *others, last = map(str, sorted(map(instance_index, ids)))
    if others:
        return f"instances {', '.join(others)} and {last} {many}".rstrip()
    return f"instance {last} {one}".rstrip()
