"""A teacher's HTTP server, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import pytest
from support.teachers.process import PATIENCE_S, wait_until
from support.teachers.serving import LIMIT, DeferredRunner, HeldRunner, Served, echo_request, serving

from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.infer_messages import REQUEST_JSON_LIMIT
from edl_runtime.protocol.tls import Trust
from edl_runtime.teacher.http.admission import MAX_STALLED_CHECKS, MAX_STALLED_CHECKS_CONTESTED, unsent_bytes

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def test_metadata_and_health_are_told(served: Served) -> None:
    """Server and model metadata, live and ready are at the paths of the protocol."""
    assert served.get("/v2")["extensions"] == ["binary_tensor_data"]
    assert served.get("/v2/health/live") == {"live": True}
    assert served.get("/v2/health/ready") == {"ready": True}
    about = served.get("/v2/models/teacher")
    assert (about["name"], about["platform"]) == ("teacher", "python")
    assert about["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    (version,) = about["versions"]
    assert served.get(f"/v2/models/teacher/versions/{version}") == about


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_gets_answers(served: Served, *, binary: bool) -> None:
    """The reference client of the protocol agrees with our server, in binary and in JSON."""
    import tritonclient.http as triton

    with triton.InferenceServerClient(served.address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("teacher")
        assert client.get_server_metadata()["name"] == "edl-airflow"
        assert client.get_model_metadata("teacher")["outputs"][1]["name"] == "sum"
        x = triton.InferInput("x", list(X.shape), "FP32")
        x.set_data_from_numpy(X, binary_data=binary)
        wanted = [triton.InferRequestedOutput("sum", binary_data=binary)]
        answer = client.infer("teacher", [x], outputs=wanted, request_id="seven")
        assert answer.get_response()["id"] == "seven"
        assert np.array_equal(answer.as_numpy("sum"), X.sum(axis=1))
        assert np.array_equal(client.infer("teacher", [x]).as_numpy("double"), X * 2)
        with pytest.raises(triton.InferenceServerException, match="the model has double, sum"):
            client.infer("teacher", [x], outputs=[triton.InferRequestedOutput("nothing")])


def test_plain_json_is_answered_in_json(served: Served) -> None:
    """A JSON file is enough for curl, the request's id comes back, and the version may be named."""
    (version,) = served.get("/v2/models/teacher")["versions"]
    body = {"id": "a", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [[1, 2, 3, 4]]}]}
    for path in ("/v2/models/teacher/infer", f"/v2/models/teacher/versions/{version}/infer"):
        answer = served.post(path, body)
        assert (answer["id"], answer["model_name"]) == ("a", "teacher")
        assert answer["outputs"][0] == {"name": "double", "datatype": "FP32", "shape": [1, 4], "data": [2, 4, 6, 8]}


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/v2/models/other/infer", 404, "served is model 'teacher'"),
        ("/v2/models/teacher/versions/9/infer", 404, "served is model 'teacher' in version"),
        ("/nothing", 404, "nothing at /nothing"),
        ("/v2/models/teacher/infer", 400, "input x is missing"),
        ("/v2/models/teacher", 405, "POST is not allowed"),
    ],
)
def test_a_refusal_has_its_reason(served: Served, path: str, status: int, said: str) -> None:
    """Unknown paths, models and versions, wrong methods and bad requests have their status and an error text."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        served.post(path, {"inputs": []})
    with refused.value as answer:
        assert answer.code == status
        assert said in json.load(answer)["error"]


@pytest.mark.parametrize(
    ("model", "x", "said", "status"),
    [
        ("arithmetic", np.zeros((2, 5), np.float32), r"'x': shape is \[2, 5\], the model takes \[-1, 4\]", 400),
        ("arithmetic", np.zeros((2, 4)), "input 'x': datatype is 'FP64', the model takes FP32", 400),
        ("fragile", np.ones((1, 4), np.float32), "ArithmeticError: one is too many", 500),
    ],
)
def test_a_request_that_fails_leaves_the_connection(model: str, x: Any, said: str, status: int) -> None:
    """The error says why; other teachers need not be asked what is wrong, but may not fail as a model does."""
    with serving(model) as served, TeacherConnection(served.address) as teacher:
        with pytest.raises(InferenceError, match=said) as refused:
            teacher.infer({"x": x}, [])
        assert (refused.value.status, refused.value.retryable) == (status, status == 500)
        assert teacher.infer({"x": X}, [])
        assert len(served.front.connections) == 1


def test_an_answer_over_the_limit_is_one_that_no_teacher_can_give() -> None:
    """Other teachers need not be asked, and the next answer comes over the same connection."""
    x = np.zeros((1 << 16, 4), np.float32)  # as many bytes as fit into the request's area, its header included
    with serving(limit=x.nbytes + 4096) as served, TeacherConnection(served.address) as teacher:
        with pytest.raises(InferenceError, match="request fewer rows or outputs") as refused:
            teacher.infer({"x": x}, [])
        assert (refused.value.status, refused.value.retryable) == (413, False)
        assert len(teacher.infer({"x": x}, ["double"])) == 1


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_number_that_json_lacks_is_not_answered_as_null(served: Served, number: float) -> None:
    """The output is named, other teachers need not be asked, and as binary the number comes."""
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    text = json.dumps({"inputs": [x], "outputs": [{"name": "sum"}]}).encode()
    body = text + np.full(4, number, np.float32).tobytes()
    request = urllib.request.Request(f"http://{served.address}/v2/models/teacher/infer", body)
    request.add_header("Inference-Header-Content-Length", str(len(text)))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    with refused.value as answer:
        assert answer.code == 400
        assert json.load(answer)["error"].startswith("output 'sum' has NaN or infinite numbers")
    with TeacherConnection(served.address) as teacher:
        answered = teacher.infer({"x": np.full((1, 4), number, np.float32)}, ["sum"])["sum"]
        assert np.array_equal(answered, [number], equal_nan=True)


def test_refusals_that_need_no_model_are_counted() -> None:
    """Each under its status, whether it ends the connection; health and metadata are not, and the teacher goes on."""
    good = b"Authorization: Bearer t\r\n"
    infer = b"POST /v2/models/teacher/infer HTTP/1.1\r\n" + good
    counted: Counter[int] = Counter()
    with serving(token="t") as served:
        for sent, status in (
            (b"GET /v2 HTTP/1.1\r\nConnection: close\r\n\r\n", 401),
            (b"GET /x HTTP/1.1\r\nConnection: close\r\n" + good + b"\r\n", 404),
            (b"GET /v2 HTTP/7.0\r\n\r\n", 400),
            (b"\x16\x03\x01 hello\r\n\r\n", 400),
            (b"GET /v2 HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
            (b"GET /v2 HTTP/1.1\r\nX: " + b"y" * 20_000, 431),
            (b"GET /v2 HTTP/1.1\r\n" + good + b"X: " + b"y" * 20_000 + b"\r\n\r\n", 431),
            (infer + b"Host: a\r\n\r\n", 411),
            (infer + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", 411),
            (infer + b"Content-Length: 99999999999\r\n\r\n", 413),
            (infer + b"Content-Length: 1\r\nContent-Encoding: gzip\r\n\r\nx", 415),
        ):
            assert served.exchange(sent).startswith(b"HTTP/1.1 %d " % status)
            counted[status] += 1
        assert served.get("/v2", Authorization="Bearer t")["name"] == "edl-airflow"
        served.front.draining = True
        for sent in (infer + b"Content-Length: 1\r\n\r\nx", b"GET /v2/health/ready HTTP/1.1\r\n\r\n"):
            assert served.exchange(sent).startswith(b"HTTP/1.1 503 ")
        assert served.front.metrics._answers == {**counted, 503: 2}


def test_a_token_is_asked_for_except_for_health() -> None:
    """With a token, only health is open to all."""
    with serving(token="secret") as served:
        assert served.get("/v2/health/ready") == {"ready": True}
        for token in ("", "wrong", "secre", "secrets", "a-secret"):
            with TeacherConnection(served.address, token=token) as teacher, pytest.raises(InferenceError) as refused:
                teacher.infer({"x": X}, [])
            assert (refused.value.status, refused.value.retryable) == (401, False)
        with TeacherConnection(served.address, token="secret") as teacher:
            assert teacher.signature().name == "teacher"
            assert len(teacher.infer({"x": X}, [])) == 2


def test_a_body_over_the_limit_is_refused_while_it_is_sent(served: Served) -> None:
    """The client gets the 413 although it was still sending, with the limit in it."""
    with TeacherConnection(served.address) as teacher, pytest.raises(InferenceError, match=f"allowed are {LIMIT}"):
        teacher.infer({"x": np.zeros((LIMIT, 4), np.float32)}, [])


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    """Requests sent at once are answered one by one, in order, heads and bodies arriving in any pieces."""
    one = b'{"id":"%d","inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'
    requests = b""
    for number in range(300):
        body = one % number
        requests += b"POST /v2/models/teacher/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        requests += b"GET /v2/health/live HTTP/1.1\r\n\r\n"
    requests += b"GET /v2 HTTP/1.1\r\nConnection: close\r\n\r\n"
    answer = served.exchange(requests)
    positions = [answer.find(b'"id":"%d"' % number) for number in range(300)]
    assert positions == sorted(positions)
    assert positions[0] >= 0
    assert answer.count(b"HTTP/1.1 200 OK") == 601


def test_nothing_stands_between_the_answer_to_head_and_the_next(served: Served) -> None:
    """HEAD is not allowed, and as its answer never has a body, none is sent that would be taken for what follows."""
    head, rest = served.exchange(b"HEAD /v2 HTTP/1.1\r\n\r\nGET /v2 HTTP/1.1\r\nConnection: close\r\n\r\n").split(
        b"\r\n\r\n", 1
    )
    assert head.startswith(b"HTTP/1.1 405 ")
    assert rest.startswith(b"HTTP/1.1 200 ")


def test_a_client_that_waits_for_continue_is_told_to(served: Served) -> None:
    """`Expect: 100-continue`, as curl sends it, gets its answer before the body."""
    head = b"POST /v2/models/teacher/infer HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    with served.connect() as raw:
        raw.sendall(head)
        assert raw.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(b"{}")
        assert raw.recv(65536).startswith(b"HTTP/1.1 400 ")


@contextmanager
def late_reader(port: int) -> Iterator[socket.socket]:
    """A client into which hardly anything fits that it has not read."""
    with socket.socket() as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        late.settimeout(PATIENCE_S)
        late.connect(("127.0.0.1", port))
        yield late


def test_a_connection_ends_once_when_a_large_answer_has_left(caplog: pytest.LogCaptureFixture) -> None:
    """Before Python 3.12 asyncio calls us while it still writes; closing there would end the connection twice."""
    size = 16 * LIMIT - 1024
    with serving("echo", limit=16 * LIMIT) as served:
        with late_reader(served.port) as late:
            late.sendall(echo_request(size))
            wait_until(lambda: served.unsent() > 0)
            answer = b""
            while part := late.recv(65536):
                answer += part
        assert answer.endswith(b"\x09" * size)
        wait_until(lambda: not served.on_loop(lambda: [*served.front.connections]))
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_an_answer_keeps_its_slot_until_the_network_has_taken_it() -> None:
    """A client that reads late gets its own answer, though others were served meanwhile."""
    size = LIMIT - 1024
    with serving("echo", slots=2) as served, late_reader(served.port) as late:
        late.sendall(echo_request(size))
        for number in range(4):
            with TeacherConnection(served.address) as teacher:
                body = np.full((1, size), number, np.uint8)
                assert np.array_equal(teacher.infer({"x": body}, ["x"])["x"], body)
        answer = b""
        while part := late.recv(65536):
            answer += part
        assert answer.endswith(b"\x09" * size)


def test_an_idle_client_holds_no_slot_over_tls(tls: tuple[ssl.SSLContext, Trust]) -> None:
    """Its answer has left when the network has it, however large it is, and not when the client comes again."""
    context, trust = tls
    with serving("echo", DeferredRunner, slots=1, limit=32 << 20, tls=context) as served, ExitStack() as stack:
        for size in (1, 8 << 20):
            body = np.full((1, size), 7, np.uint8)
            teacher = stack.enter_context(TeacherConnection(served.address, trust=trust))
            for _ in range(3):
                assert np.array_equal(teacher.infer({"x": body}, ["x"])["x"], body)
                wait_until(lambda: served.on_loop(lambda: served.front.slots.in_flight) == 0)


@pytest.mark.parametrize("secured", [False, True])
def test_a_client_that_does_not_read_its_answer_is_disconnected(
    tls: tuple[ssl.SSLContext, Trust], *, secured: bool
) -> None:
    """It holds its slot, and over TLS little memory beside it, for a while, not for ever; then others are served."""
    context, trust = tls if secured else (None, None)
    size = 24 << 20
    with (
        serving("echo", slots=1, limit=32 << 20, tls=context) as served,
        late_reader(served.port) as raw,
        trust.context.wrap_socket(raw, server_hostname="127.0.0.1") if trust else nullcontext(raw) as never,
    ):
        never.sendall(echo_request(size))
        wait_until(lambda: served.unsent() > 0)
        (connection,) = served.front.connections
        assert not secured or len(connection._unsent) > size / 2
        wait_until(
            lambda: served.check_stalled(MAX_STALLED_CHECKS) or not served.front.connections
        )  # the network may take more once
        with TeacherConnection(served.address, trust=trust) as teacher:
            assert len(teacher.infer({"x": np.zeros((1, 4), np.uint8)}, [])) == 1


def test_a_client_that_reads_slowly_gets_all_of_its_answer() -> None:
    """However many checks there are, as long as it takes bytes in between."""
    size = 24 << 20
    with serving("echo", slots=1, limit=32 << 20) as served, late_reader(served.port) as slow:
        slow.sendall(echo_request(size))
        wait_until(lambda: served.unsent() > 0)
        (connection,) = served.front.connections
        got = 0
        for _ in range(2 * MAX_STALLED_CHECKS):
            served.check_stalled()
            before = served.on_loop(lambda: unsent_bytes(connection._transport))
            while served.on_loop(lambda: unsent_bytes(connection._transport)) == before:
                part = slow.recv(1 << 12)
                assert part, "it was disconnected"
                got += len(part)
        while part := slow.recv(1 << 20):
            got += len(part)
        assert got > size


def test_a_client_that_leaves_takes_nothing_along() -> None:
    """Slots of clients that went away halfway, waiting or while their request ran, are free again."""
    with serving(runner=HeldRunner, slots=1) as served:
        with served.connect() as arriving:
            arriving.sendall(HEAD)
            wait_until(lambda: served.front.slots.in_flight == 1)
        halfway = LONG_HEAD + b"{}".ljust(LONG - 7)
        with served.connect() as receiving:
            receiving.sendall(halfway)
            wait_until(lambda: not served.front.slots._free)
            with served.connect() as waiting:
                waiting.sendall(halfway)
                wait_until(lambda: len(served.front.slots._waiting) == 1)
        with served.connect() as running:
            running.sendall(halfway + b"       ")
            wait_until(lambda: len(served.held) == 1)
        wait_until(lambda: not served.front.connections)
        served.loop.call_soon_threadsafe(served.held.pop())
        wait_until(lambda: len(served.front.slots._free) == 1)
        assert served.front.slots.in_flight == 0


def test_a_client_that_stalls_halfway_is_disconnected() -> None:
    """A silent client keeps no slot; one that is idle between requests is left alone."""
    with serving() as served, TeacherConnection(served.address) as idle, served.connect() as raw:
        assert idle.ready()
        raw.sendall(LONG_HEAD + b" " * (LONG - 1))
        wait_until(lambda: any(one.bytes_to_come == 1 for one in served.front.connections))
        assert len(served.front.slots._free) == 3
        served.check_stalled(MAX_STALLED_CHECKS)
        assert not is_closed(raw)
        served.check_stalled()
        wait_until(lambda: is_closed(raw))
        assert len(served.front.slots._free) == 4
        assert len(served.front.connections) == 1
        assert idle.ready()


LONG = 100_000
"""Bytes of a body that needs a slot before all of it is there."""
LONG_HEAD = b"POST /v2/models/teacher/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % LONG
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'
HEAD = b"POST /v2/models/teacher/infer HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)


def test_clients_that_send_a_byte_now_and_then_hold_no_slot() -> None:
    """Others are answered at once, however many there are; and so are these, when all of a request is there."""
    with ExitStack() as stack:
        served = stack.enter_context(serving(slots=1))
        clients = [stack.enter_context(served.connect()) for _ in range(4)]
        for position in range(3):
            for client in clients:
                client.sendall((HEAD if position == 0 else b"") + BODY[position : position + 1])
            wait_until(lambda: served.front.slots.in_flight == len(clients))
            with TeacherConnection(served.address) as teacher:
                assert teacher.infer({"x": X}, [])
        for client in clients:
            client.sendall(BODY[3:])
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sends", [True, False])
def test_a_slot_that_others_wait_for_is_not_held_slowly(*, sends: bool) -> None:
    """Who sends or takes next to nothing keeps it while nobody waits, and no longer; who waits is left alone."""
    with ExitStack() as stack:
        served = stack.enter_context(serving("echo", slots=1, limit=32 << 20))
        slow, waits = stack.enter_context(late_reader(served.port)), stack.enter_context(served.connect())
        slow.sendall(LONG_HEAD + b" " * (LONG - 1000) if sends else echo_request(24 << 20))
        wait_until(lambda: not served.front.slots._free and (sends or served.unsent() > 0))

        def moving_on(checks: int) -> None:
            for _ in range(checks):
                if sends:
                    slow.sendall(b" ")
                else:
                    slow.recv(1)
                served.check_stalled()

        moving_on(1 + MAX_STALLED_CHECKS_CONTESTED)
        assert served.front.slots.in_flight == 1
        waits.sendall(echo_request(1))
        wait_until(lambda: served.front.slots.contested)
        with suppress(OSError):
            moving_on(2 * MAX_STALLED_CHECKS_CONTESTED)
        assert waits.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_what_begins_as_no_http_is_closed_at_once() -> None:
    """There is nothing to wait for, and a client that speaks TLS gets an error."""
    with serving() as served:
        assert b"does the client use TLS" in served.exchange(b"\x16")


@pytest.mark.parametrize("told", [b"", b"Inference-Header-Content-Length: %d\r\n" % (REQUEST_JSON_LIMIT + 1)])
def test_json_has_a_limit_of_its_own(told: bytes) -> None:
    """It is refused before it is received: reading it would take a predictor seconds and much memory."""
    head = b"POST /v2/models/teacher/infer HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (told, REQUEST_JSON_LIMIT + 1)
    with serving(limit=2 * REQUEST_JSON_LIMIT) as served:
        answer = served.exchange(head)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"send tensors as binary" in answer


def test_a_client_moves_as_long_as_its_machine_takes_in() -> None:
    """What the system still has to send counts: on a slow network it takes nothing new for longer than a check."""
    size = 24 << 20
    with serving("echo", slots=1, limit=32 << 20) as served, late_reader(served.port) as slow:
        slow.sendall(echo_request(size))
        wait_until(lambda: served.unsent() > 0)
        (connection,) = served.front.connections
        wait_until(lambda: served.on_loop(lambda: unsent_bytes(connection._transport)) > served.unsent())


def test_clients_are_checked_periodically() -> None:
    """Nobody has to ask for it."""
    with serving(check_s=0.05) as served:
        for _ in range(2):
            with served.connect() as silent, suppress(ConnectionResetError):
                assert silent.recv(1) == b""


def is_closed(raw: socket.socket) -> bool:
    """Whether the teacher has ended this connection, of which nothing is to be read."""
    raw.settimeout(0.01)
    try:
        return raw.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_a_stranger_is_disconnected() -> None:
    """A client without the token is disconnected: not by being silent, not by asking for health alone."""
    with (
        serving(token="secret") as served,
        TeacherConnection(served.address, token="secret") as friend,
        served.connect() as silent,
        served.connect() as healthy,
    ):
        assert friend.ready()
        healthy.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert healthy.recv(65536).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: len(served.front.connections) == 3)
        served.check_stalled(1 + MAX_STALLED_CHECKS)
        wait_until(lambda: is_closed(silent))
        wait_until(lambda: is_closed(healthy))
        assert len(served.front.connections) == 1
        assert friend.ready()


@pytest.mark.parametrize("secured", [False, True])
def test_strangers_lock_out_nobody(tls: tuple[ssl.SSLContext, Trust], *, secured: bool) -> None:
    """Beyond the most connections the earliest stranger goes, also one that has yet to begin TLS."""
    context, trust = tls if secured else (None, None)
    with ExitStack() as stack:
        served = stack.enter_context(serving(token="secret", most_connections=3, tls=context))
        strangers = []
        for number in range(3):
            strangers.append(stack.enter_context(served.connect()))
            wait_until(lambda number=number: len(served.front.connections) == number + 1)
        friends = [
            stack.enter_context(TeacherConnection(served.address, token="secret", trust=trust)) for _ in range(3)
        ]
        for number, friend in enumerate(friends):
            assert friend.ready()
            assert len(served.front.connections) == 3
            wait_until(lambda number=number: is_closed(strangers[number]))
        assert all(friend.ready() for friend in friends)


def test_idle_clients_lock_out_nobody() -> None:
    """Where all have asked something, the one goes that has been idle the longest, and may come again."""
    with ExitStack() as stack:
        served = stack.enter_context(serving(most_connections=2))
        idle, lately, newest = (stack.enter_context(closing(TeacherConnection(served.address))) for _ in range(3))
        for client in (idle, lately, newest):
            assert client.ready()
        assert lately.ready()
        with pytest.raises(OSError, match=r".+"):
            idle.ready()
        assert idle.ready()


def test_clients_that_do_not_read_lock_out_nobody() -> None:
    """After a few checks they are closed for new ones, before idle clients; waiting for a slow model is no stall."""
    size = 24 << 20
    with ExitStack() as stack:
        served = stack.enter_context(serving("echo", HeldRunner, limit=32 << 20, most_connections=3))
        waits, never = stack.enter_context(served.connect()), stack.enter_context(late_reader(served.port))
        idle, newest, next_one = (stack.enter_context(closing(TeacherConnection(served.address))) for _ in range(3))
        never.sendall(echo_request(size))
        wait_until(lambda: len(served.held) == 1)
        served.on_loop(served.held.pop())
        waits.sendall(echo_request(1))
        wait_until(lambda: len(served.held) == 1)
        assert idle.ready()
        served.check_stalled(1)

        def is_still() -> bool:
            served.check_stalled()
            return served.on_loop(lambda: any(one.stalled_for for one in served.front.connections))

        wait_until(is_still)  # the network may take more a few times
        never.recv(1 << 20)
        wait_until(lambda: not served.on_loop(lambda: any(one.stalled_for for one in served.front.connections)))
        wait_until(is_still)
        assert newest.ready()
        assert idle.ready()
        assert len(served.front.connections) == 3
        served.check_stalled(MAX_STALLED_CHECKS_CONTESTED + 1)
        assert next_one.ready()
        served.on_loop(served.held.pop())
        assert waits.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_draining_teacher_answers_what_it_has_and_refuses_the_rest() -> None:
    """In flight: answered. New: 503, which another teacher may answer. Health says not ready, then all is closed."""
    with serving(runner=HeldRunner) as served, ThreadPoolExecutor(1) as thread, served.connect() as idle:
        early, late = TeacherConnection(served.address), TeacherConnection(served.address)
        assert late.ready()
        answer = thread.submit(early.infer, {"x": X}, ["sum"])
        wait_until(lambda: len(served.held) == 1)
        drained = asyncio.run_coroutine_threadsafe(served.front.drain(PATIENCE_S), served.loop)
        wait_until(lambda: served.front.draining)
        assert not late.ready()
        with pytest.raises(InferenceError, match="this teacher is shutting down") as refused:
            late.infer({"x": X}, [])
        assert (refused.value.status, refused.value.retryable) == (503, True)
        assert not drained.done()
        served.loop.call_soon_threadsafe(served.held.pop())
        assert np.array_equal(answer.result(PATIENCE_S)["sum"], X.sum(axis=1))
        assert drained.result(PATIENCE_S)
        wait_until(lambda: is_closed(idle))
        wait_until(lambda: not served.front.connections)
        early.close()
        late.close()


@pytest.mark.parametrize("secured", [False, True])
def test_a_call_can_be_broken_off_from_another_thread(tls: tuple[ssl.SSLContext, Trust], *, secured: bool) -> None:
    """close() makes a waiting call raise OSError at once, and the connection stays closed."""
    context, trust = tls if secured else (None, None)
    with serving(runner=HeldRunner, tls=context) as served, ThreadPoolExecutor(1) as thread:
        teacher = TeacherConnection(served.address, trust=trust)
        call = thread.submit(teacher.infer, {"x": X}, [])
        wait_until(lambda: len(served.held) == 1)
        teacher.close()
        assert isinstance(call.exception(PATIENCE_S), OSError)
        with pytest.raises(ConnectionAbortedError):
            teacher.ready()
        served.loop.call_soon_threadsafe(served.held.pop())


@pytest.mark.parametrize("secured", [False, True])
def test_a_call_does_not_outlast_its_time_limit(tls: tuple[ssl.SSLContext, Trust], *, secured: bool) -> None:
    """A silent teacher makes TimeoutError, and the next call connects again."""
    context, trust = tls if secured else (None, None)
    with (
        serving(runner=HeldRunner, tls=context) as served,
        TeacherConnection(served.address, timeout_s=3, trust=trust) as teacher,
    ):
        with pytest.raises(TimeoutError, match="longer than 3 s"):
            teacher.infer({"x": X}, [])
        teacher._link._timeout_s = PATIENCE_S  # of the next connection
        assert teacher.ready()
        wait_until(lambda: served.held)
        served.loop.call_soon_threadsafe(served.held.pop())
