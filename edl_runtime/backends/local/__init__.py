"""The local backend: a detached supervisor a job, processes as instances, all on this machine.

What runs above an instance, `edl_runtime.backends.local.instance`, needs none of it and doesn't wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_runtime.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edl_runtime.backends.local import backend

    return getattr(backend, name)
