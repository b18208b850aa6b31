"""Conversion of a reader's samples into shards."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edl_runtime.checkpoint.file_format import seal
from edl_runtime.checkpoint.storage import DRAFT, MANIFEST, LocalStorage, Storage, finished_name, with_retries
from edl_runtime.errors import SpecError
from edl_runtime.shards import fields
from edl_runtime.shards.dataset import (
    FORMAT,
    GROUP_BYTES,
    GROUP_RECORDS,
    Dataset,
    check_groups,
    is_shard_name,
    list_shards,
    missing_shards,
    place_of,
    pyarrow,
    read_manifest,
    store_errors,
)
from edl_runtime.shards.errors import ConversionRunningError, ReaderError, SampleError

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
    """Write the samples of a reader into shards at a path or URL, which become a set as a whole, with the manifest.

    - `reader`: without arguments; returns an iterable of samples, as a generator, or such a reader. A sample is a tuple
      of the same fields each time.
    - `records_per_shard`: the last shard may have fewer. A shard is held in memory while it is written and read.
    - `overwrite`: replace a set that is there. It stays whole until the new one is, and is removed then.

    After an error nothing new is left. What a killed conversion left is removed at the end of the next one. Raises
    SpecError, SampleError, ReaderError and DatasetStoreError; and ConversionRunningError while another conversion to
    this place runs. In an object store, where nothing tells a killed conversion from one that runs, it is the earlier
    one that raises it, at its next shard.
    """
    pyarrow()
    source = getattr(reader, "__qualname__", type(reader).__name__)
    shards: dict[str, int] = {}
    with _new_set(url, overwrite=overwrite) as new:
        samples = _Samples(reader, source)
        while content := _encode(samples, records_per_shard, lambda: advanced and advanced(len(shards), samples.taken)):
            shard = f"{len(shards):05d}-{zlib.crc32(content):08x}.parquet"
            shards[shard] = samples.taken - sum(shards.values())
            new.put(shard, content)
        if not shards:
            raise SpecError("reader", source, "one that yields a sample or more")
        dataset = Dataset(format=FORMAT, shards=shards)
        new.swap_in(dataset)
    list_shards(url)  # in an object store a later conversion may have removed some
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


@contextlib.contextmanager
def _new_set(url: str, *, overwrite: bool) -> Iterator[_NewSet]:
    """Claim a place for a new set of shards. In the end all is removed there that the manifest doesn't name."""
    storage, name = _place_to_write(url)
    with contextlib.ExitStack() as stack:
        with store_errors(url):
            with_retries(_check_place, storage, name, overwrite=overwrite)
            new = _NewSet(url, storage, name, overwrite, stack.enter_context(storage.claim(name)))
        new.check_claim()
        try:
            yield new
        finally:
            with contextlib.suppress(Exception):  # what is left means nothing, and the next conversion removes it
                new.check_claim()
                _remove_others(storage, name)


@dataclass(frozen=True)
class _NewSet:
    """A set of shards that is being written, beside one that it may replace. Methods raise ConversionRunningError."""

    url: str
    storage: Storage
    name: str
    overwrite: bool
    is_claimed: Callable[[], bool]

    def put(self, file: str, content: bytes) -> None:
        self.check_claim()
        with store_errors(self.url):
            with_retries(self.storage.put, self.name, file, content)

    def swap_in(self, dataset: Dataset) -> None:
        """Make this the set of the place, at once."""
        with store_errors(self.url):
            there = with_retries(_check_place, self.storage, self.name, overwrite=self.overwrite)
        if missing_shards(dataset, there):  # in an object store another conversion has ended meanwhile
            raise ConversionRunningError(self.url)
        self.put(MANIFEST, seal(msgspec.json.encode(dataset)))

    def check_claim(self) -> None:
        with store_errors(self.url):
            if not with_retries(self.is_claimed):
                raise ConversionRunningError(self.url)


def _check_place(storage: Storage, name: str, *, overwrite: bool) -> set[str]:
    """Return the files of a place. Raises SpecError for any but of unfinished conversions, or of a set to overwrite."""
    there = storage.contents(name)
    if any(not _is_ours(file) for file in there):
        raise SpecError("OUT", storage.url_of(name), "an empty or missing folder, or one with shards and nothing else")
    was_left = DRAFT in there and MANIFEST not in there
    if there and not was_left and not overwrite:
        raise SpecError(
            "OUT", storage.url_of(name), "a place without shards; --overwrite replaces those that are there"
        )
    return there


def _is_ours(file: str) -> bool:
    return file == DRAFT or finished_name(file) == MANIFEST or is_shard_name(finished_name(file))


def _remove_others(storage: Storage, name: str) -> None:
    """Remove what conversions have left beside the set that the manifest names, which may be none."""
    there = storage.contents(name)
    whole = read_manifest(storage, name).shards.keys() | {MANIFEST} if MANIFEST in there else frozenset()
    storage.remove_files(name, [file for file in there - whole - {DRAFT} if _is_ours(file)])


def _encode(samples: _Samples, most: int, advanced: Callable[[], object]) -> bytes | None:
    """Return the content of the next shard, None after the last sample."""
    pa, pq = pyarrow()
    shard = itertools.islice(samples, most)
    group = _next_group(shard)
    if not group:
        return None
    schema = fields.schema_of(samples.fields)
    sink, first = pa.BufferOutputStream(), samples.taken - len(group)
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
    content: bytes = sink.getvalue().to_pybytes()
    try:
        check_groups(pq.read_metadata(pa.BufferReader(content)), samples.fields, len(content))
    except ValueError as error:
        given = f"values that hardly differ, among the {samples.taken - first} samples from here on ({error})"
        raise SampleError(first, None, given, "what may be decoded again") from error
    return content


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
