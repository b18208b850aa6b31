"""Real `edl discovery` processes for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from edl_runtime.settings import RuntimeSettings


class Endpoint:
    """A running endpoint and its URL."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running_discovery(
    settings: RuntimeSettings, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[Endpoint]:
    """Start `edl discovery` with that registry; it is killed at the end at the latest."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "edl_runtime.cli", "discovery", "--json", *flags],
        env={**clean, **settings.to_env(), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the endpoint ended with {process.wait()}: {process.communicate()[1]}"
        yield Endpoint(process, msgspec.json.decode(line)["url"])
    finally:
        process.kill()
        process.communicate()
