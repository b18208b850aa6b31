"""Teachers that lie, break off and fall silent: none of it is delivered, nobody waits, and they are tried again."""

from __future__ import annotations

import pytest
from support.students.readers import Batches, reader_of
from support.students.watching import OddTeacher, read_epoch, read_until
from support.teachers.process import Teacher

from edl_runtime.distill import Fixed
from edl_runtime.settings import RuntimeSettings

WRONG = {
    "garbage": "not HTTP",
    "error": "answered 500: it broke",
    "half, then closed": "closed the connection",
    "wrong dtype": "asked for was",
    "half, then silent": "took longer than 1 s",
}
WRONG_TOO = {
    "no JSON": "JSON",
    "wrong shape": "asked for was",
    "a row less": "asked for was",
    "wrong output": "left out",
    "silent": "took longer than 1 s",
    "mute": "took longer than 1 s",
}


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [*WRONG.items(), *(pytest.param(*wrong, marks=pytest.mark.deep) for wrong in WRONG_TOO.items())],
)
def test_a_bad_teacher_s_work_is_done_by_another_until_it_is_good_again(
    behaviour: str, reason: str, good: Teacher, odd: OddTeacher
) -> None:
    """Each batch comes once, in order, with right answers; the bad one rests, with a reason, and returns."""
    batches = Batches(30, seconds=0.003)
    with reader_of(batches, Fixed((good.address, odd.address)), RuntimeSettings(teacher_timeout_s=1.0)) as reader:
        read_until(reader, batches, lambda: odd.address in reader.stats().answered)
        batches.check(read_epoch(reader, lambda: odd.become(behaviour)))
        read_until(reader, batches, lambda: odd.address in reader.stats().quarantined)
        assert reason in reader.stats().quarantined[odd.address]
        assert reader.stats().teachers == 1
        answered = reader.stats().answered[odd.address]
        odd.become("good")
        read_until(reader, batches, lambda: reader.stats().answered[odd.address] > answered)
        assert reader.stats().quarantined == {}
        assert reader.stats().teachers == 2
