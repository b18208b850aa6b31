"""What the tests with other projects' servers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.external_servers import Server, StartServer, starting

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.interop)


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Servers that tests share, started at first use."""
    servers: dict[str, Server] = {}
    with starting(tmp_path_factory.mktemp("servers")) as start:

        def shared(kind: str) -> Server:
            if kind not in servers:
                servers[kind] = start(kind)
            return servers[kind]

        yield shared


@pytest.fixture
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start servers of the test's own, in a folder with a short name, since Triton has sockets in it."""
    with starting(tmp_path_factory.mktemp("own")) as start:
        yield start
