"""Which checkpoints are kept for good, and when the next is due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.checkpoint.file_format import CheckpointPosition
from edl_runtime.checkpoint.store import kept_forever
from edl_runtime.elastic.training.checkpointing import CheckpointSchedule
from edl_runtime.specs import Checkpoint

STEPS = st.lists(st.builds(CheckpointPosition, st.integers(0, 5), st.integers(0, 200)), max_size=30)


def steps(*of: int) -> list[CheckpointPosition]:
    return [CheckpointPosition(1, step) for step in of]


def test_the_first_at_or_after_each_multiple_stays() -> None:
    """Checkpoints by time fall on no multiples; the start is none."""
    assert kept_forever(steps(0, 40, 105, 150, 200, 299), 100) == set(steps(105, 200))
    assert kept_forever(steps(1, 2), 1) == set(steps(1, 2))
    assert kept_forever(steps(1, 2), None) == set()


def test_of_one_step_that_of_the_latest_generation_stays() -> None:
    """The steps before it were repeated."""
    assert kept_forever([CheckpointPosition(1, 100), CheckpointPosition(2, 100)], 100) == {CheckpointPosition(2, 100)}


def test_what_training_went_back_behind_is_not_kept_for_good() -> None:
    """A later generation's checkpoint of an earlier step shows that; one of a later step is normal progress."""
    before, after = (
        steps(150, 200, 300),
        [CheckpointPosition(2, 195), CheckpointPosition(2, 205), CheckpointPosition(3, 290)],
    )
    assert kept_forever([*before, *after], 100) == {CheckpointPosition(1, 150), CheckpointPosition(2, 205)}
    assert kept_forever([*steps(200), CheckpointPosition(2, 205), CheckpointPosition(3, 250)], 100) == set(steps(200))


@given(STEPS, STEPS, st.integers(1, 50))
def test_what_has_been_removed_was_not_needed(
    first: list[CheckpointPosition], later: list[CheckpointPosition], every: int
) -> None:
    """To prune now and then again later, when others have been written after these, is to prune once, later."""
    later = [position for position in later if position > max(first, default=position)]
    pruned = kept_forever(first, every)
    assert kept_forever([*pruned, *later], every) == kept_forever([*first, *later], every)


def is_due(schedule: CheckpointSchedule, step: int, now: float) -> bool:
    """Whether one is due, from which the next is counted then."""
    found = schedule.due(step, now)
    if found:
        schedule.restart(step, now)
    return found


def test_one_is_due_at_each_multiple_of_the_steps() -> None:
    """Also if the steps are not looked at one by one, and after a start between multiples."""
    schedule = CheckpointSchedule(Checkpoint(url="x", every_steps=10), step=3, now=0.0)
    assert [step for step in (4, 9, 10, 11, 19, 25, 26, 30) if is_due(schedule, step, 1e9)] == [10, 25, 30]


def test_one_is_due_when_the_time_has_passed() -> None:
    """Counted from the last one."""
    schedule = CheckpointSchedule(Checkpoint(url="x", every_s=5), step=0, now=100.0)
    assert [now for now in (101.0, 105.0, 106.0, 110.0) if is_due(schedule, 1, now)] == [105.0, 110.0]
    assert schedule.age_s(112.0) == 2.0


def test_whichever_comes_first_counts_for_both() -> None:
    """With steps and seconds a checkpoint is due when either is."""
    schedule = CheckpointSchedule(Checkpoint(url="x", every_steps=10, every_s=5), step=0, now=0.0)
    assert is_due(schedule, 10, 4.0)
    assert not is_due(schedule, 11, 8.0)
    assert is_due(schedule, 12, 9.0)
