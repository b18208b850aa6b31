"""Specs of traffic sources: frozen structs that validate themselves."""

from __future__ import annotations

import math
import re
from urllib.parse import urlsplit

import msgspec

from edl_runtime.autoscale.traffic.forecast import ForecastOptions, Sample
from edl_runtime.errors import SpecError

MOST_SAMPLES = 100_000
"""The most samples of a profile: ten requests to Prometheus."""

MOST_TIMEOUT_S = 20.0
"""Two such timeouts still fit into a rescaling pass."""

_TOKEN_VARIABLE = re.compile(r"EDL_TRAFFIC_[A-Z0-9_]+")


class Prometheus(msgspec.Struct, frozen=True, kw_only=True, tag="prometheus"):
    """A query of a Prometheus server, or of one that answers as it does (Thanos, Mimir, VictoriaMetrics).

    - `url`: as in http://prometheus:9090, with a path prefix if it has one. No user and password, which would be shown.
    - `query`: PromQL that returns one series, as sum(rate(http_requests_total[5m])).
    - `step_s`: seconds between two samples.
    - `timeout_s`: of a request, in seconds, up to 20.
    - `token_env`: the environment variable with the bearer token, EDL_TRAFFIC_ and more; empty for no token. It must be
      set where the source is read, as in an Airflow worker. Other variables are refused, because the author of the
      windows chooses where the token is sent.

    Raises SpecError.
    """

    url: str
    query: str
    step_s: float = 60.0
    timeout_s: float = 10.0
    token_env: str = ""

    def __post_init__(self) -> None:
        _check_url(self.url)
        if not self.query.strip():
            raise SpecError("query", self.query, "PromQL, as in sum(rate(http_requests_total[5m]))")
        if not 1 <= self.step_s < math.inf:
            raise SpecError("step_s", self.step_s, "seconds, 1 or more")
        if not 0 < self.timeout_s <= MOST_TIMEOUT_S:
            raise SpecError("timeout_s", self.timeout_s, f"seconds, above 0, up to {MOST_TIMEOUT_S:g}")
        if self.token_env and not _TOKEN_VARIABLE.fullmatch(self.token_env):
            # Not shown: it may be the token, written where the variable's name belongs.
            given = f"{len(self.token_env)} characters that are no name of such a variable"
            allowed = "the environment variable that holds the token, whose name begins with EDL_TRAFFIC_"
            raise SpecError("token_env", given, allowed)


class RedisStream(msgspec.Struct, frozen=True, kw_only=True, tag="redis"):
    """A stream in the Redis of EDL_REDIS_URL to which the web tier adds what it needs.

    An entry has the field `needed`, a number, and optionally `at`, seconds since 1970, not after it was added. For
    example, keeping about a month of entries a minute:

        XADD web-load MAXLEN ~ 50000 * needed 14.2

    - `stream`: its key, as it is.

    Raises SpecError.
    """

    stream: str

    def __post_init__(self) -> None:
        if not self.stream:
            raise SpecError("stream", self.stream, "the key of a stream")


class CsvFile(msgspec.Struct, frozen=True, kw_only=True, tag="csv"):
    """A file with the columns `time` and `needed`, and possibly others, that may grow.

    A time is ISO 8601, by default in UTC, or seconds since 1970. A last line without an end is not read, because it may
    still be written.

    - `path`: of the file; "~" is the reader's home folder. Raises SpecError if it is empty.
    """

    path: str

    def __post_init__(self) -> None:
        if not self.path:
            raise SpecError("path", self.path, "the path of a CSV file")


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The source of what the web needs, and the forecast's margins.

    - `resource`: what the web needs, as gpu or cpu.
    - `source`: where its samples are.
    - `times`: how much of the resource for one unit of the source, as 0.002 GPUs for a request per second.
    - `forecast_options`: headroom, lead time and the like.

    Raises SpecError.
    """

    resource: str
    source: Prometheus | RedisStream | CsvFile
    times: float = 1.0
    forecast_options: ForecastOptions = ForecastOptions()

    def __post_init__(self) -> None:
        if not self.resource:
            raise SpecError("resource", self.resource, "the name of a resource, as gpu")
        if not 0 < self.times < math.inf:
            raise SpecError("times", self.times, "a number above 0")
        if isinstance(self.source, Prometheus) and self.forecast_options.memory_s > MOST_SAMPLES * self.source.step_s:
            least = self.forecast_options.memory_s / MOST_SAMPLES
            allowed = f"{least:g} or more, so that memory_s is {MOST_SAMPLES:,} samples at most"
            raise SpecError("prometheus.step_s", self.source.step_s, allowed)

    def needs(self, samples: list[Sample]) -> list[Sample]:
        """Return samples of the source as amounts of the resource."""
        return [Sample(at_s=sample.at_s, needed=sample.needed * self.times) for sample in samples]


def _check_url(url: str) -> None:
    allowed = "http:// or https:// with a host, as in http://prometheus:9090; a token has its own variable, token_env"
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError:  # half an IPv6 address, or a port that is no number
        raise SpecError("url", "no URL", allowed) from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise SpecError("url", "a URL with more than host, port and path", allowed)
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise SpecError("url", url, allowed)
