"""A local job on a small disk that fills up and is emptied again: prints what the backend says meanwhile, as JSON."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
from support.backends.jobs import eventually, reach
from support.backends.local_processes import job, processes, wait_until_gone

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.errors import BackendError

QUIET = "import time; time.sleep(600)"
OF_TWO = 1 + 2 * 2
"""Processes of a job of two instances: its supervisor, and each instance's wrapper and command."""


def fill(file: Path) -> None:
    try:
        with file.open("wb", buffering=0) as filler:
            while filler.write(b"0" * 4096):
                pass
    except OSError:
        pass


async def main(disk: Path) -> None:
    work_dir, filler = disk / "work", disk / "filler"
    backend = LocalBackend(work_dir)
    said: dict[str, object] = {}
    await backend.submit(job(QUIET, work_dir), token="mine", secrets={})
    fill(filler)
    try:
        await backend.submit(msgspec.structs.replace(job(QUIET, work_dir), name="other"), token="mine", secrets={})
    except BackendError as error:
        said["submit"] = str(error)
    said["resize"] = (await backend.resize("job", 2)).phase

    async def both_run() -> bool:
        return len(processes(work_dir)) == OF_TWO

    await eventually(both_run, "two instances", 60)
    full = await backend.get("job")
    said["full"] = full.phase, full.wanted, full.reason
    filler.unlink()
    emptied = await reach(backend, "job", lambda status: status.wanted == 2, 60)
    said["emptied"] = emptied.phase, emptied.reason
    fill(filler)
    said["stop"] = await backend.delete("job"), len(await backend.list())
    wait_until_gone(work_dir)
    sys.stdout.buffer.write(msgspec.json.encode(said))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
