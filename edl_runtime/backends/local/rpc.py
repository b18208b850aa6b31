"""How the local backend starts a job's supervisor and talks to it: one JSON request and one JSON reply a connection.

Reading a status needs no supervisor, which keeps a file; only what decides goes through here, over a unix socket, so
that one process decides on one job.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from edl_runtime.backends.errors import SubmitError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local.job_folders import WorkFolder
from edl_runtime.specs import JobSpec

_INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    }
)
_INHERITED_PREFIXES = (
    *("LC_", "PYTHON", "XDG_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "ROCR_", "HIP_"),
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GLOG_", "FLAGS_"),
)


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of the caller's `environ` a supervisor and its instances start from."""
    return {
        name: value for name, value in environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }


# What the backend asks a job's supervisor: one JSON request and one JSON reply a connection, on a unix socket.

REPLY_TIMEOUT_S = 15.0
"""Supervisors answer at once; one that takes so long is stuck."""


class AdoptRequest(msgspec.Struct, frozen=True, tag="adopt"):
    """Make `token` the owner, if the job has this digest and runs or has succeeded."""

    digest: str
    token: str


class ResizeRequest(msgspec.Struct, frozen=True, tag="resize"):
    """Change the wanted number of instances."""

    instances: int


class DeleteRequest(msgspec.Struct, frozen=True, tag="delete"):
    """Stop all instances, forget the job and end; with a token, only if that is the owner."""

    token: str | None = None


class Accepted(msgspec.Struct, frozen=True, tag="done"):
    """It is done, or for `DeleteRequest` under way."""

    status: JobStatus


class Rejected(msgspec.Struct, frozen=True, tag="refused"):
    """It is not done: `allowed` says what would be, for people."""

    reason: str
    allowed: str = ""


Request = AdoptRequest | ResizeRequest | DeleteRequest
Reply = Accepted | Rejected
_reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


class SupervisorStart(msgspec.Struct, frozen=True):
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


async def send_request(address: Path, request: Request) -> Reply:
    """Return the reply of the supervisor whose socket is at `address`.

    Raises ConnectionError or FileNotFoundError when none is there (any more), TimeoutError when it is stuck.
    """
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        reader, writer = await asyncio.open_unix_connection(address)
        try:
            writer.write(msgspec.json.encode(request))
            writer.write_eof()
            content = await reader.read()
        finally:
            writer.close()
    if not content:
        raise ConnectionResetError
    return _reply_decoder.decode(content)


# Starting a job's supervisor, from the caller's side.

START_TIMEOUT_S = 30.0


def launch_supervisor(start: SupervisorStart) -> JobStatus:
    """Start a supervisor and return its job's status once it is up. Blocks for some tenths of a second.

    Raises SubmitError or OSError. Whatever happens to the caller, there is then a job that is up or nothing.
    """
    name = start.spec.name
    folder = WorkFolder(Path(start.work_folder)).job(name).path
    command = [sys.executable, "-P", "-m", "edl_runtime.backends.local.supervisor", str(folder)]
    try:
        run = subprocess.run(
            command,
            input=msgspec.json.encode(start),
            capture_output=True,
            check=False,
            cwd=start.work_folder,
            env=inherited_environment(os.environ),
            pass_fds=(start.held,),
            start_new_session=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(name, f"its supervisor was not up within {START_TIMEOUT_S:.0f} s") from error
    if not run.stdout:
        lines = run.stderr.decode(errors="replace").strip().splitlines() or ["its supervisor ended without a word"]
        raise SubmitError(name, lines[-1])
    return msgspec.json.decode(run.stdout, type=JobStatus)
