"""Conversion of a reader's samples into shards."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edl_runtime.checkpoint.file_format import CHUNK_BYTES, seal
from edl_runtime.checkpoint.storage import DRAFT, MANIFEST, CreateFile, LocalStorage, Storage, draft_name, with_retries
from edl_runtime.errors import SpecError
from edl_runtime.shards import fields
from edl_runtime.shards.dataset import FORMAT, Dataset, is_shard_name, list_shards, place_of, pyarrow, store_errors
from edl_runtime.shards.errors import ReaderError

GROUP_RECORDS = 1000
GROUP_BYTES = 1 << 20
"""Limits of a row group, which is decoded as a whole to read one of its records."""

Advanced = Callable[[int, int], object]
"""Called now and then with the numbers of whole shards and of records so far."""


def convert(
    reader: Callable[[], Any],
    url: str,
    *,
    records_per_shard: int,
    overwrite: bool = False,
    advanced: Advanced | None = None,
) -> Dataset:
    """Write the samples of a reader into shards at a path or URL, which come into being as a whole, with the manifest.

    - `reader`: without arguments; returns an iterable of samples, as a generator, or such a reader. A sample is a tuple
      of the same fields each time.
    - `records_per_shard`: the last shard may have fewer. A shard is held in memory while it is written and read.
    - `overwrite`: replace shards that are there; they are removed once the first new one is made. What a killed
      conversion left is always removed.

    After an error nothing is left. Raises SpecError, SampleError, ReaderError and DatasetStoreError; and
    UnfinishedDatasetError when another conversion to this place took place meanwhile.
    """
    pyarrow()
    storage, name = _place_to_write(url)
    source = getattr(reader, "__qualname__", type(reader).__name__)
    with store_errors(url):
        with_retries(_check_place, storage, name, overwrite=overwrite)
    samples = _Samples(reader, source)
    shards: dict[str, int] = {}

    def encode() -> memoryview | None:
        return _encode(samples, records_per_shard, lambda: advanced and advanced(len(shards), samples.taken))

    content = encode()
    if content is None:
        raise SpecError("reader", source, "one that yields a sample or more")
    with store_errors(url):
        with_retries(_make_room, storage, name)
        with storage.draft(name) as create:
            while content is not None:
                shard = f"{len(shards):05d}-{zlib.crc32(content):08x}.parquet"
                shards[shard] = samples.taken - sum(shards.values())
                _write(create, shard, content)
                content = encode()
            dataset = Dataset(format=FORMAT, shards=shards)
            _write(create, MANIFEST, seal(msgspec.json.encode(dataset)))
    list_shards(url)  # another conversion to this place may have removed some
    return dataset


def load_reader(source: str) -> Callable[[], Any]:
    """Return the function that FILE.py:FUNCTION or package.module:FUNCTION names.

    The folder of the file, or the working directory, is searched for what it imports. Raises SpecError.
    """
    allowed = "FILE.py:FUNCTION or package.module:FUNCTION"
    place, _, function_name = source.rpartition(":")
    if not place or not function_name:
        raise SpecError("READER", source, allowed)
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise SpecError("READER", source, f"{allowed}; there is no {place}")
    try:
        module = _load_file(Path(place)) if is_file else _load_module(place)
        function = getattr(module, function_name)
    except (ImportError, AttributeError) as error:
        raise SpecError("READER", source, f"{allowed}; {error}") from error
    if not callable(function):
        raise SpecError("READER", source, f"{allowed}; this is {type(function).__name__}, and no function")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.absolute()))  # as `python FILE.py` does
    sys.modules.setdefault(path.stem, module)  # where dataclasses and pickle look for it
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)  # last, so that no file there shadows a library
    return importlib.import_module(name)


class _Samples(Iterator[Any]):
    """The samples of a reader, checked and copied. `taken`: how many. Raises SampleError, ReaderError and SpecError."""

    def __init__(self, reader: Callable[[], Any], name: str) -> None:
        self.taken = 0
        self.fields: list[fields.Field] = []
        self._name = name
        self._samples = self._opened(reader)

    def __next__(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            raise
        except Exception as error:
            raise self._failed(error) from error
        if not self.fields:
            self.fields = fields.fields_of(sample)
        fields.check(sample, self.fields, self.taken)
        self.taken += 1
        return tuple(map(_kept, sample))

    def _opened(self, reader: Callable[[], Any]) -> Iterator[Any]:
        opened: Any = reader
        for _ in range(2):  # a reader, or what makes one
            _check_takes_nothing(opened, self._name)
            try:
                opened = opened()
            except Exception as error:
                raise self._failed(error) from error
            if not callable(opened):
                break
        if not isinstance(opened, Iterable):
            raise SpecError(
                "reader", self._name, f"one that returns an iterable of samples, not {type(opened).__name__}"
            )
        return iter(opened)

    def _failed(self, error: Exception) -> ReaderError:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        return ReaderError(self._name, self.taken, cause)


def _check_takes_nothing(reader: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(reader).bind()
    except TypeError as error:
        raise SpecError("reader", name, f"a function that can be called without arguments; {error}") from None
    except ValueError:  # of a builtin without a signature
        return


def _place_to_write(url: str) -> tuple[Storage, str]:
    """Return where to write, which is where a link leads to: a folder is removed and renamed, and its link stays."""
    storage, name = place_of(url)
    return place_of(os.path.realpath(storage.url_of(name))) if isinstance(storage, LocalStorage) else (storage, name)


def _check_place(storage: Storage, name: str, *, overwrite: bool) -> None:
    """Raise SpecError where there is anything but what a killed conversion left, or shards to overwrite."""
    there = storage.contents(name)
    if any(not is_shard_name(file) and file not in (MANIFEST, DRAFT) for file in there):
        raise SpecError("OUT", storage.url_of(name), "an empty or missing folder, or one with shards and nothing else")
    was_left = DRAFT in there and MANIFEST not in there
    if there and not was_left and not overwrite:
        raise SpecError(
            "OUT", storage.url_of(name), "a place without shards; --overwrite replaces those that are there"
        )


def _make_room(storage: Storage, name: str) -> None:
    for old in (draft_name(name), name):
        storage.remove(old)


def _encode(samples: _Samples, most: int, advanced: Callable[[], object]) -> memoryview | None:
    """Return the content of the next shard, None after the last sample."""
    pa, pq = pyarrow()
    shard = itertools.islice(samples, most)
    group = _next_group(shard)
    if not group:
        return None
    schema = fields.schema_of(samples.fields)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        while group:
            begin = samples.taken - len(group)
            columns = [
                fields.to_column(field, values, place, begin)
                for place, (field, values) in enumerate(zip(samples.fields, zip(*group, strict=True), strict=True))
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            advanced()
            group = _next_group(shard)
    return memoryview(sink.getvalue())


def _next_group(samples: Iterator[Any]) -> list[Any]:
    """Return the samples of the next row group, none at the end."""
    group: list[Any] = []
    size = 0
    for sample in samples:
        group.append(sample)
        size += sum(map(_size, sample))
        if size >= GROUP_BYTES or len(group) == GROUP_RECORDS:
            break
    return group


def _kept(value: Any) -> Any:
    """Return a value as it is now: a reader may yield the same array or list again, with other content."""
    return value.copy() if isinstance(value, np.ndarray | list) else value


def _size(value: Any) -> int:
    """Return about how many bytes a value has."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 8


def _write(create: CreateFile, file: str, content: bytes | memoryview) -> None:
    with create(file) as opened:
        for begin in range(0, len(content), CHUNK_BYTES):
            opened.write(content[begin : begin + CHUNK_BYTES])
