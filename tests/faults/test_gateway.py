"""A gateway whose teachers die, lie, hang or are not there: each request is answered once, rightly, or refused."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
import pytest
from support.llm.processes import (
    POOL,
    FakeProcess,
    World,
    fake_teacher,
    gateway_process,
    metric,
    post,
    registered,
    running_gateway,
    sequences,
    starting_together,
    wait_healthy,
    world,
)
from support.llm.scores import logprobs
from support.network.certificates import Authority
from support.teachers.process import PATIENCE_S, process, wait_until

from edl_runtime.gateway.errors import TeacherFailedError
from edl_runtime.gateway.http import TeacherClient
from edl_runtime.gateway.pool import MOST_TRIES
from edl_runtime.gateway.requests import Question
from edl_runtime.gateway.teachers import LlmTeacher
from edl_runtime.protocol.llm import LlmServer, llm_signature
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import get_pool
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

ROWS = sequences(200, 40)
BODY = {"model": "fake", "prompt": ROWS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}

STREAMED = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture(scope="module")
def shared(redis_server: RedisServer) -> Iterator[World]:
    """A pool of two vLLM servers."""
    with world(redis_server.url, "vllm", "vllm") as made:
        yield made


@pytest.fixture
def pair(shared: World) -> Iterator[World]:
    """A pool of two vLLM servers, which are right when a test begins."""
    yield shared
    for fake in shared.teachers:
        fake.behave()
    shared.wait_all_good()


def check_right(response: httpx.Response, rows: list[list[int]] = ROWS) -> None:
    """Check that a request of `rows` was answered: each row once, in order, by right scores."""
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(rows)))
    for choice, ids in zip(choices, rows, strict=True):
        last = len(ids) - 1
        assert choice["prompt_logprobs"][last][str(ids[last])]["logprob"] == logprobs(ids, last)[ids[last]]


@contextmanager
def asking(url: str) -> Iterator[Future[httpx.Response]]:
    """Send a request in a thread; yields its future."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(post, f"{url}/v1/completions", BODY)


def connected(url: str) -> socket.socket:
    """Return a connection to a gateway. Raises OSError."""
    place = urlsplit(url)
    return socket.create_connection((place.hostname, place.port), PATIENCE_S)


def refuses(url: str) -> bool:
    """Whether a gateway takes no connection any more."""
    try:
        connected(url).close()
    except ConnectionRefusedError:
        return True
    return False


def quarantined(settings: RuntimeSettings) -> dict[str, str]:
    """Return the pool's teachers in quarantine, as `edl pools` shows them, and why."""

    async def read() -> dict[str, str]:
        async with connect(settings.redis_url) as client:
            info = await get_pool(client, settings.namespace, POOL)
        return {one.address: one.quarantine.reason for one in info.teachers if one.quarantine}

    return asyncio.run(read())


@contextmanager
def joined(pair: World, third: FakeProcess) -> Iterator[subprocess.Popen[str]]:
    """Register a third server in the pool, which it has left afterwards; yields its sidecar."""
    with registered(pair.settings, third.address) as sidecar:
        try:
            yield sidecar
        finally:
            sidecar.terminate()
            sidecar.wait(PATIENCE_S)


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.deep)])
def test_parts_of_a_killed_teacher_are_asked_of_another(pair: World, kind: str) -> None:
    """SIGKILL while it computes: only its parts are asked again, and the answers are whole and in order."""
    with fake_teacher(kind) as killed, joined(pair, killed), ExitStack() as stack:
        wait_until(lambda: pair.metric("teachers") == 3)
        three = [*pair.teachers, killed]
        for fake in three:
            fake.behave(slow_s=1000)
        retries, hedges, rows = pair.metric("retries"), pair.metric("hedges"), sum(pair.rows_asked())
        answers = [stack.enter_context(asking(pair.url)) for _ in range(4)]
        wait_until(lambda: all(fake.asked("running") for fake in three))  # nothing is idle, which would hedge
        killed.kill()
        wait_until(lambda: pair.metric("retries") > retries or pair.metric("hedges") > hedges)
        for fake in pair.teachers:
            fake.behave()
        for answer in answers:
            check_right(answer.result())
        most = len(ROWS) * (len(answers) + pair.metric("hedges") - hedges)
        assert sum(pair.rows_asked()) - rows < most + 50, "each row once, and self-tests"


def test_a_request_waits_for_an_empty_pool(settings: RuntimeSettings) -> None:
    """It is answered when a teacher joins; the health route says 503 meanwhile, which makes TRL wait."""
    with running_gateway(settings) as url, asking(url) as answer:
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S, trust_env=False).status_code == 503
        wait_until(lambda: metric(url, "tokens_waiting") == 0 and not answer.done())
        with fake_teacher() as fake, registered(settings, fake.address):
            check_right(answer.result())


def test_a_pool_that_stays_empty_says_when_to_ask_again(settings: RuntimeSettings) -> None:
    """503 with Retry-After, after the time given; never 504, which ends a run."""
    with running_gateway(settings, "--wait-s", 0.2) as url:
        response = post(f"{url}/v1/completions", BODY)
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) > 0
        assert f"edl pools {POOL}" in response.json()["error"]["message"]
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S, trust_env=False).status_code == 503


def test_the_part_of_a_hung_teacher_is_hedged(pair: World) -> None:
    """A second teacher is asked too, its answer counts, and the first one's request is cancelled."""
    hung, _ = pair.teachers
    hung.behave(slow_s=1000)
    check_right(post(f"{pair.url}/v1/completions", BODY))
    assert pair.metric("hedges") >= 1
    assert pair.metric("hedges_won") >= 1
    wait_until(lambda: hung.asked("gone") and not hung.asked("running"))


@pytest.mark.parametrize("leaves", ["drained", pytest.param("found", marks=pytest.mark.deep)])
def test_the_part_of_a_stopped_teacher_is_asked_of_a_busy_one(pair: World, leaves: str) -> None:
    """Nothing is idle to hedge with; when it has left the pool, as `edl register` finds out within 15 s, others answer.

    What it answers when it goes on is nobody's any more.
    """
    with fake_teacher() as stopped, joined(pair, stopped) as sidecar, ExitStack() as stack:
        wait_until(lambda: pair.metric("teachers") == 3)
        for fake in (*pair.teachers, stopped):
            fake.behave(slow_s=1000)
        before = pair.metric("sequences")
        answers = [stack.enter_context(asking(pair.url)) for _ in range(4)]
        wait_until(lambda: stopped.asked("running"))
        stopped.process.send_signal(signal.SIGSTOP)
        if leaves == "drained":
            sidecar.terminate()
        wait_until(lambda: pair.metric("teachers") == 2)
        for fake in pair.teachers:
            fake.behave()
        for answer in answers:
            check_right(answer.result())
        stopped.process.send_signal(signal.SIGCONT)
        stopped.behave()
        wait_until(lambda: not stopped.asked("running"))
        assert pair.metric("sequences") - before == len(answers) * len(ROWS)


def test_a_teacher_that_drips_its_answer_is_given_up(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends a byte now and then, so that no read of the socket is late."""
    monkeypatch.setattr("edl_runtime.gateway.http.BODY_WITHIN_S", 0.5)

    async def ask(address: str) -> None:
        server = LlmServer(kind="vllm")
        teacher = LlmTeacher(Member(id="1", address=address, signature=llm_signature("fake", server, ())), server)
        async with TeacherClient(settings) as client:
            await client.ask(teacher, Question("/v1/completions", msgspec.json.encode(BODY)))

    with fake_teacher() as fake:
        fake.behave(fault="drip")
        with pytest.raises(TeacherFailedError, match="did not end"):
            asyncio.run(ask(fake.address))


def test_a_refused_request_and_a_broken_one_leave_nothing(settings: RuntimeSettings) -> None:
    """No memory of what was read, which is a dozen times the body, and no traceback in the log."""
    with (
        fake_teacher() as fake,
        registered(settings, fake.address),
        gateway_process(settings) as (gateway, url),
    ):
        wait_healthy(url)
        memory = psutil.Process(gateway.pid).memory_info
        before = memory().rss
        rows = [[300] * 4000] * 400
        assert post(f"{url}/v1/completions", BODY | {"prompt": [*rows, []]}).status_code == 400
        wait_until(lambda: memory().rss < before + (40 << 20))
        with connected(url) as caller:
            caller.sendall(b"POST /pools/llm/v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 9\r\n\r\n{")
        check_right(post(f"{url}/v1/completions", BODY))
        gateway.terminate()
        assert "Traceback" not in gateway.communicate()[1]


@pytest.mark.parametrize("length", [f"Content-Length: {100 << 20}", "Transfer-Encoding: chunked"])
def test_bodies_that_don_t_come_hold_nothing(pair: World, length: str) -> None:
    """Nor do those for a pool without teachers: they are not read before it has one. Others are answered meanwhile."""
    begin = b'{"prompt":[[' if "Content" in length else b'c\r\n{"prompt":[[\r\n'
    with ExitStack() as stack:
        for pool in (POOL, "empty"):
            head = f"POST /pools/{pool}/v1/completions HTTP/1.1\r\nHost: [::1]\r\n{length}\r\n\r\n"
            for _ in range(30):
                stack.enter_context(connected(pair.url)).sendall(head.encode() + begin)
        check_right(post(f"{pair.url}/v1/completions", BODY))


@pytest.mark.parametrize("body", [b'{"prompt":[' + b"[]," * (30 << 20), b'{"return_logprob":[' + b"{}," * (30 << 20)])
def test_a_body_of_tiny_values_is_refused_before_they_are_made(settings: RuntimeSettings, body: bytes) -> None:
    """90 MB of them took 2.6 GB, and nobody else was served for nine seconds; also where its length is not told."""
    with fake_teacher() as fake, registered(settings, fake.address), gateway_process(settings) as (gateway, url):
        wait_healthy(url)
        before = psutil.Process(gateway.pid).memory_info().rss
        for content in (body, iter([body])):
            response = httpx.post(f"{url}/generate", content=content, timeout=PATIENCE_S, trust_env=False)
            assert response.status_code == 413
            assert "allowed are 512" in response.json()["error"]["message"]
        assert psutil.Process(gateway.pid).memory_info().rss < before + (200 << 20)


def test_a_request_that_tells_two_lengths_is_refused(pair: World) -> None:
    """And its connection closed: what one reads as its end, a proxy before it may read as another request."""
    with connected(pair.url) as caller:
        head = f"POST /pools/{POOL}/v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 2\r\n"
        caller.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        with caller.makefile("rb") as answers:
            assert answers.readline().startswith(b"HTTP/1.1 400")
            assert answers.read().count(b"HTTP/1.1") == 0


def test_a_caller_that_hangs_up_frees_its_teachers(pair: World) -> None:
    """Its parts are cancelled where they run, and the next request is answered."""
    before = sum(fake.asked("gone") for fake in pair.teachers)
    for fake in pair.teachers:
        fake.behave(slow_s=1000)
    content = msgspec.json.encode(BODY)
    with connected(pair.url) as caller:
        head = f"POST /pools/{POOL}/v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(content)}\r\n\r\n"
        caller.sendall(head.encode() + content)
        wait_until(lambda: all(fake.asked("running") for fake in pair.teachers))
    wait_until(lambda: not any(fake.asked("running") for fake in pair.teachers))
    assert sum(fake.asked("gone") for fake in pair.teachers) > before
    for fake in pair.teachers:
        fake.behave()
    check_right(post(f"{pair.url}/v1/completions", BODY))
    wait_until(lambda: pair.metric("tokens_in_flight") == 0)


@pytest.mark.parametrize(
    "fault",
    [
        "other ids",
        "other model",
        *(
            pytest.param(fault, marks=pytest.mark.deep)
            for fault in ("half", "garbage", "huge", "NaN", "null", "a row less", "a row more", "error")
        ),
    ],
)
def test_a_teacher_that_answers_wrongly_is_found(pair: World, fault: str) -> None:
    """Its part is asked of another one; `edl pools` shows why it is in quarantine, and it is back once it is right."""
    liar, _ = pair.teachers
    liar.behave(fault=fault)
    check_right(post(f"{pair.url}/v1/completions", BODY))
    (reason,) = wait_until(lambda: quarantined(pair.settings)).values()
    assert reason
    liar.behave()
    pair.wait_all_good()


@pytest.mark.parametrize(
    ("fault", "said"), [("differs", "differently each time"), ("other weights", "other weights under the same name")]
)
def test_a_teacher_that_scores_differently_is_left_out(pair: World, fault: str, said: str) -> None:
    """Its self-test finds it before a student asks it, as no answer alone shows it; it is back once it is right.

    One with other weights has the same model's name, and scores alike each time: only the other teachers tell.
    """
    with fake_teacher() as bad:
        bad.behave(fault=fault)
        with joined(pair, bad):
            found = wait_until(lambda: quarantined(pair.settings))
            assert list(found) == [bad.address]
            assert said in found[bad.address]
            check_right(post(f"{pair.url}/v1/completions", BODY))
            asked = bad.counts()
            assert asked["rows"] == asked["requests"], "its self-tests alone, each of one row"
            bad.behave()
            wait_until(lambda: pair.metric("teachers") == 3)


def test_a_request_that_all_teachers_fail_ends(pair: World) -> None:
    """It may be the cause: after some tries it is answered 503, with the last teacher's words."""
    for fake in pair.teachers:
        fake.behave(fault="error on 490")
    response = post(f"{pair.url}/v1/completions", BODY | {"prompt": [[1, 490]]})
    assert response.status_code == 503
    assert f"{MOST_TRIES} teachers" in response.json()["error"]["message"]
    assert "out of memory" in response.json()["error"]["message"]
    assert pair.metric("quarantined") == 0, "others' requests go on"


def test_a_teacher_s_refusal_is_the_caller_s(pair: World) -> None:
    """What one refuses, all would: 400 with its words, and it stays in use."""
    for fake in pair.teachers:
        fake.behave(fault="refusal")
    response = post(f"{pair.url}/v1/completions", BODY)
    assert response.status_code == 400
    assert "too much for me" in response.json()["error"]["message"]
    assert pair.metric("teachers") == 2


def test_a_stream_that_breaks_says_so(pair: World) -> None:
    """Its caller has had a part of it, so it can't be begun anew."""
    for fake in pair.teachers:
        fake.behave(fault="broken stream")
    response = post(f"{pair.url}/v1/chat/completions", STREAMED)
    assert response.text.startswith("data: ")
    assert '"error"' in response.text.splitlines()[-2]


@pytest.mark.parametrize("counted", ["held", "running"])
def test_the_stream_of_a_stopped_teacher_ends_or_moves(pair: World, counted: str) -> None:
    """Once it has left the pool: by an error event where its caller has had a part of it; else another one answers."""
    with fake_teacher() as stopped, joined(pair, stopped) as sidecar, ThreadPoolExecutor(6) as threads:
        wait_until(lambda: pair.metric("teachers") == 3)
        three = [*pair.teachers, stopped]
        for fake in three:
            fake.behave(**({"fault": "held stream"} if counted == "held" else {"slow_s": 1000}))
        before = sum(fake.asked(counted) for fake in three)
        answers = [threads.submit(post, f"{pair.url}/v1/chat/completions", STREAMED) for _ in range(6)]
        wait_until(lambda: sum(fake.asked(counted) for fake in three) == before + 6)
        his = stopped.asked(counted)
        assert his > 0
        stopped.process.send_signal(signal.SIGSTOP)
        sidecar.terminate()
        wait_until(lambda: pair.metric("teachers") == 2)
        for fake in pair.teachers:
            fake.behave()
        ends = [answer.result().text.splitlines()[-2] for answer in answers]
        stopped.process.send_signal(signal.SIGCONT)
    broken = [end for end in ends if "has left the pool" in end]
    assert len(broken) == (his if counted == "held" else 0)
    assert ends.count("data: [DONE]") == 6 - len(broken)


def test_a_token_is_needed(settings: RuntimeSettings) -> None:
    """As a bearer token, or as the password in the URL, as trainers' clients send no header of their own."""
    secured = msgspec.structs.replace(settings, gateway_token="s3cret")
    with (
        process("-m", "edl_runtime.cli", "gateway", "--host", "0.0.0.0", env=settings.to_env()) as exposed,
        starting_together(secured, "vllm") as ((fake,), url),
        registered(settings, fake.address),
    ):
        with_token = url.replace("http://", "http://edl:s3cret@")
        wait_healthy(with_token)
        check_right(post(f"{with_token}/v1/completions", BODY))
        check_right(post(f"{url}/v1/completions", BODY, headers={"Authorization": "Bearer s3cret"}))
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic !"}):
            for route in ("/v1/completions", "/infer/"):
                assert post(url + route, BODY, headers=headers).status_code == 401
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S, trust_env=False).status_code == 401
        assert exposed.wait(PATIENCE_S) == 78
        assert "EDL_GATEWAY_TOKEN" in exposed.communicate()[1]


def test_too_few_open_files_are_refused_at_the_start(settings: RuntimeSettings) -> None:
    """It would serve one caller at a time, and close the connections of the others."""
    command = "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)); "
    command += "runpy.run_module('edl_runtime.cli', run_name='__main__')"
    with process("-c", command, "gateway", env=settings.to_env()) as refused:
        assert refused.wait(PATIENCE_S) == 78
        assert "ulimit -n" in refused.communicate()[1]


def test_a_gateway_without_a_token_answers_this_machine_alone(pair: World) -> None:
    """A page of another site reaches it by a browser here: by its own name, which leads here, or across sites."""
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        response = post(f"{pair.url}/v1/completions", BODY, headers=headers)
        assert response.status_code == 403
        assert "EDL_GATEWAY_TOKEN" in response.json()["error"]["message"]
    check_right(post(f"{pair.url}/v1/completions", BODY, headers={"Host": "localhost:1", "Origin": "http://[::1]:2"}))


def test_it_speaks_tls(settings: RuntimeSettings, tmp_path: Path) -> None:
    """With the certificate of EDL_TLS_CERT, and nothing else."""
    authority = Authority(tmp_path / "ours")
    certificate = authority.sign("127.0.0.1")
    shown = msgspec.structs.replace(settings, tls_cert=str(certificate.cert), tls_key=str(certificate.key))
    with running_gateway(shown) as url:
        trusted = ssl.create_default_context(cafile=str(authority.ca))
        with httpx.Client(verify=trusted, timeout=PATIENCE_S, trust_env=False) as client:
            assert client.get(f"{url}/health").status_code == 503
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https:", "http:") + "/health", timeout=PATIENCE_S, trust_env=False)


def test_another_model_does_not_join(settings: RuntimeSettings) -> None:
    """`edl register` names both sides, and ends as a restart can't help."""
    settings = msgspec.structs.replace(settings, lease_ttl_s=12.0)  # they wait so long, as the first may be dead
    with (
        fake_teacher() as one,
        fake_teacher("sglang") as two,
        fake_teacher("sglang", model="other") as other,
        registered(settings, f"{one.address}?tokenizer=abc"),
        ExitStack() as stack,
    ):
        refusals = {
            f"{other.address}?tokenizer=abc": "name is other and the pool's fake",
            f"{two.address}?tokenizer=def": "tokenizer is def and the pool's abc",
            f"{two.address}?tokenizer=abc&logprobs_mode=processed_logprobs": "logprobs_mode is processed_logprobs",
        }
        command = ["-m", "edl_runtime.cli", "register", "--pool", POOL, "--server"]
        started = [stack.enter_context(process(*command, address, env=settings.to_env())) for address in refusals]
        for refused, said in zip(started, refusals.values(), strict=True):
            assert refused.wait(PATIENCE_S) == 78
            assert said in refused.communicate()[1]


def test_a_model_that_the_server_has_not_is_named(settings: RuntimeSettings) -> None:
    """With those that it has."""
    with fake_teacher() as fake:
        command = ["register", "--pool", POOL, "--protocol", "vllm", "--url", fake.url, "--model", "other"]
        with process("-m", "edl_runtime.cli", *command, env=settings.to_env()) as refused:
            assert refused.wait(PATIENCE_S) == 78
            assert "no model 'other', but 'fake'" in refused.communicate()[1]


def test_requests_are_answered_while_redis_is_away(own_redis: RedisServer) -> None:
    """The pool's last members are asked on, and new ones are seen when it is back."""
    with world(own_redis.url, "vllm") as made:
        own_redis.stop()
        check_right(post(f"{made.url}/v1/completions", BODY))
        own_redis.start()
        with fake_teacher() as more, registered(made.settings, more.address):
            wait_until(lambda: made.metric("teachers") == 2)


def test_a_gateway_that_ends_finishes_its_requests(settings: RuntimeSettings) -> None:
    """After SIGTERM what is open is answered, and nothing new."""
    with (
        fake_teacher() as fake,
        registered(settings, fake.address),
        gateway_process(settings) as (gateway, url),
    ):
        wait_healthy(url)
        fake.behave(slow_s=1000)
        with asking(url) as answer:
            wait_until(lambda: fake.asked("running"))
            gateway.terminate()
            wait_until(lambda: refuses(url))
            fake.behave()
            check_right(answer.result())
        assert gateway.wait(PATIENCE_S) == 0
