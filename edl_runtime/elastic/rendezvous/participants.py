"""Who of a generation is present, lost and why, and new: the first step of `planner`. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from edl_runtime.elastic.rendezvous.generation import Generation, GroupView, MemberLease

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
    - `say_s`: for the survivors of a loss to report their step.
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
    say_s: float = 1.0
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
            self, confirm_s=by * self.confirm_s, say_s=by * self.say_s, join_limit_s=by * self.join_limit_s
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


def doubled(seconds: float, timeouts: int) -> float:
    """Return the seconds, doubled so many times, up to a limit."""
    return seconds * float(2 ** min(timeouts, MAX_DOUBLINGS))


def instance_index(member_id: str) -> int:
    """Return the instance number in an agent's id."""
    return int(member_id.partition("-")[0])


def name_instances(ids: Iterable[str], one: str = "", many: str = "") -> str:
    """Name instances: "instance 2", "instances 0, 2 and 3"; with a verb for one or many of them."""
    *others, last = map(str, sorted(map(instance_index, ids)))
    if others:
        return f"instances {', '.join(others)} and {last} {many}".rstrip()
    return f"instance {last} {one}".rstrip()
