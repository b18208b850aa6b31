"""When an instance of a pool is started again."""

from __future__ import annotations

import pytest

from edl_runtime.backends.local.instances import InstanceSlot
from edl_runtime.backends.restarts import FailJob, GiveUpInstance, Restart, RestartPolicy, decide_restart
from edl_runtime.errors import EX_CONFIG, EX_DRAINED
from edl_runtime.exit_status import describe_exit, oom_kills

POLICY = RestartPolicy()


def test_each_further_restart_waits_twice_as_long_up_to_a_limit() -> None:
    """An instance that ends at once is started again ever more slowly."""
    patient = RestartPolicy(max_short_lives=100)
    delays = []
    decision: Restart | GiveUpInstance | FailJob = Restart(0.0, 0)
    for _ in range(7):
        assert isinstance(decision, Restart)
        decision = decide_restart(patient, 1, 0.1, decision.short_lives, others=False)
        delays.append(getattr(decision, "delay_s", None))
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_drained_teacher_has_not_failed() -> None:
    """However young it was, and whatever came before, another takes its place at once."""
    assert decide_restart(POLICY, EX_DRAINED, 0.1, 4, others=False) == Restart(0.2, 4)


def test_a_long_life_clears_the_record() -> None:
    """Who worked for a while is started again at once, however often it ended before."""
    assert decide_restart(POLICY, 1, 10.0, 4, others=False) == Restart(0.2, 0)


def test_the_last_short_life_in_a_row_is_one_too_many() -> None:
    """The pool gives up and says how it ended, also when the exit status was 0."""
    assert decide_restart(POLICY, 0, 9.9, 3, others=False) == Restart(1.6, 4)
    assert decide_restart(POLICY, 0, 9.9, 4, others=False) == FailJob(
        "ended 5 times in a row within 10 s of its start, the last time it exited with 0"
    )


def test_a_pool_with_others_tries_for_ever() -> None:
    """While another instance can do the work, no end is final; from the fifth on it is said what is wrong."""
    decision = decide_restart(POLICY, 1, 0.1, 4, others=True)
    assert isinstance(decision, Restart)
    assert (decision.delay_s, decision.short_lives) == (3.2, 5)
    assert decision.reason == "ended 5 times in a row within 10 s of its start, the last time it exited with 1"
    assert isinstance(decide_restart(POLICY, 1, 0.1, 100_000, others=True), Restart)


def test_what_can_never_work_is_not_tried_again() -> None:
    """Exit status 78 is the instance's last, however long it lived and whoever else there is."""
    assert isinstance(decide_restart(POLICY, EX_CONFIG, 100.0, 0, others=False), GiveUpInstance)
    assert isinstance(decide_restart(POLICY, EX_CONFIG, 100.0, 0, others=True), GiveUpInstance)


def test_a_trainer_that_ends_too_often_is_given_up_however_long_it_lives() -> None:
    """It never comes as far as to its first checkpoint; a pool's instance owes nobody progress."""
    assert decide_restart(POLICY, -9, 100.0, 0, others=False, within_an_hour=10) == Restart(0.2, 0)
    assert decide_restart(POLICY, -9, 100.0, 0, others=False, within_an_hour=11) == FailJob(
        f"ended 11 times within an hour, the last time it {describe_exit(-9)}"
    )


def test_ends_of_more_than_an_hour_ago_do_not_count() -> None:
    """A training of weeks may meet many."""
    slot = InstanceSlot(0)
    assert [slot.count_exit(now) for now in (0.0, 1800.0, 3599.0, 3600.0, 7199.0)] == [1, 2, 3, 3, 2]


@pytest.mark.parametrize(
    ("exit_code", "said"),
    [
        (0, "exited with 0"),
        (-15, "was killed by SIGTERM"),
        (-9, "was killed by SIGKILL (perhaps out of memory: see `dmesg`, and try a smaller batch)"),
        (137, "exited with 137 (perhaps out of memory: see `dmesg`, and try a smaller batch)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_ending_is_said_in_words(exit_code: int, said: str) -> None:
    """People read the names of signals, also of those that have none."""
    assert describe_exit(exit_code) == said


def test_the_system_counts_what_it_kills_for_want_of_memory() -> None:
    """As far as it tells."""
    assert oom_kills() >= 0
