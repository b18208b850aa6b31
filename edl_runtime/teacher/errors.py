"""Errors of models."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.protocol.errors import TeacherError


@dataclass(eq=False, repr=False)
class ModelError(TeacherError):
    """Raised when a model can't be loaded or lacks a requested output."""

    model: str
    reason: str

    def __str__(self) -> str:
        return f"model {self.model!r}: {self.reason}"
