"""What the web needs, asked of a server that answers as Prometheus does."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.autoscale.prometheus_server import POINTS, FakePrometheus, prometheus
from support.network.certificates import Authority

from edl_runtime.autoscale.errors import NoSamplesError, SourceUnavailableError
from edl_runtime.autoscale.traffic.forecast import DAY_S, Sample
from edl_runtime.autoscale.traffic.sources.prometheus import PrometheusSource
from edl_runtime.autoscale.traffic.sources.spec import Prometheus
from edl_runtime.errors import SpecError

NOW_S = datetime(2026, 6, 10, 12, tzinfo=UTC).timestamp()
QUERY = "sum(http_requests)"


@pytest.fixture
def server() -> Iterator[FakePrometheus]:
    """One with a series that says at what second of its day a sample is."""
    with prometheus() as stand_in:
        stand_in.series["http_requests"] = [({}, lambda at_s: at_s % DAY_S)]
        yield stand_in


def source(
    server: FakePrometheus, query: str = QUERY, *, token: str = "", step_s: float = 60, wait_s: float = 20
) -> PrometheusSource:
    """Return a source that asks that server."""
    env = "EDL_TRAFFIC_TOKEN" if token else ""
    return PrometheusSource(
        Prometheus(url=f"{server.url}/", query=query, step_s=step_s, timeout_s=wait_s, token_env=env), token
    )


async def test_a_range_has_a_sample_each_step_until_its_end(server: FakePrometheus) -> None:
    """The last one is of the end itself, and one that is no number is among them."""
    server.series["http_requests"] = [({}, lambda at_s: math.nan if at_s == NOW_S - 60 else at_s - NOW_S)]
    samples = await source(server).samples(NOW_S - 150, NOW_S)
    assert samples[::2] == [Sample(NOW_S - 120, -120), Sample(NOW_S, 0)]
    assert math.isnan(samples[1].needed)
    assert server.queries[0]["query"] == QUERY
    assert await source(server).samples(NOW_S - 5, NOW_S) == [Sample(NOW_S, 0)]


@pytest.mark.parametrize("days", [28.0, (POINTS - 1) / 1440, POINTS / 1440, (POINTS + 1) / 1440])
async def test_a_long_range_is_asked_in_parts(server: FakePrometheus, days: float) -> None:
    """Prometheus refuses more than 11,000 points a series; no sample is missing, and none comes twice."""
    since_s = NOW_S - round(days * DAY_S)
    samples = await source(server).samples(since_s, NOW_S)
    assert [sample.at_s for sample in samples] == [since_s + 60 * number for number in range(round(days * 1440) + 1)]
    assert all(sample.needed == sample.at_s % DAY_S for sample in samples)
    assert len(server.queries) == math.ceil(len(samples) / POINTS)


async def test_what_was_before_the_first_sample_is_no_error(server: FakePrometheus) -> None:
    """A server that has a week of four answers with that."""
    server.series["http_requests"] = [({}, lambda at_s: 5.0 if at_s >= NOW_S - 7 * DAY_S else None)]
    samples = await source(server).samples(NOW_S - 28 * DAY_S, NOW_S)
    assert samples[0].at_s == NOW_S - 7 * DAY_S


async def test_a_query_that_returns_nothing_is_an_error_that_names_it(server: FakePrometheus) -> None:
    """With the time it was asked of."""
    with pytest.raises(NoSamplesError) as raised:
        await source(server, "sum(http_request)").samples(NOW_S - 3600, NOW_S)
    assert str(raised.value) == (
        f"the query 'sum(http_request)' of Prometheus at {server.url} has nothing from 2026-06-10 11:00 to "
        "2026-06-10 12:00 UTC; are the metric's name and labels right?"
    )


async def test_several_series_are_to_be_made_one(server: FakePrometheus) -> None:
    """The error says how, and shows which there are."""
    server.series["http_requests"] = [({"instance": name}, lambda _: 1.0) for name in ("a", "b", "c")]
    with pytest.raises(SpecError) as raised:
        await source(server, "http_requests").samples(NOW_S - 3600, NOW_S)
    assert str(raised.value) == (
        "traffic.prometheus.query: got 'http_requests', allowed is a query of one series, as sum(...) makes of many; "
        "this one has 3, as {'instance': 'a'} and {'instance': 'b'}"
    )


async def test_prometheus_own_words_tell_what_is_wrong_with_a_query(server: FakePrometheus) -> None:
    """Also those of another server, which gives another status."""
    with pytest.raises(SpecError) as raised:
        await source(server, "sum(a").samples(NOW_S - 60, NOW_S)
    assert str(raised.value) == (
        f"traffic.prometheus.query: got 'sum(a', allowed is what Prometheus at {server.url} can answer; it says: "
        'bad_data: invalid parameter "query": 1:6: parse error: unclosed left parenthesis'
    )
    body = {"status": "error", "errorType": "execution", "error": "found duplicate series for the match group"}
    server.answer = 422, json.dumps(body).encode(), {}
    with pytest.raises(SpecError, match="it says: execution: found duplicate series for the match group"):
        await source(server).samples(NOW_S - 60, NOW_S)


async def test_the_token_is_sent_and_never_shown(server: FakePrometheus) -> None:
    """A wrong one is an error that names its variable; one that is no token is not sent."""
    server.token = "open-sesame"
    assert await source(server, token="open-sesame").samples(NOW_S - 60, NOW_S)
    for token, given in (("wrong-secret", "'EDL_TRAFFIC_TOKEN'"), ("", "'none'")):
        with pytest.raises(SpecError) as raised:
            await source(server, token=token).samples(NOW_S - 60, NOW_S)
        assert str(raised.value) == (
            f"traffic.prometheus.token_env: got {given}, allowed is a token for Prometheus at {server.url}; "
            "it answered 401"
        )
    with pytest.raises(SpecError) as raised:
        source(server, token="two\nlines-secret")
    assert str(raised.value).startswith("the token in EDL_TRAFFIC_TOKEN: got ")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, b'{"status":"error","errorType":"timeout","error":"query timed out"}', "503: timeout: query timed out"),
        (500, b'{"status":"error","errorType":"internal","error":"disk full"}', "500: internal: disk full"),
        (502, b"<html>\n<h1>Bad\nGateway</h1>", "502: <html> <h1>Bad Gateway</h1>"),
        (429, b"", "429: nothing"),
    ],
)
async def test_a_server_in_trouble_is_asked_again_later(
    server: FakePrometheus, status: int, body: bytes, says: str
) -> None:
    """That is no mistake of whoever wrote the query; its words are told."""
    server.answer = status, body, {}
    with pytest.raises(SourceUnavailableError) as raised:
        await source(server).samples(NOW_S - 60, NOW_S)
    assert str(raised.value).startswith(f"Prometheus at {server.url} can't be read (it answered {says}); try again")


@pytest.mark.parametrize(
    ("status", "body", "headers", "says"),
    [
        (404, b"404 page not found\n", {}, "/api/v1/query_range answered 404"),
        (302, b"", {"Location": "https://sso.example/login"}, "this one leads to 'https://sso.example/login'"),
        (200, b"<html>log in", {}, "it answers as Prometheus does not: <html>log in"),
        (200, b'{"status":"success","data":{"result":[{"values":[[1,"x"]]}]}}', {}, "as Prometheus does not"),
        (200, b'{"data":' + b"[" * 100_000, {}, "as Prometheus does not"),
        (200, b"\xff\xfe", {}, "as Prometheus does not"),
    ],
)
async def test_a_url_of_something_else_is_an_error(
    server: FakePrometheus, status: int, body: bytes, headers: dict[str, str], says: str
) -> None:
    """And no redirection is followed, which would take the token along."""
    server.answer = status, body, headers
    with pytest.raises(SpecError, match=r"traffic\.prometheus\.url: got 'http://127") as raised:
        await source(server, token="t").samples(NOW_S - 60, NOW_S)
    assert says in str(raised.value)
    assert len(server.queries) == 1


async def test_an_endless_answer_is_given_up(server: FakePrometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not filled by a query of thousands of series."""
    monkeypatch.setattr("edl_runtime.autoscale.traffic.sources.prometheus.ANSWER_LIMIT", 1 << 20)
    body = b" " * (64 << 20)  # many times what buffers take on the way
    server.answer = 200, body, {}
    with pytest.raises(SpecError, match=r"this one has far too many"):
        await source(server).samples(NOW_S - 60, NOW_S)
    assert server.sent < len(body)


async def test_a_silent_server_is_given_up(server: FakePrometheus) -> None:
    """After `timeout_s`."""
    server.delay_s = 600
    with pytest.raises(SourceUnavailableError, match=r"\(no answer within 0\.2 s\)"):
        await source(server, wait_s=0.2).samples(NOW_S - 60, NOW_S)


async def test_other_tasks_run_on_while_a_server_takes_its_time(server: FakePrometheus) -> None:
    """The server is not to answer before another task has said so."""
    server.delay_s = 600
    asking = asyncio.create_task(source(server).samples(NOW_S - 60, NOW_S))
    while not server.queries:  # noqa: ASYNC110 - a thread makes it so
        await asyncio.sleep(0.01)
    server.closing.set()
    assert len(await asking) == 2


def test_who_has_given_up_an_answer_that_trickles_in_can_end(server: FakePrometheus) -> None:
    """No thread goes on reading it, for which the end of the loop would wait."""
    body = b" " * 6000
    server.answer = 200, body, {}
    server.trickle_s = 0.1
    with pytest.raises(SourceUnavailableError, match=r"\(no answer within 0\.2 s\)"):
        asyncio.run(source(server, wait_s=0.2).samples(NOW_S - 60, NOW_S))
    assert server.sent < len(body)


async def test_an_answer_that_breaks_off_is_trouble_that_may_pass(server: FakePrometheus) -> None:
    """As of a server that is ended meanwhile: nothing that was written down is wrong."""
    server.answer = 200, b'{"status": "succ', {"Content-Length": "4000"}
    with pytest.raises(SourceUnavailableError, match="IncompleteRead"):
        await source(server).samples(NOW_S - 60, NOW_S)


async def test_a_server_that_is_down_is_an_error() -> None:
    """A port at which nothing listens, and a host that can't be one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for given, says in ((url, "Connection refused"), ("http://a..b", "")):
            with pytest.raises(SourceUnavailableError, match=f"Prometheus at {given} can't be read .*{says}"):
                await PrometheusSource(Prometheus(url=given, query="a")).samples(NOW_S - 60, NOW_S)


async def test_a_certificate_has_to_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an authority of one's own is, where SSL_CERT_FILE names it; else it is said."""
    authority = Authority(tmp_path / "authority")
    with prometheus(authority.sign("127.0.0.1")) as secure:
        secure.series["http_requests"] = [({}, lambda at_s: at_s)]
        with pytest.raises(SourceUnavailableError, match="certificate verify failed"):
            await source(secure).samples(NOW_S - 60, NOW_S)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        assert len(await source(secure).samples(NOW_S - 60, NOW_S)) == 2
