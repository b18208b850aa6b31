"""The format of a checkpoint: a snapshot as a folder of safetensors files, one JSON file, and the manifest.

The manifest is written last; a folder without one is no checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import RawIOBase
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias, cast

import msgspec
import numpy as np

from edl_runtime.checkpoint.errors import (
    DamagedCheckpointError,
    UnfinishedCheckpointError,
    UnknownFormatError,
    UnreadableCheckpointError,
)
from edl_runtime.checkpoint.storage import DRAFT, MANIFEST, Storage, with_retries
from edl_runtime.errors import SpecError

Arrays: TypeAlias = Mapping[str, Mapping[str, np.ndarray]]
"""Arrays by group ("model", "optimizer") and name. A group's name is one of a file: a-z, 0-9, '_' and '-'."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds.

    - `generation`, `step`: which training it is of, and after how many of its steps. They order checkpoints.
    - `arrays`: may be views of memory that the next step changes: whoever takes the snapshot copies them. bfloat16
      comes and goes as uint16, as Paddle's own `numpy()` and `set_value` have it.
    - `extra`: all else, as JSON: cursor, learning rate, state of random numbers, ledger.
    - `world_size`, `epoch`, `metrics`: for whoever looks at checkpoints without loading them.
    """

    generation: int
    step: int
    arrays: Arrays
    extra: dict[str, Any] = {}
    world_size: int = 1
    epoch: int = 0
    metrics: dict[str, float] = {}


# The manifest: what a checkpoint's files must be, written last. A folder without one is no checkpoint.

FORMAT = 1
"""The version of the format that is written here. Others are refused."""

_CHECKPOINT_NAME = re.compile(r"step-(\d{9,18})-gen-(\d{6,18})-[0-9a-f]{8}")
_FILE_NAME = re.compile(r"[a-z0-9_-]+\.(safetensors|json)")


class CheckpointPosition(NamedTuple):
    """What orders checkpoints: of a later generation is newer, whatever its step."""

    generation: int
    step: int


class FileRecord(msgspec.Struct, frozen=True):
    """What a file must be: so many bytes, of this CRC-32."""

    size: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is and what its files must be.

    `created_at` is a Unix time. Names, shapes and types of arrays stand in the headers of the safetensors files.
    """

    format: int
    generation: int
    step: int
    epoch: int
    world_size: int
    metrics: dict[str, float]
    created_at: float
    files: dict[str, FileRecord]

    def __post_init__(self) -> None:
        wrong = [name for name in self.files if not _FILE_NAME.fullmatch(name)]
        if wrong:
            raise ValueError(f"files of other names: {', '.join(wrong)}")

    @classmethod
    def decode(cls, content: bytes, url: str) -> Self:
        """Read the manifest's file of the checkpoint at `url`.

        Raises UnknownFormatError, and a ValueError that says what is wrong where its bytes are not those written.
        """
        outer = msgspec.json.decode(content, type=_Outer).format
        if outer != FORMAT:
            raise UnknownFormatError(url, outer, FORMAT)
        sealed = msgspec.json.decode(content, type=_SealedManifest)
        if zlib.crc32(sealed.manifest) != sealed.crc32:
            raise ValueError("other content than was written")
        version = msgspec.json.decode(sealed.manifest, type=_Version).format
        if version != FORMAT:
            raise UnknownFormatError(url, version, FORMAT)
        return msgspec.json.decode(sealed.manifest, type=cls)

    def encode(self) -> bytes:
        """Return the content of the manifest's file, which `decode` reads."""
        manifest = msgspec.json.encode(self)
        return msgspec.json.encode(_SealedManifest(msgspec.Raw(manifest), zlib.crc32(manifest)))


class _SealedManifest(msgspec.Struct):
    manifest: msgspec.Raw
    crc32: int


class _Outer(msgspec.Struct):
    format: int = FORMAT  # which a format whose manifest is not sealed as this one's has beside all else


class _Version(msgspec.Struct):
    format: int


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is there: where, and what its manifest says."""

    url: str
    name: str
    manifest: Manifest

    @property
    def position(self) -> CheckpointPosition:
        """What orders it among others."""
        return CheckpointPosition(self.manifest.generation, self.manifest.step)

    @property
    def size_bytes(self) -> int:
        """Bytes of its files, without the manifest."""
        return sum(record.size for record in self.manifest.files.values())


def new_name(position: CheckpointPosition) -> str:
    """Return a folder's name for a checkpoint; no two writers have the same, even of the same step."""
    return f"step-{position.step:09d}-gen-{position.generation:06d}-{secrets.token_hex(4)}"


def is_checkpoint_name(folder: str) -> bool:
    """Whether a folder is called as checkpoints are."""
    return _CHECKPOINT_NAME.fullmatch(folder) is not None


def position_of(name: str) -> CheckpointPosition:
    """Return what a checkpoint's name says."""
    found = _CHECKPOINT_NAME.fullmatch(name)
    if not found:
        raise ValueError(f"{name!r} is no checkpoint's name")
    return CheckpointPosition(int(found[2]), int(found[1]))


# Files with a check sum, computed in passing.

CHUNK_BYTES = 1 << 20
"""Bytes that are summed and written while they are in the processor's cache; Python's lock is free meanwhile."""


def write_checked(
    file: BinaryIO, pieces: Iterable[memoryview], answered: Callable[[], None] = lambda: None
) -> FileRecord:
    """Write these to a file, one after the other; return what it must be from now on.

    `answered` is called after each part of them that is written.
    """
    size = crc32 = 0
    for piece in pieces:
        for begin in range(0, len(piece), CHUNK_BYTES):
            chunk = piece[begin : begin + CHUNK_BYTES]
            crc32 = zlib.crc32(chunk, crc32)
            file.write(chunk)
            answered()
        size += len(piece)
    return FileRecord(size, crc32)


def read_checked(
    file: BinaryIO, record: FileRecord, *, keep: bool = True, answered: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Return a file's bytes, only its last ones unless they are to be kept. `answered` is called after each piece.

    A piece that can't be had is asked for again: however long a file takes to read, it is begun once. Raises ValueError
    if the bytes are not what was written.
    """
    room = np.empty(record.size if keep else min(record.size, 8 * CHUNK_BYTES), np.uint8)
    crc32 = done = 0
    while done < record.size:
        begin = done if keep else 0
        chunk = room[begin : begin + min(8 * CHUNK_BYTES, record.size - done)]
        count = with_retries(cast(RawIOBase, file).readinto, chunk.data)
        if not count:
            raise ValueError(f"{done} bytes of {record.size}")
        answered()
        crc32 = zlib.crc32(chunk[:count].data, crc32)
        done += count
    if file.read(1):
        raise ValueError(f"more than {record.size} bytes")
    if crc32 != record.crc32:
        raise ValueError("other content than was written")
    return room


# Arrays to a safetensors file and back, without a copy of them in between.

_METADATA = "__metadata__"
_DTYPES = {
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
    "C64": "<c8",
    "F32": "<f4",
    "I32": "<i4",
    "U32": "<u4",
    "F16": "<f2",
    "I16": "<i2",
    "U16": "<u2",
    "BOOL": "|b1",
    "I8": "|i1",
    "U8": "|u1",
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DTYPES["BF16"] = "<u2"  # numpy has no such type; these are its bits, as Paddle gives and takes them


def safetensors_chunks(arrays: Mapping[str, np.ndarray]) -> Iterator[memoryview]:
    """Yield the file's bytes: the header, and each array's own memory. Raises SpecError for other types of arrays."""
    if _METADATA in arrays:
        raise SpecError("checkpoint's array", _METADATA, "any other name: safetensors keeps this one for itself")
    entries: dict[str, Any] = {}
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # so that all are aligned
    end = 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": _dtype_name(name, array), "shape": array.shape, "data_offsets": (begin, end)}
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for _, array in ordered:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def check_types(arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Raise SpecError that names the first of these arrays, with their names, that no such file can hold."""
    for name, array in arrays:
        _dtype_name(name, array)


def parse_safetensors(content: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays in a file's bytes, as views of them. Raises ValueError for what is no safetensors file."""
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = msgspec.json.decode(content[8:start].tobytes(), type=dict[str, Any])
    header.pop(_METADATA, None)
    entries = msgspec.convert(header, dict[str, _TensorEntry])
    return {name: _tensor_view(content[start:], entry) for name, entry in entries.items()}


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _tensor_view(content: np.ndarray, entry: _TensorEntry) -> np.ndarray:
    begin, end = entry.data_offsets
    if entry.dtype not in _DTYPES:
        raise ValueError(f"arrays of type {entry.dtype}, known are {', '.join(_DTYPES)}")
    return content[begin:end].view(_DTYPES[entry.dtype]).reshape(entry.shape)


def _dtype_name(name: str, array: np.ndarray) -> str:
    try:
        return _DTYPE_NAMES[array.dtype.str]
    except KeyError:
        allowed = f"{', '.join(np.dtype(dtype).name for dtype in _DTYPE_NAMES)}: checkpoints hold no other types"
        raise SpecError(f"checkpoint's {name!r}", str(array.dtype), allowed) from None


# What is in a checkpoint's folder: a file a group of arrays, one for all else, and the manifest, written last.

EXTRA_FILE = "extra.json"
ARRAYS_SUFFIX = ".safetensors"


def write_checkpoint(storage: Storage, name: str, snapshot: Snapshot, answered: Callable[[], None]) -> CheckpointInfo:
    """Store a snapshot in a new folder. After an error none is left that could be loaded, unless it is whole.

    `answered` is called after each part that is written.
    """
    files = {}
    with storage.draft(name) as draft:
        for group, arrays in snapshot.arrays.items():
            with draft.create(group + ARRAYS_SUFFIX) as file:
                files[group + ARRAYS_SUFFIX] = write_checked(file, safetensors_chunks(arrays), answered)
        with draft.create(EXTRA_FILE) as file:
            files[EXTRA_FILE] = write_checked(file, [memoryview(msgspec.json.encode(snapshot.extra))])
        manifest = Manifest(
            format=FORMAT,
            generation=snapshot.generation,
            step=snapshot.step,
            epoch=snapshot.epoch,
            world_size=snapshot.world_size,
            metrics=snapshot.metrics,
            created_at=time.time(),
            files=files,
        )
        content = manifest.encode()
        with draft.create(MANIFEST) as file:
            file.write(content)
    return CheckpointInfo(url=storage.url_of(name), name=name, manifest=manifest)


def read_info(storage: Storage, name: str) -> CheckpointInfo:
    """Return what a folder's manifest says. Raises UnreadableCheckpointError."""
    url = storage.url_of(name)
    content = _read_manifest(storage, name)
    with _damaged_if_wrong(url, MANIFEST):
        manifest = Manifest.decode(content, url)
        if (manifest.generation, manifest.step) != position_of(name):
            raise ValueError(f"it is of step {manifest.step} in generation {manifest.generation}")
    return CheckpointInfo(url=url, name=name, manifest=manifest)


def _read_manifest(storage: Storage, name: str) -> bytes:
    for file in (MANIFEST, DRAFT, MANIFEST):  # twice: the draft may have been finished between the first two
        with contextlib.suppress(FileNotFoundError), storage.open(name, file) as found:
            if file == DRAFT:
                raise UnfinishedCheckpointError(storage.url_of(name), is_draft=True)
            return found.read()
    raise UnfinishedCheckpointError(storage.url_of(name), is_draft=False)


def read_files(
    storage: Storage, info: CheckpointInfo, *, keep: bool, answered: Callable[[], None]
) -> dict[str, np.ndarray]:
    """Return each file's bytes, all of them if they are to be kept. Raises DamagedCheckpointError.

    All files are opened before the first is read: a local one that is removed meanwhile can still be read. `answered`
    is called after each that is opened, and each piece that is read.
    """
    contents = {}
    with contextlib.ExitStack() as stack:
        files = {}
        for file in info.manifest.files:
            with _damaged_if_wrong(info.url, file):
                files[file] = stack.enter_context(with_retries(storage.open, info.name, file))
            answered()
        for file, record in info.manifest.files.items():
            with _damaged_if_wrong(info.url, file):
                contents[file] = read_checked(files[file], record, keep=keep, answered=answered)
    return contents


def parse_snapshot(info: CheckpointInfo, contents: dict[str, np.ndarray]) -> Snapshot:
    """Return what the bytes of a checkpoint's files mean. Raises DamagedCheckpointError."""
    arrays, extra = {}, {}
    for file, content in contents.items():
        with _damaged_if_wrong(info.url, file):
            if file == EXTRA_FILE:
                extra = msgspec.json.decode(content.data, type=dict[str, Any])
            else:
                arrays[file.removesuffix(ARRAYS_SUFFIX)] = parse_safetensors(content)
    manifest = info.manifest
    return Snapshot(
        generation=manifest.generation,
        step=manifest.step,
        arrays=arrays,
        extra=extra,
        world_size=manifest.world_size,
        epoch=manifest.epoch,
        metrics=manifest.metrics,
    )


@contextlib.contextmanager
def _damaged_if_wrong(url: str, file: str) -> Iterator[None]:
    """Raise DamagedCheckpointError for a file that is not there, can't be read or holds something else."""
    try:
        yield
    except UnreadableCheckpointError:
        raise
    except FileNotFoundError:
        raise DamagedCheckpointError(url, f"{file} is missing") from None
    except (ValueError, RecursionError) as error:  # the latter: JSON nested too deep
        raise DamagedCheckpointError(url, f"{file}: {error}") from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedCheckpointError(url, f"{file}: {error}") from error
