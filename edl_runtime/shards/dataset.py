"""Sets of shards: Parquet files, each with its checksum in its name, and a manifest that makes them whole.

    for sample in read_shard(list_shards("s3://bucket/train")[0]): ...

`edl convert` writes them.
"""

from __future__ import annotations

import contextlib
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from edl_runtime.checkpoint.file_format import unseal
from edl_runtime.checkpoint.storage import MANIFEST, Storage, storage_at, with_retries
from edl_runtime.errors import DamagedFileError, EdlError, SpecError, missing_library
from edl_runtime.files import LIMIT, read_all
from edl_runtime.shards import fields
from edl_runtime.shards.errors import DamagedShardError, DatasetStoreError, UnfinishedDatasetError

FORMAT = 1
"""The version of manifest and shards. Other versions are refused."""

GROUP_RECORDS = 1000
"""Most records of a row group, which is decoded as a whole to read one of them."""

GROUP_BYTES = 1 << 20
"""With so many bytes a row group ends; the last of its records may have any number of them."""

_CERTAIN_BYTES = 1 << 26
_MOST_TO_ONE = 1 << 15
"""A row group may have so many bytes, and so many more for each of the file's: zstd writes zeros 30,600 to 1."""

_SHARD_NAME = re.compile(r"\d{5,}-([0-9a-f]{8})\.parquet")


class Dataset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest: how many records each shard has, by the shards' names, in order."""

    format: int
    shards: dict[str, int]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"it has format {self.format}, this version of edl reads {FORMAT}")


def list_shards(url: str) -> list[str]:
    """Return the paths or URLs of the shards at `url`, a path or URL, in order: names for `run.shards`.

    Only looks that they are all there; `read_shard` finds those that are damaged. Raises UnfinishedDatasetError,
    DatasetStoreError, and SpecError.
    """
    storage, name = place_of(url)
    with store_errors(url):
        dataset = read_manifest(storage, name)
        while missing := missing_shards(dataset, with_retries(storage.contents, name)):
            before, dataset = dataset, read_manifest(storage, name)
            if dataset == before:  # and no conversion has replaced the set meanwhile
                more = f" and {len(missing) - 1} more are missing" if len(missing) > 1 else " is missing"
                raise UnfinishedDatasetError(url, missing[0] + more)
    return [f"{storage.url_of(name)}/{shard}" for shard in dataset.shards]


def read_shard(path: str, start: int = 0) -> Iterator[tuple[Any, ...]]:
    """Yield the samples of the shard at `path`, a path or URL, in order, from number `start` on.

    Those before are not decoded. Values have the types that the reader gave. The whole file is read and checked before
    the first sample, and kept in memory meanwhile. Raises DamagedShardError, also for a file that `edl convert` doesn't
    write though its checksum is right, DatasetStoreError, and SpecError, also without pyarrow.
    """
    folder, _, file = path.rpartition("/")
    found = _SHARD_NAME.fullmatch(file)
    if not found or not folder:
        raise SpecError("shard", path, "the path or URL of one, as 00003-1a2b3c4d.parquet in a folder of `edl convert`")
    pa, pq = pyarrow()
    storage, name = place_of(folder)
    with store_errors(path):
        try:
            content = with_retries(_read, storage, name, file, sys.maxsize)
        except FileNotFoundError:
            raise DamagedShardError(path, "it is missing") from None
        except DamagedFileError as error:
            raise DamagedShardError(path, str(error)) from error
    if f"{zlib.crc32(content):08x}" != found[1]:
        raise DamagedShardError(path, f"its {len(content)} bytes do not have the checksum of its name")
    with _decoding(path):
        shard = pq.ParquetFile(pa.BufferReader(content))
        kinds = fields.fields_in(shard.schema_arrow)
        check_groups(shard.metadata, kinds, len(content))
        texts = [shard.schema.column(place).path for place, kind in enumerate(kinds) if kind.type in {"str", "bytes"}]
        shard = pq.ParquetFile(pa.BufferReader(content), metadata=shard.metadata, read_dictionary=texts)
    for group in range(shard.num_row_groups):
        count = shard.metadata.row_group(group).num_rows
        if start < count:
            with _decoding(path):
                columns = shard.read_row_group(group).columns
                values = [fields.from_column(kind, column)[start:] for kind, column in zip(kinds, columns, strict=True)]
                samples = list(zip(*values, strict=True))
            yield from samples
        start = max(0, start - count)


def check_groups(metadata: Any, kinds: Sequence[fields.Field], size: int) -> None:
    """Raise ValueError unless each row group is small enough to decode, by the metadata of a file of `size` bytes."""
    most = _CERTAIN_BYTES + _MOST_TO_ONE * size
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if group.num_rows > GROUP_RECORDS:
            raise ValueError(f"a row group has {group.num_rows} records, more than {GROUP_RECORDS}")
        decoded = 0
        for place, kind in enumerate(kinds):
            column = group.column(place)
            if column.compression != "ZSTD" or not (kind.is_list or column.num_values == group.num_rows):
                raise ValueError(f"field {place} has {column.num_values} values in {column.compression}")
            decoded += max(column.total_uncompressed_size, column.num_values * kind.value_bytes)
        if decoded > most:
            raise ValueError(f"a row group has {decoded} bytes, more than {most}, in a file of {size}")


def is_shard_name(file: str) -> bool:
    """Whether a file has the name of a shard."""
    return _SHARD_NAME.fullmatch(file) is not None


def place_of(url: str) -> tuple[Storage, str]:
    """Return the storage that a set of shards is in, and its name there. Raises SpecError."""
    protocol, separator, path = url.rpartition("://")
    if protocol in ("", "file", "local"):
        protocol, separator, path = "", "", storage_at(url).url
    parent, _, name = path.rstrip("/").rpartition("/")
    if not name or (protocol and not parent):
        raise SpecError("URL", url, "a folder's path, or a URL with a name in a bucket, as s3://bucket/train")
    return storage_at(f"{protocol}{separator}{parent or '/'}"), name


def read_manifest(storage: Storage, name: str) -> Dataset:
    """Return the manifest of a set of shards. Raises UnfinishedDatasetError, and what the storage raises."""
    url = storage.url_of(name)
    try:
        content = with_retries(_read, storage, name, MANIFEST, LIMIT)
    except FileNotFoundError:
        raise UnfinishedDatasetError(url, f"it has no {MANIFEST}") from None
    except DamagedFileError as error:
        raise UnfinishedDatasetError(url, f"{MANIFEST}: {error}") from error
    try:
        return msgspec.json.decode(unseal(content), type=Dataset)
    except ValueError as error:
        raise UnfinishedDatasetError(url, f"{MANIFEST}: {error}") from None


@contextlib.contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Raise DatasetStoreError for the storage at `url`, instead of errors that are not this project's."""
    try:
        yield
    except EdlError:
        raise
    except Exception as error:  # each file system of fsspec has its own errors
        raise DatasetStoreError(url, f"{type(error).__name__}: {error}") from error


def pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and its module parquet. Raises SpecError without it."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_library("shards", error, "shards") from error
    return pa, pq


def missing_shards(dataset: Dataset, there: set[str]) -> list[str]:
    """Return the names of a set's shards that are not among the files that are there."""
    return [shard for shard in dataset.shards if shard not in there]


@contextlib.contextmanager
def _decoding(path: str) -> Iterator[None]:
    """Raise DamagedShardError instead of errors of any kind, but that of too little memory."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # pyarrow's, numpy's, and of what they call
        raise DamagedShardError(path, f"it is not from `edl convert` ({error})") from error


def _read(storage: Storage, name: str, file: str, limit: int) -> bytes:
    with storage.open(name, file) as opened:
        return read_all(opened, limit)
