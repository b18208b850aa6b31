"""The sockets of Paddle's groups: which are shut down, and how a loss is described."""

from __future__ import annotations

import select
import socket

import pytest

from edl_runtime.elastic.comm import paddle_sockets
from edl_runtime.elastic.comm.agent_protocol import JoinGeneration
from edl_runtime.elastic.comm.process_group import PaddleProcessGroup, describe_error


def test_a_closed_group_does_not_touch_the_next() -> None:
    """A late abort would else shut down the sockets of the next group."""
    group = PaddleProcessGroup(
        JoinGeneration(generation=1, rank=0, world_size=2, store="127.0.0.1:1", instances=2), "gloo"
    )
    group._older = paddle_sockets.open_epolls()  # as while it forms: every one that comes now counts as its own
    group._closed = True
    one, other = socket.socketpair()
    with one, other, select.epoll() as watcher:
        watcher.register(one)
        group.abort()
        one.sendall(b"open")
        assert other.recv(4) == b"open"
        group._closed = False
        group.abort()
        with pytest.raises(OSError, match="Broken pipe"):
            one.sendall(b"shut")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            "[/paddle/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms",
            "in time",
        ),
        ("[/paddle/gloo/pair.cc:1] TIMEOUT self_rank = 0 pair_rank = 1", "in time"),
        ("[/paddle/gloo/pair.cc:598] Connection closed by peer [127.0.0.1]:3", "the connection to another rank"),
        ("recv: Connection reset by peer", "the connection to another rank"),
        ("[/paddle/gloo/x.cc:7] something else\nat a place", "something else"),
        ("", "RuntimeError"),
    ],
)
def test_a_loss_is_described_for_people(error: str, text: str) -> None:
    """It is in the job's events."""
    told = describe_error(RuntimeError(error))
    assert text in told
    assert "/paddle" not in told
