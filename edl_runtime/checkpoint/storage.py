"""Storage of checkpoints and shards: the local file system, object stores through fsspec, and retries."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeAlias, TypeVar, cast

import stamina

from edl_runtime import locks
from edl_runtime.checkpoint.errors import CheckpointStoreError, MissingExtraError
from edl_runtime.errors import DamagedFileError, EdlError, SpecError
from edl_runtime.files import open_regular

MANIFEST = "manifest.json"
"""The manifest's file name."""

DRAFT = "draft"
"""A file that marks a folder that is claimed, or an unfinished one in an object store.

A folder without it and without a manifest has lost its manifest or is being removed. A local draft has another name
instead.
"""

READ_AT_ONCE = 1 << 23
"""Bytes of one read from an object store."""

IDENTITY_FILE = ".edl-place"
"""A file in a checkpoint folder that identifies it by a random first line and its inode: a folder that is created again
has another line, a copy has another inode."""

_TOKEN_LIMIT = 1 << 10

EXTRAS = {"s3": "the extra s3 (pip install 'edl-airflow[s3]')"}
"""What to install for a protocol."""


CreateFile: TypeAlias = Callable[[str], contextlib.AbstractContextManager[BinaryIO]]
"""Opens a new file of a draft for writing; after the context it is stored durably."""


def storage_at(url: str) -> Storage:
    """Return the storage at a path or URL. Raises nothing; its `check` reports whether it can be used."""
    protocol, separator, path = url.partition("://")
    if separator and protocol not in ("file", "local"):
        return ObjectStorage(f"{protocol}://{path.rstrip('/')}")
    return LocalStorage(Path(path if separator else url).expanduser().absolute())


class LocalStorage:
    """Folders of files on a file system. A draft has another name, and is renamed once all its files are on disk.

    `url`: an absolute path. Methods raise OSError.
    """

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        self._root = root

    def identity(self) -> str:
        """Return a unique id of this folder, the same for all paths that lead to it.

        Creates the folder if it is missing, and a small file in it.
        """
        mark = self._root / IDENTITY_FILE
        while True:
            with contextlib.suppress(FileNotFoundError), _open_mark(mark) as file:
                token, end, _ = file.read(_TOKEN_LIMIT).partition(b"\n")
                if end or len(token) == _TOKEN_LIMIT:  # limited, in case another program wrote the file
                    return f"folder {os.fstat(file.fileno()).st_ino} {token.decode('ascii', 'backslashreplace')}"
            _make_folder(self._root)
            with mark.open("ab") as file:  # several processes may append; the first line counts
                file.write(f"{secrets.token_hex(16)}\n".encode())

    def url_of(self, folder: str) -> str:
        """Return the path or URL of a folder in this one."""
        return f"{self.url}/{folder}"

    def check(self) -> None:
        """Write a small file and remove it."""
        _make_folder(self._root)
        probe = self._root / _probe_name()
        probe.write_bytes(b"probe")
        probe.unlink()

    def exists(self) -> bool:
        """Whether the folder exists, even if empty; in an object store, whether it has any object."""
        return self._root.is_dir()

    def folders(self) -> list[str]:
        """Return the names of all folders here, including drafts."""
        try:
            return [entry.name for entry in os.scandir(self._root) if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def contents(self, folder: str) -> set[str]:
        """Return the names of the files and folders in a folder, none if it is missing."""
        try:
            return {entry.name for entry in os.scandir(self._root / folder)}
        except FileNotFoundError:
            return set()

    def open(self, folder: str, file: str) -> BinaryIO:
        """Open a file for reading. Raises FileNotFoundError, and DamagedFileError for what is no regular file."""
        return open_regular(self._root / folder / file)

    @contextlib.contextmanager
    def draft(self, folder: str) -> Iterator[CreateFile]:
        """Create a folder that becomes complete at the end of the context; an error removes it.

        A process that is killed meanwhile leaves a draft: a folder of another name, or one with the file DRAFT. So does
        an error if the folder can't be removed; an error after the last file may leave a complete folder.
        """
        path = self._root / draft_name(folder)
        _make_folder(self._root)
        path.mkdir()
        try:
            yield lambda file: _create_synced(path / file)
            _sync(path)
            path.rename(self._root / folder)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        _sync(self._root)

    @contextlib.contextmanager
    def claim(self, folder: str) -> Iterator[Callable[[], bool]]:
        """Claim a folder, which is created if it is missing, to change single files in it for the context.

        Yields a function that tells whether the folder is this claim's. Here the claim is a lock: the first one has it
        until its process ends. An object store can't tell whether a claimer still lives: there the last one has it. Its
        file DRAFT is removed in the end, and so is a folder that it created, if that is empty.
        """
        path = self._root / folder
        was_there = path.is_dir()
        descriptor = _lock(path)
        try:
            yield lambda: descriptor is not None
        finally:
            if descriptor is not None:
                (path / DRAFT).unlink(missing_ok=True)
                if not was_there:
                    with contextlib.suppress(OSError):
                        path.rmdir()
                os.close(descriptor)

    def put(self, folder: str, file: str, content: bytes) -> None:
        """Write a file of a folder that is there, durably and as a whole: others see its former content or this one.

        A process that is killed meanwhile may leave a file with the name of the file's draft.
        """
        path = self._root / folder
        partial = path / draft_name(file)
        partial.unlink(missing_ok=True)
        with _create_synced(partial) as opened:
            opened.write(content)
        partial.replace(path / file)
        _sync(path)

    def remove_files(self, folder: str, files: Collection[str]) -> None:
        """Remove files of a folder; some may be gone already."""
        for file in files:
            (self._root / folder / file).unlink(missing_ok=True)

    def changed_at(self, folder: str) -> float:
        """Return the Unix time of the last change in a folder; now, if it is gone."""
        path = self._root / folder
        try:
            return max(each.stat().st_mtime for each in (path, *path.iterdir()))
        except FileNotFoundError:
            return time.time()

    def remove(self, folder: str) -> None:
        """Remove a folder if it exists, its manifest first: if interrupted, nothing is left that looks complete."""
        path = self._root / folder
        (path / MANIFEST).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def _lock(folder: Path) -> int | None:
    """Create a folder and take the lock that is its file DRAFT. Returns None if somebody else has it."""
    while True:
        _make_folder(folder)
        try:
            return locks.take(folder / DRAFT)
        except FileNotFoundError:  # who claimed the folder before has just removed it
            if (folder / DRAFT).is_symlink():
                raise


def _open_mark(mark: Path) -> BinaryIO:
    try:
        return open_regular(mark)
    except DamagedFileError as error:
        raise FileExistsError(errno.EEXIST, str(error), str(mark)) from error


@contextlib.contextmanager
def _create_synced(path: Path) -> Iterator[BinaryIO]:
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


class ObjectStorage:
    """Has the methods of `LocalStorage`, in a store that fsspec supports; they raise errors of the store's library.

    A folder is complete once it has its manifest, the last file. A draft has a marker file until then; beside a
    manifest it means nothing. Endpoint and credentials are configured as for the store's library, as in
    AWS_ENDPOINT_URL_S3. `url` has no slash at its end.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def identity(self) -> str:
        return self.url

    @cached_property
    def _fs(self) -> Any:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        protocol = self.url.partition("://")[0]
        try:
            return url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)[0]
        except ImportError as error:
            raise MissingExtraError(self.url, str(error), EXTRAS.get(protocol, "a package")) from error
        except ValueError as error:
            allowed = "a path, or a URL of a protocol that fsspec supports, as s3://bucket/job"
            raise SpecError("URL", self.url, allowed) from error

    def url_of(self, folder: str) -> str:
        return f"{self.url}/{folder}"

    def check(self) -> None:
        probe = _probe_name()
        self._write_first(self.url, probe, b"probe")
        self._fs.rm_file(self.url_of(probe))

    def exists(self) -> bool:
        return bool(self._fs.exists(self.url))

    def folders(self) -> list[str]:
        try:
            entries = self._fs.ls(self.url, detail=True)
        except FileNotFoundError:
            return []
        return [_last_name(entry["name"]) for entry in entries if entry["type"] == "directory"]

    def contents(self, folder: str) -> set[str]:
        try:
            names = self._fs.ls(self.url_of(folder), detail=False)
        except FileNotFoundError:
            return set()
        return {_last_name(name) for name in names if not name.endswith("/")}  # which is how consoles mark a folder

    def open(self, folder: str, file: str) -> BinaryIO:
        path = f"{self.url_of(folder)}/{file}"
        is_remote = self._fs.async_impl  # as S3, where there are only files, and this would be one more request
        if not is_remote and self._fs.info(path)["type"] in ("other", "directory"):
            raise DamagedFileError("not a regular file")
        return cast(BinaryIO, self._fs.open(path, "rb", block_size=READ_AT_ONCE, cache_type="none"))

    @contextlib.contextmanager
    def draft(self, folder: str) -> Iterator[CreateFile]:
        mark = f"{self.url_of(folder)}/{DRAFT}"
        try:
            self._write_first(self.url_of(folder), DRAFT, b"")
            yield lambda file: self._fs.open(f"{self.url_of(folder)}/{file}", "wb")
        except Exception:
            with contextlib.suppress(Exception):  # raise the first error; what is left is a draft or complete
                self.remove(folder)
            raise
        with contextlib.suppress(Exception):  # it is complete with or without the marker
            self._fs.rm_file(mark)

    @contextlib.contextmanager
    def claim(self, folder: str) -> Iterator[Callable[[], bool]]:
        mark, token = f"{self.url_of(folder)}/{DRAFT}", secrets.token_bytes(16)

        def is_ours() -> bool:
            with contextlib.suppress(FileNotFoundError):
                return bool(self._fs.cat_file(mark) == token)
            return False

        self._write_first(self.url_of(folder), DRAFT, token)
        try:
            yield is_ours
        finally:
            with contextlib.suppress(Exception):  # beside a manifest it means nothing, and else that this failed
                if is_ours():
                    self._fs.rm_file(mark)

    def put(self, folder: str, file: str, content: bytes) -> None:
        self._fs.pipe_file(f"{self.url_of(folder)}/{file}", content)

    def remove_files(self, folder: str, files: Collection[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm([f"{self.url_of(folder)}/{file}" for file in files])

    def changed_at(self, folder: str) -> float:
        files = self._fs.find(self.url_of(folder))
        return max((self._fs.modified(file).timestamp() for file in files), default=time.time())

    def remove(self, folder: str) -> None:
        url = self.url_of(folder)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{url}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm([file for file in self._fs.find(url) if _last_name(file) != DRAFT])
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(url, recursive=True)

    def _write_first(self, folder: str, file: str, content: bytes) -> None:
        """Write the first file of a folder, and create the folder if it has to be there before, as over SFTP.

        An object store has no folders, so it gets no further request. Never creates a bucket.
        """
        try:
            self._fs.pipe_file(f"{folder}/{file}", content)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno != errno.ENOENT:
                raise
            self._make(folder)
            self._fs.pipe_file(f"{folder}/{file}", content)

    def _make(self, folder: str) -> None:
        parent = folder.rpartition("/")[0]
        if parent.endswith(":/") or self._fs.exists(folder):  # the former: a bucket, share or host
            return
        self._make(parent)
        with contextlib.suppress(FileExistsError):  # another process has just created it
            self._fs.mkdir(folder, create_parents=False)


Storage: TypeAlias = LocalStorage | ObjectStorage


def draft_name(folder: str) -> str:
    """Return the name of a local draft of a folder, or of a file."""
    return f".{folder}.partial"


def finished_name(name: str) -> str:
    """Return the name of a folder or file, given its own or that of its draft."""
    return name.removeprefix(".").removesuffix(".partial")


def _probe_name() -> str:
    return f".probe-{secrets.token_hex(4)}"


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        _sync(each.parent)


def _sync(folder: Path) -> None:
    """Write a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Temporary and permanent errors of a storage.

_PERMANENT = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
}

_CHECKSUM_ERRORS = {"FlexibleChecksumError", "ChecksumError"}
"""Of botocore and gcsfs, which need not be here."""

_retrying = stamina.RetryingCaller(attempts=3, wait_initial=0.2, wait_max=2.0, timeout=20.0)

P = ParamSpec("P")
T = TypeVar("T")


def ask_storage(url: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `with_retries`, and raise as `storage_errors`."""
    with storage_errors(url):
        return with_retries(work, *args, **kwargs)


def with_retries(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns; repeat it a few times after a temporary error.

    Raises the last error, and DamagedFileError instead of that of the store's library for a wrong checksum.
    """
    try:
        return _retrying(_is_transient, work, *args, **kwargs)
    except Exception as error:
        if type(error).__name__ not in _CHECKSUM_ERRORS:
            raise
        raise DamagedFileError(f"the store's check sum differs ({error})") from error


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Raise CheckpointStoreError for the storage at `url`, instead of errors that are not this project's."""
    try:
        yield
    except EdlError:
        raise
    except Exception as error:  # each file system of fsspec has its own errors
        raise CheckpointStoreError(url, f"{type(error).__name__}: {error}") from error


def _is_transient(error: BaseException) -> bool:
    if not isinstance(error, Exception):  # also called for KeyboardInterrupt
        return False
    if isinstance(error, OSError):
        lasting = error.errno in _PERMANENT or isinstance(error, PermissionError | FileNotFoundError)
        return not lasting
    return not isinstance(error, EdlError | ValueError | TypeError | LookupError)
