"""What the web needs, from what its tier writes: entries of a real Redis's stream, and lines of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from edl_runtime.autoscale.errors import NoSamplesError
from edl_runtime.autoscale.traffic.forecast import Sample
from edl_runtime.autoscale.traffic.sources.records import PAGE, CsvSource, StreamSource
from edl_runtime.autoscale.traffic.sources.spec import CsvFile, RedisStream
from edl_runtime.errors import SpecError
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

NOW_S = datetime(2026, 6, 10, 12, tzinfo=UTC).timestamp()
NOW_MS = int(NOW_S * 1000)


@pytest.fixture
def stream(namespace: str) -> str:
    """The key of a stream that no other test has."""
    return f"web-load-{namespace}"


async def add(client: Redis, stream: str, fields: Mapping[str, str], late_s: int = 0) -> None:
    """Add an entry as if it were so much later than now."""
    number = await client.xlen(stream)
    await client.execute_command("XADD", stream, f"{NOW_MS + late_s * 1000}-{number}", *chain(*fields.items()))


async def test_entries_are_of_when_they_were_added(client: Redis, stream: str) -> None:
    """Unless they say of when they are, and only those of the time that was asked for count."""
    for late_s, fields in (
        (-7200, {"needed": "1"}),
        (-600, {"needed": "2.5"}),
        (-300, {"needed": "4", "at": str(NOW_S - 900)}),
        (-200, {"needed": "5", "at": "2026-06-10T13:55:00+02:00", "by": "web-3"}),
        (0, {"needed": "6"}),
    ):
        await add(client, stream, fields, late_s)
    samples = await StreamSource(RedisStream(stream=stream), client).samples(NOW_S - 3600, NOW_S)
    times = [(sample.at_s - NOW_S, sample.needed) for sample in samples]
    assert times == [(-900, 4), (-600, 2.5), (-300, 5), (0, 6)]


async def test_a_long_stream_is_read_in_pages(client: Redis, stream: str) -> None:
    """Each entry once, also such that were added in the same millisecond."""
    count = 2 * PAGE + 3
    async with client.pipeline(transaction=False) as pipe:
        for number in range(count):
            pipe.xadd(stream, {"needed": number}, id=f"{NOW_MS - count + number // 7}-{number % 7}")
        await pipe.execute()
    samples = await StreamSource(RedisStream(stream=stream), client).samples(NOW_S - 3600, NOW_S)
    assert [sample.needed for sample in samples] == [*range(count)]


async def test_entries_that_cant_be_read_are_skipped_and_counted(client: Redis, stream: str) -> None:
    """One line of the log says how many, and shows the first."""
    for fields in ({"load": "3"}, {"needed": "many"}, {"needed": "3", "at": "noon"}, {"needed": "7"}):
        await add(client, stream, fields)
    with capture_logs() as logs:
        samples = await StreamSource(RedisStream(stream=stream), client).samples(NOW_S - 60, NOW_S)
    assert samples == [Sample(NOW_S, 7.0)]
    first = f"entry {NOW_MS}-0: '{NOW_S}', ''"
    source = f"the Redis stream {stream!r}"
    assert logs == [
        {"event": "source.records_skipped", "log_level": "warning", "source": source, "records": 3, "first": first}
    ]


async def test_the_error_of_a_stream_without_entries_shows_what_it_has(client: Redis, stream: str) -> None:
    """None at all, of a clock that runs ahead, or such that can't be read."""
    source = StreamSource(RedisStream(stream=stream), client)
    for fields, late_s, hint in (
        (None, 0, "is the web tier still writing?"),
        ({"needed": "x"}, 0, f"1 can't be read, as entry {NOW_MS}-0: '{NOW_S}', 'x'"),
        ({"needed": "1"}, 90, f"1 can't be read, as entry {NOW_MS}-0: '{NOW_S}', 'x'; 1 have a later time, so check"),
    ):
        if fields:
            await add(client, stream, fields, late_s)
        with pytest.raises(NoSamplesError) as raised:
            await source.samples(NOW_S - 60, NOW_S)
        said = f"the Redis stream {stream!r} has nothing from 2026-06-10 11:59 to 2026-06-10 12:00 UTC; {hint}"
        assert str(raised.value).startswith(said)


async def test_a_key_of_another_type_is_an_error(client: Redis, stream: str) -> None:
    """And so are entries that are no texts."""
    await client.set(stream, "14.2")
    with pytest.raises(SpecError, match=f"traffic.redis.stream: got '{stream}', allowed is the key of a stream; Redis"):
        await StreamSource(RedisStream(stream=stream), client).samples(NOW_S - 60, NOW_S)
    await client.delete(stream)
    await client.xadd(stream, {"needed": b"\xff"})
    with pytest.raises(NoSamplesError, match=r"1 can't be read, as entry .*\\xff"):
        await StreamSource(RedisStream(stream=stream), client).samples(NOW_S - 60, NOW_S)
    assert await client.ping()


async def test_redis_away_is_redis_away(own_redis: RedisServer) -> None:
    """The error that all of this project raises for it."""
    async with connect(own_redis.url) as client:
        own_redis.stop()
        with pytest.raises(RegistryUnavailableError):
            await StreamSource(RedisStream(stream="a"), client).samples(NOW_S - 60, NOW_S)


def lines(*rows: str) -> str:
    """Return a file's text."""
    return "".join(f"{row}\n" for row in ("time,needed", *rows))


async def read(path: Path) -> list[tuple[float, float]]:
    """Return what a file says of the last hour, in seconds from now."""
    samples = await CsvSource(CsvFile(path=str(path))).samples(NOW_S - 3600, NOW_S)
    return [(sample.at_s - NOW_S, sample.needed) for sample in samples]


async def test_a_file_that_grows_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    """What is being written is no sample yet: it may be cut in the middle of its number."""
    path = tmp_path / "web.csv"
    path.write_text(lines("2026-06-10T11:50:00Z,12.5", f"{NOW_S - 300:.0f},13") + "2026-06-10T11:56:00Z,14")
    assert await read(path) == [(-600, 12.5), (-300, 13)]
    with path.open("a") as file:
        file.write("0.25\n2026-06-10T11:5")
    assert await read(path) == [(-600, 12.5), (-300, 13), (-240, 140.25)]
    path.write_text(lines("2026-06-10T11:59:00Z,1"))
    assert await read(path) == [(-60, 1)]


async def test_columns_are_found_by_name_and_times_by_their_zone(tmp_path: Path) -> None:
    """A file from a spreadsheet has a mark in front, blanks, other columns and other line ends."""
    path = tmp_path / "web.csv"
    path.write_bytes("\ufeffhost, needed , time\r\na,3,2026-06-10 11:59\r\nb,4,2026-06-10T13:58:00+02:00\r\n".encode())
    assert await read(path) == [(-120, 4), (-60, 3)]


async def test_lines_that_cant_be_read_are_skipped_and_counted(tmp_path: Path) -> None:
    """A line that is cut, or empty, or of something else."""
    path = tmp_path / "web.csv"
    path.write_text(lines("2026-06-10T11:50:00Z,12.5", "2026-06-10T11:51", "", "soon,much", f"{NOW_S},7,8,9"))
    with capture_logs() as logs:
        assert await read(path) == [(-600, 12.5), (0, 7)]
    assert [(line["event"], line["records"], line["first"]) for line in logs] == [
        ("source.records_skipped", 2, "line 3: '2026-06-10T11:51', ''")
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("when,needed\n1,2\n", "with the columns time and needed; its first line is 'when,needed', without time"),
        ("1,2\n", "its first line is '1,2', without time and needed"),
        ("\0\0\0\xff\n", "without time and needed"),
    ],
)
async def test_a_file_of_another_format_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    """The error shows the line in which the columns should be."""
    path = tmp_path / "web.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError) as raised:
        await read(path)
    assert str(raised.value).startswith(f"traffic.csv.path: got '{path}', allowed is a CSV file")
    assert says in str(raised.value)


async def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """Also a folder, and a pipe that would keep us waiting; an empty file has nothing yet."""
    path = tmp_path / "web.csv"
    with pytest.raises(SpecError, match=r"a CSV file that can be read \(No such file or directory"):
        await read(path)
    os.mkfifo(path)
    with pytest.raises(SpecError, match="allowed is a file"):
        await read(path)
    path.unlink()
    path.write_text("time,nee")
    with pytest.raises(NoSamplesError, match=r"the file .* has nothing from"):
        await read(path)
