"""Fake teachers, `edl register` and `edl gateway`, all in processes of their own."""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
from support.teachers.process import PATIENCE_S, process, wait_until

from edl_runtime.settings import RuntimeSettings

POOL = "llm"
FAKE = Path(__file__).with_name("fake_teacher.py")


class FakeProcess:
    """A running fake teacher; `address` is what `edl register --server` takes."""

    def __init__(self, process: subprocess.Popen[str], kind: str, url: str, model: str) -> None:
        self.process = process
        self.url = url
        self.address = f"{kind}+{url}/{model}"

    def behave(self, **how: Any) -> None:
        """Change how it answers from now on; what takes `slow_s` goes on at once."""
        httpx.post(f"{self.url}/behaviour", json=how, timeout=PATIENCE_S, trust_env=False).raise_for_status()

    def asked(self, what: str) -> int:
        """Return one of its counts, 0 if there was none of it."""
        return self.counts().get(what, 0)

    def counts(self) -> dict[str, int]:
        """Return how many requests and rows it was asked, and how many requests are running or gone."""
        counts: dict[str, int] = httpx.get(f"{self.url}/asked", timeout=PATIENCE_S, trust_env=False).json()
        return counts

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def first_line(started: subprocess.Popen[str]) -> str:
    """Return the line that a process prints when it is ready."""
    assert started.stdout is not None
    line = started.stdout.readline().strip()
    assert line, f"it ended with {started.wait()}: {started.communicate()[1]}"
    return line


@contextmanager
def fake_teacher(kind: str = "vllm", *flags: object, model: str = "fake") -> Iterator[FakeProcess]:
    """Run a fake teacher."""
    with process(FAKE, kind, "--model", model, *flags) as started:
        yield FakeProcess(started, kind, first_line(started), model)


@contextmanager
def registered(settings: RuntimeSettings, *addresses: str, pool: str = POOL) -> Iterator[subprocess.Popen[str]]:
    """Run `edl register` for these servers; all are in the pool."""
    servers = [word for address in addresses for word in ("--server", address)]
    command = ["-m", "edl_runtime.cli", "register", "--pool", pool, "--drain-s", 0, "--json", *servers]
    with process(*command, env=settings.to_env()) as started:
        for _ in addresses:
            first_line(started)
        yield started


@contextmanager
def gateway_process(settings: RuntimeSettings, *flags: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `edl gateway`; yields its process, and the URL of the pool."""
    with process("-m", "edl_runtime.cli", "gateway", "--json", *flags, env=settings.to_env()) as started:
        yield started, msgspec.json.decode(first_line(started))["url"] + f"/pools/{POOL}"


@contextmanager
def running_gateway(settings: RuntimeSettings, *flags: object) -> Iterator[str]:
    """Run `edl gateway`; yields the URL of the pool."""
    with gateway_process(settings, *flags) as (_, url):
        yield url


def wait_healthy(url: str) -> None:
    """Wait until the pool at that URL has a good teacher."""
    wait_until(lambda: httpx.get(f"{url}/health", timeout=PATIENCE_S, trust_env=False).status_code == 200)


def post(url: str, body: Any, **more: Any) -> httpx.Response:
    """POST JSON, and wait for the answer as long as it takes."""
    return httpx.post(url, json=body, timeout=PATIENCE_S, trust_env=False, **more)


def sequences(count: int, tokens: int = 12) -> list[list[int]]:
    """Return different sequences of tokens, of different lengths."""
    return [[(7 * row + 3 * place) % 490 + 1 for place in range(2 + (row * 5) % tokens)] for row in range(count)]


@contextmanager
def starting_together(settings: RuntimeSettings, *kinds: str) -> Iterator[tuple[list[FakeProcess], str]]:
    """Run fake teachers that are not registered yet, and a gateway; yields them and the URL of the pool."""
    with ExitStack() as stack:
        started = [stack.enter_context(process(FAKE, kind, "--model", "fake")) for kind in kinds]
        url = stack.enter_context(running_gateway(settings))
        yield [FakeProcess(one, kind, first_line(one), "fake") for one, kind in zip(started, kinds, strict=True)], url


class World(NamedTuple):
    """A gateway's URL of a pool, the pool's teachers, and its registry."""

    url: str
    teachers: list[FakeProcess]
    settings: RuntimeSettings

    def rows_asked(self) -> list[int]:
        """Return how many rows each teacher has been asked."""
        return [teacher.asked("rows") for teacher in self.teachers]

    def metric(self, name: str) -> float:
        """Return one of the gateway's counts of the pool; 0 if it does not follow the pool."""
        return metric(self.url, name)

    def wait_all_good(self) -> None:
        """Wait until no teacher is in quarantine."""
        wait_until(lambda: self.metric("teachers") == len(self.teachers))


def metric(url: str, name: str) -> float:
    """Return one of a gateway's counts of the pool at that URL; 0 if it does not follow the pool."""
    text = httpx.get(url.replace(f"/pools/{POOL}", "/metrics"), timeout=PATIENCE_S, trust_env=False).text
    found = re.search(rf'^edl_gateway_{name}(?:_total)?{{pool="{POOL}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@contextmanager
def world(redis_url: str, *kinds: str) -> Iterator[World]:
    """Run a pool of these kinds of fake teachers behind a gateway. All are good."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, lease_ttl_s=600.0)
    with ExitStack() as stack:
        fakes, url = stack.enter_context(starting_together(settings, *kinds))
        stack.enter_context(registered(settings, *(fake.address for fake in fakes)))
        made = World(url, fakes, settings)
        wait_healthy(made.url)
        made.wait_all_good()
        yield made
