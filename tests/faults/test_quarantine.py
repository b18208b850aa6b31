"""What people see of a teacher in quarantine: `edl pools NAME --json`, while a student reads."""

from __future__ import annotations

import json

from click.testing import CliRunner
from support.students.readers import POOL, Batches, reader_of, registered
from support.students.watching import OddTeacher, read_until
from support.teachers.process import Teacher, wait_until

from edl_runtime.cli.pools import pools
from edl_runtime.distill import Discovered
from edl_runtime.settings import RuntimeSettings

BATCHES = Batches(30, seconds=0.002)


def shown(settings: RuntimeSettings, address: str) -> str | None:
    """The reason that is shown for the teacher; None if it is in use."""
    env = {"EDL_REDIS_URL": settings.redis_url, "EDL_NAMESPACE": settings.namespace}
    said = CliRunner(env=env).invoke(pools, [POOL, "--json"])
    assert said.exit_code == 0, said.output
    [teacher] = [teacher for teacher in json.loads(said.stdout)["teachers"] if teacher["address"] == address]
    quarantine = teacher["quarantine"]
    return str(quarantine["reason"]) if quarantine else None


def test_people_see_why_a_teacher_rests_until_it_is_used_again(
    settings: RuntimeSettings, good: Teacher, odd: OddTeacher
) -> None:
    """The reason is what the teacher did, and gone when a probe has found it good."""
    with (
        registered(settings, good.address, odd.address),
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
    ):
        read_until(reader, BATCHES, lambda: odd.address in reader.stats().answered)
        assert shown(settings, odd.address) is None
        odd.become("wrong dtype")
        read_until(reader, BATCHES, lambda: odd.address in reader.stats().quarantined)
        wait_until(lambda: "is float64" in (shown(settings, odd.address) or ""))
        odd.become("good")
        read_until(reader, BATCHES, lambda: not reader.stats().quarantined)
        wait_until(lambda: shown(settings, odd.address) is None)
