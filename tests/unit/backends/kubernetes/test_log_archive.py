"""What is kept of a job's log fits into a ConfigMap."""

from __future__ import annotations

import base64
import gzip
import random
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from edl_runtime.backends.interface import LogLine
from edl_runtime.backends.kubernetes import log_archive
from edl_runtime.errors import BackendError


def unpacked(lines: list[LogLine]) -> list[LogLine]:
    packed = base64.b64decode(log_archive._pack(lines))
    assert len(packed) <= log_archive.MAX_BYTES
    return msgspec.json.decode(gzip.decompress(packed), type=list[LogLine])


def noise(instance: int, number: int, size: int) -> list[LogLine]:
    """Lines that can't be made smaller than half of them."""
    random_bytes = random.Random(instance)
    return [LogLine(instance, f"{line} {random_bytes.randbytes(size).hex()}") for line in range(number)]


@pytest.mark.parametrize("texts", [[], ["one"], ["", "é\0\ud7ff", '"\\', "x" * 70_000]])
def test_lines_are_kept_as_they_are(texts: list[str]) -> None:
    """Whatever is in them."""
    lines = [LogLine(3, text) for text in texts]
    assert unpacked(lines) == lines


def test_of_too_much_the_end_of_each_instance_is_kept() -> None:
    """None is lost for the sake of another; who wrote little keeps it all."""
    lines = [*noise(0, 2000, 400), LogLine(1, "short"), *noise(2, 2000, 400)]
    kept = unpacked(lines)
    count = Counter(line.instance for line in kept)
    assert count[0] == count[2] > 300
    assert count[1] == 1
    for instance in (0, 1, 2):
        of_one = [line for line in lines if line.instance == instance]
        assert [line for line in kept if line.instance == instance] == of_one[-count[instance] :]


def test_of_each_instance_only_the_last_lines_are_kept() -> None:
    """However small they are."""
    kept = unpacked([LogLine(0, str(number)) for number in range(log_archive.MAX_LINES + 5)])
    assert (len(kept), kept[0].text) == (log_archive.MAX_LINES, "5")


def test_a_line_that_is_too_long_on_its_own_is_dropped() -> None:
    """Better than a job that can't be deleted."""
    assert unpacked(noise(0, 1, log_archive.MAX_BYTES * 2)) == []


def test_more_than_can_fit_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances write as much as they like, and each try takes its time."""
    compress = gzip.compress
    tried: list[int] = []

    def noted(content: bytes) -> bytes:
        tried.append(len(content))
        return compress(content, 1)

    monkeypatch.setattr(gzip, "compress", noted)
    assert unpacked([LogLine(number % 4, "x" * 60_000) for number in range(4 * 400)])
    assert max(tried) <= log_archive.MAX_UNPACKED_BYTES


async def test_a_log_is_packed_and_unpacked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop may be that of a triggerer or of Airflow's API server."""
    threads = set[int]()

    def noting(do: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(content: Any) -> Any:
            threads.add(threading.get_ident())
            return do(content)

        return noted

    for name in ("_pack", "_unpack"):
        monkeypatch.setattr(log_archive, name, noting(getattr(log_archive, name)))
    api: Any = ConfigMaps()
    await log_archive.archive_log(api, "night", [LogLine(0, "all")], run="one")
    assert await log_archive.read_archived_log(api, "night") == ([LogLine(0, "all")], "")
    assert threads
    assert threading.get_ident() not in threads


class ConfigMaps:
    """Those of a namespace, as `Api` has them."""

    def __init__(self, *others: str) -> None:
        self.there: dict[str, Any] = {name: {"metadata": {"name": name, "labels": {}}} for name in others}

    async def get(self, _: str, name: str) -> Any:
        return self.there.get(name)

    async def create(self, made: Any) -> None:
        self.there[made["metadata"]["name"]] = made

    async def list(self, _: str, *, labels: str) -> tuple[list[Any], str]:
        return [one for one in self.there.values() if labels in one["metadata"]["labels"]], "1"

    async def delete(self, one: Any) -> None:
        del self.there[one["metadata"]["name"]]


def in_json(text: bytes) -> bytes:
    return gzip.compress(b'[{"instance":0,"text":"' + text + b'"}]')


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (in_json(b"x" * log_archive.MAX_UNPACKED_BYTES), "it has more than 16 MiB"),
        (gzip.compress(b"[]")[:-1], "it ends early"),
        (b"[]", "incorrect header"),
        (gzip.compress(b"["), "truncated"),
    ],
    ids=["too long", "cut", "no gzip", "no JSON"],
)
async def test_a_log_that_we_have_not_written_is_named(content: bytes, cause: str) -> None:
    """And not unpacked beyond what ours have: half a megabyte may be half a gigabyte."""
    kept = {**log_archive.archive_manifest("night"), "binaryData": {"lines": base64.b64encode(content).decode()}}
    api: Any = ConfigMaps()
    await api.create(kept)
    with pytest.raises(BackendError, match=f"the log of 'night' in the ConfigMap night-log can't be read: .*{cause}"):
        await log_archive.read_archived_log(api, "night")


async def test_the_longest_log_that_is_kept_is_read() -> None:
    """As long as it may be, with characters that take several bytes."""
    api: Any = ConfigMaps()
    await log_archive.archive_log(api, "night", [LogLine(0, "ж" * 60_000)] * 2000, run="one")
    found = await log_archive.read_archived_log(api, "night")
    assert found
    assert 100 < len(found.lines) < log_archive.MAX_UNPACKED_BYTES / 120_000


async def test_the_last_twenty_jobs_that_were_deleted_keep_their_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of ever new names don't fill the cluster; what is somebody else's is neither counted nor overwritten."""
    monkeypatch.setattr(log_archive, "time", SimpleNamespace(time=count(1.0).__next__))
    api: Any = ConfigMaps("settings", "taken-log")
    for job in ("taken", *(f"night-{number}" for number in range(22))):
        await log_archive.archive_log(api, job, [LogLine(0, job)], run="one", owner="dag/task")
    assert set(api.there) == {"settings", "taken-log", *(f"night-{number}-log" for number in range(2, 22))}
    assert [await log_archive.read_archived_log(api, job) for job in ("taken", "night-1")] == [None, None]
    assert await log_archive.read_archived_log(api, "night-2") == ([LogLine(0, "night-2")], "dag/task")


async def test_a_job_that_has_written_nothing_leaves_nothing() -> None:
    """It takes no other's place among those that are kept."""
    api: Any = ConfigMaps()
    await log_archive.archive_log(api, "silent", [], run="one")
    assert api.there == {}
