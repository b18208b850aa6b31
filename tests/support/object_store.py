"""An S3 server on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import fsspec  # type: ignore[import-untyped]
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

BUCKET = "bucket"
SECRET = "never-written-down"


@contextmanager
def running_server() -> Iterator[str]:
    """Run a server on a free port; yield its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def empty(url: str) -> None:
    """Reset the server of the environment to one empty bucket."""
    with urlopen(f"{url}/moto-api/reset", data=b"") as answer:
        assert answer.status == 200
    files().mkdir(BUCKET)


def harm(url: str) -> None:
    """Change a byte of an object as a disk does: the server still answers with the checksum of what was sent."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    stored = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].get_object(bucket, key)
    assert stored is not None
    stored.value = bytes([stored.value[0] ^ 1]) + stored.value[1:]


def files() -> fsspec.AbstractFileSystem:
    """Return a file system of the server's objects, always the same one, as it takes long to make."""
    return fsspec.filesystem("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"], use_listings_cache=False)
