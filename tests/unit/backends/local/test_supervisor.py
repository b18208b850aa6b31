"""What a supervisor answers to those who connect."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from unittest.mock import create_autospec

import msgspec
import pytest

from edl_runtime.backends.local.backend import DeleteRequest, Request, send_request
from edl_runtime.backends.local.supervisor import SupervisedJob, _serve


def asking(content: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(content)
    reader.feed_eof()
    return reader


@pytest.mark.parametrize("nonsense", [b"", b"{", b"null", b'{"type":"\xff"}', b'{"type":"delete","x":' + b"[" * 5000])
async def test_who_asks_nonsense_gets_no_answer(nonsense: bytes) -> None:
    """The connection is closed, and nothing is done."""
    job = create_autospec(SupervisedJob, instance=True)
    writer = create_autospec(asyncio.StreamWriter, instance=True)
    await _serve(job, asking(nonsense), writer)
    job.answer.assert_not_called()
    writer.write.assert_not_called()
    writer.close.assert_called_once_with()


async def test_a_failure_of_the_job_closes_the_connection() -> None:
    """Nobody waits for an answer that does not come."""
    job = create_autospec(SupervisedJob, instance=True)
    job.answer.side_effect = OSError("disk full")
    request: Request = DeleteRequest(token="t")
    writer = create_autospec(asyncio.StreamWriter, instance=True)
    with pytest.raises(OSError, match="disk full"):
        await _serve(job, asking(msgspec.json.encode(request)), writer)
    writer.close.assert_called_once_with()


async def test_a_supervisor_with_too_many_requests_refuses_another(tmp_path: Path) -> None:
    """The system gives no such error for a Unix socket; who gets this one asks again."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(str(path))
        with pytest.raises(ConnectionRefusedError):
            await send_request(path, DeleteRequest())
        for one in waiting:
            one.close()
