"""Groups over sockets: sums and states that go around, ranks that are lost, and how a loss is described."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
from support.elastic.fake_agent import AgentEnd
from support.elastic.fake_gpu import FakeNccl
from support.network.ports import free_ports

from edl_runtime.checkpoint.file_format import Snapshot
from edl_runtime.elastic.comm import agent_protocol
from edl_runtime.elastic.comm.agent_protocol import JoinGeneration, SocketAgentClient
from edl_runtime.elastic.comm.process_group import (
    CHUNK_BYTES,
    SMALL_SUM_BYTES,
    GroupSession,
    NcclProcessGroup,
    SocketProcessGroup,
    describe_error,
)
from edl_runtime.elastic.comm.ring import PIECE_BYTES, Ring
from edl_runtime.elastic.errors import GroupLostError, NoGroupError
from edl_runtime.elastic.training.train_state import share_state, state_receivers


@contextmanager
def connected(
    size: int, generation: int = 1, kind: type[SocketProcessGroup] = SocketProcessGroup
) -> Iterator[list[SocketProcessGroup]]:
    """The ranks of a group, each to be used in a thread of its own."""
    store = f"127.0.0.1:{free_ports(1)[0]}"
    joins = [
        JoinGeneration(generation=generation, rank=rank, world_size=size, store=store, instances=size)
        for rank in range(size)
    ]
    groups = [kind(join) for join in joins]
    try:
        on_all(groups, lambda group: group.connect(str(group.rank), None))
        yield groups
    finally:
        for group in groups:
            group.close()


def on_all(groups: Sequence[SocketProcessGroup], work: Callable[[SocketProcessGroup], Any]) -> list[Any]:
    """Return what `work` returns for each."""
    with ThreadPoolExecutor(len(groups)) as pool:
        started = [pool.submit(work, group) for group in groups]
        if wait(started, 60, FIRST_EXCEPTION).not_done:
            for group in groups:
                group.abort()  # else the pool would wait for ever
        return [each.result() for each in started]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_have_the_same_bits(size: int) -> None:
    """Few values are added up by rank 0; many go around in pieces, also where these are of different sizes."""
    rng = np.random.default_rng(1)
    with connected(size) as groups:
        for count in (1, SMALL_SUM_BYTES // 4, SMALL_SUM_BYTES // 4 + 1, 3 * size * PIECE_BYTES // 4 + 7):
            for kind in (np.float32, np.float64):
                own = [rng.random(count).astype(kind) for _ in groups]
                wanted = np.sum(own, axis=0, dtype=np.float64)
                on_all(groups, lambda group, own=own: group.all_reduce(own[group.rank]))
                assert all((each == own[0]).all() for each in own)
                np.testing.assert_allclose(own[0], wanted, rtol=1e-5)


def test_an_nccl_group_is_made_with_what_paddle_s_binding_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has counts and states sent over sockets."""
    monkeypatch.setattr("paddle.base.core.ProcessGroupNCCL", FakeNccl, raising=False)
    with connected(2, kind=NcclProcessGroup) as groups:
        sums = on_all(groups, lambda group: group.all_reduce_counts(np.full(2, group.rank)))
        assert [each.tolist() for each in sums] == [[1, 1]] * 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("(Unavailable) connection reset by peer"), GroupLostError),
        (OSError("(External) NCCL error(2), unhandled system error"), GroupLostError),
        (OSError("(External) NCCL error(5), invalid usage"), NoGroupError),
        (RuntimeError("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"), NoGroupError),
        (RuntimeError("Paddle is not compiled with CUDA"), NoGroupError),
        (NotImplementedError("(Unimplemented) no such type"), NoGroupError),
        (TypeError("allreduce(): incompatible function arguments"), NoGroupError),
        (ImportError("libnccl.so.2: cannot open shared object file"), NoGroupError),
    ],
    ids=str,
)
def test_an_error_that_comes_each_time_is_no_lost_connection(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    """A later group of the same ranks would end by it, too; as they meet, and in a sum."""
    monkeypatch.setattr("paddle.base.core.ProcessGroupNCCL", FakeNccl, raising=False)
    with connected(2, kind=NcclProcessGroup) as (first, _):
        monkeypatch.setattr(FakeNccl, "error", error)
        with pytest.raises(kind, match=re.escape(describe_error(error))):
            first.all_reduce(None)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(FakeNccl, "create", fail)
    with pytest.raises(kind), connected(2, kind=NcclProcessGroup):
        pass


@pytest.mark.parametrize(("error", "kind"), [(RuntimeError, GroupLostError), (TypeError, NoGroupError)])
def test_ranks_whose_store_can_t_be_opened_lose_each_other(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], kind: type[Exception]
) -> None:
    """No other error leaves `connect`: it would count as the script's own."""

    def fail(*_: object) -> None:
        raise error("no store")

    monkeypatch.setattr("paddle.base.core.TCPStore", fail)
    with pytest.raises(kind, match="no store"), connected(2, kind=NcclProcessGroup):
        pass


def model(step: int, megabytes: float) -> Snapshot:
    """A snapshot with an array of this size."""
    values = np.random.default_rng(step).integers(0, 255, int(megabytes * CHUNK_BYTES), np.uint8)
    return Snapshot(generation=1, step=step, arrays={"model": {"weights": values, "bias": np.ones(3)}})


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The bytes of states that each rank has sent."""
    found: dict[int, int] = {}
    own = Ring.send

    def send(ring: Ring, values: Any) -> None:
        found[ring._rank] = found.get(ring._rank, 0) + len(values)
        own(ring, values)

    monkeypatch.setattr(Ring, "send", send)
    return found


@pytest.mark.parametrize(
    ("steps", "senders"),
    [
        ([7, *[None] * 7], 7),  # all but the last pass it on
        ([*[7] * 8, *[None] * 8], 8),
        ([7, None, 7, None, 6, 7], 3),  # those ahead send at once, also to one that is behind
        ([None, None, 7, None], 3),  # it goes around the end
    ],
)
def test_no_rank_sends_the_state_twice(steps: list[int | None], senders: int, sent: dict[int, int]) -> None:
    """However many need it, and whoever has it."""
    snapshot = model(7, 3.5)
    receivers = state_receivers(steps)
    with connected(len(steps)) as groups:
        found = on_all(
            groups, lambda group: share_state(group, receivers, None if group.rank in receivers else snapshot)
        )
    for each in found:
        assert each.step == 7
        for name, value in snapshot.arrays["model"].items():
            assert (each.arrays["model"][name] == value).all()
    size = sum(value.nbytes for value in snapshot.arrays["model"].values())
    assert len(sent) == senders
    assert max(sent.values()) < size + CHUNK_BYTES / 10


@pytest.mark.parametrize("lost", [1, 3], ids=["the one that sends it", "one that passes it on"])
def test_a_state_is_sent_again_when_a_rank_is_lost_on_its_way(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait for it are released, and have it after the next generation."""
    snapshot = model(7, 6.0)
    pieces = [0]
    own = Ring.send

    def send(ring: Ring, values: Any) -> None:
        if ring._rank == lost:
            pieces[0] += 1
            if pieces[0] == 4:
                raise ConnectionResetError
        own(ring, values)

    def share(group: SocketProcessGroup, steps: Sequence[int | None]) -> int | None:
        receivers = state_receivers(steps)
        try:
            return share_state(group, receivers, None if group.rank in receivers else snapshot).step
        except GroupLostError:
            group.abort()  # as a session does
            return steps[group.rank]  # one that sends it keeps it

    monkeypatch.setattr(Ring, "send", send)
    with connected(5) as groups:
        steps = on_all(groups, lambda group: share(group, [7, 7, None, None, None]))
    assert [steps[rank] for rank in (0, 1, 3, 4)] == [7, 7, None, None]
    assert steps[2] in ([None] if lost == 1 else [None, 7]), "it may have passed on all before the next one is lost"
    del steps[lost]
    monkeypatch.setattr(Ring, "send", own)
    with connected(4, generation=2) as groups:
        assert on_all(groups, lambda group: share(group, steps)) == [7] * 4


def test_an_aborted_group_waits_for_nobody() -> None:
    """By another thread, be it in a sum or in a state; nor does a closed one."""
    values = np.ones(SMALL_SUM_BYTES, np.float32)
    waits: list[Callable[[SocketProcessGroup], Any]] = [
        lambda group: group.all_reduce_counts(np.ones(1, np.int64)),
        lambda group: group.all_reduce(values),
        lambda group: group.pass_on(values.view(np.uint8), receives=True, sends=False),
    ]
    for waiting in waits:
        with connected(3) as groups, ThreadPoolExecutor(1) as pool:
            held = pool.submit(waiting, groups[1])
            with pytest.raises(TimeoutError):
                held.result(0.1)
            groups[1].abort()
            with pytest.raises(GroupLostError):
                held.result(60)
            groups[1].close()
            with pytest.raises(GroupLostError):
                waiting(groups[1])


def test_groups_leave_nothing_behind() -> None:
    """A process may be in any number of them."""
    process = psutil.Process()
    before = process.net_connections()
    for generation in range(1, 6):
        with connected(3, generation) as groups:
            on_all(groups, lambda group: group.all_reduce(np.ones(SMALL_SUM_BYTES, np.float32)))
            listening = [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
            assert set(listening) <= set(before), "for no longer than the ranks need to meet"
    assert set(process.net_connections()) <= set(before)


def test_a_rank_listens_for_the_next_generation_before_it_votes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All train on until each has been told of it; where it listened for one that none has entered, it does no more."""
    monkeypatch.setattr(agent_protocol, "INSIST_AFTER_S", 3600.0)
    next_one, the_one_after = (f"127.0.0.1:{port}" for port in free_ports(2))

    def told(rank: int, generation: int, store: str) -> None:
        join = JoinGeneration(generation=generation, rank=rank, world_size=2, store=store, instances=2)
        agents[rank].send(join)
        while clients[rank].wait_for_directive(generation - 1) != join:
            pass

    def votes() -> list[Any]:
        """Return what each rank learns."""
        return on_all(
            [session.group for session in sessions],  # type: ignore[misc]
            lambda group: int(group.all_reduce_counts(np.array([sessions[group.rank].votes_to_stop()]))[0]),
        )

    with ExitStack() as stack:
        ends = [socket.socketpair() for _ in range(2)]
        clients = [SocketAgentClient(theirs, lost=lambda: None) for _, theirs in ends]
        for client in clients:
            stack.callback(client.close)
        agents = [AgentEnd(stack.enter_context(ours)) for ours, _ in ends]
        sessions = [GroupSession(client) for client in clients]
        first = f"127.0.0.1:{free_ports(1)[0]}"
        for rank in range(2):
            told(rank, 1, first)
        enter_all(sessions)
        assert votes() == [0, 0]
        told(0, 2, next_one)
        assert votes() == [1, 1]
        socket.create_connection(("127.0.0.1", int(next_one.rpartition(":")[2]))).close()
        told(1, 2, next_one)
        assert votes() == [2, 2]
        for rank in range(2):
            told(rank, 3, the_one_after)
        enter_all(sessions)
        assert [session.generation for session in sessions] == [3, 3]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(next_one.rpartition(":")[2])))
        for session in sessions:
            session.group.close()


def enter_all(sessions: Sequence[GroupSession]) -> None:
    """Have all enter the next generation, each in a thread of its own."""
    with ThreadPoolExecutor(len(sessions)) as pool:
        for entered in [pool.submit(each.next_generation, 1, lambda _: None, lambda *_: None) for each in sessions]:
            assert entered.result(60) is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("NCCL error in: [/paddle/phi/nccl.cc:81] Timed out waiting 30000ms", "in time"),
        ("[/paddle/phi/pair.cc:598] Connection closed by peer [127.0.0.1]:3", "the connection to another rank"),
        ("recv: Connection reset by peer", "the connection to another rank"),
        ("[/paddle/phi/x.cc:7] something else\nat a place", "something else"),
        ("", "RuntimeError"),
    ],
)
def test_a_loss_is_described_for_people(error: str, text: str) -> None:
    """It is in the job's events."""
    told = describe_error(RuntimeError(error))
    assert text in told
    assert "/paddle" not in told
