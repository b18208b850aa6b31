"""Starts a job's supervisor, and sends it requests: one JSON request and one JSON reply per connection.

Statuses are read from a file. Changes go through the supervisor's Unix socket, so that one process decides on a job.
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
    """Return the variables that a supervisor and its instances inherit."""
    return {
        name: value for name, value in environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }


REPLY_TIMEOUT_S = 15.0
"""Supervisors reply at once; one that takes longer is stuck."""


class AdoptRequest(msgspec.Struct, frozen=True, tag="adopt"):
    """Replace the token, if the job has this digest and has not failed."""

    digest: str
    token: str


class ResizeRequest(msgspec.Struct, frozen=True, tag="resize"):
    """Request another number of instances."""

    instances: int


class DeleteRequest(msgspec.Struct, frozen=True, tag="delete"):
    """Stop all instances, remove the job and exit; with a token, only if the job has it."""

    token: str | None = None


class Accepted(msgspec.Struct, frozen=True, tag="done"):
    """It is done; a `DeleteRequest` has begun."""

    status: JobStatus


class Rejected(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


Request = AdoptRequest | ResizeRequest | DeleteRequest
Reply = Accepted | Rejected
_reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


class SupervisorStart(msgspec.Struct, frozen=True):
    """Input of a supervisor, on stdin so that `secrets` are in no file and no argument.

    - `folder`: a hidden folder, which the supervisor renames to `jobs/NAME` once it is ready.
    - `held`: the descriptor of the job's lock, which the supervisor holds until it is ready.
    """

    spec: JobSpec
    token: str
    secrets: dict[str, str]
    work_folder: str
    folder: str
    held: int


async def send_request(address: Path, request: Request) -> Reply:
    """Send a request to the supervisor whose socket is at `address`.

    Raises ConnectionError or FileNotFoundError if it has ended, TimeoutError if it does not reply.
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


START_TIMEOUT_S = 30.0


def launch_supervisor(start: SupervisorStart) -> JobStatus:
    """Start a supervisor and return its job's first status. Blocks for some tenths of a second.

    Even if the caller dies, the job is started completely or not at all. Raises SubmitError or OSError.
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
        raise SubmitError(name, f"its supervisor was not ready within {START_TIMEOUT_S:.0f} s") from error
    if not run.stdout:
        lines = run.stderr.decode(errors="replace").strip().splitlines() or ["its supervisor ended without output"]
        raise SubmitError(name, lines[-1])
    return msgspec.json.decode(run.stdout, type=JobStatus)
