"""What an agent does with its trainer, as a function of what the group has agreed on and of what the trainer has said.

A generation is entered *live* by the trainer that is there, *warm* by the standby after it has left, *cold* by a new
process. A plain script is started anew for each generation in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from edl_runtime.elastic.generation import Generation, GroupView
from edl_runtime.elastic.messages import Abort, Gear, Join, Leave, ToTrainer

LET_GO_S = 2.0
"""How long a trainer may take to leave when nobody trains with it any more."""

PLAIN_LEAVE_S = 5.0
"""How long a plain script may take to write what it wants to after SIGTERM."""

LONGEST_LEAVE_S = 60.0
"""How long a trainer may take to leave at the end of a step that others take part in; from the last part of a
checkpoint that it has written, if any."""

ALONE_AFTER_S = 2.0
"""After so long without a generation that does without it, an instance that was told to go goes all the same."""

GRACE_SHARE = 0.8
"""What of an instance's grace its trainer has; the rest is for its agent."""

SPARE_AFTER_S = 1.0
"""How long a trainer is up before a standby for the next is begun: till then it has enough to do."""

Phase = Literal["absent", "loading", "loaded", "starting", "ready", "member", "leaving", "done"]


class Mine(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of its own trainer.

    - `phase`: loading what its script imports; loaded; starting, up to where an elastic script can join; ready to do
      so; a member of a generation, or on its way; told to leave; done with all there is to train.
    - `since`: when that began; of one that leaves, when it last wrote a part of its checkpoint.
    - `told`: the generation that it was last told to be in, and `peers` its members; 0 for none.
    - `up`: the last that it was up in; `fallen`: the last whose communication has failed it.
    - `aborted`: the last that it was told to let go of.
    - `left`: it has said that it leaves, and only its end is still to come.
    - `spare`: how far its standby is; one that failed is not replaced before it is missed.
    """

    phase: Phase = "absent"
    since: float = 0.0
    told: int = 0
    peers: tuple[str, ...] = ()
    up: int = 0
    fallen: int = 0
    aborted: int = 0
    left: bool = False
    spare: Literal["absent", "loading", "loaded", "failed"] = "absent"

    @property
    def trains(self) -> bool:
        """Whether it is in a generation that works, as far as it knows."""
        return self.phase == "member" and self.up > self.fallen


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """Whose trainer it is, and what is wished of this instance.

    - `elastic`: its script joins generations by itself. `gear`: the fastest that the job's owner allows.
    - `instances`: most that the job may have.
    - `leaving_since`: when it was told to go, None while it is not; it has `grace_s` from then on.
    - `exclusive`: a trainer needs a device that the one before has to have let go of.
    - `finished`: its trainer has trained all there is and has ended.
    """

    member: str
    elastic: bool
    gear: Gear = "live"
    instances: int = 1
    leaving_since: float | None = None
    grace_s: float = 10.0
    exclusive: bool = False
    finished: bool = False


class Begin(msgspec.Struct, frozen=True):
    """Make the standby the trainer; without one, or with `fresh` since a standby did not do, a new process."""

    fresh: bool = False


class Spare(msgspec.Struct, frozen=True):
    """Begin a standby."""


class Retire(msgspec.Struct, frozen=True):
    """Let the trainer end by itself, and have room for the next."""


class Run(msgspec.Struct, frozen=True):
    """Start the script: for this generation if it is plain."""

    generation: Generation | None = None


class Tell(msgspec.Struct, frozen=True):
    """Say this to the trainer."""

    message: ToTrainer
    generation: Generation | None = None


class Terminate(msgspec.Struct, frozen=True):
    """Ask a plain script to end."""


class Kill(msgspec.Struct, frozen=True):
    """End the trainer at once. `planned`: it is nobody's failure."""

    why: str
    planned: bool = True


Order = Begin | Spare | Retire | Run | Tell | Terminate | Kill


def orders(mine: Mine, post: Post, view: GroupView, now: float) -> list[Order]:
    """Return what to do now; nothing of it is to be done again once `mine` says that it has been."""
    return [*_about_losses(mine, view), *_about_trainer(mine, post, view, now), *_about_spare(mine, post, view, now)]


def _about_losses(mine: Mine, view: GroupView) -> Iterator[Order]:
    """Let a trainer go that may wait for somebody who is gone: no communication outlives one of its members."""
    if mine.phase not in ("member", "leaving"):
        return
    suspected = view.suspicion.generation if view.suspicion else 0
    broken = mine.told if mine.told == suspected or any(_is_gone(view, peer, mine.told) for peer in mine.peers) else 0
    if broken > max(mine.aborted, mine.fallen):
        yield Tell(Abort(generation=broken))


def _is_gone(view: GroupView, peer: str, generation: int) -> bool:
    there = view.find(peer)
    if there is None:
        return peer not in view.granted and peer not in view.left and peer not in view.finished
    return there.member.lost >= generation


def _stays(view: GroupView, peer: str, generation: int) -> bool:
    there = view.find(peer)
    return (
        there is not None and not there.member.leaving and not there.member.finished and there.member.lost < generation
    )


def _about_trainer(mine: Mine, post: Post, view: GroupView, now: float) -> Iterator[Order]:
    match mine.phase:
        case "absent" if not is_ending(post, view) and not post.finished:
            current = view.generation if view.rank(post.member) is not None else None
            yield Begin(fresh=current is not None and current.gear == "cold" and current.attempt > 0)
        case "loading" | "loaded" | "starting" | "ready":
            yield from _about_newcomer(mine, post, view)
        case "member":
            yield from _about_member(mine, post, view, now)
        case "leaving" if mine.left and not post.exclusive and not is_ending(post, view):
            yield Retire()
        case "leaving":
            if now >= _left_by(mine, post, view):
                yield Kill("it did not leave in time")
        case "done" if view.outcome is not None and view.outcome.kind == "failed":
            yield Kill("the job has failed")
        case "done" if post.leaving_since is not None and now >= _left_by(mine, post, view):
            yield Kill("its script did not end in time")


def _about_newcomer(mine: Mine, post: Post, view: GroupView) -> Iterator[Order]:
    following = _next(mine, post, view)
    if is_ending(post, view):
        yield Kill("it is not needed any more")
    elif post.elastic and mine.phase == "loaded":
        yield Run()
    elif post.elastic and mine.phase == "ready" and following is not None:
        yield Tell(_join(following, post), following)
    elif not post.elastic and mine.phase == "loaded" and following is not None:
        yield Run(following)


def _about_member(mine: Mine, post: Post, view: GroupView, now: float) -> Iterator[Order]:
    following = _next(mine, post, view)
    if not post.elastic:
        if is_ending(post, view) or _is_over(mine, view):
            yield Terminate()
    elif view.outcome is not None:
        yield Kill("the job has ended")
    elif view.stop is not None:
        yield Tell(Leave(reason=view.stop, checkpoint=_writes(mine, post, view, all_go=True)))
    elif following is None and _is_over(mine, view):
        left = post.leaving_since is not None
        yield Tell(Leave(reason="told to leave" if left else "the others go on without it", checkpoint=False))
    elif post.leaving_since is not None and following is None and _goes_alone(mine, post, view, now):
        yield Tell(Leave(reason="told to leave", checkpoint=_writes(mine, post, view)))
    elif following is not None and following.gear == "live":
        yield Tell(_join(following, post), following)
    elif following is not None:
        yield Tell(Leave(reason=following.reason, checkpoint=following.writer == post.member))


def _about_spare(mine: Mine, post: Post, view: GroupView, now: float) -> Iterator[Order]:
    if is_ending(post, view) or post.gear == "cold" or mine.spare != "absent":
        return
    if mine.trains and now >= mine.since + SPARE_AFTER_S:
        yield Spare()


def is_ending(post: Post, view: GroupView) -> bool:
    """Whether this instance trains no more: the job has ended or is to, or it was told to go."""
    return view.outcome is not None or view.stop is not None or post.leaving_since is not None


def _next(mine: Mine, post: Post, view: GroupView) -> Generation | None:
    """Return the generation that the trainer is to be in from now on, None when it is in it or there is none."""
    rank = view.rank(post.member)
    return view.generation if rank is not None and _is_over(mine, view) else None


def _is_over(mine: Mine, view: GroupView) -> bool:
    return view.generation is not None and view.generation.number > mine.told


def _goes_alone(mine: Mine, post: Post, view: GroupView, now: float) -> bool:
    """Whether an instance that is told to go waits in vain for the others to go on without it.

    They do not before the present generation has formed.
    """
    members = view.generation.members if view.generation else ()
    begin = max(mine.since, post.leaving_since if post.leaving_since is not None else now)
    waited = mine.up == mine.told and view.state == "active" and now - begin >= ALONE_AFTER_S
    return waited or not any(_stays(view, member, mine.told) for member in members)


def _writes(mine: Mine, post: Post, view: GroupView, *, all_go: bool = False) -> bool:
    """Whether its trainer is the one that writes a checkpoint, of those that leave without a generation to follow.

    The first by rank does; but where one has been agreed on who writes, that one. `all_go`: nobody stays.
    """
    if view.generation and _is_over(mine, view) and view.generation.writer:
        return view.generation.writer == post.member
    leave = [
        peer
        for peer in mine.peers
        if not _is_gone(view, peer, mine.told) and (all_go or not _stays(view, peer, mine.told))
    ]
    return not leave or leave[0] == post.member


def _left_by(mine: Mine, post: Post, view: GroupView) -> float:
    if post.leaving_since is not None:
        return post.leaving_since + GRACE_SHARE * post.grace_s
    if not post.elastic:
        return mine.since + PLAIN_LEAVE_S
    included = view.rank(post.member) is not None or view.stop is not None
    works = mine.up == mine.told and not mine.aborted >= mine.told > mine.fallen  # else it may be stuck
    return mine.since + (LONGEST_LEAVE_S if included and works else LET_GO_S)


def _join(generation: Generation, post: Post) -> Join:
    return Join(
        generation=generation.number,
        rank=generation.members.index(post.member),
        world_size=len(generation.members),
        store=generation.store,
        instances=post.instances,
        word=generation.word,
    )
