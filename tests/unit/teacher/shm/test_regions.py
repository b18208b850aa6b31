"""What a teacher takes for shared memory, and what it refuses."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.shared_memory import MAX_REGION_BYTES, SEALS, TENSORS_START, ClientRegion, Registration
from edl_runtime.teacher.shm.regions import MAX_REGIONS, RegionReceiver, RegionSender, RegionTable, region_channel

SECRET = "s" * TENSORS_START
SIZE = 8192

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is for Linux")


@pytest.fixture
def regions() -> Iterator[RegionTable]:
    opened = RegionTable()
    yield opened
    for region in list(opened._open):
        opened.close(region)


def memory(*, size: int = SIZE, seals: int = SEALS, content: bytes | None = None) -> int:
    """Return a descriptor of memory as a hostile student may make it."""
    descriptor = os.memfd_create("edl-test", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, size)
    os.pwrite(descriptor, SECRET.encode().ljust(size, b"x") if content is None else content, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def fifo() -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        return os.open(f"{folder}/fifo", os.O_RDONLY | os.O_NONBLOCK)


def registration(fd: int, *, pid: int | None = None, secret: str = SECRET) -> memoryview:
    return memoryview(msgspec.json.encode(Registration(os.getpid() if pid is None else pid, fd, secret)))


def open_descriptors() -> set[str]:
    return {file.name for file in Path("/proc/self/fd").iterdir()}


def test_a_students_region_is_mapped_without_being_writable(regions: RegionTable) -> None:
    """What the student writes is seen by the teacher, at once, and the teacher can't write there."""
    mine = ClientRegion(1000)
    with mine.offered() as offer:
        theirs = regions.register(memoryview(offer))
    mine.write([np.arange(10, dtype=np.float32), np.arange(3, dtype=np.int64)])
    assert theirs.view.readonly
    assert np.frombuffer(theirs.view[TENSORS_START:][:40], np.float32).tolist() == list(range(10))
    assert np.frombuffer(theirs.view[TENSORS_START + 40 :][:24], np.int64).tolist() == [0, 1, 2]


def test_a_students_region_can_neither_shrink_nor_get_holes() -> None:
    """Whatever a student does to its own memory later, a teacher that reads it is safe."""
    region = ClientRegion(1000)
    descriptor = region._descriptor
    with region.offered():
        with pytest.raises(PermissionError):
            os.truncate(descriptor, 0)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda: memory(seals=SEALS & ~fcntl.F_SEAL_SHRINK), "seals", id="can-shrink"),
        pytest.param(lambda: memory(seals=SEALS & ~0x10), "seals", id="can-get-holes"),
        pytest.param(lambda: memory(seals=0), "seals", id="unsealed"),
        pytest.param(lambda: memory(content=SECRET.encode()), "all its pages", id="has-holes"),
        pytest.param(lambda: memory(content=b"t" * SIZE), "secret", id="somebody-else's"),
        pytest.param(lambda: memory(size=TENSORS_START - 1, content=b""), "bytes", id="too-small"),
        pytest.param(lambda: memory(size=MAX_REGION_BYTES + 1, content=b""), "bytes", id="too-large"),
        pytest.param(lambda: os.open("/dev/null", os.O_RDONLY), "memfd", id="device"),
        pytest.param(lambda: os.open(__file__, os.O_RDONLY), "memfd", id="file"),
        pytest.param(lambda: os.open("/", os.O_RDONLY), "memfd", id="folder"),
        pytest.param(lambda: os.eventfd(0), "memfd", id="eventfd"),
        pytest.param(lambda: os.open("/proc/self/maps", os.O_RDONLY), "memfd", id="proc"),
        pytest.param(fifo, "memfd", id="fifo"),  # opening it would wait for ever
    ],
)
def test_other_descriptors_are_refused(make: Callable[[], int], reason: str, regions: RegionTable) -> None:
    """Memory that could be taken away, files, devices and pipes are not opened, and nothing stays open."""
    descriptor = make()
    before = open_descriptors()
    with pytest.raises(ProtocolError, match=reason):
        regions.register(registration(descriptor))
    assert open_descriptors() <= before  # what an earlier test has left may be closed meanwhile
    os.close(descriptor)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b'{"pid": 1, "fd": "../../etc/passwd", "secret": ""}',
        b'{"pid": "self", "fd": 3, "secret": ""}',
        b'{"pid": 1.5, "fd": 3, "secret": ""}',
        b'{"pid": 1, "fd": 3, "secret": "", "key": "/dev/shm/x"}',
        b'{"pid": -1, "fd": 0, "secret": ""}',
        b'{"pid": 99999999999999999999999, "fd": 0, "secret": ""}',
        b'{"pid": 1, "fd": -1, "secret": "\xc3\xa9"}',
        b"\xff",
        b'{"x":' + b"[" * 100_000,
    ],
)
def test_what_is_no_registration_is_refused(body: bytes, regions: RegionTable) -> None:
    """Only numbers name a region; a path can't be given in any way."""
    with pytest.raises(ProtocolError):
        regions.register(memoryview(body))


def test_the_number_of_regions_is_bounded(regions: RegionTable) -> None:
    """One too many is refused; when a client goes there is room again."""
    descriptor = memory()
    for _ in range(MAX_REGIONS):
        last = regions.register(registration(descriptor))
    with pytest.raises(ProtocolError, match="no more shared memory"):
        regions.register(registration(descriptor))
    regions.close(last)
    regions.register(registration(descriptor))
    os.close(descriptor)


def test_each_region_is_sent_once_and_forgotten(regions: RegionTable) -> None:
    """A predictor gets a region before its first use, keeps it, and closes it when the client has disconnected."""
    descriptor = memory()
    forgotten: list[int] = []
    ours, theirs = region_channel()
    sender, receiver = RegionSender(ours, forgotten.append), RegionReceiver(theirs)
    one, other = regions.register(registration(descriptor)), regions.register(registration(descriptor))
    os.close(descriptor)
    numbers = [sender.send_region(region) for region in (one, other, one)]
    assert numbers == [one.number, other.number, one.number]
    for number in (other.number, one.number):
        view = receiver.view(number)
        assert view is not None
        assert bytes(view[:TENSORS_START]) == SECRET.encode()
    assert receiver.view(0) is None
    assert receiver.view(10**6) is None
    regions.close(one)
    assert forgotten == [one.number]
    receiver.forget(one.number)
    assert receiver.view(one.number) is None
    theirs.close()
    assert sender.send_region(regions.register(registration(memory()))) == 0  # the predictor has ended
    sender.close()


def test_all_regions_can_be_sent_while_the_predictor_is_busy(regions: RegionTable) -> None:
    """It maps them later; until then none is refused for lack of room."""
    ours, theirs = region_channel()
    sender, receiver = RegionSender(ours, lambda _: None), RegionReceiver(theirs)
    descriptor = memory()
    numbers = [sender.send_region(regions.register(registration(descriptor))) for _ in range(MAX_REGIONS)]
    os.close(descriptor)
    assert all(numbers)
    assert all(receiver.view(number) is not None for number in numbers)
    for number in numbers:
        receiver.forget(number)
    theirs.close()
    sender.close()
