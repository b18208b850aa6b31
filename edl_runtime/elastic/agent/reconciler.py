"""What the agent does with its worker next: a pure function of the worker's state, the desired state and the group.

A generation is entered *live* by the running worker, *warm* by the standby after it has left, *cold* by a new process.
A plain script is restarted for each generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from edl_runtime.elastic.comm.agent_protocol import (
    AbortGeneration,
    AgentMessage,
    Gear,
    JoinGeneration,
    Leave,
    SaveCheckpoint,
)
from edl_runtime.elastic.rendezvous.generation import DEFAULT_TIMEOUTS, Generation, GroupView

UNNEEDED_LEAVE_S = 2.0
"""How long a worker may take to leave when no other trains with it any more."""

PLAIN_LEAVE_S = 5.0
"""How long a plain script may take to end after SIGTERM."""

MAX_LEAVE_S = 60.0
"""How long a worker may take to leave at the end of a step, counted from the last piece of its checkpoint."""

ALONE_AFTER_S = 2.0
"""After so long without a generation that excludes it, an instance that has to leave does so anyway."""

GRACE_SHARE = 0.8
"""Share of an instance's grace for its worker; the rest is for its agent."""

STANDBY_AFTER_S = 1.0
"""How long a worker is up before a standby starts: until then it needs the processor."""

WorkerPhase = Literal["absent", "loading", "loaded", "starting", "ready", "member", "leaving", "done"]


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's knowledge of its worker, most of it as last reported.

    - `phase`: importing what its script imports; loaded; starting, until an elastic script can join; ready to join; a
      member of a generation, or on its way; leaving; done with everything.
    - `since`: when the phase began; of "leaving", when the last piece of a checkpoint was written.
    - `assigned`: the generation that it was last assigned to, and `peers` its members; 0 for none.
    - `up`: the last generation that it has entered; `comm_failed`: the last whose communication failed; `aborted`: the
      last that it was told to abort.
    - `left`: it has reported that it leaves; only its exit is still to come.
    - `standby`: a failed one is not replaced before it is needed.
    - `elastic`: its script joins generations by itself, as far as is known. `called`: it has called `elastic.init`.
    - `gpu`: it has a GPU, which the next worker gets only once it has ended.
    - `checkpoint`: where it keeps checkpoints, "" while unknown. `keeps`: it keeps some, as far as is known.
    - `saving`: the last request for a checkpoint that it was sent, 0 for none.
    - `live`, `seen`, `waits_for`, `moves`, `unsaved`: as in `TrainerMember`.
    - `finished`: it has trained everything and has ended.
    """

    phase: WorkerPhase = "absent"
    since: float = 0.0
    assigned: int = 0
    peers: tuple[str, ...] = ()
    up: int = 0
    comm_failed: int = 0
    aborted: int = 0
    left: bool = False
    standby: Literal["absent", "loading", "loaded", "failed"] = "absent"
    elastic: bool = True
    called: bool = False
    gpu: bool = False
    checkpoint: str = ""
    keeps: bool = True
    saving: int = 0
    live: bool = False
    seen: int = 0
    waits_for: int = 0
    moves: int = 0
    unsaved: str = ""
    finished: bool = False

    @property
    def trains(self) -> bool:
        """Whether it is in a generation that works."""
        return self.phase == "member" and self.up > self.comm_failed


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state of this instance.

    - `gear`: the fastest that the job's owner allows. `instances`: most that the job may have.
    - `leaving_since`: when it was told to leave, None if it was not; it has `grace_s` from then on.
    """

    member: str
    gear: Gear = "live"
    instances: int = 1
    leaving_since: float | None = None
    grace_s: float = 10.0


class StartWorker(msgspec.Struct, frozen=True):
    """Make the standby the worker; without a standby, or with `fresh` because a standby failed, start a process."""

    fresh: bool = False


class StartStandby(msgspec.Struct, frozen=True):
    """Start a standby process."""


class RetireWorker(msgspec.Struct, frozen=True):
    """Let the worker exit by itself, and make room for the next."""


class RunScript(msgspec.Struct, frozen=True):
    """Start the script: a plain one for this generation."""

    generation: Generation | None = None


class SendMessage(msgspec.Struct, frozen=True):
    """Send a message to the worker."""

    message: AgentMessage
    generation: Generation | None = None


class TerminateWorker(msgspec.Struct, frozen=True):
    """Send SIGTERM to a plain script."""


class KillWorker(msgspec.Struct, frozen=True):
    """Kill the worker. `planned`: it does not count as a failure."""

    why: str
    planned: bool = True


Action = StartWorker | StartStandby | RetireWorker | RunScript | SendMessage | TerminateWorker | KillWorker


def reconcile(worker: WorkerState, desired: DesiredState, view: GroupView, now: float) -> list[Action]:
    """Return what to do now. An action is not repeated once `worker` shows its effect."""
    return [
        *_on_lost_members(worker, view),
        *_on_worker(worker, desired, view, now),
        *_on_checkpoint_request(worker, desired, view),
        *_on_standby(worker, desired, view, now),
    ]


def _on_lost_members(worker: WorkerState, view: GroupView) -> Iterator[Action]:
    """Abort a generation whose communication has lost a member: the worker may wait for it."""
    if worker.phase not in ("member", "leaving"):
        return
    suspected = view.suspicion.generation if view.suspicion else 0
    broken = (
        worker.assigned
        if worker.assigned == suspected or any(_is_gone(view, peer, worker.assigned) for peer in worker.peers)
        else 0
    )
    if broken > max(worker.aborted, worker.comm_failed):
        yield SendMessage(AbortGeneration(generation=broken))


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


def _on_worker(worker: WorkerState, desired: DesiredState, view: GroupView, now: float) -> Iterator[Action]:
    match worker.phase:
        case "absent" if not is_ending(desired, view) and not worker.finished:
            current = view.generation if view.rank(desired.member) is not None else None
            yield StartWorker(fresh=current is not None and current.gear == "cold" and current.attempt > 0)
        case "loading" | "loaded" | "starting" | "ready":
            yield from _on_joining(worker, desired, view)
        case "member":
            yield from _on_member(worker, desired, view, now)
        case "leaving" if worker.left and not worker.gpu and not is_ending(desired, view):
            yield RetireWorker()
        case "leaving":
            if now >= _leave_deadline(worker, desired, view):
                yield KillWorker("it did not leave in time")
        case "done" if view.outcome is not None and view.outcome.kind == "failed":
            yield KillWorker("the job has failed")
        case "done" if desired.leaving_since is not None and now >= _leave_deadline(worker, desired, view):
            yield KillWorker("its script did not end in time")


def _on_joining(worker: WorkerState, desired: DesiredState, view: GroupView) -> Iterator[Action]:
    following = _next_generation(worker, desired, view)
    if is_ending(desired, view):
        yield KillWorker("it is not needed any more")
    elif worker.elastic and worker.phase == "loaded":
        yield RunScript()
    elif worker.elastic and worker.phase == "ready" and following is not None:
        yield SendMessage(_join_message(following, desired), following)
    elif not worker.elastic and worker.phase == "loaded" and following is not None:
        yield RunScript(following)


def _on_member(worker: WorkerState, desired: DesiredState, view: GroupView, now: float) -> Iterator[Action]:
    following = _next_generation(worker, desired, view)
    if not worker.elastic:
        if is_ending(desired, view) or _is_superseded(worker, view):
            yield TerminateWorker()
    elif view.outcome is not None:
        yield KillWorker("the job has ended")
    elif view.stop is not None:
        yield SendMessage(Leave(reason=view.stop, checkpoint=_writes_checkpoint(worker, desired, view, all_go=True)))
    elif following is None and _is_superseded(worker, view):
        left = desired.leaving_since is not None
        yield SendMessage(Leave(reason="told to leave" if left else "the others continue without it", checkpoint=False))
    elif desired.leaving_since is not None and following is None and _leaves_alone(worker, desired, view, now):
        yield SendMessage(Leave(reason="told to leave", checkpoint=_writes_checkpoint(worker, desired, view)))
    elif following is not None and following.gear == "live":
        yield SendMessage(_join_message(following, desired), following)
    elif following is not None:
        yield SendMessage(Leave(reason=following.reason, checkpoint=following.writer == desired.member))


def _on_standby(worker: WorkerState, desired: DesiredState, view: GroupView, now: float) -> Iterator[Action]:
    if is_ending(desired, view) or desired.gear == "cold" or worker.standby != "absent":
        return
    if worker.trains and now >= worker.since + STANDBY_AFTER_S:
        yield StartStandby()


def _on_checkpoint_request(worker: WorkerState, desired: DesiredState, view: GroupView) -> Iterator[Action]:
    """Send rank 0 a request, unless the one that had it lives and may still write its checkpoint as it leaves."""
    request, current = view.checkpoint_asked, view.generation
    is_open = request > max(view.checkpoint_answered, worker.saving)
    if not (is_open and current and worker.elastic and worker.keeps and worker.trains):
        return
    alive_at = current.proposed_at - DEFAULT_TIMEOUTS.confirm_s  # who is lost was silent for longer
    others = [each for each in view.members if each.member.saving >= request and each.heartbeat_at >= alive_at]
    is_up = worker.up == current.number and view.rank(desired.member) == 0
    if is_up and all(view.rank(other.member.id) is not None for other in others):
        yield SendMessage(SaveCheckpoint(request=request, asked_in=view.checkpoint_asked_in))


def is_ending(desired: DesiredState, view: GroupView) -> bool:
    """Whether this instance stops training: the job has ended or has to, or the instance has to leave."""
    return view.outcome is not None or view.stop is not None or desired.leaving_since is not None


def _next_generation(worker: WorkerState, desired: DesiredState, view: GroupView) -> Generation | None:
    """Return the generation that the worker has to enter, None when it is in it or there is none."""
    rank = view.rank(desired.member)
    return view.generation if rank is not None and _is_superseded(worker, view) else None


def _is_superseded(worker: WorkerState, view: GroupView) -> bool:
    return view.generation is not None and view.generation.number > worker.assigned


def _leaves_alone(worker: WorkerState, desired: DesiredState, view: GroupView, now: float) -> bool:
    """Whether an instance that has to leave does not wait any longer for a generation without it.

    Such a generation does not come before the present one has formed.
    """
    members = view.generation.members if view.generation else ()
    begin = max(worker.since, desired.leaving_since if desired.leaving_since is not None else now)
    waited = worker.up == worker.assigned and view.state == "active" and now - begin >= ALONE_AFTER_S
    return waited or not any(_stays(view, member, worker.assigned) for member in members)


def _writes_checkpoint(worker: WorkerState, desired: DesiredState, view: GroupView, *, all_go: bool = False) -> bool:
    """Whether its worker writes the checkpoint, of those that leave without a generation to follow.

    The first by rank does, unless a newer generation names another. `all_go`: nobody stays.
    """
    if view.generation and _is_superseded(worker, view) and view.generation.writer:
        return view.generation.writer == desired.member
    leave = [
        peer
        for peer in worker.peers
        if not _is_gone(view, peer, worker.assigned) and (all_go or not _stays(view, peer, worker.assigned))
    ]
    return not leave or leave[0] == desired.member


def _leave_deadline(worker: WorkerState, desired: DesiredState, view: GroupView) -> float:
    if desired.leaving_since is not None:
        return desired.leaving_since + GRACE_SHARE * desired.grace_s
    if not worker.elastic:
        return worker.since + PLAIN_LEAVE_S
    included = view.rank(desired.member) is not None or view.stop is not None
    works = (
        worker.up == worker.assigned and not worker.aborted >= worker.assigned > worker.comm_failed
    )  # else it may be stuck
    return worker.since + (MAX_LEAVE_S if included and works else UNNEEDED_LEAVE_S)


def _join_message(generation: Generation, desired: DesiredState) -> JoinGeneration:
    return JoinGeneration(
        generation=generation.number,
        rank=generation.members.index(desired.member),
        world_size=len(generation.members),
        store=generation.store,
        instances=desired.instances,
        token=generation.token,
    )
