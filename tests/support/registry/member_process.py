"""A member in a process of its own: `member_process.py NAMESPACE POOL ID LEASE_S`, with the Redis in EDL_REDIS_URL.

Prints a line when it is registered. Leaves when its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys

from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.store.client import connect
from edl_runtime.store.keys import Service


async def main() -> None:
    namespace, pool, member_id, ttl_s = sys.argv[1:]
    member = Member(id=member_id, address="127.0.0.1:1")
    async with (
        connect(os.environ["EDL_REDIS_URL"]) as client,
        hold_lease(client, Service(namespace, pool), member, ttl_s=float(ttl_s)),
    ):
        print("registered", flush=True)  # noqa: T201 - how it tells the test
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
