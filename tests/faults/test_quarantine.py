"""What people see of a teacher in quarantine: `edl pools NAME --json`, while a student reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from support.students.readers import POOL, Batches, reader_of, slow_teacher
from support.students.watching import OddTeacher, metadata_of, read_until, tell
from support.teachers.process import wait_until

from edl_runtime.cli.pools import pools
from edl_runtime.distill import Discovered
from edl_runtime.distill.loop import LoopThread
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect
from edl_runtime.store.keys import Service

BATCHES = Batches(60, seconds=0.002)


@contextlib.contextmanager
def registered(address: str, settings: RuntimeSettings) -> Iterator[None]:
    """Have somebody in the pool who does not register by itself."""
    there, leave = threading.Event(), threading.Event()

    async def stay() -> None:
        async with connect(settings.redis_url) as client:
            service = Service(settings.namespace, POOL)
            async with hold_lease(client, service, Member(id=address, address=address)):
                there.set()
                await asyncio.to_thread(leave.wait)

    thread = LoopThread("registered", stay)
    thread.start()
    try:
        assert there.wait(10)
        yield
    finally:
        leave.set()
        thread.join(10)


def shown(settings: RuntimeSettings, address: str) -> str | None:
    """The reason that is shown for the teacher; None if it is in use."""
    env = {"EDL_REDIS_URL": settings.redis_url, "EDL_NAMESPACE": settings.namespace}
    said = CliRunner(env=env).invoke(pools, [POOL, "--json"])
    assert said.exit_code == 0, said.output
    [teacher] = [teacher for teacher in json.loads(said.stdout)["teachers"] if teacher["address"] == address]
    quarantine = teacher["quarantine"]
    return str(quarantine["reason"]) if quarantine else None


@pytest.mark.slow
def test_people_see_why_a_teacher_rests_until_it_is_used_again(settings: RuntimeSettings, odd: OddTeacher) -> None:
    """The reason is what the teacher did, and gone when a probe has found it good."""
    with (
        slow_teacher(settings) as good,
        registered(odd.address, settings),
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
    ):
        assert metadata_of(good.address) == metadata_of(odd.address)
        read_until(reader, BATCHES, lambda: odd.address in reader.stats().answered)
        assert shown(settings, odd.address) is None
        odd.become("wrong dtype")
        read_until(reader, BATCHES, lambda: odd.address in reader.stats().quarantined)
        shown_s = wait_until(lambda: "is float64" in (shown(settings, odd.address) or ""))
        odd.become("good")
        read_until(reader, BATCHES, lambda: not reader.stats().quarantined)
        gone_s = wait_until(lambda: shown(settings, odd.address) is None)
        tell(f"shown after {shown_s:.2f} s, gone {gone_s:.2f} s after the probe")
        assert gone_s < 3.0
