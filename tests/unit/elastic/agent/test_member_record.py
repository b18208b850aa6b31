"""What an agent reports of its instance to the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.agent.agent import member_record
from edl_runtime.elastic.agent.entrypoint import PortReservation
from edl_runtime.elastic.agent.reconciler import DesiredState, WorkerPhase, WorkerState
from edl_runtime.elastic.rendezvous.generation import GroupView, TrainerMember

ME = TrainerMember(id="0-me", index=0, lost=3)
DESIRED = DesiredState(member=ME.id)


def group(number: int, *members: str, **changes: Any) -> GroupView:
    view = GroupView(now=0.0, number=number, generation=generation(number, members, gear="warm"))
    return msgspec.structs.replace(view, **changes)


def record(
    phase: WorkerPhase,
    view: GroupView,
    *,
    desired: DesiredState = DESIRED,
    before: TrainerMember = ME,
    failing: bool = False,
    **worker: Any,
) -> TrainerMember:
    state = WorkerState(phase=phase, **{"called": True, "live": True, **worker})
    with PortReservation("127.0.0.1") as ports:
        return member_record(before, state, desired, view, ports, failing=failing)


@pytest.mark.parametrize(
    ("phase", "elastic", "ready"),
    [
        ("loading", True, False),
        ("loaded", True, False),
        ("loaded", False, True),
        ("starting", True, False),
        ("ready", True, True),
        ("member", True, True),
        ("done", True, True),
        ("absent", True, False),
    ],
)
def test_an_instance_is_ready_once_its_worker_can_join(phase: WorkerPhase, *, elastic: bool, ready: bool) -> None:
    """Not before: no other waits while it loads."""
    assert record(phase, group(7, "1-peer"), elastic=elastic).ready is ready


def test_on_the_way_into_a_generation_an_instance_stays_ready() -> None:
    """While one process replaces another; not once that one was assigned, nor when the instance ends."""
    included = group(7, "1-peer", ME.id)
    assert record("absent", included).ready
    assert record("loading", included).ready
    assert not record("loading", included, assigned=7).ready
    assert not record("absent", msgspec.structs.replace(included, stop="deadline")).ready
    assert not record("absent", included, desired=msgspec.structs.replace(DESIRED, leaving_since=1.0)).ready


def test_a_worker_that_fails_is_reported_before_it_has_exited() -> None:
    """The others may notice it sooner, and must neither continue with it nor wait while the next one loads."""
    fails = record("member", group(7, ME.id), assigned=7, failing=True)
    assert (fails.lost, fails.ready) == (7, False)
    stays = record("member", group(7, ME.id), assigned=7)
    assert (stays.lost, stays.ready) == (3, True)


def test_an_elastic_script_is_reported() -> None:
    """All instances then treat theirs as elastic; one whose worker has yet to join again is not ready before it can."""
    assert record("starting", group(7, ME.id)).elastic
    assert not record("loaded", group(7, ME.id), elastic=False).elastic
    assert not record("starting", group(7, ME.id), assigned=7).ready
    assert record("starting", group(8, ME.id), assigned=7).ready


def test_a_script_that_runs_and_has_not_called_init_is_reported() -> None:
    """Since when by the group's clock; not while it loads, and no plain script."""
    begun, later = (msgspec.structs.replace(group(7), now=now) for now in (5.0, 9.0))
    silent = record("starting", later, called=False, before=record("starting", begun, called=False))
    assert (silent.called, silent.uncalled_since) == (False, 5.0)
    calls = record("starting", later, before=silent)
    assert (calls.called, calls.uncalled_since) == (True, 0.0)
    assert not record("loading", later, called=False, before=silent).uncalled_since
    assert not record("starting", later, called=False, elastic=False).uncalled_since


def test_a_process_that_is_in_no_generation_yet_counts_as_a_standby() -> None:
    """A newcomer can enter a warm generation."""
    assert record("ready", group(7)).standby
    assert not record("member", group(7, ME.id)).standby
    assert record("member", group(7, ME.id), standby="loaded").standby


def test_a_worker_that_moves_state_advances() -> None:
    """More pieces than before; another process counts from 0 again."""
    included = group(7, "1-peer", ME.id)
    assert not record("member", included, assigned=7).advanced
    moving = record("member", included, assigned=7, moves=5)
    assert (moving.advanced, moving.moves) == (True, 5)
    assert not record("member", included, assigned=7, moves=5, before=moving).advanced
    assert not record("starting", included, moves=0, before=moving).advanced


def test_a_worker_that_ends_a_step_or_leaves_advances() -> None:
    """Not once it waits for others, has lost them, or is in the generation."""
    included = group(7, "1-peer", ME.id)
    assert record("member", included, assigned=7, up=6).advanced
    assert record("leaving", included, assigned=7, up=6).advanced
    assert not record("member", included, assigned=7, up=6, waits_for=12).advanced
    assert not record("member", included, assigned=7, up=6, comm_failed=6).advanced
    assert not record("member", included, assigned=7, up=7).advanced


def test_the_highest_number_seen_is_kept() -> None:
    """Of a checkpoint or of the group: the next one is above."""
    assert record("ready", group(7), seen=9).seen == 9
    assert record("ready", group(7), seen=2).seen == 7


def test_each_generation_has_its_own_ports() -> None:
    """Those of the one before may be in use still; the last two pairs stay reserved."""
    with PortReservation("127.0.0.1") as ports:
        first = (ports.store, ports.trainer)
        ports.renew(0)
        assert (ports.store, ports.trainer) == first
        ports.renew(1)
        assert len({*first, ports.store, ports.trainer}) == 4


def test_a_script_that_fails_after_the_end_stays_done() -> None:
    """Until its next worker joins, which trains again what the checkpoint lacks."""
    included = group(4, ME.id)
    done = record("done", included)
    assert done.done
    again = record("loading", included, before=done)
    assert again.done
    assert not record("member", included, before=again).done
