"""The manifest: what a checkpoint's files must be, written last. A folder without one is no checkpoint."""

from __future__ import annotations

import re
import secrets
import zlib
from typing import NamedTuple, Self

import msgspec

from edl_runtime.errors import UnknownFormatError

FORMAT = 1
"""The version of the format that is written here. Others are refused."""

MANIFEST = "manifest.json"
"""The manifest's file name."""

DRAFT = "draft"
"""A file that an object store's folder has from its first byte until its manifest is there.

One with neither has lost its manifest, or is being removed. On a file system a draft has another name instead.
"""

_NAME = re.compile(r"step-(\d{9,18})-gen-(\d{6,18})-[0-9a-f]{8}")
_FILE = re.compile(r"[a-z0-9_-]+\.(safetensors|json)")


class Position(NamedTuple):
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
        wrong = [name for name in self.files if not _FILE.fullmatch(name)]
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
        sealed = msgspec.json.decode(content, type=_Sealed)
        if zlib.crc32(sealed.manifest) != sealed.crc32:
            raise ValueError("other content than was written")
        version = msgspec.json.decode(sealed.manifest, type=_Version).format
        if version != FORMAT:
            raise UnknownFormatError(url, version, FORMAT)
        return msgspec.json.decode(sealed.manifest, type=cls)

    def encode(self) -> bytes:
        """Return the content of the manifest's file, which `decode` reads."""
        manifest = msgspec.json.encode(self)
        return msgspec.json.encode(_Sealed(msgspec.Raw(manifest), zlib.crc32(manifest)))


class _Sealed(msgspec.Struct):
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
    def position(self) -> Position:
        """What orders it among others."""
        return Position(self.manifest.generation, self.manifest.step)

    @property
    def size_bytes(self) -> int:
        """Bytes of its files, without the manifest."""
        return sum(record.size for record in self.manifest.files.values())


def new_name(position: Position) -> str:
    """Return a folder's name for a checkpoint; no two writers have the same, even of the same step."""
    return f"step-{position.step:09d}-gen-{position.generation:06d}-{secrets.token_hex(4)}"


def is_name(folder: str) -> bool:
    """Whether a folder is called as checkpoints are."""
    return _NAME.fullmatch(folder) is not None


def position_of(name: str) -> Position:
    """Return what a checkpoint's name says."""
    found = _NAME.fullmatch(name)
    if not found:
        raise ValueError(f"{name!r} is no checkpoint's name")
    return Position(int(found[2]), int(found[1]))
