"""Teachers that lie, break off and fall silent: none of it is delivered, nobody waits, and they are tried again."""

from __future__ import annotations

import pytest
from support.students.readers import Batches, reader_of
from support.students.watching import OddTeacher, read_epoch, read_until, tell
from support.teachers.process import Teacher

from edl_runtime.distill import Fixed
from edl_runtime.settings import RuntimeSettings

STALL_S = 1.0
TIMEOUT_S = 2.0
"""Longer than any stall: what a silent teacher was asked, another answers long before."""

WRONG = {
    "garbage": "not HTTP",
    "no JSON": "JSON",
    "wrong shape": "asked for was",
    "a row less": "asked for was",
    "wrong dtype": "asked for was",
    "wrong output": "left out",
    "error": "answered 500: it broke",
    "half, then closed": "closed the connection",
}
SILENT = dict.fromkeys(["half, then silent", "silent", "mute"], "took longer than 2 s")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [*WRONG.items(), *(pytest.param(*silence, marks=pytest.mark.slow) for silence in SILENT.items())],
)
def test_a_bad_teacher_s_work_is_done_by_another_until_it_is_good_again(
    behaviour: str, reason: str, good: Teacher, odd: OddTeacher
) -> None:
    """Each batch comes once, in order, with right answers and soon; the bad one rests, with a reason, and returns."""
    settings = RuntimeSettings(teacher_timeout_s=TIMEOUT_S)
    batches = Batches(60, seconds=0.005)
    with reader_of(batches, Fixed((good.address, odd.address)), settings) as reader:
        batches.check(list(reader))  # by which it is known how long answers take
        seen, longest_gap_s = read_epoch(reader, lambda: odd.become(behaviour))
        batches.check(seen)
        assert longest_gap_s < STALL_S
        read_until(reader, batches, lambda: odd.address in reader.stats().quarantined)
        assert reason in reader.stats().quarantined[odd.address]
        assert reader.stats().teachers == 1
        answered = reader.stats().answered[odd.address]
        odd.become("good")
        back_s = read_until(reader, batches, lambda: reader.stats().answered[odd.address] > answered)
        tell(f"{behaviour}: longest gap {longest_gap_s:.3f} s, back after {back_s:.2f} s")
        assert reader.stats().quarantined == {}
        assert reader.stats().teachers == 2
