"""Trouble with a place that may pass, and trouble that lasts."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import stamina

from edl_runtime.errors import CheckpointStoreError, EdlError

_LASTING = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENOENT,
    errno.ENOTDIR,
}

_patiently = stamina.RetryingCaller(attempts=3, wait_initial=0.2, wait_max=2.0, timeout=20.0)

P = ParamSpec("P")
T = TypeVar("T")


def trying(url: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns, which needs the place at `url`; ask it again a few times when that may help.

    Raises this project's errors as they are, and CheckpointStoreError for all others.
    """
    try:
        return _patiently(_may_pass, work, *args, **kwargs)
    except EdlError:
        raise
    except Exception as error:  # every file system of fsspec's has errors of its own
        raise CheckpointStoreError(url, f"{type(error).__name__}: {error}") from error


def _may_pass(error: Exception) -> bool:
    if isinstance(error, OSError):
        lasting = error.errno in _LASTING or isinstance(error, PermissionError | FileNotFoundError)
        return not lasting
    return not isinstance(error, EdlError | ValueError | TypeError | LookupError)
