"""What the tests with other projects' servers share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.external_servers import Server, StartServer, starting

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.interop)


@contextmanager
def short_folder() -> Iterator[Path]:
    """Give a folder with a short name, since Triton has sockets in it: pytest's own is too long under xdist."""
    with tempfile.TemporaryDirectory(prefix="edl-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shared_servers() -> Iterator[Callable[[str], Server]]:
    """Servers that tests share, started at first use."""
    servers: dict[str, Server] = {}
    with short_folder() as folder, starting(folder) as start:

        def shared(kind: str) -> Server:
            if kind not in servers:
                servers[kind] = start(kind)
            return servers[kind]

        yield shared


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start servers of the test's own."""
    with short_folder() as folder, starting(folder) as start:
        yield start
