"""Sets of shards as they are read, whole and damaged."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from support.depth import DEEP
from support.special_files import SPECIAL, put

from edl_runtime.errors import SpecError
from edl_runtime.shards.convert import convert
from edl_runtime.shards.dataset import list_shards, read_shard
from edl_runtime.shards.errors import DamagedShardError, UnfinishedDatasetError
from edl_runtime.shards.fields import Field, schema_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def reader() -> Iterator[tuple[int, np.ndarray]]:
    return ((number, np.full(200, number, np.float64)) for number in range(1300))


@pytest.fixture
def out(tmp_path: Path) -> str:
    convert(reader, str(tmp_path / "out"), records_per_shard=1000)
    return str(tmp_path / "out")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A shard of few bytes."""
    convert(lambda: [(number,) for number in range(3)], str(tmp_path / "small"), records_per_shard=10)
    return Path(list_shards(str(tmp_path / "small"))[0])


def test_any_record_is_read_by_its_number(out: str) -> None:
    """Also across row groups, of which this shard has two; none after its last."""
    first, second = list_shards(out)
    for shard, offset, length in ((first, 0, 1000), (second, 1000, 300)):
        for start in (0, 1, 298, 299, *((655, 656, 999) if length == 1000 else ())):
            (record,) = islice(read_shard(shard, start), 1)
            assert (record[0], record[1][0]) == (offset + start, offset + start)
            assert len(list(read_shard(shard, start))) == length - start
        assert list(read_shard(shard, length)) == []


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_damage(small: Path, kind: str) -> None:
    """Nobody waits for a pipe that nobody writes to, or reads a device without end."""
    if kind != "endless":
        put(kind, small)
        with pytest.raises(DamagedShardError, match="not a regular file"):
            next(read_shard(str(small)))
    put(kind, small.with_name("manifest.json"))
    with pytest.raises(UnfinishedDatasetError, match=r"manifest\.json: (not a regular file|more than 67108864 bytes)"):
        list_shards(str(small.parent))


def test_each_flipped_bit_is_found(small: Path) -> None:
    """Before any record is used, whichever it is: of records, of the format's own marks, of its footer.

    One bit of each byte; at full depth, all.
    """
    content = small.read_bytes()
    damaged = bytearray(content)
    for byte in range(len(content)):
        for bit in range(8) if DEEP else [byte % 8]:
            damaged[byte] ^= 1 << bit
            small.write_bytes(damaged)
            with pytest.raises(DamagedShardError):
                next(read_shard(str(small)))
            damaged[byte] ^= 1 << bit
    small.write_bytes(content)
    assert len(list(read_shard(str(small)))) == 3


def test_a_torn_shard_is_found(small: Path) -> None:
    """Cut at many a byte, longer, with zeros in place of its end, of another name, or gone."""
    content = small.read_bytes()
    lengths = range(0, len(content) - 8, 1 if DEEP else 17)
    torn = [content[:length] for length in lengths]
    zeros = [part.ljust(len(content), b"\0") for part in torn]
    for damaged in (*torn, *zeros, content + b"\0"):
        small.write_bytes(damaged)
        with pytest.raises(DamagedShardError, match="do not have the checksum of its name"):
            next(read_shard(str(small)))
    small.write_bytes(content)
    renamed = small.rename(small.with_name("00000-0123abcd.parquet"))
    with pytest.raises(DamagedShardError):
        next(read_shard(str(renamed)))
    with pytest.raises(DamagedShardError, match="it is missing"):
        next(read_shard(str(small)))


@pytest.mark.parametrize(
    ("field", "column"),
    [
        (None, pa.array([1, 2])),
        (b"{", pa.array([1, 2])),
        (b'{"type":"int"}', pa.array(["a", "b"])),
        (b'{"type":"none"}', pa.array([1, 2])),
        (b'{"type":"O","shape":[1]}', pa.array([b"12345678"], pa.binary(8))),
        (b'{"type":"<f4","shape":[-1]}', pa.array([b"12345678"], pa.binary(8))),
        (b'{"type":"<f4","shape":[-1,-1]}', pa.array([b"1234"], pa.binary(4))),
        (b'{"type":"<f4","shape":[4294967296,4294967296]}', pa.array([b"12345678"], pa.binary(8))),
        (b'{"type":"(","shape":[1]}', pa.array([b"12345678"], pa.binary(8))),
        (b'{"type":"<f4","shape":[3]}', pa.array([b"12345678"], pa.binary(8))),
    ],
)
def test_parquet_of_others_is_refused(tmp_path: Path, field: bytes | None, column: pa.Array) -> None:
    """Though its name has its checksum; so is what is no Parquet at all."""
    metadata = {b"edl_field": field} if field else None
    schema = pa.schema([pa.field("0", column.type, nullable=False, metadata=metadata)])
    made = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays([column], schema=schema), made)
    for content in (made.getvalue().to_pybytes(), field or b""):
        shard = tmp_path / f"00000-{zlib.crc32(content):08x}.parquet"
        shard.write_bytes(content)
        with pytest.raises(DamagedShardError, match="it is not from `edl convert`"):
            next(read_shard(str(shard)))


def as_shard(folder: Path, content: bytes) -> str:
    """Write a file as a shard whose checksum is right."""
    path = folder / f"00000-{zlib.crc32(content):08x}.parquet"
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("field", "column", "compression", "problem"),
    [
        (Field("int"), pa.array(np.zeros(2_000_000, np.int64)), "zstd", "has 2000000 records, more than 1000"),
        (
            Field("int", is_list=True),
            pa.array([np.zeros(12_000_000, np.int64)]),
            "zstd",
            r"has 96000000 bytes, more than \d+, in a file of \d+",
        ),
        (Field("int"), pa.array(np.zeros(2, np.int64)), "brotli", "has 2 values in BROTLI"),
    ],
)
def test_a_small_file_can_not_take_much_memory(
    tmp_path: Path, field: Field, column: pa.Array, compression: str, problem: str
) -> None:
    """What its row groups have is known, and bounded, before any is decoded."""
    made = pa.BufferOutputStream()
    table = pa.Table.from_arrays([column], schema=schema_of([field]))
    pq.write_table(table, made, row_group_size=1 << 30, compression=compression)
    with pytest.raises(DamagedShardError, match=problem):
        next(read_shard(as_shard(tmp_path, made.getvalue().to_pybytes())))


def test_equal_texts_are_one_object(tmp_path: Path) -> None:
    """A file has them once, and may have few bytes for a thousand long ones; also in lists."""
    text = "a" * 1_000_000
    fields = [Field("str"), Field("bytes"), Field("str", is_list=True)]
    columns = [[text] * 100, [text.encode()] * 100, [[text], []] * 50]
    made = pa.BufferOutputStream()
    table = pa.Table.from_arrays([pa.array(column) for column in columns], schema=schema_of(fields))
    pq.write_table(table, made, compression="zstd")
    found = list(read_shard(as_shard(tmp_path, made.getvalue().to_pybytes())))
    assert found == list(zip(*columns, strict=True))
    assert len({id(value) for value, *_ in found}) == len({id(value) for _, value, _ in found}) == 1
    assert len({id(value) for *_, values in found for value in values}) == 1


def test_damage_behind_a_right_checksum_is_damage(tmp_path: Path, out: str) -> None:
    """Whatever pyarrow raises about it, as a file may have been made by anybody; nothing else comes out."""
    content = Path(list_shards(out)[1]).read_bytes()
    random = np.random.default_rng(7)
    refused = 0
    for _ in range(3000 if DEEP else 300):
        damaged = np.frombuffer(content, np.uint8).copy()
        begin = random.integers(4, len(damaged) - 4)
        damaged[begin : begin + random.integers(1, 5)] = random.integers(256)
        try:
            list(read_shard(as_shard(tmp_path, damaged.tobytes())))
        except DamagedShardError:
            refused += 1
    assert refused


def test_a_set_that_is_not_whole_is_refused(out: str) -> None:
    """Without a shard, with any flipped bit of its manifest, or without that."""
    manifest, shard = Path(out) / "manifest.json", Path(list_shards(out)[1])
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(UnfinishedDatasetError, match=rf"{shard.name} is missing; run `edl convert`"):
        list_shards(out)
    shard.write_bytes(content)
    whole = manifest.read_bytes()
    accepted = 0
    for place in range(0, 8 * len(whole), 1 if DEEP else 7):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        manifest.write_bytes(damaged)
        try:
            accepted += len(list_shards(out)) == 2
        except UnfinishedDatasetError:
            continue
    assert accepted == 0
    manifest.unlink()
    with pytest.raises(UnfinishedDatasetError, match=r"it has no manifest\.json"):
        list_shards(out)


@pytest.mark.parametrize(
    "path", ["data.parquet", "out/data.csv", "out/00000-1234567.parquet", "00000-12345678.parquet"]
)
def test_other_files_are_no_shards(path: str) -> None:
    """They have no checksum."""
    with pytest.raises(
        SpecError, match=r"shard: got .*, allowed is the path or URL of one, as 00003-1a2b3c4d\.parquet"
    ):
        next(read_shard(path))


@pytest.mark.parametrize("url", ["/", "s3://", "s3://bucket", "s3://bucket/"])
def test_a_whole_bucket_or_disk_is_no_set(url: str) -> None:
    """It is a folder, which can be written under another name first, and removed."""
    with pytest.raises(SpecError, match=r"URL: got .*, allowed is a folder's path, or a URL with a name in a bucket"):
        list_shards(url)
