"""What the backend asks a job's supervisor: one JSON request and one JSON reply a connection, on a unix socket.

Reading a status needs no supervisor (it keeps a file); only what decides goes through here, so that one process
decides on one job and nothing can come between.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from edl_runtime.backends.base import JobStatus
from edl_runtime.specs import JobSpec

REPLY_WITHIN_S = 15.0
"""Supervisors answer at once; one that takes so long is stuck."""


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Make `token` the owner, if the job has this digest and runs or has succeeded."""

    digest: str
    token: str


class Resize(msgspec.Struct, frozen=True, tag="resize"):
    """Change the wanted number of instances."""

    instances: int


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    """Stop all instances, forget the job and end; with a token, only if that is the owner."""

    token: str | None = None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done, or for `Delete` under way."""

    status: JobStatus


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It is not done: `allowed` says what would be, for people."""

    reason: str
    allowed: str = ""


Request = Adopt | Resize | Delete
Reply = Done | Refused
_REPLIES: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


class Start(msgspec.Struct, frozen=True):
    """What a supervisor is given on its standard input. `secrets` are in no file and no argument.

    - `folder`: the hidden folder that becomes `work_folder`'s `jobs/NAME` once the supervisor is up.
    - `held`: the descriptor of the job's lock, which the supervisor holds until it is up.
    """

    spec: JobSpec
    token: str
    secrets: dict[str, str]
    work_folder: str
    folder: str
    held: int


async def ask(address: Path, request: Request) -> Reply:
    """Return the reply of the supervisor whose socket is at `address`.

    Raises ConnectionError or FileNotFoundError when none is there (any more), TimeoutError when it is stuck.
    """
    async with asyncio.timeout(REPLY_WITHIN_S):
        reader, writer = await asyncio.open_unix_connection(address)
        try:
            writer.write(msgspec.json.encode(request))
            writer.write_eof()
            content = await reader.read()
        finally:
            writer.close()
    if not content:
        raise ConnectionResetError
    return _REPLIES.decode(content)
