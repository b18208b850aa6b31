"""Teachers that lie, break off and fall silent: none of it is delivered, nobody waits, and they are tried again."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner
from support.students.readers import POOL, Batches, OddTeacher, read_epoch, read_until, reader_of, registered
from support.teachers.process import Teacher, wait_until

from edl_runtime.cli.pools import pools
from edl_runtime.distill import Discovered
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


def shown(settings: RuntimeSettings, address: str) -> str:
    """Return the reason that `edl pools` shows for the teacher's quarantine; empty if it is in use."""
    env = {"EDL_REDIS_URL": settings.redis_url, "EDL_NAMESPACE": settings.namespace}
    said = CliRunner(env=env).invoke(pools, [POOL, "--json"])
    assert said.exit_code == 0, said.output
    [teacher] = [teacher for teacher in json.loads(said.stdout)["teachers"] if teacher["address"] == address]
    return teacher["quarantine"]["reason"] if teacher["quarantine"] else ""


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [*WRONG.items(), *(pytest.param(*wrong, marks=pytest.mark.deep) for wrong in WRONG_TOO.items())],
)
def test_a_bad_teacher_s_work_is_done_by_another_until_it_is_good_again(
    behaviour: str, reason: str, settings: RuntimeSettings, good: Teacher, odd: OddTeacher
) -> None:
    """Each batch comes once, in order, with right answers; the bad one rests, people see why, and it returns."""
    batches = Batches(30, seconds=0.003)
    quick = msgspec.structs.replace(settings, teacher_timeout_s=1.0)
    with registered(settings, good.address, odd.address), reader_of(batches, Discovered(POOL), quick) as reader:
        read_until(reader, batches, lambda: odd.address in reader.stats().answered)
        assert not shown(settings, odd.address)
        batches.check(read_epoch(reader, lambda: odd.become(behaviour)))
        read_until(reader, batches, lambda: odd.address in reader.stats().quarantined)
        assert reason in reader.stats().quarantined[odd.address]
        assert reader.stats().teachers == 1
        wait_until(lambda: reason in shown(settings, odd.address))
        answered = reader.stats().answered[odd.address]
        odd.become("good")
        read_until(reader, batches, lambda: reader.stats().answered[odd.address] > answered)
        assert reader.stats().quarantined == {}
        assert reader.stats().teachers == 2
        wait_until(lambda: not shown(settings, odd.address))
