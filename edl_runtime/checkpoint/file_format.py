"""The format of a checkpoint: a folder of safetensors files, one JSON file, and the manifest.

The manifest is written last; a folder without one is not a checkpoint.
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
from typing import Annotated, Any, BinaryIO, NamedTuple, Self, TypeAlias, cast

import msgspec
import numpy as np

from edl_runtime.checkpoint.errors import (
    DamagedCheckpointError,
    UnfinishedCheckpointError,
    UnknownFormatError,
    UnreadableCheckpointError,
)
from edl_runtime.checkpoint.finite import all_finite
from edl_runtime.checkpoint.storage import DRAFT, MANIFEST, Storage, with_retries
from edl_runtime.errors import SpecError
from edl_runtime.files import read_all

Arrays: TypeAlias = Mapping[str, Mapping[str, np.ndarray]]
"""Arrays by group ("model", "optimizer") and name. A group's name is part of a file name: a-z, 0-9, '_' and '-'."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a checkpoint.

    - `generation`, `step`: order checkpoints.
    - `arrays`: may be views of memory that the next step changes; copy them before. bfloat16 is represented as uint16,
      as in Paddle's `numpy()` and `set_value`.
    - `extra`: everything else, as JSON: cursor, learning rate, random state, ledger.
    - `world_size`, `epoch`, `metrics`: shown without loading the checkpoint.
    - `request`: the number of the request that it answers, 0 for none.
    - `trained`: by group, the names of the arrays that training changes. If they are not finite, the checkpoint is
      marked; others, as masks in buffers or registered state, may be infinite.
    """

    generation: int
    step: int
    arrays: Arrays
    extra: dict[str, Any] = {}
    world_size: int = 1
    epoch: int = 0
    metrics: dict[str, float] = {}
    request: int = 0
    trained: dict[str, list[str]] = {}


# The manifest.

FORMAT = 1
"""The version of the format. Other versions are refused."""

MAX_NAMED = 3
"""Arrays that a text lists."""

_CHECKPOINT_NAME = re.compile(r"step-(\d{9,18})-gen-(\d{6,18})-[0-9a-f]{8}")
_FILE_NAME = re.compile(r"[a-z0-9_-]+\.(safetensors|json)")


class CheckpointPosition(NamedTuple):
    """The order of checkpoints: first by generation, then by step."""

    generation: int
    step: int


class FileRecord(msgspec.Struct, frozen=True):
    """The size and CRC-32 of a file."""

    size: int
    crc32: int


LATEST = 1e11
"""A Unix time that no checkpoint is of; the calendar ends a little later."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Describes a checkpoint and its files. `created_at` is a Unix time; `request` as in `Snapshot`.

    `not_finite`: "group/name" of each array of a trained parameter, or of its optimizer, that has NaN or infinity. Runs
    do not continue from such a checkpoint.
    """

    format: int
    generation: int
    step: int
    epoch: int
    world_size: int
    metrics: dict[str, float]
    created_at: float
    files: dict[str, FileRecord]
    request: int = 0
    not_finite: list[str] = []

    def __post_init__(self) -> None:
        wrong = [name for name in self.files if not _FILE_NAME.fullmatch(name)]
        if wrong:
            raise ValueError(f"unexpected file names: {', '.join(wrong)}")
        if not 0 <= self.created_at < LATEST:
            raise ValueError(f"created_at is {self.created_at:g}, allowed is a Unix time")

    @classmethod
    def decode(cls, content: bytes, url: str) -> Self:
        """Parse the manifest file of the checkpoint at `url`.

        Raises UnknownFormatError, and ValueError if the file is damaged.
        """
        _check_format(content, url)
        manifest = unseal(content)
        _check_format(manifest, url)
        return msgspec.json.decode(manifest, type=cls)

    def encode(self) -> bytes:
        """Return the content of the manifest file."""
        return seal(msgspec.json.encode(self))


class _SealedManifest(msgspec.Struct):
    manifest: msgspec.Raw
    crc32: int


def seal(manifest: bytes) -> bytes:
    """Return the content of a manifest's file: the manifest, as JSON, with its check sum."""
    return msgspec.json.encode(_SealedManifest(msgspec.Raw(manifest), zlib.crc32(manifest)))


def unseal(content: bytes) -> msgspec.Raw:
    """Return the manifest in a file of `seal`. Raises ValueError if the file is damaged."""
    sealed = msgspec.json.decode(content, type=_SealedManifest)
    if zlib.crc32(sealed.manifest) != sealed.crc32:
        raise ValueError("check sum differs")
    return sealed.manifest


class _Format(msgspec.Struct):
    format: int = FORMAT  # other formats may have it at the top level, without a check sum


def _check_format(content: bytes | msgspec.Raw, url: str) -> None:
    found = msgspec.json.decode(content, type=_Format).format
    if found != FORMAT:
        raise UnknownFormatError(url, found, FORMAT)


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The location and manifest of a checkpoint."""

    url: str
    name: str
    manifest: Manifest

    @property
    def position(self) -> CheckpointPosition:
        return CheckpointPosition(self.manifest.generation, self.manifest.step)

    @property
    def defect(self) -> str:
        """What is wrong with its weights, for people; "" for nothing."""
        names = self.manifest.not_finite
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return f"NaN or infinity in {', '.join(names[:MAX_NAMED])}{more}" if names else ""

    @property
    def size_bytes(self) -> int:
        """Total size of its files, without the manifest."""
        return sum(record.size for record in self.manifest.files.values())


def new_name(position: CheckpointPosition) -> str:
    """Return a unique folder name for a checkpoint: several writers may write the same step."""
    return f"step-{position.step:09d}-gen-{position.generation:06d}-{secrets.token_hex(4)}"


def is_checkpoint_name(folder: str) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _CHECKPOINT_NAME.fullmatch(folder) is not None


def position_of(name: str) -> CheckpointPosition:
    """Return the position in a checkpoint's name."""
    found = _CHECKPOINT_NAME.fullmatch(name)
    if not found:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    return CheckpointPosition(int(found[2]), int(found[1]))


# Files with a check sum, which is computed while they are written or read.

CHUNK_BYTES = 1 << 20
"""Small enough to be still in the CPU cache for the write after the check sum; both release the GIL."""


def write_checked(
    file: BinaryIO, pieces: Iterable[memoryview], answered: Callable[[], None] = lambda: None
) -> FileRecord:
    """Write these to a file and return its record. `answered` is called after each written chunk."""
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
    """Return a file's bytes; without `keep` only check them. `answered` is called after each chunk.

    Retries each chunk, not the whole file. Raises ValueError if the bytes differ from what was written.
    """
    room = np.empty(record.size if keep else min(record.size, 8 * CHUNK_BYTES), np.uint8)
    crc32 = done = 0
    while done < record.size:
        begin = done if keep else 0
        chunk = room[begin : begin + min(8 * CHUNK_BYTES, record.size - done)]
        count = with_retries(cast(RawIOBase, file).readinto, chunk.data)
        if not count:
            raise ValueError(f"only {done} of {record.size} bytes")
        answered()
        crc32 = zlib.crc32(chunk[:count].data, crc32)
        done += count
    if file.read(1):
        raise ValueError(f"more than {record.size} bytes")
    if crc32 != record.crc32:
        raise ValueError("check sum differs")
    return room


# Arrays to a safetensors file and back, without copies: the library would copy each array, and reads no bfloat16.

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
_DTYPES["BF16"] = "<u2"  # numpy has no such type; Paddle represents it like this


def safetensors_chunks(arrays: Mapping[str, np.ndarray]) -> Iterator[memoryview]:
    """Yield the header and the memory of each array. Raises SpecError for unsupported types."""
    if _METADATA in arrays:
        raise SpecError("checkpoint's array", _METADATA, "any other name: safetensors reserves this one")
    entries: dict[str, Any] = {}
    ordered = sorted(
        arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])
    )  # largest items first, so that all are aligned
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
    """Raise SpecError for the first of these named arrays that a checkpoint can't hold."""
    for name, array in arrays:
        _dtype_name(name, array)


def parse_safetensors(content: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of a file as views of `content`. Raises ValueError if it is not a safetensors file."""
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    if not 8 < start <= len(content):
        raise ValueError(f"header of {start - 8} bytes in {len(content)} bytes")
    header = msgspec.json.decode(content[8:start].tobytes(), type=dict[str, Any])
    header.pop(_METADATA, None)
    entries = msgspec.convert(header, dict[str, _TensorEntry])
    return {name: _tensor_view(content[start:], entry) for name, entry in entries.items()}


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


def _tensor_view(content: np.ndarray, entry: _TensorEntry) -> np.ndarray:
    begin, end = entry.data_offsets
    if entry.dtype not in _DTYPES:
        raise ValueError(f"unknown type {entry.dtype}, known are {', '.join(_DTYPES)}")
    if not begin <= end <= len(content):
        raise ValueError(f"array at bytes {begin} to {end} of {len(content)}")
    return content[begin:end].view(_DTYPES[entry.dtype]).reshape(entry.shape)


def _dtype_name(name: str, array: np.ndarray) -> str:
    try:
        return _DTYPE_NAMES[array.dtype.str]
    except KeyError:
        allowed = f"{', '.join(np.dtype(dtype).name for dtype in _DTYPE_NAMES)}: checkpoints hold no other types"
        raise SpecError(f"checkpoint's {name!r}", str(array.dtype), allowed) from None


# The folder of a checkpoint: one file for each group of arrays, one for everything else, and the manifest.

EXTRA_FILE = "extra.json"
ARRAYS_SUFFIX = ".safetensors"


def write_checkpoint(storage: Storage, name: str, snapshot: Snapshot, answered: Callable[[], None]) -> CheckpointInfo:
    """Store a snapshot in a new folder. After an error nothing is left that could be loaded, unless it is complete.

    `answered` is called after each written chunk.
    """
    files = {}
    with storage.draft(name) as create:
        for group, arrays in snapshot.arrays.items():
            with create(group + ARRAYS_SUFFIX) as file:
                files[group + ARRAYS_SUFFIX] = write_checked(file, safetensors_chunks(arrays), answered)
        with create(EXTRA_FILE) as file:
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
            request=snapshot.request,
            not_finite=_not_finite(snapshot),
        )
        content = manifest.encode()
        with create(MANIFEST) as file:
            file.write(content)
    return CheckpointInfo(url=storage.url_of(name), name=name, manifest=manifest)


def _not_finite(snapshot: Snapshot) -> list[str]:
    return [
        f"{group}/{name}"
        for group, names in snapshot.trained.items()
        for name in names
        if name in snapshot.arrays.get(group, {}) and not all_finite(snapshot.arrays[group][name])
    ]


def read_info(storage: Storage, name: str) -> CheckpointInfo:
    """Read a folder's manifest. Raises UnreadableCheckpointError."""
    url = storage.url_of(name)
    content = _read_manifest(storage, name)
    with _damaged_if_wrong(url, MANIFEST):
        manifest = Manifest.decode(content, url)
        if (manifest.generation, manifest.step) != position_of(name):
            raise ValueError(f"it says step {manifest.step}, generation {manifest.generation}")
    return CheckpointInfo(url=url, name=name, manifest=manifest)


def _read_manifest(storage: Storage, name: str) -> bytes:
    for file in (MANIFEST, DRAFT, MANIFEST):  # twice: the draft may have been finished between the first two
        with contextlib.suppress(FileNotFoundError), storage.open(name, file) as found:
            if file == DRAFT:
                raise UnfinishedCheckpointError(storage.url_of(name), is_draft=True)
            return read_all(found)
    raise UnfinishedCheckpointError(storage.url_of(name), is_draft=False)


def read_files(
    storage: Storage, info: CheckpointInfo, *, keep: bool, answered: Callable[[], None]
) -> dict[str, np.ndarray]:
    """Return each file's bytes; without `keep` only check them. Raises DamagedCheckpointError.

    Opens all files before it reads the first, so that local files can be read even if they are removed meanwhile.
    `answered` is called after each opened file and each chunk.
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
    """Parse the files of a checkpoint. Raises DamagedCheckpointError."""
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
    """Raise DamagedCheckpointError for a file that is missing or can't be read or parsed."""
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
