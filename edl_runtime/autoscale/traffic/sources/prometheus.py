"""Traffic source: a query to Prometheus."""

from __future__ import annotations

import asyncio
import http.client
import time
import urllib.error
import urllib.request
from typing import NoReturn
from urllib.parse import urlencode

import msgspec

from edl_runtime.autoscale.errors import SourceUnavailableError
from edl_runtime.autoscale.traffic.forecast import Sample
from edl_runtime.autoscale.traffic.sources.records import no_samples
from edl_runtime.autoscale.traffic.sources.spec import Prometheus
from edl_runtime.errors import SpecError
from edl_runtime.parsing import JsonDecoder
from edl_runtime.settings import check_token

POINTS = 11_000
"""The most points of a series that Prometheus returns."""

ANSWER_LIMIT = 16 << 20
"""Bytes of a response. One series of POINTS has half a megabyte."""

_PIECE = 1 << 16
_MESSAGE_LIMIT = 300


class PrometheusSource:
    """Requests a range in parts of at most POINTS, each in a thread so that the event loop is not blocked.

    `token` is the bearer token, "" for none. Redirections are not followed: they could send the token elsewhere. The
    variables HTTP_PROXY, HTTPS_PROXY, NO_PROXY and SSL_CERT_FILE apply.
    """

    def __init__(self, spec: Prometheus, token: str = "") -> None:
        """Raise SpecError for a token that can't stand in a header."""
        self._spec = spec
        self._url = spec.url.rstrip("/")
        self._name = f"Prometheus at {self._url}"
        self._headers = {"Accept": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {check_token(f'the token in {spec.token_env}', token)}"

    async def samples(self, since_s: float, until_s: float) -> list[Sample]:
        """Return a sample every `step_s`, the last one at `until_s`; see `TrafficSource`."""
        step_ms = round(self._spec.step_s * 1000)
        until_ms = int(until_s * 1000)
        first_ms = until_ms - (until_ms - int(since_s * 1000)) // step_ms * step_ms
        found: list[Sample] = []
        for start_ms in range(first_ms, until_ms + 1, POINTS * step_ms):
            end_ms = min(until_ms, start_ms + (POINTS - 1) * step_ms)
            found += await self._part(start_ms, end_ms)
        if not found:
            hint = "are the metric's name and labels right?"
            raise no_samples(f"the query {self._spec.query!r} of {self._name}", since_s, until_s, hint)
        return found

    async def _part(self, start_ms: int, end_ms: int) -> list[Sample]:
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                status, body, where = await asyncio.to_thread(self._get, start_ms, end_ms)
        except TimeoutError:
            raise SourceUnavailableError(self._name, f"no answer within {self._spec.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: an invalid host name
            cause = getattr(error, "reason", None) or error
            raise SourceUnavailableError(self._name, str(cause) or type(cause).__name__) from None
        if status != http.client.OK:
            self._refuse(status, body, where)
        return self._read(body)

    def _get(self, start_ms: int, end_ms: int) -> tuple[int, bytes, str]:
        """Return status, body (cut soon after ANSWER_LIMIT) and the Location header of a response."""
        parameters = {
            "query": self._spec.query,
            "start": f"{start_ms / 1000:.3f}",
            "end": f"{end_ms / 1000:.3f}",
            "step": f"{self._spec.step_s:.3f}",
        }
        url = f"{self._url}/api/v1/query_range?{urlencode(parameters)}"
        request = urllib.request.Request(url, headers=self._headers)  # noqa: S310 - the spec allows http and https only
        timeout_s = self._spec.timeout_s
        until = time.monotonic() + timeout_s
        try:
            response = urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            body = bytearray()
            while piece := response.read1(
                _PIECE
            ):  # read1 returns what has arrived, so that the deadline is checked in time
                body += piece
                if time.monotonic() > until:
                    raise TimeoutError
                if len(body) > ANSWER_LIMIT:
                    break
            else:
                if response.length:  # the connection was closed before the whole body
                    raise http.client.IncompleteRead(bytes(body), response.length)
            return response.status, bytes(body), response.headers.get("Location", "")

    def _refuse(self, status: int, body: bytes, where: str) -> NoReturn:
        """Raise the error of a status other than 200."""
        message = _error_of(body)
        if status in (400, 422):
            raise SpecError(
                "traffic.prometheus.query", self._spec.query, f"what {self._name} can answer; it says: {message}"
            )
        if status in (401, 403):
            given = self._spec.token_env or "none"
            raise SpecError("traffic.prometheus.token_env", given, f"a token for {self._name}; it answered {status}")
        if 300 <= status < 400:
            allowed = f"Prometheus' own URL; this one leads to {where[:200]!r}"
            raise SpecError("traffic.prometheus.url", self._spec.url, allowed)
        if status in (404, 405):
            allowed = f"Prometheus' own URL; {self._url}/api/v1/query_range answered {status}"
            raise SpecError("traffic.prometheus.url", self._spec.url, allowed)
        raise SourceUnavailableError(self._name, f"it answered {status}: {message}")

    def _read(self, body: bytes) -> list[Sample]:
        if len(body) > ANSWER_LIMIT:
            self._too_many("far too many")
        try:
            result = _decoder.decode(body).data.result
            found = [[Sample(at_s=at_s, needed=float(value)) for at_s, value in series.values] for series in result]
        except ValueError:
            allowed = f"Prometheus' own URL; it answers as Prometheus does not: {_error_of(body)}"
            raise SpecError("traffic.prometheus.url", self._spec.url, allowed) from None
        if len(result) > 1:
            self._too_many(f"{len(result)}, as {result[0].metric} and {result[1].metric}")
        return found[0] if found else []

    def _too_many(self, series: str) -> NoReturn:
        allowed = f"a query of one series, as sum(...) makes of many; this one has {series}"
        raise SpecError("traffic.prometheus.query", self._spec.query, allowed)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_request: object) -> None:
        """Return None: do not follow it."""


class _Series(msgspec.Struct):
    metric: dict[str, str] = {}
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Series]


class _Answer(msgspec.Struct):
    data: _Data


class _Refusal(msgspec.Struct, rename="camel"):
    error: str
    error_type: str = ""


_decoder = JsonDecoder(_Answer)


def _error_of(body: bytes) -> str:
    """Return the error message of a response, or else its beginning."""
    try:
        refusal = JsonDecoder(_Refusal).decode(body)
    except msgspec.DecodeError:
        words = " ".join(body[: 4 * _MESSAGE_LIMIT].decode(errors="replace").split())
    else:
        words = f"{refusal.error_type}: {refusal.error}".removeprefix(": ")
    return words[:_MESSAGE_LIMIT] or "nothing"
